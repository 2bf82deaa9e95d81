"""MetaSchedule's own searches, run over our design spaces."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Final

from tvm.s_tir import meta_schedule as ms

from builder.kernels.design_space import Decisions, Point, decisions_of
from builder.records.task import Task
from builder.tuning.search.unvisited import Unvisited

# Our spaces have tens or hundreds of points; MetaSchedule's default populations are made for millions.
POPULATION: Final = 64
STALE_ROUNDS: Final = 2  # proposals without a new point before the rest is visited in random order


class MetaScheduleSearch:
    """A search strategy of MetaSchedule; when it finds nothing new, the rest of the space follows.

    `rest`: the points that have not been measured.
    `known`: the points measured before -> seconds per call; None for a point that did not run.
    `trials`, `batch`: number of points wanted in all, and per proposal.
    `seed`: seed of every random choice.
    `evolves`: whether to use evolutionary search, guided only by the measured times, instead of random
        points.
    """

    def __init__(
        self,
        task: Task,
        rest: Unvisited,
        known: dict[Decisions, float | None],
        trials: int,
        batch: int,
        seed: int,
        *,
        evolves: bool,
    ) -> None:
        self._task, self._rest, self._known = task, rest, known
        self._stale = 0
        strategy = (
            ms.search_strategy.EvolutionarySearch(
                population_size=POPULATION, init_min_unmeasured=batch, genetic_num_iters=3
            )
            if evolves
            else ms.search_strategy.ReplayTrace()
        )
        with _without_intrinsics():
            self._context = ms.TuneContext(
                mod=task.workload,
                target=task.space.target.tvm_target,
                space_generator=task.space.generator(),
                search_strategy=strategy,
                task_name=task.name,
                rand_state=seed + 1,  # MetaSchedule does not accept 0
                num_threads=1,
            )
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(task.workload)
        with task.space.target.tvm_target:
            spaces = self._context.generate_design_space()
            self._context.search_strategy.pre_tuning(
                max(trials, 1) * 100, batch, spaces, self._database, ms.cost_model.RandomModel()
            )
        self._open: tuple[list[ms.MeasureCandidate], list[Decisions]] | None = None
        points = [p for d in known if (p := task.space.point(d)) is not None]
        self._store(points, [known[p.decisions] for p in points])

    def propose(self, count: int) -> list[Point]:
        """Return at most `count` new points."""
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
                if self._rest.is_new(decisions) and len(points) < count:
                    self._rest.mark(decisions)
                    points.append(Point(decisions, candidate.sch))
                    new += 1
            self._stale = 0 if new else self._stale + 1
            if new:
                break  # their times improve the next proposals
        return points or self._rest.propose(count)

    def learn(self, points: Sequence[Point], seconds: Sequence[float | None]) -> None:
        """Learn the seconds per call of proposed points; None for one that did not run."""
        self._known.update((p.decisions, s) for p, s in zip(points, seconds, strict=True))
        self._settle()
        self._store(points, seconds)

    def _settle(self) -> None:
        """Report the results of the last candidates to MetaSchedule; it needs one for each of them."""
        if self._open is None:
            return
        (candidates, found), self._open = self._open, None
        results = [_result(self._known.get(decisions)) for decisions in found]
        self._context.search_strategy.notify_runner_results(candidates, results)

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
    """Keep `TuneContext` from loading TVM's tensor intrinsics.

    Its constructor imports five hundred of them, each parsed from source. That takes 30 s, and our spaces use
    none of them.
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
