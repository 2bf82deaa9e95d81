"""Where a bundle comes from: the model, the compiler, its reference and its tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from agent.bundle import canonical_json, values
from agent.bundle.names import check_sha256

# Kernels of a model, and timed pairs: both stay far below.
_MAX_COUNT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tuned model timed against the untuned one, on one board, in alternating pairs of runs.

    Attributes
    ----------
    board
        The board that was measured on.
    untuned_ms, tuned_ms
        Median time of an inference, in milliseconds.
    speedup, low, high
        Median of untuned / tuned over the pairs, and its 95 % interval.
    pairs
        Number of pairs.
    """

    board: str
    untuned_ms: float
    tuned_ms: float
    speedup: float
    low: float
    high: float
    pairs: int

    def __post_init__(self) -> None:
        values.sentence("board", self.board)
        for name in ("untuned_ms", "tuned_ms", "speedup", "low", "high"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: expected a finite number above 0, got {value}")
        values.within("pairs", self.pairs, 1, _MAX_COUNT)


@dataclass(frozen=True, slots=True)
class ShippedRecords:
    """The tuning records that came with the compiler and were applied to `kernels` different kernels.

    `name` is the kind of core that they are for, and `sha256` the digest of their file. `board_timed` says
    whether they were timed on a device of that kind.
    """

    name: str
    sha256: str
    kernels: int
    board_timed: bool

    def __post_init__(self) -> None:
        values.word("name", self.name)
        check_sha256("sha256", self.sha256)
        values.within("kernels", self.kernels, 1, _MAX_COUNT)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the bundle comes from: the model, the compiler, its reference and its tuning.

    Attributes
    ----------
    source_sha256
        Digest of the model file that was compiled.
    builder
        Name and version of the compiler, such as `edgebundle 0.1.0`.
    tuning_records_sha256
        Digest of the tuning records that were applied, or None.
    parity_error
        Largest relative error against the reference on the recorded inputs, or None if it was not measured.
    reference
        Name and version of that reference, or None.
    tuning
        How much faster tuning made this model, or None if it was not tuned or not compared.
    shipped_records
        The records that came with the compiler and were applied, or None.
    """

    source_sha256: str
    builder: str
    tuning_records_sha256: str | None = None
    parity_error: float | None = None
    reference: str | None = None
    tuning: Tuning | None = None
    shipped_records: ShippedRecords | None = field(default=None, metadata=canonical_json.LATER)

    def __post_init__(self) -> None:
        check_sha256("source_sha256", self.source_sha256)
        values.sentence("builder", self.builder)
        if self.tuning_records_sha256 is not None:
            check_sha256("tuning_records_sha256", self.tuning_records_sha256)
        if self.parity_error is not None:
            values.not_negative("parity_error", self.parity_error)
        if self.reference is not None:
            values.sentence("reference", self.reference)
