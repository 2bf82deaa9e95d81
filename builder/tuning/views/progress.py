"""What a tuning run tells whoever watches it, in one frozen picture after each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from builder.boards.interface import BoardStatus


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """A task, so far.

    Attributes
    ----------
    trials, planned
        Points measured, and how many will be at most.
    default_s, best_s
        Seconds of a call by the heuristic and by the best point, None where nothing ran yet.
    gflops
        Of the best point.
    """

    index: int
    name: str
    kind: str
    calls: int
    trials: int
    planned: int
    default_s: float | None
    best_s: float | None
    gflops: float | None
    finished: bool
    point: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """A run, so far.

    Attributes
    ----------
    phase
        What is being done, in a word or two.
    active
        Index of the task that is searched, None for none.
    left_s
        Estimated seconds to the end, None where nobody can tell yet.
    peak_gflops
        What the board does at most.
    """

    phase: str
    tasks: tuple[TaskProgress, ...]
    boards: tuple[BoardStatus, ...]
    active: int | None
    elapsed_s: float
    left_s: float | None
    peak_gflops: float | None

    @property
    def trials(self) -> int:
        """Points measured in all."""
        return sum(task.trials for task in self.tasks)

    @property
    def default_s(self) -> float:
        """Seconds that the tuned operators of one inference take by the heuristic."""
        return sum((task.default_s or 0.0) * task.calls for task in self.tasks)

    @property
    def best_s(self) -> float:
        """The same at the best points so far."""
        return sum((task.best_s or task.default_s or 0.0) * task.calls for task in self.tasks)


class View(Protocol):
    """Somebody who watches."""

    def update(self, progress: Progress) -> None:
        """Show how far the run is."""

    def note(self, text: str) -> None:
        """Show one remark."""


class Silent:
    """Nobody watches."""

    def update(self, progress: Progress) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""
