"""What to search for, and how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Options of a search.

    Attributes
    ----------
    tuner
        `xgb`, `ga`, `random` or `gridsearch`; see `builder.tuning.search.strategies.TUNERS`.
    trials
        Most points of one task, those in the records included.
    early_stopping
        Points of a task without a better one after which it is left alone; None for never.
    tasks
        `all`, or numbers and ranges such as `0,2|3-5`.
    parallel
        Candidates built at once; None for one a CPU.
    batch
        Candidates measured between two thoughts of the search.
    seed
        Of every random choice.
    time_limit_s
        Of the search; the comparison at the end comes on top. None for no limit.
    pairs
        Measurements of each side in the comparison; 0 leaves it out.
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
