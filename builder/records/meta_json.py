"""`meta.json` of a records folder: what the records are for, and what became of them.

Strictly parsed: a folder that does not say what it is for is not used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Final

from agent.bundle import canonical_json
from agent.errors import FormatError
from builder.errors import RecordsError
from builder.kernels.decisions import SPACE_VERSION
from builder.target.device_target import DeviceTarget

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class BoardTime:
    """What a board did: seconds it was busy for us, and how its measurements went."""

    seconds: float = 0.0
    measured: int = 0
    failed: int = 0
    invalid: int = 0
    dropped: int = 0

    def __add__(self, other: BoardTime) -> BoardTime:
        return BoardTime(
            self.seconds + other.seconds,
            self.measured + other.measured,
            self.failed + other.failed,
            self.invalid + other.invalid,
            self.dropped + other.dropped,
        )

    def describe(self) -> str:
        """In words."""
        whole, rest = divmod(round(self.seconds), 60)
        counts = [(self.failed, "failed"), (self.invalid, "throttled"), (self.dropped, "times dropped")]
        parts = [f"{self.measured} measured in {f'{whole} min ' if whole else ''}{rest} s"]
        return ", ".join([*parts, *(f"{count} {what}" for count, what in counts if count)])


@dataclass(frozen=True, slots=True)
class TunedOperator:
    """A workload by name: its design space, and the values that its decisions index."""

    name: str
    kind: str
    flops: float
    values: tuple[tuple[int, ...], ...]
    default: tuple[int, ...]

    def describe(self, decisions: tuple[int, ...]) -> str:
        """The values behind `decisions`, such as `4x7x2`."""
        return "x".join(str(self.values[i][d]) for i, d in enumerate(decisions))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Paired times of two things, measured in turn.

    Attributes
    ----------
    untuned_us, tuned_us
        Medians, in microseconds.
    speedup, low, high
        Median of untuned / tuned over the pairs, and its 95 % bootstrap interval.
    pairs
        How many.
    """

    untuned_us: float
    tuned_us: float
    speedup: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an operator's best point is used: only where it is faster beyond doubt.

    Attributes
    ----------
    decisions
        The point that was compared with the heuristic's.
    ratio
        How they compared.
    use
        Whether `decisions` replace the heuristic's.
    """

    decisions: tuple[int, ...]
    ratio: Ratio
    use: bool


@dataclass(frozen=True, slots=True)
class ModelResult:
    """A model that was tuned.

    Attributes
    ----------
    name
        Of its file.
    calls
        Workload key -> calls in one inference.
    board, ratio
        Who compared the whole of it, tuned against untuned, and how that came out; None where nobody did.
    use
        Whether it is compiled with its records: not where the whole became slower.
    """

    name: str
    calls: Mapping[str, int]
    board: str | None = None
    ratio: Ratio | None = None
    use: bool = True


@dataclass(frozen=True, slots=True)
class RecordsMeta:
    """The contents of `meta.json`.

    Attributes
    ----------
    format, tvm, space, target
        What records depend on: this layout, TVM's version, that of the design spaces, the device.
    peak_gflops
        What a board does at most, as far as it was measured.
    boards
        Name -> what it did.
    operators
        Workload key -> its name and space.
    verdicts
        Workload key -> what the final comparison said.
    models
        SHA-256 of a model's file -> its operators, and how the whole of it compared.
    """

    format: int
    tvm: str
    space: int
    target: str
    peak_gflops: float | None = None
    boards: Mapping[str, BoardTime] = field(default_factory=dict)
    operators: Mapping[str, TunedOperator] = field(default_factory=dict)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    models: Mapping[str, ModelResult] = field(default_factory=dict)

    @classmethod
    def new(cls, target: DeviceTarget) -> RecordsMeta:
        """That of records which are made here and now."""
        return cls(FORMAT, tvm_version(), SPACE_VERSION, target.description())

    @property
    def device(self) -> str:
        """The target in a few words."""
        return _short(self.target)

    def to_text(self) -> str:
        """The file's text."""
        return json.dumps(canonical_json.to_json(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_text(cls, text: str, where: str) -> RecordsMeta:
        """Read the file's text.

        Raises
        ------
        RecordsError
            If it is not what `to_text` writes.
        """
        try:
            return canonical_json.from_json(cls, json.loads(text), where)
        except (ValueError, FormatError) as error:
            raise RecordsError(
                f"{where}: expected tuning records of edgebundle: {str(error)[:200]}",
                hint="records are a folder that `edgebundle tune -o FOLDER` wrote",
            ) from error

    def check_version(self, where: str) -> None:
        """Refuse records of another format, TVM or design space.

        Raises
        ------
        RecordsError
            If with what was expected and what came.
        """
        for name, mine, theirs in (
            ("format", FORMAT, self.format),
            ("design-space version", SPACE_VERSION, self.space),
            ("TVM version", tvm_version(), self.tvm),
        ):
            if mine != theirs:
                raise RecordsError(
                    f"{where}: expected records of {name} {mine}, got {theirs}",
                    hint="what was measured then means something else now: tune again into a new folder",
                )

    def check_target(self, target: DeviceTarget, where: str) -> None:
        """Refuse records of another target.

        Raises
        ------
        RecordsError
            If with what was expected and what came.
        """
        if self.target != target.description():
            raise RecordsError(
                f"{where}: expected records for {_short(target.description())}, got {_short(self.target)}",
                hint="compile with the --target that was tuned, or start another target's search from these "
                "with `tune --tuning-records`",
            )

    def with_board(self, name: str, time: BoardTime) -> RecordsMeta:
        """The same, with what a board did added."""
        return replace(self, boards={**self.boards, name: self.boards.get(name, BoardTime()) + time})


def tvm_version() -> str:
    """The version of TVM that compiles here."""
    return metadata.version("apache-tvm")


def _short(description: str) -> str:
    target = json.loads(description)
    words = [target.get("mtriple"), target.get("mcpu"), *target.get("mattr", [])]
    return " ".join(str(word) for word in words if word)
