"""What quantising a model did and cost: numbers for a table, for JSON and for a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from builder.quantising import table
from builder.quantising.agreement import Agreement


@dataclass(frozen=True, slots=True)
class Block:
    """An operator, or several, that can be quantised as a whole.

    `precision`: `int8` or `float`.
    `sqnr_db`: signal to noise if only this block is quantised, in dB; None if it was never quantised.
    `macs`: Multiply-adds.
    """

    name: str
    kind: str
    precision: str
    sqnr_db: float | None
    macs: int


@dataclass(frozen=True, slots=True)
class QuantisationReport:
    """What quantising a model did and cost.

    Attributes
    ----------
    model
        The model's name.
    activations
        Type of the levels of activations: `uint8` or `int8`.
    samples
        How many calibration samples were used.
    float_bytes, bytes
        Size of the float model, as imported, and of the quantised one.
    agreement
        The quantised model against the float model, on the calibration samples.
    max_drop
        Percentage points that were allowed to be lost, or None if the model has no class scores.
    min_sqnr_db
        Signal to noise that was asked for in that case, in dB, or None.
    total_macs, int8_macs
        Multiply-adds of the model, and of its quantised blocks.
    excluded
        Names of blocks that were left in float because they cost too much accuracy.
    blocks
        Every block, in the graph's order.
    methods
        How ranges were found -> of how many tensors.
    bias_correction_db
        What correcting biases added to the model's signal to noise, in dB; None if it is not used.
    warnings
        What the user should know; one line each.
    widened
        For each layer whose sums of four products fit 16 bits: how much larger the steps of its weights are
        for that, on average.
    """

    model: str
    activations: str
    samples: int
    float_bytes: int
    bytes: int
    agreement: Agreement
    max_drop: float | None
    min_sqnr_db: float | None
    total_macs: int
    int8_macs: int
    excluded: tuple[str, ...]
    blocks: tuple[Block, ...]
    methods: dict[str, int]
    bias_correction_db: float | None
    warnings: tuple[str, ...]
    widened: tuple[float, ...] = ()

    @property
    def int8_share(self) -> float:
        """Share of the multiply-adds that are quantised to int8, in percent."""
        return 100 * self.int8_macs / self.total_macs if self.total_macs else 0.0

    def document(self) -> dict[str, Any]:
        """Return all fields, and `int8_share` and `drop`, for JSON."""
        drop = self.agreement.drop
        return asdict(self) | {"int8_share": self.int8_share, "drop": drop}

    def lines(self) -> list[str]:
        """Return the table that a person reads, one row each."""
        return table.lines(self.rows()) + [f"  note: {w}" for w in self.warnings]

    def rows(self) -> list[tuple[str, str]]:
        """Return the table as pairs of a title and a text."""
        return [
            (
                "size",
                f"{kilobytes(self.bytes)}, float {kilobytes(self.float_bytes)} "
                f"({self.bytes / max(self.float_bytes, 1):.2f})",
            ),
            *self._accuracy(),
            ("noise", self._noise()),
            (
                "quantised",
                f"{self.int8_share:.1f} % of {self.total_macs / 1e6:,.1f} million multiply-adds, "
                f"{sum(b.precision == 'int8' for b in self.blocks)} of {len(self.blocks)} blocks",
            ),
            *([("16-bit sums", self._word_sums())] if self.widened else []),
            *([("left in float", table.names(self.excluded))] if self.excluded else []),
            (
                "ranges",
                ", ".join(f"{method}: {count}" for method, count in self.methods.items()) + " tensors",
            ),
            (
                "bias correction",
                "not used: it adds noise"
                if self.bias_correction_db is None
                else f"{self.bias_correction_db:+.1f} dB",
            ),
        ]

    def _accuracy(self) -> list[tuple[str, str]]:
        found, rows = self.agreement, []
        allowed = "" if self.max_drop is None else f" (at most {self.max_drop:g} points may be lost)"
        if found.accuracy is not None:
            text = f"{found.accuracy:.2f} %, float {found.float_accuracy:.2f} %{allowed}"
            rows.append(("accuracy", text))
            allowed = ""
        if found.top1 is not None:
            text = f"{found.top1:.2f} % of {found.samples} samples have float's best class{allowed}"
            rows.append(("agreement", text))
        return rows

    def _word_sums(self) -> str:
        """Return how many layers add four products in 16 bits, and what their weights lost for that."""
        larger = 100 * (sum(self.widened) / len(self.widened) - 1)
        return f"four products in {len(self.widened)} layers, whose weights have {larger:.0f} % larger steps"

    def _noise(self) -> str:
        """Return the model's signal to noise, and the noisiest blocks."""
        db = self.agreement.sqnr_db
        wanted = "" if self.min_sqnr_db is None else f" (at least {self.min_sqnr_db:g} dB)"
        text = "no float output" if db is None else f"{db:.1f} dB signal to noise at the outputs{wanted}"
        worst = sorted(
            (block for block in self.blocks if block.precision == "int8" and block.sqnr_db is not None),
            key=lambda block: block.sqnr_db or 0.0,
        )
        if not worst:
            return text
        listed = ", ".join(
            f"{table.short(block.name)} {block.sqnr_db:.1f} dB" for block in worst[: table.NAMED]
        )
        return f"{text}; least inside: {listed}"


def count_methods(methods: Sequence[str]) -> dict[str, int]:
    """Count how often each method was chosen, most often first."""
    return dict(sorted(Counter(methods).items(), key=lambda item: (-item[1], item[0])))


def kilobytes(size: int) -> str:
    """Return a size as text, in kB or MB."""
    return f"{size / 1e6:,.1f} MB" if size >= 10_000_000 else f"{size / 1e3:,.1f} kB"
