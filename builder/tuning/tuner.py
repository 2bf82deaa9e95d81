"""A tuning run, from a model to records that make it faster and never slower.

The heuristic's point of each task is measured first. Then each batch goes to the most promising task: the one
that takes most of the model's time, relative to the number of batches it has had. Every measurement is
written to disk at once. At the end, the best points are compared with the heuristic's, first operator by
operator and then as a whole model; those that do not help are not used.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from builder.kernels.decisions import heuristic
from builder.kernels.design_space import Decisions
from builder.records.folder import Records
from builder.records.meta_json import ModelResult
from builder.records.task import Task
from builder.target.device_target import DeviceTarget, resolve
from builder.tuning.candidates.candidate_builder import CandidateBuilder
from builder.tuning.candidates.peak_kernel import ATTEMPTS as PEAK_ATTEMPTS
from builder.tuning.candidates.peak_kernel import peak_kernel
from builder.tuning.candidates.pipeline import Batch, Job, Pipeline
from builder.tuning.context import TuningContext
from builder.tuning.interruption import Interruption, deferred
from builder.tuning.options import TrackerBoards, TuneOptions
from builder.tuning.search import strategies
from builder.tuning.tasks.extraction import extract_tasks, select
from builder.tuning.tasks.task_run import TaskRun
from builder.tuning.verdicts.final_comparison import FinalComparison
from builder.tuning.views.progress import Progress, Silent, View

SEEDS: Final = 8  # best points of a task that are taken from each other folder and measured early


def tune(
    model: ImportedModel | str | os.PathLike[str],
    target: str | Mapping[str, Any] | DeviceTarget = "host",
    records_path: str | os.PathLike[str] = "records",
    *,
    options: TuneOptions | None = None,
    runner: RunnerOptions | None = None,
    boards: Boards | TrackerBoards | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    view: View | None = None,
) -> Records:
    """Tune a model.

    Parameters
    ----------
    model
        A model that `builder.load` returned, or the path of an ONNX file.
    target
        The device; the boards must be of that kind.
    records_path
        A folder; if it already holds records for this target, the run continues from them.
    options, runner
        How to search, and how to time.
    boards
        Boards to measure on: those of a tracker, or any implementation, such as a simulator or a counter of
        instructions. None for this machine. They are closed at the end.
    input_shapes
        Shapes of inputs with symbolic dimensions, if `model` is a path.
    view
        Shows the progress; None shows nothing.

    Returns
    -------
    Records
        The records, as `builder.compile` accepts them in `tuning_records`.

    Raises
    ------
    RecordsError
        If another process is writing to the folder, or its records do not fit.
    FleetError
        If the tracker or its boards do not answer.
    """
    options, runner, view = options or TuneOptions(), runner or RunnerOptions(), view or Silent()
    device = target if isinstance(target, DeviceTarget) else resolve(target)
    if boards is None and not device.is_native:
        raise FleetError(
            f"this machine cannot measure for {device.triple} {device.cpu}",
            hint="tune on boards of that kind: --rpc-tracker HOST:PORT --rpc-key KEY",
        )
    imported = model if isinstance(model, ImportedModel) else load(model, input_shapes=input_shapes)
    tasks = select(extract_tasks(imported, device, choose=options.choose or heuristic), options.tasks)
    seeds = _seeds(options.prior_records, tasks, view.note)
    with Records.write(records_path, device, view.note) as records:
        if boards is None:
            boards = LocalBoard(runner)
        elif isinstance(boards, TrackerBoards):
            where = boards.tracker if isinstance(boards.tracker, Tracker) else Tracker.parse(boards.tracker)
            boards = RpcBoards(where, boards.key, runner, view.note)
        builder = CandidateBuilder(device, options.parallel)
        context = TuningContext(imported, device, records, builder, boards, options, runner, view)
        with deferred() as interruption:
            run = _Run(context, tasks, interruption)
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
    """The steps of one call of `tune`."""

    def __init__(self, context: TuningContext, tasks: Sequence[Task], interruption: Interruption) -> None:
        self._context = context
        self._records, self._boards, self._options = context.records, context.boards, context.options
        self._view, self._interruption = context.view, interruption
        self._tasks = [TaskRun(task, context.records) for task in tasks]
        self._pipeline = Pipeline(context.builder, context.boards, interruption)
        self._comparison = FinalComparison(context)
        self._started = time.monotonic()
        self._measured = 0
        self._active: int | None = None

    def prepare(self) -> None:
        """Record the model's operators, and measure the board's peak rate and the heuristic's points."""
        self._show("measuring the heuristic's schedules")
        calls = {run.task.key: run.task.calls for run in self._tasks}
        nodes = {run.task.key: run.task.nodes for run in self._tasks}
        meta, model = self._records.meta, self._context.model
        digest = model.source_sha256
        known = meta.models.get(digest, ModelResult(model.name, {}))
        known = replace(known, calls={**known.calls, **calls}, nodes={**(known.nodes or {}), **nodes})
        self._records.update(replace(meta, models={**meta.models, digest: known}))
        self._measure_peak()
        jobs = []
        for run in self._tasks:
            if run.task.space.default not in run.known:
                point = run.task.space.point(run.task.space.default)
                if point is not None:
                    jobs.append((run, point))
        self._measure(jobs, "measuring the heuristic's schedules")

    def seed(self, seeds: Mapping[str, Sequence[Decisions]]) -> None:
        """Measure the best points of other records; `seeds` maps a task's key to decisions."""
        jobs = []
        for run in self._tasks:
            for decisions in seeds.get(run.task.key, ()):
                if decisions not in run.known and len(run.known) < run.planned(self._options.trials):
                    point = run.task.space.point(decisions)
                    if point is not None:
                        jobs.append((run, point))
        self._measure(jobs, "measuring the best points of other records")

    def search(self) -> None:
        """Measure batch after batch, each of the task with the highest `TaskRun.promise`."""
        ahead: list[Job] | None = None
        with self._under_way("searching"):
            while True:
                while not self._pipeline.is_full and not self._is_over():
                    jobs, ahead = ahead, None
                    if jobs is not None and jobs[0][0].is_stale(self._options.early_stopping):
                        continue
                    jobs = jobs or self._next_batch()
                    if jobs is None:
                        break
                    self._active = jobs[0][0].task.index
                    self._put(jobs)
                if self._pipeline.is_empty:
                    break
                if ahead is None and not self._boards.elsewhere and not self._is_over():
                    with self._pipeline.calm:  # while the batch is built, and not while it is measured
                        ahead = self._next_batch()
                batch = self._take("searching")
                if batch.is_done:
                    self._learn(batch)
                    if not self._boards.elsewhere:  # a comparison would have to wait for a board to be free
                        self._comparison.confirm_leader(batch.jobs[0][0])
        self._active = None
        self._measure_peak()

    def compare(self) -> None:
        """Compare the best points with the heuristic's, operator by operator, then the whole models."""
        if self._options.pairs < 1:
            return
        better = [run for run in self._tasks if run.confirmed is not None or run.candidates]
        for number, run in enumerate(better):
            self._active = run.task.index
            self._show(f"comparing with the heuristic's schedules, {number + 1} of {len(better)}")
            self._comparison.compare_operator(run)
            self.account()
        self._active = None
        if self._tasks:
            self._show("comparing the whole model")
            self._comparison.compare_models(self._tasks)
            self.account()
        self._show("done")

    def _measure_peak(self) -> None:
        """Measure the board's peak rate in GFLOP/s, and keep it if it is the highest so far."""
        if not self._tasks or self._is_over():
            return
        kernel, flops = peak_kernel(self._context.target, self._context.runner.threads)
        measured = self._boards.measure([kernel] * PEAK_ATTEMPTS)
        if times := [s for measurement in measured for s in measurement.seconds or ()]:
            peak = float(f"{flops / min(times) / 1e9:.4g}")
            if peak > (self._records.meta.peak_gflops or 0.0):
                self._records.update(replace(self._records.meta, peak_gflops=peak))

    def account(self) -> None:
        """Add the work of the boards since the last call to the records."""
        meta = self._records.meta
        rates = [run.task.flops * run.gain / run.default_s / 1e9 for run in self._tasks if run.default_s]
        if meta.peak_gflops is not None and rates and max(rates) > meta.peak_gflops:
            # Another program was using the machine while its peak was measured.
            meta = replace(meta, peak_gflops=float(f"{max(rates):.4g}"))
        for name, spent in self._boards.take_times().items():
            meta = meta.with_board(name, replace(spent, seconds=round(spent.seconds, 3)))
        if meta != self._records.meta:
            self._records.update(meta)

    def _next_batch(self) -> list[Job] | None:
        """Return points of the task with the highest `TaskRun.promise`; None if no task wants more."""
        while True:
            open_runs = [run for run in self._tasks if run.wanted(self._options)]
            if not open_runs:
                return None
            run = max(open_runs, key=lambda run: run.promise)
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
        """Build, measure and record points in batches; `phase` is what the view shows."""
        batches = [jobs[i : i + self._options.batch] for i in range(0, len(jobs), self._options.batch)]
        with self._under_way(phase):
            while batches or not self._pipeline.is_empty:
                while batches and not self._pipeline.is_full:
                    self._put(batches.pop(0))
                self._take(phase)

    @contextlib.contextmanager
    def _under_way(self, phase: str) -> Iterator[None]:
        """Show `phase`; if the block is interrupted, record the measurements that have already ended."""
        self._show(phase)
        try:
            yield
        except BaseException:
            for batch, index, measurement in self._pipeline.drain(self._context.runner.timeout_s):
                self._record(batch, index, measurement)
            raise

    def _put(self, jobs: Sequence[Job]) -> None:
        for run, _ in jobs:
            run.under_way += 1
        self._pipeline.put(jobs)

    def _take(self, phase: str) -> Batch:
        """Wait for the next measurement, record it, and return its batch."""
        batch, index, measurement = self._pipeline.take()
        self._record(batch, index, measurement)
        batch.jobs[index][0].under_way -= 1
        self._measured += 1
        if batch.is_done:
            self.account()
            self._show(phase)
        return batch

    def _record(self, batch: Batch, index: int, measurement: Measurement) -> None:
        run, point = batch.jobs[index]
        if not measurement.spoilt:
            self._records.append(run.task, [(point, measurement.seconds)])
            run.known = self._records.measured(run.task.key)
            if measurement.seconds is not None:
                run.keep(point.decisions, batch.kernels[index])
        if measurement.error is not None:
            values = run.task.space.describe(point.decisions)
            self._view.note(f"task {run.task.index}, point {values}: {measurement.error}")

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


def _seeds(
    paths: Sequence[str | os.PathLike[str]], tasks: Sequence[Task], progress: Callable[[str], None]
) -> dict[str, list[Decisions]]:
    """Return the best points of the same workloads in other records, for any target: key -> decisions."""
    seeds: dict[str, list[Decisions]] = {}
    for path in paths:
        others = Records.read(Path(path))
        for line in others.notes():
            progress(line)
        for task in tasks:
            operator = others.meta.operators.get(task.key)
            if operator is None or operator.values != task.space.values:
                continue
            seeds.setdefault(task.key, []).extend(r.decisions for r in others.best(task.key, SEEDS))
    return seeds
