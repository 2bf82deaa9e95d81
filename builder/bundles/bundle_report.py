"""A report on a bundle for people: its manifest, its files, and whether its signature was verified.

Promises that nothing in the bundle is loaded or executed, and that the report says whether it was verified.
Leaves verification to `agent.bundle.verify`.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agent.bundle import archive, canonical_json
from agent.bundle.audio import Audio, Keywords, Speech
from agent.bundle.columns import columns_of
from agent.bundle.detection import Objects
from agent.bundle.keyring import Keyring
from agent.bundle.manifest import Manifest, Resources
from agent.bundle.processing import (
    ClassMap,
    Ctc,
    Detect,
    Normalise,
    Pose,
    Postprocess,
    Preprocess,
    Softmax,
    Step,
    TopK,
)
from agent.bundle.quantisation import NO_QUANTISATION, Quantised, by_name
from agent.bundle.signature import claimed_key_id
from agent.bundle.state import State
from agent.bundle.tensor_spec import TensorSpec
from agent.bundle.verify import verify
from agent.errors import BundleError, FormatError
from agent.reading import open_at_once
from builder.errors import PackageError
from builder.spelling import similar_file

WIDTH: Final = 100  # characters per line, for a terminal on half a screen; digests are never broken
LISTED_TEXTS: Final = 8  # of a column; cities or products may be thousands


@dataclass(frozen=True, slots=True)
class BundleReport:
    """A bundle's manifest, its members, and the state of its signature.

    `manifest`: what the file claims; trustworthy only if `key_id` is not None.
    `signed`: whether the bundle has a signature, valid or not.
    `key_id`: the trusted key that verified it, or None.
    `claimed_key_id`: the key that the signature names, verified or not; None without a readable signature.
    `digest`: SHA-256 of the whole file if it was verified, else None.
    `refusal`: why verification failed, or None if it succeeded or no keys were given.
    """

    manifest: Manifest
    members: dict[str, int]
    signed: bool
    key_id: str | None
    claimed_key_id: str | None
    digest: str | None
    refusal: BundleError | None

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "verified": self.key_id is not None,
            "signed": self.signed,
            "key_id": self.key_id,
            "claimed_key_id": self.claimed_key_id,
            "digest": self.digest,
            "refusal": None if self.refusal is None else self.refusal.code,
            "manifest": canonical_json.to_json(self.manifest),
            "members": self.members,
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        manifest = self.manifest
        edges = manifest.quantisation or NO_QUANTISATION
        quantised = by_name(edges.inputs), by_name(edges.outputs)
        runtime, target, samples = manifest.runtime, manifest.target, manifest.samples
        rows = [
            ("signature", self._signature()),
            ("digest", self.digest or "not computed: the bundle was not verified"),
            ("target", f"{target.triple}, {target.cpu}" + _listed(", needs ", target.features)),
            ("runtime", f"{runtime.abi}, glibc {runtime.glibc} or newer, {runtime.executor} executor"),
            ("compatible", ", ".join(manifest.compatible)),
            ("counter", f"{manifest.security_counter} ({_counter_note(manifest)})"),
            *(("input", _tensor(spec, manifest, quantised[0])) for spec in manifest.inputs),
            *(("output", _tensor(spec, manifest, quantised[1])) for spec in manifest.outputs),
            *(("bucket", line) for line in _buckets(manifest)),
            ("before", _before(manifest)),
            *(("text", line) for line in _texts(manifest)),
            *(() if manifest.states is None else (("kept", _states(manifest.states)),)),
            ("after", "nothing" if manifest.postprocess is None else _postprocess(manifest.postprocess)),
            ("parity", _parity(manifest)),
            ("samples", f"{samples.count}, checked within rtol {samples.rtol:g} and atol {samples.atol:g}"),
            ("memory", _memory(manifest.resources)),
            ("compiled", f"by {manifest.provenance.builder}, TVM {runtime.tvm}, tvm-ffi {runtime.tvm_ffi}"),
            ("from", f"a model of sha256 {manifest.provenance.source_sha256}"),
        ]  # fmt: skip
        width = max(len(name) for name in self.members)
        return [
            f"{manifest.name} {manifest.version}",
            *(line for name, value in rows for line in _row(name, value)),
            "members",
            *(f"  {name:<{width}}  {_size(size):>10}" for name, size in self.members.items()),
        ]

    def _signature(self) -> str:
        if self.key_id is not None:
            return f"verified, by key {self.key_id}"
        if self.refusal is not None:
            return f"DOES NOT VERIFY ({self.refusal.code}): do not trust anything below"
        if not self.signed:
            return "none: devices refuse this bundle"
        claim = "" if self.claimed_key_id is None else f"; it names key {self.claimed_key_id}"
        return f"not checked{claim}: give --trust KEY.pub"


def _buckets(manifest: Manifest) -> list[str]:
    if manifest.buckets is None:
        return []
    return [
        f"{dimension}, computed at {', '.join(map(str, dimension.sizes))}"
        + (", requests together" if dimension.name == manifest.buckets.batch else "")
        for dimension in manifest.buckets.dimensions
    ]


def _memory(resources: Resources) -> str:
    return f"{_size(resources.params_bytes)} for weights, {_size(resources.arena_bytes)} for the rest" + (
        f", {_size(resources.thread_bytes)} for each further thread" if resources.thread_bytes else ""
    )


def inspect_bundle(path: str | os.PathLike[str], keyring: Keyring | None = None) -> BundleReport:
    """Read a bundle's manifest and index, and verify it if keys are given.

    Parameters
    ----------
    path
        The bundle.
    keyring
        Keys to verify it with, or None not to verify it.

    Raises
    ------
    PackageError
        If the file cannot be opened.
    FormatError, EndlessDataError
        If the file is not a bundle, so there is nothing to report.
    """
    try:
        fd = open_at_once(path)
    except OSError as error:
        raise PackageError(
            f"cannot read the bundle {os.fspath(path)}: {error.strerror}",
            hint=similar_file(path),
        ) from error
    try:
        index = {member.name: member for member in archive.read_index(fd)}
        if archive.MANIFEST not in index:
            raise FormatError(f"the bundle has no {archive.MANIFEST}")
        manifest = Manifest.from_bytes(archive.read_member(fd, index[archive.MANIFEST]))
        key_id = digest = refusal = claimed = None
        if archive.SIGNATURE in index:
            with contextlib.suppress(BundleError):
                claimed = claimed_key_id(archive.read_member(fd, index[archive.SIGNATURE]))
        if keyring is not None:
            try:
                with verify(fd, keyring) as bundle:
                    key_id, digest = bundle.key_id, bundle.digest
            except BundleError as error:
                refusal = error
    finally:
        os.close(fd)
    sizes = {name: member.size for name, member in index.items()}
    return BundleReport(manifest, sizes, archive.SIGNATURE in index, key_id, claimed, digest, refusal)


def _row(name: str, value: str) -> list[str]:
    return textwrap.wrap(
        value,
        WIDTH,
        initial_indent=f"  {name:<10}  ",
        subsequent_indent=" " * 14,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _tensor(spec: TensorSpec, manifest: Manifest, quantised: Mapping[str, Quantised]) -> str:
    buckets, held = manifest.buckets, (manifest.number_types or {}).get(spec.name)
    shape = str(list(spec.shape)) if buckets is None else buckets.describe(spec)
    found = quantised.get(spec.name)
    real = "" if found is None else f", real numbers are (integer {-found.zero:+d}) * {found.scale:.6g}"
    return f"{spec.name} {spec.datatype} {shape}{f', each byte holds {held}' if held else ''}{real}"


def _before(manifest: Manifest) -> str:
    if manifest.audio is not None:
        return _audio(manifest.audio)
    return "nothing" if manifest.preprocess is None else _preprocess(manifest.preprocess)


def _texts(manifest: Manifest) -> list[str]:
    """Return what each column of texts may have, and what any other text counts as."""
    lines = []
    for column in columns_of(manifest.columns or ()):
        if column.categories is None:
            continue
        more = len(column.categories) - LISTED_TEXTS
        listed = ", ".join(column.categories[:LISTED_TEXTS]) + (f" and {more} more" if more > 0 else "")
        other = "is refused" if column.unknown is None else "counts as unknown, as the model's encoder has it"
        lines.append(f"{column.name}: {listed}; any other {other}")
    return lines


def _preprocess(declared: Preprocess) -> str:
    steps = [declared.colour + (", inverted" if declared.invert else "")]
    if declared.resize:
        steps.append(
            f"{declared.resize[0]}x{declared.resize[1]} {declared.resize_mode} {declared.interpolation}"
        )
    if declared.resize_mode == "line":
        steps.append("last column repeated" if declared.pad is None else f"filled with {declared.pad}")
    elif declared.pad is not None or declared.position is not None:
        steps.append(f"{(declared.position or 'centre').replace('_', ' ')} on {declared.pad or 0}")
    if declared.reduce:
        steps.append("large images reduced first")
    if declared.crop:
        steps.append(f"centre {declared.crop[0]}x{declared.crop[1]}")
    mean, std = (" ".join(f"{value:g}" for value in values) for values in (declared.mean, declared.std))
    steps.append(f"(pixel * {declared.scale:g} - [{mean}]) / [{std}]")
    return f"image to {declared.input}: {', '.join(steps)}, {declared.layout}"


def _postprocess(declared: Postprocess) -> str:
    return ", then ".join(_step(step) for step in declared.steps)


def _step(step: Step) -> str:
    match step:
        case Softmax():
            return f"softmax of {step.output}"
        case TopK():
            return f"the {step.k} largest of {step.output}"
        case Detect():
            return f"detections from {step.boxes} and {step.scores}, score over {step.score_threshold:g}"
        case Objects():
            parts = {"key points": step.keypoints, "masks": step.mask_weights}
            what = " with ".join(["objects", *(name for name, part in parts.items() if part)])
            return f"{what} from {', '.join(step.outputs)}, score over {step.score_threshold:g}"
        case Pose():
            return f"persons with key points from {step.output}, score over {step.score_threshold:g}"
        case ClassMap() if step.threshold is not None:
            return f"the pixels of {step.output} with a score over {step.threshold:g}"
        case ClassMap():
            return f"the best class of each pixel of {step.output}"
        case Normalise():
            return f"{step.output} divided by its length"
        case Ctc():
            return f"the text of {step.output} (CTC)"
        case Speech():
            return f"the times of speech from {step.output}, probability of {step.threshold:g} or more"
        case Keywords():
            return f"the words of {step.output} and their times, score of {step.threshold:g} or more"


def _audio(declared: Audio) -> str:
    steps = [f"{declared.window} samples every {declared.hop}"]
    if declared.peak != "none":
        steps.append(f"divided by their {declared.peak}")
    features = declared.features
    if features is not None:
        what = f"{features.coefficients} MFCCs of " if features.coefficients else ""
        steps.append(
            f"{declared.frames} frames of {what}{features.bands} mel bands from {features.low_hz:g} to "
            f"{features.high_hz:g} Hz"
        )
    return f"recording of {declared.rate} Hz to {declared.input}: {', '.join(steps)}"


def _states(states: tuple[State, ...]) -> str:
    return ", ".join(
        f"{state.output} becomes {state.input}" + (f", first {state.initial:g}" if state.initial else "")
        for state in states
    )


def _parity(manifest: Manifest) -> str:
    provenance = manifest.provenance
    if provenance.parity_error is None:
        return "not measured"
    return f"relative error {provenance.parity_error:.1e} against {provenance.reference or 'the reference'}"


def _listed(lead: str, words: tuple[str, ...]) -> str:
    return lead + " ".join(words) if words else ""


def _size(count: int) -> str:
    for unit, bytes_per_unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= bytes_per_unit:
            return f"{count / bytes_per_unit:.1f} {unit}"
    return f"{count} B"


def _counter_note(manifest: Manifest) -> str:
    return "security_counter" + (", ahead of time" if manifest.counter_ahead_of_time else "")
