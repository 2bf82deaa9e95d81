"""The signed manifest of a bundle: what it is, what it needs, and the digest of everything in it.

Promises that `Manifest.from_bytes` accepts only what `Manifest.to_bytes` writes, and that every value has its
declared type and lies within its limits. Leaves the rules for its name, version and counter to `names`, the
signature and the files' contents to `verify`, and whether this machine can run the bundle to `admission`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from agent.bundle import canonical_json, values
from agent.bundle.archive import MANIFEST, MAX_BUNDLE_BYTES, MAX_MEMBER_BYTES, SIGNATURE, max_member_bytes
from agent.bundle.audio import Audio, Keywords, Speech
from agent.bundle.buckets import Buckets
from agent.bundle.columns import InputColumns, check_columns
from agent.bundle.detection import MAX_ROWS
from agent.bundle.names import (
    check_compatible,
    check_model_name,
    check_security_counter,
    check_sha256,
    check_version,
)
from agent.bundle.output_length import OutputLength, check_lengths
from agent.bundle.processing import (
    Normalise,
    Postprocess,
    Preprocess,
    Softmax,
    outputs_of,
    real_outputs,
)
from agent.bundle.provenance import Provenance
from agent.bundle.quantisation import Quantisation, Quantised, by_name
from agent.bundle.state import State, check_states, requested
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EndlessDataError, FormatError, InputError

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
# A recent x86-64 CPU has some 40 features that kernels use.
_MAX_FEATURES: Final = 64
# 1 TiB, more memory than any device has.
_MAX_MEMORY_BYTES: Final = 1 << 40
_NUMBER_TYPE: Final = re.compile(r"[A-Z][A-Z0-9]{2,15}", re.ASCII)
_GLIBC: Final = re.compile(r"2\.(0|[1-9]\d{0,2})(\.\d{1,3})?", re.ASCII)


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
        values.word("triple", self.triple)
        values.word("cpu", self.cpu)
        if len(self.features) > _MAX_FEATURES:
            raise ValueError(f"features: expected at most {_MAX_FEATURES} entries, got {len(self.features)}")
        for feature in self.features:
            values.word("features", feature)
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
            values.word(name, getattr(self, name))
        if self.executor != "graph":
            raise ValueError(f"executor: expected graph, got {self.executor!r:.80}")
        values.match("glibc", self.glibc, _GLIBC, "a version of glibc such as 2.28")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """SHA-256 (hexadecimal) and size in bytes of one file."""

    sha256: str
    size: int

    def __post_init__(self) -> None:
        check_sha256("sha256", self.sha256)
        values.within("size", self.size, 0, MAX_BUNDLE_BYTES)


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
        values.within("count", self.count, 0, MAX_SAMPLES)
        values.not_negative("rtol", self.rtol)
        values.not_negative("atol", self.atol)


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
        values.within("arena_bytes", self.arena_bytes, 0, _MAX_MEMORY_BYTES)
        values.within("params_bytes", self.params_bytes, 0, _MAX_MEMORY_BYTES)
        values.within("thread_bytes", self.thread_bytes or 0, 0, _MAX_MEMORY_BYTES)

    def needed_bytes(self, threads: int) -> int:
        """Return the most memory that the model takes with kernels of `threads` threads."""
        return self.arena_bytes + self.params_bytes + max(0, threads - 1) * (self.thread_bytes or 0)


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
    states
        Outputs that are inputs of the next run, kept for each session of a client; None for a model without.
    audio
        How a recording becomes an input, or None.
    buckets
        The dimensions that change from request to request, and the sizes of its graphs; None if
        all shapes are fixed. `inputs` and `outputs` then have the shapes of the largest bucket.
    columns
        The columns of a table that the inputs take, or None.
    quantisation
        The scales of inputs and outputs whose integers stand for real numbers, or None.
    class_counts
        Outputs that hold numbers of classes -> how many classes there are; None if the model's file says
        nothing about it. Labels are checked with it when the bundle gets others; a device does not read it.
    number_types
        Inputs and outputs of bytes that hold numbers of another type -> that type, such as `FLOAT8E4M3FN`;
        None if there are none. A device does not read it.
    counter_ahead_of_time
        True if the counter is meant to be ahead of time; None for every other bundle.

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
    states: tuple[State, ...] | None = field(default=None, metadata=canonical_json.LATER)
    audio: Audio | None = field(default=None, metadata=canonical_json.LATER)
    buckets: Buckets | None = field(default=None, metadata=canonical_json.LATER)
    columns: tuple[InputColumns, ...] | None = field(default=None, metadata=canonical_json.LATER)
    quantisation: Quantisation | None = field(default=None, metadata=canonical_json.LATER)
    class_counts: Mapping[str, int] | None = field(default=None, metadata=canonical_json.LATER)
    number_types: Mapping[str, str] | None = field(default=None, metadata=canonical_json.LATER)
    counter_ahead_of_time: bool | None = field(default=None, metadata=canonical_json.LATER)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", MappingProxyType(dict(sorted(self.files.items()))))
        if self.format != FORMAT:
            raise ValueError(f"format: expected {FORMAT}, got {self.format}")
        check_model_name(self.name)
        check_version(self.version)
        check_security_counter(self.security_counter)
        if self.counter_ahead_of_time is False:
            raise ValueError("counter_ahead_of_time: expected true or nothing, got false")
        check_compatible(self.compatible)
        _check_tensors("inputs", self.inputs)
        _check_tensors("outputs", self.outputs)
        _check_files(self.files)
        if self.buckets is not None:
            self.buckets.check(self.inputs, self.outputs)
        if self.quantisation is not None:
            self.quantisation.check(self.inputs, self.outputs)
        if self.class_counts is not None:
            object.__setattr__(
                self, "class_counts", MappingProxyType(dict(sorted(self.class_counts.items())))
            )
            for name, count in self.class_counts.items():
                values.within("class_counts", count, 1, MAX_ROWS)
                if name not in {spec.name for spec in self.outputs}:
                    raise ValueError(f"class_counts: output {name!r:.80} does not exist")
        if self.number_types is not None:
            object.__setattr__(
                self, "number_types", MappingProxyType(dict(sorted(self.number_types.items())))
            )
            holders = {spec.name for spec in (*self.inputs, *self.outputs) if spec.itemsize == 1}
            for name, kind in self.number_types.items():
                if name not in holders:
                    raise ValueError(f"number_types: {name!r:.80} is no input or output of bytes")
                if not _NUMBER_TYPE.fullmatch(kind):
                    raise ValueError(f"number_types: expected a name such as FLOAT8E4M3FN, got {kind!r:.80}")
        if self.preprocess is not None and self.preprocess.input not in {spec.name for spec in self.inputs}:
            raise ValueError(f"preprocess is for input {self.preprocess.input!r:.80}, which does not exist")
        if self.postprocess is not None:
            for name in sorted(self.postprocess.outputs - {spec.name for spec in self.outputs}):
                raise ValueError(f"postprocess is for output {name!r:.80}, which does not exist")
        if self.lengths is not None:
            processed = frozenset() if self.postprocess is None else frozenset(self.postprocess.outputs)
            check_lengths(self.lengths, self.outputs, processed)
        if self.states is not None:
            check_states(self.states, self.inputs, self.outputs)
        _check_over_time(self)
        if self.columns is not None:
            if self.preprocess is not None or self.audio is not None:
                raise ValueError("expected columns, preprocess or audio, got two of them")
            check_columns(self.columns, self.row_inputs)

    @property
    def quantised_inputs(self) -> Mapping[str, Quantised]:
        """How inputs are quantised, by their names; those that are not are left out."""
        return by_name(() if self.quantisation is None else self.quantisation.inputs)

    @property
    def real_outputs(self) -> Mapping[str, Quantised]:
        """The quantised outputs that are made real before the answer, by their names.

        These are the outputs that a step reads, and all outputs of a model that declares columns. Other
        answers have the model's own integers.
        """
        quantised = by_name(() if self.quantisation is None else self.quantisation.outputs)
        if self.columns is not None or not quantised:
            return quantised
        return real_outputs(self.postprocess, quantised)

    @property
    def smallest_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the smallest request; all have these shapes if they are fixed."""
        if self.buckets is None:
            return self.inputs
        return self.buckets.smallest(self.inputs, self.buckets.input_shape)

    @property
    def row_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the smallest request, without states: what one row becomes."""
        return requested(self.smallest_inputs, [state.input for state in self.states or ()])

    @property
    def smallest_outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of the smallest request."""
        if self.buckets is None:
            return self.outputs
        return self.buckets.smallest(self.outputs, self.buckets.output_shape)

    @property
    def takes_one_item(self) -> bool:
        """Whether a postprocessing step makes one result of a whole output, so of one item of a batch."""
        steps = () if self.postprocess is None else self.postprocess.steps
        return any(not isinstance(step, Softmax | Normalise) for step in steps)

    def check_items(self, sizes: Sequence[int]) -> None:
        """Check that a request of these sizes of the buckets' dimensions is one item, if it must be.

        Raises
        ------
        InputError
            If it is more.
        """
        if self.buckets is None or not self.takes_one_item:
            return
        for dimension, size in zip(self.buckets.dimensions, sizes, strict=True):
            if size > dimension.low and dimension.name in self.buckets.batches:
                raise InputError(
                    f"expected a {dimension.name} of {dimension.low}, got {size}: this model's "
                    "postprocessing takes one item",
                    hint="send each in a request of its own",
                )

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


