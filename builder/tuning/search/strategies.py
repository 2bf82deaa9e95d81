"""The search strategies by the names of `--tuner`, and their common interface.

All of them propose only points that have not been measured, and end when no point is left. A search may be
asked for more points before it has learnt the times of the last ones: it does not propose those again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from builder.errors import RecordsError
from builder.kernels.design_space import Decisions, Point
from builder.records.task import Task
from builder.spelling import did_you_mean
from builder.tuning.search.metaschedule_search import MetaScheduleSearch
from builder.tuning.search.ranked_search import RankedSearch
from builder.tuning.search.unvisited import Unvisited

Results = Mapping[Decisions, float | None]

TUNERS: Mapping[str, str] = {
    "xgb": "ranks every point with an XGBoost cost model of its decisions (MetaSchedule's ranks a sample)",
    "ga": "MetaSchedule's evolutionary search, with a random model in place of the cost model",
    "random": "MetaSchedule's ReplayTrace: random points",
    "gridsearch": "every point in turn",
}


class Search(Protocol):
    """Decides which points of a task to measure next."""

    def propose(self, count: int) -> list[Point]:
        """Return at most `count` points that were neither proposed nor known before; `[]` if none is left."""

    def learn(self, points: Sequence[Point], seconds: Sequence[float | None]) -> None:
        """Learn the seconds per call of proposed points; None for one that did not run."""


def start(tuner: str, task: Task, known: Results, trials: int, batch: int, seed: int) -> Search:
    """Start a search.

    `tuner`: one of `TUNERS`.
    `known`: the points measured before -> seconds per call: the search learns from them and does not repeat
        them.
    `trials`, `batch`: number of points wanted in all, and per proposal.
    Raises `RecordsError` if `tuner` is not in `TUNERS`.
    """
    if tuner not in TUNERS:
        raise RecordsError(
            f"--tuner: expected {', '.join(TUNERS)}, got {tuner[:40]!r}",
            hint=did_you_mean(tuner, TUNERS, otherwise=f"write --tuner {next(iter(TUNERS))}"),
        )
    unvisited = Unvisited(task.space, known, None if tuner == "gridsearch" else seed)
    if tuner == "gridsearch":
        return unvisited
    if tuner == "xgb":
        return RankedSearch(unvisited, dict(known), seed)
    return MetaScheduleSearch(task, unvisited, dict(known), trials, batch, seed, evolves=tuner == "ga")
