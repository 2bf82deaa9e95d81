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

# A record stores a point as a trace over these spaces. Raise the version when a trace comes to mean something
# else: decisions in another order, other values, other loops. Records of another version are refused.
SPACE_VERSION: Final = 8

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
            What it may be.
        default
            What the heuristic would take; it need not be among `values`.
        """


class BestKnown(Protocol):
    """Schedules that were measured."""

    def trace(self, func: tirx.PrimFunc) -> Trace | None:
        """Return the fastest measured schedule of an unscheduled function, None if there is none to use."""


class Recorded(Chooser, Protocol):
    """Repeats recorded decisions.

    It raises a `ValueError` where the space no longer asks for what was recorded.
    """

    def check_all_used(self) -> None:
        """Check, once a space has asked for its decisions, that it asked for every recorded one.

        Raises
        ------
        ValueError
            If it did not: the record is of another space.
        """


class Shipped(Protocol):
    """Decisions that come with the compiler, by signature (`builder.kernels.signature`)."""

    def chooser(self, signature: str) -> Recorded | None:
        """Return what makes the recorded decisions for a signature, None if there is no record."""

    def count_outcome(self, signature: str, *, fits: bool) -> None:
        """Note whether the decisions recorded for `signature` could be applied."""


def heuristic(name: str, values: Sequence[int], default: int) -> Decision:
    """Choose what the design space takes without measuring: `default`."""
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
        Makes the decisions that neither of them has made.
    progress
        Called with a line for each measured schedule that does not apply.
    """

    best: BestKnown | None = None
    shipped: Shipped | None = None
    choose: Chooser = heuristic
    progress: Callable[[str], None] = _ignore


UNTUNED: Final = Schedules()
