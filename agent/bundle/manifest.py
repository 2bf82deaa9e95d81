"""The signed manifest of a bundle: what it is, what it needs, and the digest of everything in it.

Promises that `Manifest.from_bytes` accepts only what `Manifest.to_bytes` writes, and that every value has its
declared type and lies within its limits. Leaves the signature and the files' contents to `verify`, and
whether this machine can run the bundle to `admission`.

The rules for values that users choose (`check_model_name`, `check_version`, `check_security_counter`,
`check_compatible`) can be called without a manifest: the builder refuses a bad value before it compiles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from agent.bundle import canonical_json
from agent.bundle.archive import MANIFEST, MAX_BUNDLE_BYTES, MAX_MEMBER_BYTES, SIGNATURE, max_member_bytes
from agent.bundle.buckets import Buckets
from agent.bundle.names import COMPATIBLE, MAX_VERSION_CHARS, MODEL_NAME, SEMVER, SHA256
from agent.bundle.output_length import OutputLength, check_lengths
from agent.bundle.processing import Postprocess, Preprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EndlessDataError, FormatError

FORMAT: Final = 1
MAX_MANIFEST_BYTES: Final = MAX_MEMBER_BYTES[MANIFEST]
_REQUIRED_FILES: Final = ("mod.json", "mod.params", "mod.so")
_SAMPLE_FILES: Final = ("samples/inputs.params", "samples/outputs.params")
# Inputs or outputs of a model. Exports of language models with their caches have some hundred.
MAX_TENSORS: Final = 1024
# A device runs every sample before it serves a model.
MAX_SAMPLES: Final = 1024
# Samples are named "<k>/<tensor name>", and TensorSpec limits that whole name to 256 characters.
_MAX_TENSOR_NAME_CHARS: Final = 240
# A 64-bit signed integer, which every language can read.
MAX_SECURITY_COUNTER: Final = (1 << 63) - 1
# For device types and for CPU features; a recent x86-64 CPU has some 40 features that kernels use.
MAX_WORDS: Final = 64

# 1 TiB, more memory than any device has.
_MAX_MEMORY_BYTES: Final = 1 << 40
# Kernels of a model, and timed pairs: both stay far below.
_MAX_COUNT: Final = 1 << 20
_GLIBC: Final = re.compile(r"2\.(0|[1-9]\d{0,2})(\.\d{1,3})?", re.ASCII)
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_SENTENCE: Final = re.compile(r"[ -~]{1,256}")


def check_model_name(name: str) -> None:
    """Check a model's name: 1 to 64 of `a-z`, `0-9`, `.`, `_` and `-`, the first a letter or a digit.

    Raises
    ------
    ValueError
        If it breaks that rule.
    """
    _match(
        "name",
        name,
        MODEL_NAME,
        "1 to 64 lower case letters, digits, '.', '_' and '-', first a letter or digit",
    )


def check_version(version: str) -> None:
    """Check a model's version: semantic version 2.0.0 (semver.org) of at most 64 characters.

    Raises
    ------
    ValueError
        If it is longer or not a semantic version.
    """
    if len(version) > MAX_VERSION_CHARS:
        raise ValueError(f"version: expected at most {MAX_VERSION_CHARS} characters, got {len(version)}")
    _match("version", version, SEMVER, "a semantic version such as 1.0.0")


def check_security_counter(counter: int) -> None:
    """Check a security counter: 0 to 2^63 - 1.

    Raises
    ------
    ValueError
        If it is out of that range.
    """
    _within("security_counter", counter, 0, MAX_SECURITY_COUNTER)


def check_compatible(compatible: Sequence[str]) -> None:
    """Check the device types that a bundle is for: 1 to 64 strings such as `raspberrypi,4-model-b`.

    Each has 1 to 128 of `A-Z`, `a-z`, `0-9` and `,._+-`, and begins with a letter or a digit.

    Raises
    ------
    ValueError
        If there are none or too many, or one breaks that rule.
    """
    if not 1 <= len(compatible) <= MAX_WORDS:
        raise ValueError(f"compatible: expected 1 to {MAX_WORDS} device types, got {len(compatible)}")
    for device_type in compatible:
        _match("compatible", device_type, COMPATIBLE, "a device type such as raspberrypi,4-model-b")


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that the kernels were compiled for.

    Attributes
    ----------
    triple
        LLVM's target triple, such as `aarch64-linux-gnu`.
    cpu
        LLVM's name of the CPU, such as `cortex-a72`.
    features
        CPU features that the kernels use, named as in /proc/cpuinfo; sorted, at most 64.
    """

    triple: str
    cpu: str
    features: tuple[str, ...]

    def __post_init__(self) -> None:
        _word("triple", self.triple)
        _word("cpu", self.cpu)
        if len(self.features) > MAX_WORDS:
            raise ValueError(f"features: expected at most {MAX_WORDS} entries, got {len(self.features)}")
        for feature in self.features:
            _word("features", feature)
        if list(self.features) != sorted(set(self.features)):
            raise ValueError(
                f"features: expected sorted entries without duplicates, got {', '.join(self.features):.200}"
            )


