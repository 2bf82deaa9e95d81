"""Where a bundle comes from, as its manifest says: the model, the compiler, its reference, its tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agent.bundle import canonical_json
from agent.bundle.limits import SENTENCE, SHA256, WORD, match, within


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the model compared with itself before tuning, on a board, both timed in turn.

    Attributes
    ----------
    board
        Who measured.
    untuned_ms, tuned_ms
        Medians of an inference, in milliseconds.
    speedup, low, high
        Median of untuned / tuned over the pairs, and its 95 % interval.
    pairs
        How many.
    """

    board: str
    untuned_ms: float
    tuned_ms: float
    speedup: float
    low: float
    high: float
    pairs: int

    def __post_init__(self) -> None:
        match("board", self.board, SENTENCE)
        for name in ("untuned_ms", "tuned_ms", "speedup", "low", "high"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is finite and positive, not {value}")
        within("pairs", self.pairs, 1, 1 << 20)


@dataclass(frozen=True, slots=True)
class ShippedRecords:
    """The tuning records that came with the compiler, as far as they were applied.

    Attributes
    ----------
    name
        The kind of core that they are for.
    sha256
        Of the file.
    kernels
        How many different kernels have their schedules from it.
    board_timed
        Whether a device of that kind was timed to make them.
    """

    name: str
    sha256: str
    kernels: int
    board_timed: bool

    def __post_init__(self) -> None:
        match("name", self.name, WORD)
        match("sha256", self.sha256, SHA256)
        within("kernels", self.kernels, 1, 1 << 20)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the bundle comes from.

    Attributes
    ----------
    source_sha256
        Digest of the model file that was compiled.
    builder
        Name and version of the compiler, as in `edgebundle 0.1.0`.
    tuning_records_sha256
        Digest of the tuning records that were applied, or None.
    parity_error
        Largest relative error against the reference on the recorded inputs, or None where it was not
        measured.
    reference
        Name and version of that reference, or None.
    tuning
        What the tuning records say of this model, or None where it was not tuned or not compared.
    shipped_records
        What came with the compiler and was applied, or None.
    """

    source_sha256: str
    builder: str
    tuning_records_sha256: str | None = None
    parity_error: float | None = None
    reference: str | None = None
    tuning: Tuning | None = None
    shipped_records: ShippedRecords | None = field(default=None, metadata=canonical_json.LATER)

    def __post_init__(self) -> None:
        match("source_sha256", self.source_sha256, SHA256)
        match("builder", self.builder, SENTENCE)
        if self.tuning_records_sha256 is not None:
            match("tuning_records_sha256", self.tuning_records_sha256, SHA256)
        if self.parity_error is not None and not (
            math.isfinite(self.parity_error) and self.parity_error >= 0
        ):
            raise ValueError(f"parity_error is finite and not negative, not {self.parity_error}")
        if self.reference is not None:
            match("reference", self.reference, SENTENCE)
