"""Searches: which points of a design space to measure next.

All propose points that were not measured before, and end when the space does. One may be asked for more
points before it was told what the last ones took: it knows them as handed out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from builder.errors import RecordsError
from builder.kernels.design_space import Decisions, Point
from builder.records.task import Task
from builder.tuning.search.metaschedule_search import MetaScheduleSearch
from builder.tuning.search.ranked_search import RankedSearch
from builder.tuning.search.unvisited import Unvisited

Results = Mapping[Decisions, float | None]

TUNERS: Mapping[str, str] = {
    "xgb": "every point ranked by an XGBoost cost model of its decisions, as MetaSchedule's ranks a sample",
    "ga": "MetaSchedule's evolutionary search, with a random model in place of the cost model",
    "random": "MetaSchedule's ReplayTrace: points at random",
    "gridsearch": "every point in turn",
}


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
        If there is no such tuner.
    """
    if tuner not in TUNERS:
        raise RecordsError(f"--tuner: expected {', '.join(TUNERS)}, got {tuner[:40]!r}")
    unvisited = Unvisited(task.space, known, None if tuner == "gridsearch" else seed)
    if tuner == "gridsearch":
        return unvisited
    if tuner == "xgb":
        return RankedSearch(unvisited, dict(known), seed)
    return MetaScheduleSearch(task, unvisited, dict(known), trials, batch, seed, evolves=tuner == "ga")