@dataclass(frozen=True, slots=True)
class Runtime:
    """The software that the kernels need.

    Attributes
    ----------
    tvm, tvm_ffi
        Versions that compiled the bundle.
    executor
        `graph`.
    abi
        `tvm-ffi-<major>.<minor>`.
    glibc
        The newest glibc version that mod.so needs a symbol of, such as `2.28`.
    """

    tvm: str
    tvm_ffi: str
    executor: str
    abi: str
    glibc: str

    def __post_init__(self) -> None:
        for name in ("tvm", "tvm_ffi", "abi"):
            _word(name, getattr(self, name))
        if self.executor != "graph":
            raise ValueError(f"executor: expected graph, got {self.executor!r:.80}")
        _match("glibc", self.glibc, _GLIBC, "a version of glibc such as 2.28")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """SHA-256 (hexadecimal) and size in bytes of one file."""

    sha256: str
    size: int

    def __post_init__(self) -> None:
        _sha256("sha256", self.sha256)
        _within("size", self.size, 0, MAX_BUNDLE_BYTES)


@dataclass(frozen=True, slots=True)
class Samples:
    """The recorded inputs and outputs with which a device tests itself before it serves a model.

    Attributes
    ----------
    count
        Number of samples, 0 to 1024.
    rtol, atol
        Relative and absolute tolerance of an output element.
    """

    count: int
    rtol: float
    atol: float

    def __post_init__(self) -> None:
        _within("count", self.count, 0, MAX_SAMPLES)
        _not_negative("rtol", self.rtol)
        _not_negative("atol", self.atol)


