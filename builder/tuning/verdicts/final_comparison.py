"""The final comparison: each task's best points against the heuristic's, then the whole model.

The fastest of many noisy measurements is partly luck, so a point is used only if it is faster beyond doubt:
if the whole confidence interval of its speed-up is above 1. Both sides are timed alternately on one board.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from builder.boards.measuring_process import BuiltKernel
from builder.errors import MeasureFault, ParityError
from builder.records.meta_json import Verdict
from builder.tuning.context import TuningContext
from builder.tuning.tasks.task_run import TaskRun
from builder.tuning.verdicts.paired_timing import compare_kernels, compare_models

FINALISTS: Final = 3  # number of a task's fastest points that are compared, at most


class FinalComparison:
    """Compares the results of a run with the untuned model, and writes the verdicts to the records."""

    def __init__(self, context: TuningContext) -> None:
        self._context = context
        self._records, self._view = context.records, context.view

    def compare_operator(self, run: TaskRun) -> None:
        """Compare a task's fastest points with the heuristic's, until one is faster beyond doubt."""
        task, pairs = run.task, self._context.options.pairs
        default = task.space.default
        best = [r.decisions for r in self._records.best(task.key) if r.decisions != default]
        verdict = self._records.meta.verdicts.get(task.key)
        if not best or (
            verdict is not None
            and verdict.decisions == best[0]
            and verdict.use
            and verdict.ratio.pairs >= pairs
        ):
            return
        limit = run.default_s or float("inf")
        finalists = [r.decisions for r in self._records.best(task.key, FINALISTS) if (r.seconds or 0) < limit]
        points = [task.space.point(d) for d in [default, *finalists]]
        kernels = self._context.builder.build([(task, point) for point in points if point is not None])
        untuned, *others = kernels
        if len(kernels) != len(finalists) + 1 or not isinstance(untuned, BuiltKernel):
            return
        verdict = None
        for decisions, kernel in zip(finalists, others, strict=True):
            if not isinstance(kernel, BuiltKernel):
                continue
            try:
                ratio = compare_kernels(self._context.boards, untuned, kernel, pairs, self._context.runner)
            except MeasureFault as error:
                self._view.note(f"task {task.index} could not be compared: {error}")
                continue
            verdict = Verdict(decisions, ratio, use=ratio.low > 1.0)
            if verdict.use:
                break
        if verdict is None:
            self._view.note(
                f"task {task.index} has no new verdict: no point could be compared with the heuristic's"
            )
            return
        meta = self._records.meta
        self._records.update(replace(meta, verdicts={**meta.verdicts, task.key: verdict}))

    def compare_models(self, runs: Sequence[TaskRun]) -> None:
        """Compile the model with and without its records, and time the two alternately."""
        from builder.compiling.compilation import compile

        context = self._context
        meta, digest = self._records.meta, context.model.source_sha256
        used = [r for r in runs if (v := meta.verdicts.get(r.task.key)) is not None and v.use]
        if not used:
            self._view.note("no point is faster than the heuristic's beyond doubt: the model stays as it is")
            return
        fresh = replace(meta.models[digest], use=True)
        self._records.update(replace(meta, models={**meta.models, digest: fresh}))
        try:
            untuned = compile(context.model, context.target)
            tuned = compile(context.model, context.target, tuning_records=self._records)
        except ParityError as error:
            self._view.note(f"the tuned model is not used: {error}")
            meta = self._records.meta
            refused = replace(fresh, board=None, ratio=None, use=False)
            self._records.update(replace(meta, models={**meta.models, digest: refused}))
            return
        expected = sum((run.best[1] if run.best else 0.0) * run.task.calls for run in runs)
        try:
            board, ratio = compare_models(context, untuned, tuned, expected)
        except MeasureFault as error:
            self._view.note(f"the whole model could not be compared: {error}")
            return
        result = replace(fresh, board=board, ratio=ratio, use=ratio.speedup >= 1.0)
        meta = self._records.meta
        self._records.update(replace(meta, models={**meta.models, digest: result}))
