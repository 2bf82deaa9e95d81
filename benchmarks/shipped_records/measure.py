"""The interface of all ways to measure what a point costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from builder.kernels.design_space import Decisions
from builder.records.task import Task

LEAST_GAIN: Final = 1.03  # a smaller gain is not worth an entry, and may be chance


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a point with the heuristic's, over all kernels of a signature.

    Attributes
    ----------
    gain
        The heuristic's cost over that of the point, for the kernel with the smallest ratio.
    holds
        Whether the point has proved better, so that it gets an entry.
    summary
        The verdict in one line, for the maintainer.
    """

    gain: float
    holds: bool
    summary: str


class Measure(Protocol):
    """Measures the cost of points, in any unit."""

    sentence: str  # says in the records how they were measured

    def costs(self, asked: Sequence[tuple[Task, Sequence[Decisions]]]) -> list[dict[Decisions, float | None]]:
        """Return the cost of each point of each task; None for one that does not run."""

    def verdicts(self, asked: Sequence[tuple[Sequence[Task], Decisions]]) -> list[Verdict]:
        """Compare one point of each signature with the heuristic's again, more carefully."""

    def close(self) -> None:
        """End the processes that were started."""
