"""A tuning run, from a model to records that make it faster and never slower.

Each task's heuristic point is measured first. Then batch after batch goes to the task that promises most, the
one with the largest share of the model's time for the batches it has had; every batch is on disk before the
next is thought of. At the end the best points meet the heuristic's in turn, operator by operator and then as
whole models, and what does not help is not used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from builder.errors import FleetError
from builder.importer import ImportedModel, load
from builder.target import DeviceTarget, resolve
from builder.tuning import search
from builder.tuning.boards import Boards, Outcome
from builder.tuning.build import CandidateBuilder
from builder.tuning.interruption import Interruption, deferred
from builder.tuning.local_board import LocalBoard
from builder.tuning.measuring import Code, RunnerOptions
from builder.tuning.meta import ModelResult
from builder.tuning.options import TuneOptions
from builder.tuning.peak import ATTEMPTS as PEAK_ATTEMPTS
from builder.tuning.peak import peak_kernel
from builder.tuning.records import Records
from builder.tuning.rpc_boards import RpcBoards
from builder.tuning.space import Decisions, Point
from builder.tuning.task_run import TaskRun
from builder.tuning.tasks import Task, extract_tasks, select
from builder.tuning.tracker import Tracker
from builder.tuning.verdicts import Verdicts
from builder.tuning.view import Progress, Silent, View

SEEDS = 8  # points of a task that are taken over from other records and measured early

_HOW = "--rpc-tracker HOST:PORT --rpc-key KEY"


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
        ``host:port`` of an RPC tracker and what the boards register as; without them this machine measures.
    prior_records
        Other folders, of other models or targets, whose best points are measured early.
    input_shapes
        Of inputs with symbolic dimensions, where `model` is a path.
    view
        Who is told how it goes.

    Returns
    -------
    Records
        What `builder.compile` takes as ``tuning_records``.

    Raises
    ------
    RecordsError
        The folder is in use, or its records do not fit.
    FleetError
        The tracker or its boards do not answer.
    """
    options, runner, view = options or TuneOptions(), runner or RunnerOptions(), view or Silent()
    device = target if isinstance(target, DeviceTarget) else resolve(target)
    if (tracker is None) != (key is None):
        raise FleetError(
            "an RPC tracker and a key belong together", hint="--rpc-tracker HOST:PORT --rpc-key KEY"
        )
    if tracker is None and not device.is_native:
        raise FleetError(
            f"this machine cannot measure for {device.triple} {device.cpu}",
            hint=f"tune on boards of that kind: {_HOW}",
        )
    imported = model if isinstance(model, ImportedModel) else load(model, input_shapes=input_shapes)
    with Records.write(records_path, device, view.note) as records:
        tasks = select(extract_tasks(imported, device), options.tasks)
        seeds = _seeds(prior_records, tasks)
        boards: Boards = (
            LocalBoard(runner)
            if tracker is None or key is None
            else RpcBoards(
                tracker if isinstance(tracker, Tracker) else Tracker.parse(tracker), key, runner, view.note
            )
        )
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
        self._verdicts = Verdicts(model, target, records, boards, builder, runner, options.pairs, view)
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
        if meta.peak_gflops is None and self._tasks:
            code, flops = peak_kernel(self._target, self._runner.threads)
            outcomes = self._boards.measure([code] * PEAK_ATTEMPTS)
            if times := [s for outcome in outcomes for s in outcome.seconds or ()]:
                peak = float(f"{flops / min(times) / 1e9:.4g}")
                self._records.update(replace(self._records.meta, peak_gflops=peak))
        jobs = []
        for run in self._tasks:
            if run.task.space.default not in run.known:
                point = run.task.space.point(run.task.space.default)
                if point is not None:
                    jobs.append((run, point))
        for first in range(0, len(jobs), self._options.batch):
            self._measure(jobs[first : first + self._options.batch], "measuring the heuristic's schedules")

    def seed(self, seeds: Mapping[str, Sequence[Decisions]]) -> None:
        """Measure what other records found best."""
        jobs = []
        for run in self._tasks:
            for decisions in seeds.get(run.task.key, ()):
                if decisions not in run.known and len(run.known) < run.planned(self._options.trials):
                    point = run.task.space.point(decisions)
                    if point is not None:
                        jobs.append((run, point))
        for first in range(0, len(jobs), self._options.batch):
            self._measure(
                jobs[first : first + self._options.batch], "measuring what other records found best"
            )

    def search(self) -> None:
        """Batch after batch, to the task that promises most."""
        while not self._is_over():
            open_runs = [run for run in self._tasks if not run.is_finished(self._options)]
            if not open_runs:
                break
            run = max(open_runs, key=lambda run: run.promise)
            self._active = run.task.index
            if run.search is None:
                run.search = search.start(
                    self._options.tuner,
                    run.task,
                    run.known,
                    self._options.trials,
                    self._options.batch,
                    self._options.seed + run.task.index,
                )
            wanted = min(self._options.batch, run.planned(self._options.trials) - len(run.known))
            points = run.search.propose(wanted)[:wanted]
            run.batches += 1
            if not points:
                run.exhausted = True
                continue
            self._measure([(run, point) for point in points], "searching")
            run.search.learn(points, [run.known.get(point.decisions) for point in points])
        self._active = None

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

    def _measure(self, jobs: Sequence[tuple[TaskRun, Point]], phase: str) -> None:
        """Build, measure and record; what came in before an interruption is recorded too."""
        self._show(phase)
        built = self._builder.build([(run.task, point) for run, point in jobs])
        outcomes: dict[int, Outcome] = {}
        places: list[int] = []
        codes: list[Code] = []
        for place, code in enumerate(built):
            if isinstance(code, Code):
                places.append(place)
                codes.append(code)
            else:
                outcomes[place] = Outcome(None, code, "")

        def done(index: int, outcome: Outcome) -> None:
            outcomes[places[index]] = outcome
            self._interruption.check()

        try:
            self._boards.measure(codes, done)
        finally:
            self._record(jobs, outcomes)
        self._measured += len(jobs)
        self.account()
        self._show(phase)

    def _record(self, jobs: Sequence[tuple[TaskRun, Point]], outcomes: Mapping[int, Outcome]) -> None:
        for run in dict.fromkeys(run for run, _ in jobs):
            results = [
                (point, outcomes[i].seconds)
                for i, (owner, point) in enumerate(jobs)
                if owner is run and i in outcomes and not outcomes[i].spoilt
            ]
            self._records.append(run.task, results)
            run.known = self._records.measured(run.task.key)
        for i, outcome in outcomes.items():
            if outcome.error is not None:
                run, point = jobs[i]
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
