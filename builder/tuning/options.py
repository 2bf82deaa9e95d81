"""How to search, and for how long."""

from __future__ import annotations

from dataclasses import dataclass


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
