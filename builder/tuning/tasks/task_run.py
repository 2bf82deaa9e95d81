"""The state of one task in a run: its measured points, which of them are confirmed, and how promising it is.

The fastest of many noisy measurements is partly luck. So a point counts as faster only when it has been timed
alternately with the heuristic's point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from builder.boards.measuring_process import BuiltKernel
from builder.kernels.design_space import Decisions
from builder.records.folder import Records
from builder.records.meta_json import Ratio, Verdict
from builder.records.task import Task
from builder.tuning.options import TuneOptions
from builder.tuning.search import strategies
from builder.tuning.views.progress import TaskProgress

WORTH_COMPARING: Final = 0.98  # of the time to beat: a leader must seem faster by 2 % to be compared
KEPT: Final = 4  # kernels that are kept to be compared: the heuristic's, and the fastest


class TaskRun:
    """The state of one task in a run.

    `known`: point -> seconds per call, in the order of measuring; None for a point that did not run.
    `kernels`: the code of the heuristic's point and of the fastest ones, if this run built them.
    `search`: the search over its design space, started with the first batch.
    `batches`: number of batches proposed for it so far.
    `under_way`: candidates being built or measured.
    """

    def __init__(self, task: Task, records: Records) -> None:
        self.task = task
        self.known = records.measured(task.key)
        self.kernels: dict[Decisions, BuiltKernel] = {}
        self._verdict = records.meta.verdicts.get(task.key)
        self._compared = {task.space.default}
        if self._verdict is not None:
            self._compared.add(self._verdict.decisions)
        self._untuned_s: float | None = None
        self.search: strategies.Search | None = None
        self.batches = 0
        self.under_way = 0
        self.exhausted = False

    @property
    def default_s(self) -> float | None:
        """Seconds per call at the heuristic's point."""
        return self._untuned_s or self.known.get(self.task.space.default)

    @property
    def confirmed(self) -> Verdict | None:
        """The point that was faster than the heuristic's when both were timed in turn; None if none was."""
        return self._verdict if self._verdict is not None and self._verdict.use else None

    @property
    def gain(self) -> float:
        """The least speed-up that is confirmed: the lower end of the interval; 1 if none is."""
        return self.confirmed.ratio.low if self.confirmed is not None else 1.0

    @property
    def candidates(self) -> Sequence[Decisions]:
        """The points that seem faster than the confirmed one and were not compared yet, fastest first."""
        if self.default_s is None:
            return ()
        limit = self.default_s * WORTH_COMPARING
        if self.confirmed is not None:
            limit /= self.confirmed.ratio.speedup
        left = ((s, d) for d, s in self.known.items() if d not in self._compared)
        faster = [(s, d) for s, d in left if s is not None and s < limit]
        return [decisions for _, decisions in sorted(faster)]

    def judge(self, decisions: Decisions, ratio: Ratio) -> Verdict:
        """Take note of a comparison of a point with the heuristic's; return the verdict that holds now."""
        verdict = Verdict(decisions, ratio, use=ratio.is_gain)
        self._untuned_s = ratio.untuned_us / 1e6
        self._compared.add(decisions)
        held = self.confirmed
        if (
            held is None
            or held.decisions == decisions
            or (verdict.use and ratio.speedup > held.ratio.speedup)
        ):
            self._verdict = held = verdict
        return held

    def give_up(self, decisions: Decisions) -> None:
        """Do not compare a point in this run: its comparison failed."""
        self._compared.add(decisions)

    def keep(self, decisions: Decisions, kernel: BuiltKernel) -> None:
        """Keep the code of a point that was measured, as long as it is one of the fastest."""
        self.kernels[decisions] = kernel
        default = self.task.space.default
        order = sorted(self.kernels, key=lambda d: (d != default, self.known.get(d) or float("inf")))
        self.kernels = {d: self.kernels[d] for d in order[:KEPT]}

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
        task = self.task
        return TaskProgress(
            task.index,
            task.title,
            task.kind,
            task.calls,
            len(self.known),
            self.planned(options.trials),
            self.default_s,
            self.confirmed.ratio.low if self.confirmed is not None else None,
            self.is_finished(options),
            task.flops * self.gain / self.default_s / 1e9 if self.default_s else None,
            task.space.describe(self.confirmed.decisions if self.confirmed else task.space.default),
        )
