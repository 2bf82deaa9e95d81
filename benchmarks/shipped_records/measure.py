"""What a point costs, however it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from builder.kernels.design_space import Decisions
from builder.records.task import Task

LEAST_GAIN = 1.03  # a smaller gain is not worth an entry, and may be chance


@dataclass(frozen=True)
class Verdict:
    """How a point compares with the heuristic's, for all kernels of a signature.

    Attributes
    ----------
    gain
        The heuristic's cost over that of the point, in the kernel where that is smallest.
    holds
        Whether the point proved better, and gets an entry.
    summary
        The verdict in one line, for the maintainer.
    """

    gain: float
    holds: bool
    summary: str


class Measure(Protocol):
    """Measures the cost of points, in any unit."""

    sentence: str  # describes what is measured, in the records

    def costs(self, asked: Sequence[tuple[Task, Sequence[Decisions]]]) -> list[dict[Decisions, float | None]]:
        """Return the cost of each point of each task; None for one that does not run."""

    def verdicts(self, asked: Sequence[tuple[Sequence[Task], Decisions]]) -> list[Verdict]:
        """Compare points with the heuristic's again, more carefully."""

    def close(self) -> None:
        """End the processes that were started."""
