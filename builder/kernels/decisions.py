"""Who decides inside a design space: the heuristic, the middle of the space, or a search.

A space's `schedule` asks a `Chooser` for each of its decisions, in an order that depends on the function
alone, and hands the answers to `apply`. The heuristic answers with numbers; a search answers with random
variables of the schedule's trace (`builder.kernels.design_space`), so that one `apply` serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from tvm import tirx
from tvm.s_tir.schedule import Trace

# Records name points by a trace over these spaces. Raise it when a space changes what a trace means: another
# order of decisions, other values, other loops. Records of another version are refused.
SPACE_VERSION: Final = 8

# A whole number, or a variable of a schedule's trace that stands for one.
Decision: TypeAlias = Any


class Chooser(Protocol):
    """Makes one decision."""

    def __call__(self, name: str, values: Sequence[int], default: int) -> Decision:
        """Choose among `values` for the decision called `name`; the heuristic would take `default`."""


class BestKnown(Protocol):
    """What is known from measuring."""

    def trace(self, func: tirx.PrimFunc) -> Trace | None:
        """The schedule that was measured to be best for an unscheduled function, None where none helps."""


class Recorded(Chooser, Protocol):
    """Decides as somebody did before; a `ValueError` where that means nothing any more."""

    def finish(self) -> None:
        """All decisions have been asked for."""


class Shipped(Protocol):
    """Decisions that come with the compiler, by signature (`builder.kernels.signature`)."""

    def chooser(self, signature: str) -> Recorded | None:
        """Who decides, None where nothing is known."""

    def tell(self, signature: str, *, fits: bool) -> None:
        """Whether what was known could be applied."""


def heuristic(name: str, values: Sequence[int], default: int) -> Decision:
    """What the design space thinks best without measuring."""
    del name, values
    return default


def middle(name: str, values: Sequence[int], default: int) -> Decision:
    """The middle of the values: a baseline without knowledge, for showing what a search finds."""
    del name
    return sorted({*values, default})[len(values) // 2]


def _ignore(_: str) -> None:
    """Report to nobody."""


@dataclass(frozen=True, slots=True)
class Schedules:
    """Where a kernel's schedule comes from: the first of `best`, `shipped` and `choose` that has one.

    Attributes
    ----------
    best
        Schedules that were measured, such as `builder.records.best_records.BestRecords`.
    shipped
        Decisions that come with the compiler, such as `builder.records.shipped.shipped_for` returns.
    choose
        Makes the decisions that neither of them has made.
    progress
        Called with a line for each measured schedule that does not apply.
    """

    best: BestKnown | None = None
    shipped: Shipped | None = None
    choose: Chooser = heuristic
    progress: Callable[[str], None] = _ignore


UNTUNED: Final = Schedules()
