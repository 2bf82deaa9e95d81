"""How to search, and for how long."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from builder.boards.tracker_client import Tracker
    from builder.kernels.decisions import Chooser


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Options of a tuning run's search.

    Attributes
    ----------
    tuner
        `xgb`, `ga`, `random` or `gridsearch`; see `builder.tuning.search.strategies.TUNERS`.
    trials
        Maximum number of points per task, including those already in the records.
    early_stopping
        Stop a task after this many points without a better one; None for never.
    tasks
        `all`, or numbers and ranges such as `0,2|3-5`.
    parallel
        Candidates built at the same time; None for one per CPU.
    batch
        Candidates per search step.
    seed
        Seed of every random choice.
    time_limit_s
        Time limit of the search in seconds, without the comparison at the end; None for no limit.
    pairs
        Measurements of each side in the comparison at the end; 0 skips it.
    prior_records
        Other folders, for other models or targets, whose best points are measured early.
    choose
        Chooses the points that the search starts from; None for the heuristic.
    """

    tuner: str = "xgb"
    trials: int = 64
    early_stopping: int | None = None
    tasks: str = "all"
    parallel: int | None = None
    batch: int = 8
    seed: int = 0
    time_limit_s: float | None = None
    pairs: int = 21
    prior_records: Sequence[str | os.PathLike[str]] = ()
    choose: Chooser | None = None


@dataclass(frozen=True, slots=True)
class TrackerBoards:
    """The boards that are registered with an RPC tracker.

    Attributes
    ----------
    tracker
        Its address, `host:port`.
    key
        The key that the boards are registered under.
    """

    tracker: str | Tracker
    key: str
