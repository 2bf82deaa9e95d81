"""Searches: which points of a design space to measure next.

All propose points that were not measured before; when the spaces' own search finds none that is new, they go
on with what is left, in an order that the seed decides. So a search ends when its space does.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from tvm.s_tir import meta_schedule as ms

from builder.errors import RecordsError
from builder.tuning.space import Decisions, Point, decisions_of
from builder.tuning.tasks import Task

Results = Mapping[Decisions, float | None]

TUNERS: Mapping[str, str] = {
    "xgb": "MetaSchedule's evolutionary search, candidates ranked by an XGBoost cost model",
    "ga": "the same evolutionary search with a random model in place of the cost model",
    "random": "MetaSchedule's ReplayTrace: points at random",
    "gridsearch": "every point in turn",
}

# Spaces here have tens or hundreds of points, MetaSchedule's default populations are made for millions.
POPULATION = 64
STALE_ROUNDS = 2  # proposals without a new point before the rest of the space is taken as it comes
FAILED_S = 1e10


class Search(Protocol):
    """Proposes points of one task."""

    def propose(self, count: int) -> list[Point]:
        """At most `count` points that were neither proposed nor known before; none when all are."""

    def learn(self, points: Sequence[Point], seconds: Sequence[float | None]) -> None:
        """Take in what proposed points took, None where one did not run."""


def start(tuner: str, task: Task, known: Results, trials: int, batch: int, seed: int) -> Search:
    """A search by its old name.

    Parameters
    ----------
    tuner
        One of `TUNERS`.
    task
        What to search.
    known
        What was measured before: not proposed again, and learnt from.
    trials, batch
        How many points are wanted in all, and in one proposal.
    seed
        Decides every random choice.

    Raises
    ------
    RecordsError
        There is no such tuner.
    """
    rest = _Rest(task, known, None if tuner == "gridsearch" else seed)
    if tuner == "gridsearch":
        return rest
    if tuner not in TUNERS:
        raise RecordsError(f"--tuner: expected {', '.join(TUNERS)}, got {tuner[:40]!r}")
    return _MetaSchedule(tuner, task, rest, known, trials, batch, seed)


class _Rest:
    """Points that nobody measured, in turn or shuffled."""

    def __init__(self, task: Task, known: Results, seed: int | None) -> None:
        self._task = task
        self.seen = set(known)
        self._left = list(task.space.all_decisions())
        if seed is not None:
            random.Random(seed).shuffle(self._left)  # noqa: S311 - a search, not a secret
        self._next = 0

    def propose(self, count: int) -> list[Point]:
        points: list[Point] = []
        while len(points) < count and self._next < len(self._left):
            decisions = self._left[self._next]
            self._next += 1
            if decisions in self.seen:
                continue
            self.seen.add(decisions)
            point = self._task.space.point(decisions)
            if point is not None:
                points.append(point)
        return points

    def learn(self, points: Sequence[Point], seconds: Sequence[float | None]) -> None:
        """Nothing is learnt here."""


class _MetaSchedule:
    """A search of MetaSchedule's, asked for candidates and told their times."""

    def __init__(
        self, tuner: str, task: Task, rest: _Rest, known: Results, trials: int, batch: int, seed: int
    ) -> None:
        self._task, self._rest, self._known = task, rest, dict(known)
        self._stale = 0
        strategy = (
            ms.search_strategy.ReplayTrace()
            if tuner == "random"
            else ms.search_strategy.EvolutionarySearch(
                population_size=POPULATION, init_min_unmeasured=batch, genetic_num_iters=3
            )
        )
        with _without_intrinsics():
            self._context = ms.TuneContext(
                mod=task.workload,
                target=task.space.target.tvm_target,
                space_generator=task.space.generator(),
                search_strategy=strategy,
                task_name=task.name,
                rand_state=seed + 1,  # MetaSchedule takes no zero
                num_threads=1,
            )
        self._model = (
            ms.cost_model.XGBModel(num_tuning_cores=1) if tuner == "xgb" else ms.cost_model.RandomModel()
        )
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(task.workload)
        with task.space.target.tvm_target:
            spaces = self._context.generate_design_space()
            self._context.search_strategy.pre_tuning(
                max(trials, 1) * 100, batch, spaces, self._database, self._model
            )
        self._open: tuple[list[ms.MeasureCandidate], list[Decisions]] | None = None
        self._teach(known)

    def propose(self, count: int) -> list[Point]:
        points: list[Point] = []
        while len(points) < count and self._stale < STALE_ROUNDS:
            self._settle()
            with self._task.space.target.tvm_target:
                candidates = self._context.search_strategy.generate_measure_candidates()
            if not candidates:
                self._stale = STALE_ROUNDS
                break
            found = [decisions_of(c.sch.trace) for c in candidates]
            self._open = (list(candidates), found)
            new = 0
            for candidate, decisions in zip(candidates, found, strict=True):
                if decisions not in self._rest.seen and len(points) < count:
                    self._rest.seen.add(decisions)
                    points.append(Point(decisions, candidate.sch))
                    new += 1
            self._stale = 0 if new else self._stale + 1
            if new:
                break  # what they take is worth knowing before more are proposed
        return points or self._rest.propose(count)

    def learn(self, points: Sequence[Point], seconds: Sequence[float | None]) -> None:
        results = {p.decisions: s for p, s in zip(points, seconds, strict=True)}
        self._known.update(results)
        if self._open is not None:
            self._settle()
        else:
            self._teach(results)
        self._store(points, seconds)

    def _settle(self) -> None:
        """Tell the search about its last candidates: just measured, known from before, or left out."""
        if self._open is None:
            return
        (candidates, found), self._open = self._open, None
        told = [_result(self._known.get(decisions)) for decisions in found]
        self._context.search_strategy.notify_runner_results(candidates, told)

    def _teach(self, results: Results) -> None:
        """Train the cost model and fill the database with points that the search did not propose itself."""
        points = [p for d, s in results.items() if (p := self._task.space.point(d)) is not None]
        if not points:
            return
        infos = ms.arg_info.ArgInfo.from_entry_func(self._task.workload, False)
        candidates = [ms.MeasureCandidate(p.schedule, infos) for p in points]
        seconds = [results[p.decisions] for p in points]
        self._model.update(self._context, candidates, [_result(s) for s in seconds])
        self._store(points, seconds)

    def _store(self, points: Sequence[Point], seconds: Sequence[float | None]) -> None:
        infos = ms.arg_info.ArgInfo.from_entry_func(self._task.workload, False)
        target = self._task.space.target.tvm_target
        for point, value in zip(points, seconds, strict=True):
            if value is not None:
                self._database.commit_tuning_record(
                    ms.database.TuningRecord(point.trace, self._workload, [value], target, infos)
                )


@contextlib.contextmanager
def _without_intrinsics() -> Iterator[None]:
    """Keep a context from loading TVM's tensor intrinsics.

    Its constructor imports five hundred of them, parsed one by one from their source: 30 s, for names that
    our
    spaces never mention.
    """
    name = "tvm.s_tir.tensor_intrin"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = types.ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


def _result(seconds: float | None) -> ms.runner.RunnerResult:
    if seconds is None:
        return ms.runner.RunnerResult(None, "failed")
    return ms.runner.RunnerResult([seconds], None)
