"""A tuning run, from a model to records that make it faster and never slower.

Each task's heuristic point is measured first. Then batch after batch goes to the task that promises most, the
one with the largest share of the model's time for the batches it has had; every outcome is on disk as it
comes. At the end the best points meet the heuristic's in turn, operator by operator and then as whole models,
and what does not help is not used.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from builder.boards.interface import Boards, Measurement
from builder.boards.local_board import LocalBoard
from builder.boards.measuring_process import RunnerOptions
from builder.boards.rpc_boards import RpcBoards
from builder.boards.tracker_client import Tracker
from builder.errors import FleetError
from builder.importer import ImportedModel, load
from builder.kernels.decisions import Chooser
from builder.kernels.design_space import Decisions
from builder.records.folder import Records
from builder.records.meta_json import ModelResult
from builder.records.task import Task
from builder.target.device_target import DeviceTarget, resolve
from builder.tuning.candidates.candidate_builder import CandidateBuilder
from builder.tuning.candidates.peak_kernel import ATTEMPTS as PEAK_ATTEMPTS
from builder.tuning.candidates.peak_kernel import peak_kernel
from builder.tuning.candidates.pipeline import Batch, Job, Pipeline
from builder.tuning.interruption import Interruption, deferred
from builder.tuning.options import TuneOptions
from builder.tuning.search import strategies
from builder.tuning.tasks.extraction import extract_tasks, select
from builder.tuning.tasks.task_run import TaskRun
from builder.tuning.verdicts.final_comparison import FinalComparison
from builder.tuning.views.progress import Progress, Silent, View

SEEDS: Final = 8  # points of a task that are taken over from other records and measured early

_HOW: Final = "--rpc-tracker HOST:PORT --rpc-key KEY"


def tune(
    model: ImportedModel | str | os.PathLike[str],
    target: str | Mapping[str, Any] | DeviceTarget = "host",
    records_path: str | os.PathLike[str] = "records",
    *,
    options: TuneOptions | None = None,
    runner: RunnerOptions | None = None,
    tracker: str | Tracker | None = None,
    key: str | None = None,
    prior_records: Sequence[str | os.PathLike[str]] = (),
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    view: View | None = None,
    boards: Boards | None = None,
    choose: Chooser | None = None,
) -> Records:
    """Tune a model.

    Parameters
    ----------
    model
        What `builder.load` returned, or an ONNX file's path.
    target
        The device, which must be what measures.
    records_path
        A folder; where it has records of this target already, the run goes on from them.
    options, runner
        What to search, and how to time.
    tracker, key
        `host:port` of an RPC tracker and what the boards register as; without them this machine measures.
    prior_records
        Other folders, of other models or targets, whose best points are measured early.
    input_shapes
        Of inputs with symbolic dimensions, where `model` is a path.
    view
        Who is told how it goes.
    boards
        Who measures, in place of this machine or a tracker's boards: a simulator, a counter of instructions.
        Closed at the end.
    choose
        Whose points the search starts from; None for what compiling uses without records.

    Returns
    -------
    Records
        What `builder.compile` takes as `tuning_records`.

    Raises
    ------
    RecordsError
        If the folder is in use, or its records do not fit.
    FleetError
        If the tracker or its boards do not answer.
    """
    options, runner, view = options or TuneOptions(), runner or RunnerOptions(), view or Silent()
    device = target if isinstance(target, DeviceTarget) else resolve(target)
    if (tracker is None) != (key is None):
        raise FleetError(
            "an RPC tracker and a key belong together", hint="--rpc-tracker HOST:PORT --rpc-key KEY"
        )
    if boards is None and tracker is None and not device.is_native:
        raise FleetError(
            f"this machine cannot measure for {device.triple} {device.cpu}",
            hint=f"tune on boards of that kind: {_HOW}",
        )
    imported = model if isinstance(model, ImportedModel) else load(model, input_shapes=input_shapes)
    tasks = select(extract_tasks(imported, device, choose=choose), options.tasks)
    seeds = _seeds(prior_records, tasks)
    with Records.write(records_path, device, view.note) as records:
        if boards is None:
            boards = _boards(tracker, key, runner, view)
        builder = CandidateBuilder(device, options.parallel)
        with deferred() as interruption:
            run = _Run(imported, device, tasks, records, boards, builder, options, runner, view, interruption)
            try:
                run.prepare()
                run.seed(seeds)
                run.search()
                run.compare()
            finally:
                run.account()
                builder.close()
                boards.close()
    return Records.read(records_path, device)


class _Run:
    """One call of `tune`."""

    def __init__(
        self,
        model: ImportedModel,
        target: DeviceTarget,
        tasks: Sequence[Task],
        records: Records,
        boards: Boards,
        builder: CandidateBuilder,
        options: TuneOptions,
        runner: RunnerOptions,
        view: View,
        interruption: Interruption,
    ) -> None:
        self._model, self._target, self._records = model, target, records
        self._boards, self._builder = boards, builder
        self._options, self._runner, self._view = options, runner, view
        self._tasks = [TaskRun(task, records) for task in tasks]
        self._interruption = interruption
        self._pipeline = Pipeline(builder, boards, interruption)
        self._verdicts = FinalComparison(model, target, records, boards, builder, runner, options.pairs, view)
        self._started = time.monotonic()
        self._measured = 0
        self._active: int | None = None

    def prepare(self) -> None:
        """Measure the board's peak once, and the heuristic's points."""
        self._show("measuring the heuristic's schedules")
        calls = {run.task.key: run.task.calls for run in self._tasks}
        meta, digest = self._records.meta, self._model.source_sha256
        known = meta.models.get(digest, ModelResult(self._model.name, {}))
        self._records.update(
            replace(meta, models={**meta.models, digest: replace(known, calls={**known.calls, **calls})})
        )
        self._measure_peak()
        jobs = []
        for run in self._tasks:
            if run.task.space.default not in run.known:
                point = run.task.space.point(run.task.space.default)
                if point is not None:
                    jobs.append((run, point))
        self._measure(jobs, "measuring the heuristic's schedules")

    def seed(self, seeds: Mapping[str, Sequence[Decisions]]) -> None:
        """Measure what other records found best."""
        jobs = []
        for run in self._tasks:
            for decisions in seeds.get(run.task.key, ()):
                if decisions not in run.known and len(run.known) < run.planned(self._options.trials):
                    point = run.task.space.point(decisions)
                    if point is not None:
                        jobs.append((run, point))
        self._measure(jobs, "measuring what other records found best")

    def search(self) -> None:
        """Batch after batch, to the task that promises most."""
        with self._under_way("searching"):
            while True:
                while not self._pipeline.is_full and not self._is_over():
                    if (jobs := self._next_batch()) is None:
                        break
                    self._put(jobs)
                if self._pipeline.is_empty:
                    break
                batch = self._take("searching")
                if batch.is_done:
                    self._learn(batch)
        self._active = None
        self._measure_peak()

    def compare(self) -> None:
        """Meet the heuristic's points once more, in turn; then the whole models."""
        if self._options.pairs < 1:
            return
        better = [
            run for run in self._tasks if run.best is not None and run.best[0] != run.task.space.default
        ]
        for number, run in enumerate(better):
            self._active = run.task.index
            self._show(f"comparing with the heuristic's schedules, {number + 1} of {len(better)}")
            self._verdicts.compare_operator(run)
            self.account()
        self._active = None
        if self._tasks:
            self._show("comparing the whole model")
            self._verdicts.compare_models(self._tasks)
            self.account()
        self._show("done")

    def _measure_peak(self) -> None:
        """What the board does at most, as far as it was seen: before the search and after it."""
        if not self._tasks or self._is_over():
            return
        code, flops = peak_kernel(self._target, self._runner.threads)
        outcomes = self._boards.measure([code] * PEAK_ATTEMPTS)
        if times := [s for outcome in outcomes for s in outcome.seconds or ()]:
            peak = float(f"{flops / min(times) / 1e9:.4g}")
            if peak > (self._records.meta.peak_gflops or 0.0):
                self._records.update(replace(self._records.meta, peak_gflops=peak))

    def account(self) -> None:
        """Write down what the boards did."""
        meta = self._records.meta
        rates = [run.task.flops / run.best[1] / 1e9 for run in self._tasks if run.best is not None]
        if meta.peak_gflops is not None and rates and max(rates) > meta.peak_gflops:
            # Something else had the machine while its peak was measured: it does more than that.
            meta = replace(meta, peak_gflops=float(f"{max(rates):.4g}"))
        for name, spent in self._boards.take_times().items():
            meta = meta.with_board(name, replace(spent, seconds=round(spent.seconds, 3)))
        if meta != self._records.meta:
            self._records.update(meta)

    def _next_batch(self) -> list[Job] | None:
        """Points of the task that promises most, None where no task wants any."""
        while True:
            open_runs = [run for run in self._tasks if run.wanted(self._options)]
            if not open_runs:
                return None
            run = max(open_runs, key=lambda run: run.promise)
            self._active = run.task.index
            options, wanted = self._options, run.wanted(self._options)
            if run.search is None:
                seed = options.seed + run.task.index
                run.search = strategies.start(
                    options.tuner, run.task, run.known, options.trials, options.batch, seed
                )
            run.batches += 1
            if points := run.search.propose(wanted)[:wanted]:
                return [(run, point) for point in points]
            run.exhausted = True

    def _learn(self, batch: Batch) -> None:
        run = batch.jobs[0][0]
        points = [point for _, point in batch.jobs]
        if run.search is not None:
            run.search.learn(points, [run.known.get(point.decisions) for point in points])

    def _measure(self, jobs: Sequence[Job], phase: str) -> None:
        """Build, measure and record."""
        batches = [jobs[i : i + self._options.batch] for i in range(0, len(jobs), self._options.batch)]
        with self._under_way(phase):
            while batches or not self._pipeline.is_empty:
                while batches and not self._pipeline.is_full:
                    self._put(batches.pop(0))
                self._take(phase)

    @contextlib.contextmanager
    def _under_way(self, phase: str) -> Iterator[None]:
        """While this lasts batches are under way; what came in before an interruption is recorded too."""
        self._show(phase)
        try:
            yield
        except BaseException:
            for batch, index, outcome in self._pipeline.drain(self._runner.timeout_s):
                self._record(batch, index, outcome)
            raise

    def _put(self, jobs: Sequence[Job]) -> None:
        for run, _ in jobs:
            run.under_way += 1
        self._pipeline.put(jobs)

    def _take(self, phase: str) -> Batch:
        """Record the next outcome."""
        batch, index, outcome = self._pipeline.take()
        self._record(batch, index, outcome)
        batch.jobs[index][0].under_way -= 1
        self._measured += 1
        if batch.is_done:
            self.account()
            self._show(phase)
        return batch

    def _record(self, batch: Batch, index: int, outcome: Measurement) -> None:
        run, point = batch.jobs[index]
        if not outcome.spoilt:
            self._records.append(run.task, [(point, outcome.seconds)])
            run.known = self._records.measured(run.task.key)
        if outcome.error is not None:
            values = run.task.space.describe(point.decisions)
            self._view.note(f"task {run.task.index}, point {values}: {outcome.error}")

    def _is_over(self) -> bool:
        limit = self._options.time_limit_s
        return limit is not None and time.monotonic() - self._started >= limit

    def _show(self, phase: str) -> None:
        self._interruption.check()
        elapsed = time.monotonic() - self._started
        planned = sum(run.planned(self._options.trials) for run in self._tasks)
        known = sum(len(run.known) for run in self._tasks)
        left = elapsed / self._measured * max(0, planned - known) if self._measured else None
        if left is not None and self._options.time_limit_s is not None:
            left = min(left, max(0.0, self._options.time_limit_s - elapsed))
        self._view.update(
            Progress(
                phase,
                tuple(run.progress(self._options) for run in self._tasks),
                self._boards.status(),
                self._active,
                elapsed,
                left,
                self._records.meta.peak_gflops,
            )
        )


def _boards(tracker: str | Tracker | None, key: str | None, runner: RunnerOptions, view: View) -> Boards:
    """The machine itself, or those of a tracker."""
    if tracker is None or key is None:
        return LocalBoard(runner)
    where = tracker if isinstance(tracker, Tracker) else Tracker.parse(tracker)
    return RpcBoards(where, key, runner, view.note)


def _seeds(paths: Sequence[str | os.PathLike[str]], tasks: Sequence[Task]) -> dict[str, list[Decisions]]:
    """The best points of the same workloads in other records, whatever target they are for."""
    seeds: dict[str, list[Decisions]] = {}
    for path in paths:
        others = Records.read(Path(path))
        for task in tasks:
            operator = others.meta.operators.get(task.key)
            if operator is None or operator.values != task.space.values:
                continue
            seeds.setdefault(task.key, []).extend(r.decisions for r in others.best(task.key, SEEDS))
    return seeds
