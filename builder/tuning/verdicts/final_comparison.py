"""Verdicts: each task's best points against the heuristic's, then the whole model, in turn on one board.

The fastest of many noisy measurements is partly luck: a point is used only where it is faster beyond doubt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from builder.boards.interface import Boards
from builder.boards.measuring_process import BuiltKernel, RunnerOptions
from builder.errors import MeasureFault, ParityError
from builder.importer import ImportedModel
from builder.records.folder import Records
from builder.records.meta_json import Verdict
from builder.target.device_target import DeviceTarget
from builder.tuning.candidates.candidate_builder import CandidateBuilder
from builder.tuning.tasks.task_run import TaskRun
from builder.tuning.verdicts.paired_timing import compare_kernels, compare_models
from builder.tuning.views.progress import View

FINALISTS: Final = 3  # a task's fastest points, of which the comparison takes the first that holds


@dataclass(frozen=True, slots=True)
class FinalComparison:
    """Comes to verdicts and writes them down.

    Attributes
    ----------
    model, target, records
        What was tuned, for what, and what is known of it.
    boards, builder, runner
        Who measures, who builds, and how is timed.
    pairs
        Measurements of each side.
    view
        Who is told.
    """

    model: ImportedModel
    target: DeviceTarget
    records: Records
    boards: Boards
    builder: CandidateBuilder
    runner: RunnerOptions
    pairs: int
    view: View

    def compare_operator(self, run: TaskRun) -> None:
        """The fastest points in order, until one is faster beyond doubt: the very fastest may be luck."""
        task, pairs = run.task, self.pairs
        default = task.space.default
        best = [r.decisions for r in self.records.best(task.key) if r.decisions != default]
        verdict = self.records.meta.verdicts.get(task.key)
        if not best or (
            verdict is not None
            and verdict.decisions == best[0]
            and verdict.use
            and verdict.ratio.pairs >= pairs
        ):
            return
        limit = run.default_s or float("inf")
        finalists = [r.decisions for r in self.records.best(task.key, FINALISTS) if (r.seconds or 0) < limit]
        points = [task.space.point(d) for d in [default, *finalists]]
        codes = self.builder.build([(task, point) for point in points if point is not None])
        untuned, *others = codes
        if len(codes) != len(finalists) + 1 or not isinstance(untuned, BuiltKernel):
            return
        verdict = None
        for decisions, code in zip(finalists, others, strict=True):
            if not isinstance(code, BuiltKernel):
                continue
            try:
                ratio = compare_kernels(self.boards, untuned, code, pairs, self.runner)
            except MeasureFault as error:
                self.view.note(f"task {task.index} could not be compared: {error}")
                continue
            verdict = Verdict(decisions, ratio, use=ratio.low > 1.0)
            if verdict.use:
                break
        if verdict is None:
            self.view.note(
                f"task {task.index} keeps the heuristic's schedule: nothing could be compared with it"
            )
            return
        meta = self.records.meta
        self.records.update(replace(meta, verdicts={**meta.verdicts, task.key: verdict}))

    def compare_models(self, runs: Sequence[TaskRun]) -> None:
        """Compile the model without its records and with them, and let the two meet in turn."""
        from builder.compiling.compilation import compile

        meta, digest = self.records.meta, self.model.source_sha256
        used = [r for r in runs if (v := meta.verdicts.get(r.task.key)) is not None and v.use]
        if not used:
            self.view.note("nothing beat the heuristic beyond doubt: the model stays as it is")
            return
        fresh = replace(meta.models[digest], use=True)
        self.records.update(replace(meta, models={**meta.models, digest: fresh}))
        try:
            untuned = compile(self.model, self.target)
            tuned = compile(self.model, self.target, tuning_records=self.records)
        except ParityError as error:
            self.view.note(f"the tuned model is not used: {error}")
            meta = self.records.meta
            refused = replace(fresh, board=None, ratio=None, use=False)
            self.records.update(replace(meta, models={**meta.models, digest: refused}))
            return
        expected = sum((run.best[1] if run.best else 0.0) * run.task.calls for run in runs)
        try:
            board, ratio = compare_models(self.boards, untuned, tuned, self.pairs, self.runner, expected)
        except MeasureFault as error:
            self.view.note(f"the whole model could not be compared: {error}")
            return
        result = replace(fresh, board=board, ratio=ratio, use=ratio.speedup >= 1.0)
        meta = self.records.meta
        self.records.update(replace(meta, models={**meta.models, digest: result}))