def _check_over_time(manifest: Manifest) -> None:
    """Check what takes a recording, or is kept from one request to the next, against the rest."""
    states, audio = manifest.states or (), manifest.audio
    if (states or audio is not None) and (manifest.buckets is not None or manifest.lengths is not None):
        raise ValueError("states and audio: expected fixed shapes, got buckets or lengths")
    steps = () if manifest.postprocess is None else manifest.postprocess.steps
    for name in sorted({state.output for state in states} & {n for s in steps for n in outputs_of(s)}):
        raise ValueError(f"postprocess is for output {name!r:.80}, which is a state")
    taken = [each.input for each in (manifest.preprocess, audio) if each is not None]
    for name in sorted({state.input for state in states} & set(taken)):
        raise ValueError(f"input {name!r:.80} is a state and takes a picture or a recording")
    if audio is None:
        if any(isinstance(step, Speech | Keywords) for step in steps):
            raise ValueError("postprocess: speech and keywords need audio, got none")
        return
    if manifest.preprocess is not None:
        raise ValueError("expected preprocess or audio, got both")
    if [spec.name for spec in requested(manifest.inputs, [s.input for s in states])] != [audio.input]:
        raise ValueError(f"audio: expected input {audio.input!r:.80} as the only one besides the states")
    if not all(isinstance(step, Softmax | Speech | Keywords) for step in steps):
        raise ValueError("postprocess: expected softmax, speech or keywords for a model that takes audio")


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
            values.within(f"size of {name}", digest.size, 0, max_member_bytes(name))
        except FormatError as error:
            raise ValueError(str(error)) from error
