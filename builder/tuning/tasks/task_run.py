"""The state of one task in a run: its measured points, and how promising it is."""

from __future__ import annotations

from builder.kernels.design_space import Decisions
from builder.records.folder import Records
from builder.records.task import Task
from builder.tuning.options import TuneOptions
from builder.tuning.search import strategies
from builder.tuning.views.progress import TaskProgress


class TaskRun:
    """The state of one task in a run.

    Attributes
    ----------
    task
        The task.
    known
        Point -> seconds per call, in the order of measuring; None for a point that did not run.
    search
        The search over its design space, started with the first batch.
    batches
        Number of batches proposed for it so far.
    under_way
        Candidates being built or measured.
    exhausted
        Whether the search has no points left.
    """

    def __init__(self, task: Task, records: Records) -> None:
        self.task = task
        self.known = records.measured(task.key)
        self.search: strategies.Search | None = None
        self.batches = 0
        self.under_way = 0
        self.exhausted = False

    @property
    def default_s(self) -> float | None:
        """Seconds per call at the heuristic's point."""
        return self.known.get(self.task.space.default)

    @property
    def best(self) -> tuple[Decisions, float] | None:
        """The fastest point, and its seconds per call."""
        ran = [(d, s) for d, s in self.known.items() if s is not None]
        return min(ran, key=lambda r: r[1]) if ran else None

    def planned(self, trials: int) -> int:
        """Return the maximum number of points that will be measured."""
        return min(trials, self.task.space.size)

    def is_stale(self, early_stopping: int | None) -> bool:
        """Whether none of the last `early_stopping` points was the best so far."""
        if early_stopping is None or self.best is None:
            return False
        order = list(self.known)
        return len(order) - 1 - order.index(self.best[0]) >= early_stopping

    def wanted(self, options: TuneOptions) -> int:
        """Return the number of points in its next batch; 0 if it gets none."""
        if self.exhausted or self.is_stale(options.early_stopping):
            return 0
        left = self.planned(options.trials) - len(self.known) - self.under_way
        return max(0, min(options.batch, left))

    def is_finished(self, options: TuneOptions) -> bool:
        """Whether it gets no further batch."""
        return (
            self.exhausted
            or len(self.known) >= self.planned(options.trials)
            or self.is_stale(options.early_stopping)
        )

    @property
    def promise(self) -> float:
        """Seconds that the model spends in this task, divided by the number of its batches plus one."""
        seconds = self.best[1] if self.best else 1.0  # nothing has run yet: give it priority
        return seconds * self.task.calls / (self.batches + 1)

    def progress(self, options: TuneOptions) -> TaskProgress:
        """Return what the views show of this task."""
        task, best = self.task, self.best
        return TaskProgress(
            task.index,
            task.name,
            task.kind,
            task.calls,
            len(self.known),
            self.planned(options.trials),
            self.default_s,
            best[1] if best else None,
            task.flops / best[1] / 1e9 if best else None,
            self.is_finished(options),
            task.space.describe(best[0]) if best else "",
        )
