"""The progress of a tuning run, as a frozen value after each step, and the interface of the views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from builder.boards.interface import BoardStatus


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """The progress of one task.

    Attributes
    ----------
    index, name, kind, calls
        As in `builder.records.task.Task`.
    trials, planned
        Number of points measured, and the maximum.
    default_s, best_s
        Seconds per call at the heuristic's point and at the best point; None if nothing has run yet.
    gflops
        Rate of the best point, in GFLOP/s.
    finished
        Whether the task gets no further batch.
    point
        Values of the best point, such as `4x7x2`.
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
    """The progress of a run.

    Attributes
    ----------
    phase
        The current step, in a few words.
    tasks, boards
        The state of each task and of each board.
    active
        Index of the task that is being searched; None if none is.
    elapsed_s, left_s
        Seconds since the start, and the estimated seconds to the end; None if it cannot be estimated yet.
    peak_gflops
        The board's peak rate, in GFLOP/s; None if it has not been measured yet.
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
        """Number of points measured, over all tasks."""
        return sum(task.trials for task in self.tasks)

    @property
    def default_s(self) -> float:
        """Seconds that the operators of one inference take at the heuristic's points."""
        return sum((task.default_s or 0.0) * task.calls for task in self.tasks)

    @property
    def best_s(self) -> float:
        """Seconds that the operators of one inference take at the best points so far."""
        return sum((task.best_s or task.default_s or 0.0) * task.calls for task in self.tasks)


class View(Protocol):
    """Shows the progress of a run."""

    def update(self, progress: Progress) -> None:
        """Show the state of the run."""

    def note(self, text: str) -> None:
        """Show a note of one line."""


class Silent:
    """A view that shows nothing."""

    def update(self, progress: Progress) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""
