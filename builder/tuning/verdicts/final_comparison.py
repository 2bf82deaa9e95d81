"""Comparisons with the heuristic's points: of each task's best points, and at the end of the whole model.

The fastest of many noisy measurements is partly luck, so a point is used only if it is faster beyond doubt:
if the whole confidence interval of its speed-up is above 1. Both sides are timed alternately on one board.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from builder.boards.measuring_process import BuiltKernel
from builder.errors import MeasureFault, ParityError
from builder.kernels.design_space import Decisions
from builder.records.meta_json import Verdict
from builder.tuning.context import TuningContext
from builder.tuning.tasks.task_run import TaskRun
from builder.tuning.verdicts.paired_timing import compare_kernels, compare_models

FINALISTS: Final = 3  # number of a task's fastest points that are compared at the end, at most
SEARCH_PAIRS: Final = 9  # pairs of a comparison during the search, which the one at the end repeats


class FinalComparison:
    """Compares the results of a run with the untuned model, and writes the verdicts to the records."""

    def __init__(self, context: TuningContext) -> None:
        self._context = context
        self._records, self._view = context.records, context.view

    def confirm_leader(self, run: TaskRun) -> None:
        """During the search, compare the point that seems fastest, unless it has been compared already."""
        pairs = min(self._context.options.pairs, SEARCH_PAIRS)
        if pairs and (candidates := run.candidates):
            self._compare(run, candidates[:1], pairs)

    def compare_operator(self, run: TaskRun) -> None:
        """Compare a task's fastest points with the heuristic's, until one is faster beyond doubt.

        A point that the search has confirmed comes first, and is compared again: of several points that were
        compared, the one that did best was also lucky.
        """
        pairs = self._context.options.pairs
        confirmed, finalists = run.confirmed, list(run.candidates)
        if confirmed is not None and (confirmed.ratio.pairs < pairs or finalists):
            finalists.insert(0, confirmed.decisions)
        if finalists:
            self._compare(run, finalists[:FINALISTS], pairs)

    def _compare(self, run: TaskRun, finalists: Sequence[Decisions], pairs: int) -> None:
        """Compare points with the heuristic's until one is faster beyond doubt, and record the verdict."""
        task = run.task
        untuned, *others = self._kernels(run, [task.space.default, *finalists])
        verdict: Verdict | None = None
        for decisions, kernel in zip(finalists, others, strict=True):
            if untuned is None or kernel is None:
                continue
            try:
                ratio = compare_kernels(self._context.boards, untuned, kernel, pairs, self._context.runner)
            except MeasureFault as error:
                self._view.note(f"task {task.index} could not be compared: {error}")
                run.give_up(decisions)
                continue
            verdict = run.judge(decisions, ratio)
            if verdict.use:
                break
        if verdict is None:
            self._view.note(
                f"task {task.index} has no new verdict: no point could be compared with the heuristic's"
            )
            return
        meta = self._records.meta
        self._records.update(replace(meta, verdicts={**meta.verdicts, task.key: verdict}))

    def _kernels(self, run: TaskRun, wanted: Sequence[Decisions]) -> list[BuiltKernel | None]:
        """Return the code of points, None for one that does not compile; build those that are not kept."""
        missing = [d for d in wanted if d not in run.kernels]
        points = [point for d in missing if (point := run.task.space.point(d)) is not None]
        built = self._context.builder.build([(run.task, point) for point in points]) if points else []
        found: dict[Decisions, BuiltKernel] = dict(run.kernels)
        for point, kernel in zip(points, built, strict=True):
            if isinstance(kernel, BuiltKernel):
                found[point.decisions] = kernel
        return [found.get(d) for d in wanted]

    def compare_models(self, runs: Sequence[TaskRun]) -> None:
        """Compile the model with and without its records, and time the two alternately."""
        from builder.compiler import compile

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
