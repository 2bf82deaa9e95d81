"""The progress of a tuning run, as a frozen value after each step, and the interface of the views.

A gain appears here only when it is confirmed, that is, when both points were timed alternately, and then as
the lower end of the interval. What a single measurement promises is partly luck, and does not appear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from builder.boards.interface import BoardStatus


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """The progress of one task.

    `trials`, `planned`: number of points measured, and the maximum.
    `default_s`: seconds per call at the heuristic's point; None if it has not run yet.
    `gain`: the least speed-up of the point that was confirmed to be faster than the heuristic's: the lower
        end of its interval; None if none is confirmed.
    `finished`: whether the task gets no further batch.
    `gflops`: rate of the confirmed point or else of the heuristic's, in GFLOP/s.
    `point`: values of that point, such as `4x7x2`.
    """

    index: int
    name: str
    kind: str
    calls: int
    trials: int
    planned: int
    default_s: float | None
    gain: float | None
    finished: bool
    gflops: float | None
    point: str = ""

    @property
    def saved_s(self) -> float:
        """Seconds that the confirmed point saves per call, at least."""
        if self.default_s is None or self.gain is None:
            return 0.0
        return self.default_s * (1 - 1 / self.gain)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run.

    `phase`: the current step, in a few words.
    `active`: index of the task that is being searched; None if none is.
    `elapsed_s`, `left_s`: seconds since the start, and the estimated seconds to the end; None if it cannot be
        estimated yet.
    `peak_gflops`: the board's peak rate, in GFLOP/s; None if it has not been measured yet.
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
    def saved_s(self) -> float:
        """Seconds per inference that the confirmed points save, at least."""
        return sum(task.saved_s * task.calls for task in self.tasks)


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