@dataclass(frozen=True, slots=True)
class Resources:
    """Memory that the model needs to run, besides the bundle's files.

    Attributes
    ----------
    arena_bytes
        Inputs, activations and workspace with one thread; more if loading takes more than that for weights
        that are still to be transformed.
    params_bytes
        Weights as kernels read them, so transformed where that is done at load.
    thread_bytes
        Workspace of each further thread. None for a bundle by an early compiler: its `arena_bytes` then
        counts only activations, and its `params_bytes` the weights before they are transformed.
    """

    arena_bytes: int
    params_bytes: int
    thread_bytes: int | None = field(default=None, metadata=canonical_json.LATER)

    def __post_init__(self) -> None:
        _within("arena_bytes", self.arena_bytes, 0, _MAX_MEMORY_BYTES)
        _within("params_bytes", self.params_bytes, 0, _MAX_MEMORY_BYTES)
        _within("thread_bytes", self.thread_bytes or 0, 0, _MAX_MEMORY_BYTES)

    def needed_bytes(self, threads: int) -> int:
        """Return the most memory that the model takes with kernels of `threads` threads."""
        return self.arena_bytes + self.params_bytes + max(0, threads - 1) * (self.thread_bytes or 0)


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
        _sentence("board", self.board)
        for name in ("untuned_ms", "tuned_ms", "speedup", "low", "high"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: expected a finite number above 0, got {value}")
        _within("pairs", self.pairs, 1, _MAX_COUNT)


@dataclass(frozen=True, slots=True)
class ShippedRecords:
    """The tuning records that came with the compiler and were applied.

    Attributes
    ----------
    name
        The kind of core that they are for.
    sha256
        Digest of the records' file.
    kernels
        Number of different kernels whose schedules come from it.
    board_timed
        Whether they were timed on a device of that kind.
    """

    name: str
    sha256: str
    kernels: int
    board_timed: bool

    def __post_init__(self) -> None:
        _word("name", self.name)
        _sha256("sha256", self.sha256)
        _within("kernels", self.kernels, 1, _MAX_COUNT)


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
        _sha256("source_sha256", self.source_sha256)
        _sentence("builder", self.builder)
        if self.tuning_records_sha256 is not None:
            _sha256("tuning_records_sha256", self.tuning_records_sha256)
        if self.parity_error is not None:
            _not_negative("parity_error", self.parity_error)
        if self.reference is not None:
            _sentence("reference", self.reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that is signed about a bundle, except its files' contents.

    Attributes
    ----------
    name
        The model's name, see `check_model_name`.
    version
        Semantic version 2.0.0, see `check_version`.
    security_counter
        0 to 2^63 - 1. A device refuses a bundle whose counter is lower than the one it committed for `name`.
    compatible
        Device types that the bundle is for; one of them must be among the device's own.
    target, runtime
        The machine and the software that the kernels need.
    inputs, outputs
        The model's tensors, in the order in which it takes and returns them; 1 to 1024 each.
    preprocess, postprocess
        How the device turns an image into an input, and outputs into an answer, or None.
    samples
        Number and tolerance of the recorded inputs and outputs.
    resources
        Memory that the model needs.
    files
        Name -> digest of every member except manifest.json and model.sig.
    provenance
        Where the bundle comes from.
    lengths
        Axes of outputs whose length changes from answer to answer, or None if there are none.
    format
        Version of the manifest's format, 1.
    buckets
        The dimensions that change from request to request, and the sizes of its graphs; None if
        all shapes are fixed. `inputs` and `outputs` then have the shapes of the largest bucket.

    Raises
    ------
    ValueError
        If a value is out of its limits, or refers to a tensor that the model does not have.
    """

    name: str
    version: str
    security_counter: int
    compatible: tuple[str, ...]
    target: Target
    runtime: Runtime
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    preprocess: Preprocess | None
    postprocess: Postprocess | None
    samples: Samples
    resources: Resources
    files: Mapping[str, FileDigest]
    provenance: Provenance
    lengths: tuple[OutputLength, ...] | None = field(default=None, metadata=canonical_json.LATER)
    format: int = FORMAT
    buckets: Buckets | None = field(default=None, metadata=canonical_json.LATER)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", MappingProxyType(dict(sorted(self.files.items()))))
        if self.format != FORMAT:
            raise ValueError(f"format: expected {FORMAT}, got {self.format}")
        check_model_name(self.name)
        check_version(self.version)
        check_security_counter(self.security_counter)
        check_compatible(self.compatible)
        _check_tensors("inputs", self.inputs)
        _check_tensors("outputs", self.outputs)
        _check_files(self.files)
        if self.buckets is not None:
            self.buckets.check(self.inputs, self.outputs)
        if self.preprocess is not None and self.preprocess.input not in {spec.name for spec in self.inputs}:
            raise ValueError(f"preprocess is for input {self.preprocess.input!r:.80}, which does not exist")
        if self.postprocess is not None:
            for name in sorted(self.postprocess.outputs - {spec.name for spec in self.outputs}):
                raise ValueError(f"postprocess is for output {name!r:.80}, which does not exist")
        if self.lengths is not None:
            processed = frozenset() if self.postprocess is None else frozenset(self.postprocess.outputs)
            check_lengths(self.lengths, self.outputs, processed)

    @property
    def has_labels(self) -> bool:
        """Whether the bundle has a labels.txt."""
        return "labels.txt" in self.files

    @property
    def smallest_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the smallest request; all have these shapes if they are fixed."""
        if self.buckets is None:
            return self.inputs
        return self.buckets.smallest(self.inputs, self.buckets.input_shape)

    @property
    def smallest_outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of the smallest request."""
        if self.buckets is None:
            return self.outputs
        return self.buckets.smallest(self.outputs, self.buckets.output_shape)

    def smallest_shapes(self, specs: tuple[TensorSpec, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the smallest inputs or outputs; none if all shapes are fixed."""
        return () if self.buckets is None else tuple(spec.shape for spec in specs)

    def to_bytes(self) -> bytes:
        """Return the one encoding of this manifest.

        Raises
        ------
        FormatError
            If `files` lacks one that every bundle, or every bundle with samples, must have.
        EndlessDataError
            If it is larger than the 512 KiB that a reader accepts.
        """
        graphs = () if self.buckets is None else self.buckets.members()
        required = [*_REQUIRED_FILES, *graphs, *(_SAMPLE_FILES if self.samples.count else ())]
        if missing := [name for name in required if name not in self.files]:
            raise FormatError(f"the manifest's files lack {missing[0]}")
        if extra := sorted(n for n in self.files if n.startswith("buckets/") and n not in graphs):
            raise FormatError(f"the manifest's files have {extra[0]}, the graph of no bucket")
        raw = canonical_json.encode(canonical_json.to_json(self))
        if len(raw) > MAX_MANIFEST_BYTES:
            raise EndlessDataError(
                f"expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, got {len(raw)}"
            )
        return raw

    @classmethod
    def from_bytes(cls, raw: bytes) -> Manifest:
        """Read a manifest, strictly.

        Raises
        ------
        FormatError
            If `to_bytes` would have written any byte differently.
        EndlessDataError
            If it is larger than 512 KiB.
        """
        if len(raw) > MAX_MANIFEST_BYTES:
            raise EndlessDataError(
                f"expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, got {len(raw)}"
            )
        manifest = canonical_json.from_json(cls, canonical_json.parse(raw, "manifest.json"), "manifest")
        if manifest.to_bytes() != raw:
            raise FormatError("manifest.json: expected canonical JSON (sorted keys, no spaces, ASCII)")
        return manifest


def _check_tensors(kind: str, specs: tuple[TensorSpec, ...]) -> None:
    if not 1 <= len(specs) <= MAX_TENSORS:
        raise ValueError(f"{kind}: expected 1 to {MAX_TENSORS} tensors, got {len(specs)}")
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError(f"{kind}: two tensors have the same name")
    for spec in specs:
        if spec.datatype == "BYTES":
            raise ValueError(f"{kind}: {spec.name} has datatype BYTES, which no kernel takes")
        if len(spec.name) > _MAX_TENSOR_NAME_CHARS:
            raise ValueError(
                f"{kind}: expected a name of at most {_MAX_TENSOR_NAME_CHARS} characters, "
                f"got {len(spec.name)} in {spec.name:.80}"
            )


def _check_files(files: Mapping[str, FileDigest]) -> None:
    for name, digest in files.items():
        if name in (MANIFEST, SIGNATURE):
            raise ValueError(f"files: {name} cannot hold its own digest")
        try:
            _within(f"size of {name}", digest.size, 0, max_member_bytes(name))
        except FormatError as error:
            raise ValueError(str(error)) from error


def _word(name: str, value: str) -> None:
    _match(name, value, _WORD, "1 to 64 letters, digits, '.', '_', '+' and '-', first a letter or digit")


def _sentence(name: str, value: str) -> None:
    _match(name, value, _SENTENCE, "1 to 256 printable ASCII characters")


def _sha256(name: str, value: str) -> None:
    _match(name, value, SHA256, "64 lower case hexadecimal digits")


def _match(name: str, value: str, pattern: re.Pattern[str], expected: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{name}: expected {expected}, got {value!r:.80}")


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value}")


def _not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value}")
