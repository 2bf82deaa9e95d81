"""`meta.json` of a records folder: target, versions, operators, the work of the boards, and the verdicts.

It is parsed strictly: a folder without a valid `meta.json` is refused.
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
from builder.kernels.space_versions import SPACE_VERSIONS
from builder.target.device_target import DeviceTarget

FORMAT: Final = 2


@dataclass(frozen=True, slots=True)
class BoardTime:
    """The work of a board.

    Attributes
    ----------
    seconds
        How long it was busy.
    measured, failed, invalid
        Candidates measured; candidates that did not run; measurements discarded because it throttled.
    dropped
        How often it was dropped.
    """

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
        """Return one line, such as `64 measured in 2 min 5 s, 1 failed`."""
        whole, rest = divmod(round(self.seconds), 60)
        counts = [(self.failed, "failed"), (self.invalid, "throttled"), (self.dropped, "times dropped")]
        parts = [f"{self.measured} measured in {f'{whole} min ' if whole else ''}{rest} s"]
        return ", ".join([*parts, *(f"{count} {what}" for count, what in counts if count)])


@dataclass(frozen=True, slots=True)
class TunedOperator:
    """An operator of a model and its design space.

    Attributes
    ----------
    name, kind
        The name of its function, and the kind of its design space.
    version
        The version of that kind that its records are of.
    flops
        Floating-point operations of one call.
    values
        For each decision, the values to choose from.
    default
        The heuristic's point, as indices into `values`.
    """

    name: str
    kind: str
    version: int
    flops: float
    values: tuple[tuple[int, ...], ...]
    default: tuple[int, ...]

    @property
    def is_current(self) -> bool:
        """Whether its records are of the present version of its kind of design space."""
        return SPACE_VERSIONS.get(self.kind) == self.version

    def describe(self, decisions: tuple[int, ...]) -> str:
        """Return the values that `decisions` stand for, such as `4x7x2`."""
        return "x".join(str(self.values[i][d]) for i, d in enumerate(decisions))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two kernels or models, timed alternately.

    Attributes
    ----------
    untuned_us, tuned_us
        Medians, in microseconds.
    speedup, low, high
        Median of untuned / tuned over the pairs, and its 95 % bootstrap interval.
    pairs
        Number of pairs.
    """

    untuned_us: float
    tuned_us: float
    speedup: float
    low: float
    high: float
    pairs: int

    @property
    def is_gain(self) -> bool:
        """Whether the tuned side is faster beyond doubt: only then may the speed-up be claimed."""
        return self.low > 1.0

    def describe(self) -> str:
        """Return one phrase, such as `1.05x as fast (1.02 to 1.08)`."""
        interval = f"{self.low:.2f} to {self.high:.2f}"
        if self.low <= 1.0 <= self.high:
            return f"no difference beyond doubt ({interval})"
        return f"{self.speedup:.2f}x as fast ({interval})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an operator's best point is used.

    Attributes
    ----------
    decisions
        The point that was compared with the heuristic's.
    ratio
        The result of the comparison.
    use
        Whether `decisions` replace the heuristic's: only if the whole interval of `ratio` is above 1.
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
        Name of the model's file.
    calls
        Workload key -> calls in one inference.
    board, ratio
        The board that compared the whole model, tuned against untuned, and the result; None if they have
        not been compared.
    use
        Whether the model is compiled with its records; False if it became slower as a whole.
    nodes
        Workload key -> the ONNX nodes of its first call, as `Operator name`; None in older folders.
    """

    name: str
    calls: Mapping[str, int]
    board: str | None = None
    ratio: Ratio | None = None
    use: bool = True
    nodes: Mapping[str, tuple[str, ...]] | None = field(default=None, metadata=canonical_json.LATER)


@dataclass(frozen=True, slots=True)
class RecordsMeta:
    """The contents of `meta.json`.

    `format`, `tvm`, `target`: what all records depend on: the layout of this file, the version of TVM, and
        the target's description. The version of the design space stands with each operator.
    `peak_gflops`: the highest rate that a board has reached; None if it was not measured.
    `boards`: name of a board -> its work.
    `operators`: workload key -> the operator and its design space.
    `verdicts`: workload key -> the verdict of the final comparison.
    `models`: SHA-256 of a model's file -> its operators, and the comparison of the whole model.
    `retired`: numbers, from 0, of the workloads in the database whose records are of an earlier version, and
        for which there is a later line.
    """

    format: int
    tvm: str
    target: str
    peak_gflops: float | None = None
    boards: Mapping[str, BoardTime] = field(default_factory=dict)
    operators: Mapping[str, TunedOperator] = field(default_factory=dict)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    models: Mapping[str, ModelResult] = field(default_factory=dict)
    retired: tuple[int, ...] = ()

    @classmethod
    def new(cls, target: DeviceTarget) -> RecordsMeta:
        """Return the contents for a new, empty folder of records for `target`."""
        return cls(FORMAT, tvm_version(), target.description())

    @property
    def device(self) -> str:
        """The target in a few words, such as `aarch64-linux-gnu cortex-a72`."""
        return _short(self.target)

    @property
    def spaces(self) -> str:
        """The kinds of design spaces of the operators, and their versions, such as `conv2d 10, matmul 11`."""
        found = {(operator.kind, operator.version) for operator in self.operators.values()}
        return ", ".join(f"{kind} {version}" for kind, version in sorted(found))

    def is_current(self, key: str) -> bool:
        """Whether the records of a workload are of the present version of its design space."""
        return key in self.operators and self.operators[key].is_current

    def without_verdicts(self, key: str) -> RecordsMeta:
        """Return a copy without the verdicts on a workload and on the models that have it."""
        models = {
            digest: replace(model, board=None, ratio=None, use=True) if key in model.calls else model
            for digest, model in self.models.items()
        }
        verdicts = {k: verdict for k, verdict in self.verdicts.items() if k != key}
        return replace(self, verdicts=verdicts, models=models)

    def to_text(self) -> str:
        """Return the file's text."""
        return json.dumps(canonical_json.to_json(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_text(cls, text: str, where: str) -> RecordsMeta:
        """Parse the file's text; `where` is its path in messages.

        Raises `RecordsError` if `text` is not what `to_text` writes.
        """
        try:
            return canonical_json.from_json(cls, json.loads(text), where)
        except (ValueError, FormatError) as error:
            raise RecordsError(
                f"{where}: expected tuning records of edgebundle: {str(error)[:200]}",
                hint="give a folder that `edgebundle tune -o FOLDER` wrote",
            ) from error

    def check_version(self, where: str) -> None:
        """Check that the records are of this format and TVM; `where` is the folder.

        Raises `RecordsError` if one of the two differs.
        """
        for name, mine, theirs in (
            ("format", FORMAT, self.format),
            ("TVM version", tvm_version(), self.tvm),
        ):
            if mine != theirs:
                raise RecordsError(
                    f"{where}: expected records of {name} {mine}, got {theirs}",
                    hint="tune again into a new folder: these records no longer mean the same schedules",
                )

    def check_target(self, target: DeviceTarget, where: str) -> None:
        """Check that the records are for `target`; `where` is the folder.

        Raises `RecordsError` if they are for another target.
        """
        if self.target != target.description():
            raise RecordsError(
                f"{where}: expected records for {_short(target.description())}, got {_short(self.target)}",
                hint="compile with the --target that was tuned, or let `tune --tuning-records` start the "
                "search for another target from these records",
            )

    def with_board(self, name: str, time: BoardTime) -> RecordsMeta:
        """Return a copy with `time` added to the work of the board `name`."""
        return replace(self, boards={**self.boards, name: self.boards.get(name, BoardTime()) + time})


def tvm_version() -> str:
    """Return the version of the installed TVM."""
    return metadata.version("apache-tvm")


def _short(description: str) -> str:
    target = json.loads(description)
    words = [target.get("mtriple"), target.get("mcpu"), *target.get("mattr", [])]
    return " ".join(str(word) for word in words if word)
