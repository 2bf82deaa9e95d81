"""The signed manifest of a bundle: what it is, what it needs, and the digest of everything in it.

Promises that `Manifest.from_bytes` takes only what `Manifest.to_bytes` writes, and that every value is of
its declared type and within its limits. Leaves to others whether the signature holds (`verify`), whether
the files match (`verify`) and whether this machine can run it (`admission`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from agent.bundle import canonical_json
from agent.bundle.archive import MANIFEST, MAX_BUNDLE_BYTES, MAX_MEMBER_BYTES, SIGNATURE, max_member_bytes
from agent.bundle.limits import SHA256, WORD, match, within
from agent.bundle.processing import Detect, Postprocess, Preprocess, Softmax, Step, TopK
from agent.bundle.provenance import Provenance, ShippedRecords, Tuning
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EndlessDataError, FormatError

__all__ = [
    "MAX_MANIFEST_BYTES",
    "Detect",
    "FileDigest",
    "Manifest",
    "Postprocess",
    "Preprocess",
    "Provenance",
    "Resources",
    "Runtime",
    "Samples",
    "ShippedRecords",
    "Softmax",
    "Step",
    "Target",
    "TopK",
    "Tuning",
]

FORMAT: Final = 1
MAX_MANIFEST_BYTES: Final = MAX_MEMBER_BYTES[MANIFEST]
_REQUIRED_FILES: Final = ("mod.json", "mod.params", "mod.so")
_SAMPLE_FILES: Final = ("samples/inputs.params", "samples/outputs.params")
MAX_TENSORS: Final = 1024
MAX_SAMPLES: Final = 1024
# The samples' names are "<k>/<tensor name>" and bounded by TensorSpec too.
_MAX_TENSOR_NAME_CHARS: Final = 240

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
# https://semver.org/#is-there-a-suggested-regular-expression-regex-to-check-a-semver-string
_SEMVER: Final = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(-(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(\.(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*)?"
    r"(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?",
    re.ASCII,
)
# Devicetree specification 0.4, 2.3.1 compatible: "manufacturer,model".
_COMPATIBLE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9,._+-]{0,127}")
_GLIBC: Final = re.compile(r"2\.(0|[1-9]\d{0,2})(\.\d{1,3})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that the kernels were compiled for; features have the names of /proc/cpuinfo."""

    triple: str
    cpu: str
    features: tuple[str, ...]

    def __post_init__(self) -> None:
        match("triple", self.triple, WORD)
        match("cpu", self.cpu, WORD)
        _sorted_words("features", self.features)


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
        The newest glibc version that mod.so needs a symbol of, as in `2.28`.
    """

    tvm: str
    tvm_ffi: str
    executor: str
    abi: str
    glibc: str

    def __post_init__(self) -> None:
        for name in ("tvm", "tvm_ffi", "abi"):
            match(name, getattr(self, name), WORD)
        if self.executor != "graph":
            raise ValueError(f"executor is graph, not {self.executor!r:.80}")
        match("glibc", self.glibc, _GLIBC)


@dataclass(frozen=True, slots=True)
class FileDigest:
    """SHA-256 (hexadecimal) and size in bytes of one file."""

    sha256: str
    size: int

    def __post_init__(self) -> None:
        match("sha256", self.sha256, SHA256)
        within("size", self.size, 0, MAX_BUNDLE_BYTES)


@dataclass(frozen=True, slots=True)
class Samples:
    """How many recorded inputs and outputs there are, and how far off an output may be."""

    count: int
    rtol: float
    atol: float

    def __post_init__(self) -> None:
        within("count", self.count, 0, MAX_SAMPLES)
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is finite and not negative, not {value}")


@dataclass(frozen=True, slots=True)
class Resources:
    """Memory that running takes, in bytes: activations, and weights."""

    arena_bytes: int
    params_bytes: int

    def __post_init__(self) -> None:
        within("arena_bytes", self.arena_bytes, 0, 1 << 40)
        within("params_bytes", self.params_bytes, 0, 1 << 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that is signed about a bundle, but its files' contents.

    Attributes
    ----------
    name
        The model's name: lower case letters, digits, `._-`; at most 64, the first a letter or digit.
    version
        Semantic version 2.0.0.
    security_counter
        Never lower than what a device has committed for this name.
    compatible
        Machines that take it; one of these must be among the device's own.
    files
        Name -> digest of every member but manifest.json and model.sig.

    Raises
    ------
    ValueError
        If a value is out of its limits, or refers to something that is not there.
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
    format: int = FORMAT

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", MappingProxyType(dict(sorted(self.files.items()))))
        if self.format != FORMAT:
            raise ValueError(f"format is {FORMAT}, not {self.format}")
        match("name", self.name, _NAME)
        if len(self.version) > 64:
            raise ValueError(f"version has at most 64 characters, not {len(self.version)}")
        match("version", self.version, _SEMVER)
        within("security_counter", self.security_counter, 0, (1 << 63) - 1)
        if not 1 <= len(self.compatible) <= 64:
            raise ValueError(f"compatible has 1 to 64 entries, not {len(self.compatible)}")
        for entry in self.compatible:
            match("compatible", entry, _COMPATIBLE)
        for kind, specs in (("inputs", self.inputs), ("outputs", self.outputs)):
            if not 1 <= len(specs) <= MAX_TENSORS:
                raise ValueError(f"{kind} has 1 to {MAX_TENSORS} entries, not {len(specs)}")
            if len({spec.name for spec in specs}) != len(specs):
                raise ValueError(f"{kind} has a name twice")
            for spec in specs:
                if spec.datatype == "BYTES":
                    raise ValueError(f"{kind} has {spec.name} of datatype BYTES, which no kernel takes")
                within(
                    f"the length of the name of {kind} {spec.name}", len(spec.name), 1, _MAX_TENSOR_NAME_CHARS
                )
        _check_files(self.files)
        if self.preprocess is not None and self.preprocess.input not in {spec.name for spec in self.inputs}:
            raise ValueError(f"preprocess is for input {self.preprocess.input!r:.80}, which is not there")
        if self.postprocess is not None:
            _check_steps(self.postprocess, self.outputs)

    @property
    def has_labels(self) -> bool:
        """Whether the bundle has a labels.txt."""
        return "labels.txt" in self.files

    def to_bytes(self) -> bytes:
        """Return the one encoding of this manifest.

        Raises
        ------
        FormatError
            If the digest of a file is missing that every such bundle has.
        EndlessDataError
            If it is larger than a reader takes.
        """
        required = [*_REQUIRED_FILES, *(_SAMPLE_FILES if self.samples.count else ())]
        if missing := [name for name in required if name not in self.files]:
            raise FormatError(f"the manifest's files lack {missing[0]}")
        raw = canonical_json.encode(canonical_json.to_json(self))
        if len(raw) > MAX_MANIFEST_BYTES:
            raise EndlessDataError(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes, this one {len(raw)}")
        return raw

    @classmethod
    def from_bytes(cls, raw: bytes) -> Manifest:
        """Read a manifest, strictly.

        Raises
        ------
        FormatError
            If any byte is not as `to_bytes` would have written it.
        EndlessDataError
            If it is larger than 512 KiB.
        """
        if len(raw) > MAX_MANIFEST_BYTES:
            raise EndlessDataError(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes, this one {len(raw)}")
        manifest = canonical_json.from_json(cls, canonical_json.parse(raw, "manifest.json"), "manifest")
        if manifest.to_bytes() != raw:
            raise FormatError("manifest.json is not in its one encoding: keys sorted, no spaces, ASCII")
        return manifest


def _check_files(files: Mapping[str, FileDigest]) -> None:
    for name, digest in files.items():
        if name in (MANIFEST, SIGNATURE):
            raise ValueError(f"files has {name}, which cannot hold its own digest")
        try:
            within(f"the size of {name}", digest.size, 0, max_member_bytes(name))
        except FormatError as error:
            raise ValueError(str(error)) from error


def _check_steps(postprocess: Postprocess, outputs: tuple[TensorSpec, ...]) -> None:
    for name in sorted(postprocess.outputs - {spec.name for spec in outputs}):
        raise ValueError(f"postprocess is for output {name!r:.80}, which is not there")


def _sorted_words(name: str, words: tuple[str, ...]) -> None:
    if len(words) > 64:
        raise ValueError(f"{name} has at most 64 entries, not {len(words)}")
    for word in words:
        match(name, word, WORD)
    if list(words) != sorted(set(words)):
        raise ValueError(f"{name} is sorted and without duplicates, not {', '.join(words):.200}")
