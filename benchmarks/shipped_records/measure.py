"""What a candidate costs, whichever way it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from builder.kernels.design_space import Decisions
from builder.records.task import Task

LEAST_GAIN = 1.03  # below this an entry is not worth its line, and may be luck


@dataclass(frozen=True)
class Verdict:
    """How a point compares with the heuristic's, over all kernels of a signature.

    Attributes
    ----------
    gain
        Cost of the heuristic's over that of the point, in the kernel where it is smallest.
    holds
        Whether the point is used.
    says
        For the maintainer, in a line.
    """

    gain: float
    holds: bool
    says: str


class Measure(Protocol):
    """Costs of points, in a unit of its own."""

    sentence: str  # what is measured, for the records

    def costs(self, asked: Sequence[tuple[Task, Sequence[Decisions]]]) -> list[dict[Decisions, float | None]]:
        """The cost of each point of each task, None where it does not run."""

    def verdicts(self, asked: Sequence[tuple[Sequence[Task], Decisions]]) -> list[Verdict]:
        """Compare points with the heuristic's, once more and more carefully."""

    def close(self) -> None:
        """End what was started."""
