"""A task in a run: what is known of it, and how much it promises."""

from __future__ import annotations

from builder.kernels.design_space import Decisions
from builder.records.folder import Records
from builder.records.task import Task
from builder.tuning.options import TuneOptions
from builder.tuning.search import strategies
from builder.tuning.views.progress import TaskProgress


class TaskRun:
    """A task's state in a run."""

    def __init__(self, task: Task, records: Records) -> None:
        self.task = task
        self.known = records.measured(task.key)
        self.search: strategies.Search | None = None
        self.batches = 0
        self.under_way = 0
        self.exhausted = False

    @property
    def default_s(self) -> float | None:
        """Seconds of a call by the heuristic."""
        return self.known.get(self.task.space.default)

    @property
    def best(self) -> tuple[Decisions, float] | None:
        """The fastest point, and its seconds."""
        ran = [(d, s) for d, s in self.known.items() if s is not None]
        return min(ran, key=lambda r: r[1]) if ran else None

    def planned(self, trials: int) -> int:
        """How many points will be measured at most."""
        return min(trials, self.task.space.size)

    def is_stale(self, early_stopping: int | None) -> bool:
        """Whether the last `early_stopping` points brought nothing better."""
        if early_stopping is None or self.best is None:
            return False
        order = list(self.known)
        return len(order) - 1 - order.index(self.best[0]) >= early_stopping

    def wanted(self, options: TuneOptions) -> int:
        """Points of its next batch, 0 where it gets none."""
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
        """The task's share of the model's time, less with every batch it has had."""
        seconds = self.best[1] if self.best else 1.0  # nothing ran: find out soon
        return seconds * self.task.calls / (self.batches + 1)

    def progress(self, options: TuneOptions) -> TaskProgress:
        """What is shown of it."""
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
