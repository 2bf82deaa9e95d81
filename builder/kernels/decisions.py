"""Where the decisions of a design space come from: measurements, a search or the heuristic.

A space's `schedule` asks a `Chooser` for each of its decisions, in an order that depends only on the
function, and passes the answers to `apply`. The heuristic answers with numbers; a search answers with random
variables of the schedule's trace (`builder.kernels.design_space`), so that one `apply` serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeVar

from tvm import tirx
from tvm.s_tir.schedule import Trace

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Tiles = TypeVar("Tiles", bound="DataclassInstance")

# An anchor carries its design space's kind under this key, in the attributes of its tensor expression.
SPACE_MARK: Final = "edge.space"
# A reduction whose result must be NaN if one of its elements is, has this attribute (`identities`).
NAN_MARK: Final = "edge.nan"

# An integer, or a variable of a schedule's trace that stands for one.
Decision: TypeAlias = Any


class Chooser(Protocol):
    """Makes one decision at each call."""

    def __call__(self, name: str, values: Sequence[int], default: int) -> Decision:
        """Choose a value for the decision called `name`.

        Parameters
        ----------
        name
            The decision, such as `oc`.
        values
            The values that it may take.
        default
            The heuristic's choice; it need not be among `values`.
        """


@dataclass(frozen=True, slots=True)
class Space(Generic[Tiles]):
    """A design space: the heuristic's decisions, and what else they may be.

    `values`: name of a decision -> the values that it may take, in the order of the trace. Other fields of
        `default` are no choice.
    """

    default: Tiles
    values: Mapping[str, tuple[int, ...]]

    def decide(self, choose: Chooser) -> Tiles:
        """Return the decisions of `choose`."""
        return replace(
            self.default,
            **{
                name: choose(name, values, getattr(self.default, name))
                for name, values in self.values.items()
            },
        )


class BestKnown(Protocol):
    """Schedules that were measured."""

    def trace(self, func: tirx.PrimFunc) -> Trace | None:
        """Return the fastest measured schedule of an unscheduled function, None if there is none to use."""


def heuristic(name: str, values: Sequence[int], default: int) -> Decision:
    """Choose `default`: what a design space takes without measuring."""
    del name, values
    return default


def middle(name: str, values: Sequence[int], default: int) -> Decision:
    """Choose the middle of the values: a baseline without knowledge, to show what a search gains."""
    del name
    return sorted({*values, default})[len(values) // 2]


def _ignore(_: str) -> None:
    """Discard a progress line."""


@dataclass(frozen=True, slots=True)
class Schedules:
    """The sources of a kernel's schedule: those of `best`, and for other kernels `choose`.

    Attributes
    ----------
    best
        Schedules that were measured, such as `builder.records.best_records.BestRecords`.
    choose
        Makes the decisions of a kernel that has none of these.
    progress
        Called with a line for each schedule that does not apply.
    strict
        Whether a kernel whose design space fails is an error. If not, the fallback orders its loops: the
        kernel is right, but slow.
    """

    best: BestKnown | None = None
    choose: Chooser = heuristic
    progress: Callable[[str], None] = _ignore
    strict: bool = False


UNTUNED: Final = Schedules()
