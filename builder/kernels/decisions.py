"""Where the decisions of a design space come from: measurements, shipped records, a search or the heuristic.

A space's `schedule` asks a `Chooser` for each of its decisions, in an order that depends only on the
function, and passes the answers to `apply`. The heuristic answers with numbers; a search answers with random
variables of the schedule's trace (`builder.kernels.design_space`), so that one `apply` serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from tvm import tirx
from tvm.s_tir.schedule import Trace

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


class BestKnown(Protocol):
    """Schedules that were measured."""

    def trace(self, func: tirx.PrimFunc) -> Trace | None:
        """Return the fastest measured schedule of an unscheduled function, None if there is none to use."""


class Recorded(Chooser, Protocol):
    """Repeats recorded decisions.

    It raises `ValueError` if the space no longer fits the record: it asks for a decision that was not
    recorded, or does not offer the recorded value.
    """

    def check_all_used(self) -> None:
        """Check that a space asked for every recorded decision; call this after it has been applied.

        Raises
        ------
        ValueError
            If a decision was not asked for: the record is of another space.
        """


class Shipped(Protocol):
    """Decisions that come with the compiler, by signature (`builder.kernels.signature`)."""

    def chooser(self, signature: str) -> Recorded | None:
        """Return a chooser that repeats the decisions recorded for a signature, None if there are none."""

    def count_outcome(self, signature: str, *, fits: bool) -> None:
        """Count an attempt to apply the decisions recorded for `signature`: `fits` if it succeeded."""


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
    """The sources of a kernel's schedule: the first of `best`, `shipped` and `choose` that has one is used.

    Attributes
    ----------
    best
        Schedules that were measured, such as `builder.records.best_records.BestRecords`.
    shipped
        Decisions that come with the compiler, such as `builder.records.shipped.shipped_for` returns.
    choose
        Makes the decisions of a kernel that has neither.
    progress
        Called with a line for each measured schedule that does not apply.
    strict
        Whether a kernel whose design space fails is an error. If not, the fallback orders its loops: the
        kernel is right, but slow.
    """

    best: BestKnown | None = None
    shipped: Shipped | None = None
    choose: Chooser = heuristic
    progress: Callable[[str], None] = _ignore
    strict: bool = False


UNTUNED: Final = Schedules()
