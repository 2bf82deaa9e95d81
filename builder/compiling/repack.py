"""Change what a bundle declares without compiling: pre- and postprocess, labels, name, version, counter.

Promises the same kernels, weights and recorded samples, byte for byte. Samples are the model's own tensors,
so they stay right whatever happens before and after the model. The result is unsigned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from agent.bundle.audio import Keywords
from agent.bundle.columns import InputColumns
from agent.bundle.output_length import answered
from agent.bundle.processing import Postprocess
from agent.bundle.quantisation import NO_QUANTISATION, by_name
from agent.bundle.state import requested
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import MixAndMatchError
from builder.bundles.package import Package, digests
from builder.compiling import audio_presets, declarations
from builder.compiling.columns import Names, declare_columns, read_names
from builder.compiling.first_look import look_again
from builder.compiling.hints import Hints
from builder.compiling.identity import DESCRIBABLE, Identity
from builder.compiling.labels import Labels, check_labels, read_named_labels
from builder.compiling.pixel_steps import cut_off_note
from builder.errors import ModelError
from builder.importer.classic.string_inputs import Texts
from builder.importer.edge_scales import EdgeScales

# In place of a declaration or of labels: the bundle then has none.
NONE: Final = "none"
_LABELS: Final = "labels.txt"


def repack(
    package: Package,
    *,
    identity: Identity | None = None,
    preprocess: str | None = None,
    postprocess: str | None = None,
    labels: Labels | None = None,
    columns: Names | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Package:
    """Change what a bundle declares.

    Parameters
    ----------
    package
        The bundle.
    identity
        Its new name, version, counter and compatible devices; None in place of the name or the devices keeps
        them. None keeps all but the counter, which becomes the time of the build.
    preprocess, postprocess
        As in `builder.compile`; None keeps what the bundle declares, `"none"` removes it.
    labels
        As in `builder.compile`; None keeps those of the bundle, `"none"` removes them.
    columns
        As in `builder.compile`; None keeps those of the bundle, `"none"` removes them. Only an input that
        could have missing values before can have them.
    progress
        Called with each line on what the preprocess and the postprocess make of pixels and of the sample.

    Returns
    -------
    Package
        The new package, unsigned.

    Raises
    ------
    ModelError
        If a declaration cannot be used, or does not fit the model, its sample or the labels.
    MixAndMatchError
        If the bundle's files are not those of its manifest.
    """
    manifest = package.manifest
    if digests(package.members) != dict(manifest.files):
        raise MixAndMatchError(
            f"the manifest of {manifest.name} does not match its files", hint="compile the model again"
        )
    identity = identity or Identity(version=manifest.version)
    identity.check()
    before, after, audio = manifest.preprocess, manifest.postprocess, manifest.audio
    inputs = requested(manifest.smallest_inputs, [state.input for state in manifest.states or ()])
    answers = answered(manifest.smallest_outputs, manifest.lengths or ())
    outputs = requested(answers, [state.output for state in manifest.states or ()])
    scales = EdgeScales(manifest.quantisation or NO_QUANTISATION)
    if preprocess is not None:
        before, audio = None, None
        if preprocess != NONE and audio_presets.is_audio(preprocess):
            audio = audio_presets.audio(preprocess, inputs)
            old = None if manifest.audio is None else manifest.audio.features
            if manifest.quantisation is None and audio.features is not None and old is not None:
                # Early bundles have the scale of a quantised input here, and it is the model's.
                audio = replace(audio, features=replace(audio.features, mean=old.mean, std=old.std))
        elif preprocess != NONE:
            before = declarations.preprocess(preprocess, inputs, scales)
            spec = next(spec for spec in inputs if spec.name == before.input)
            if line := cut_off_note(before, spec, by_name(scales.quantisation.inputs).get(spec.name)):
                progress(line)
    if postprocess is not None:
        roles = dict.fromkeys(package.manifest.class_counts or (), "classes")
        hints = Hints(classes=len(package.members.get(_LABELS, b"").splitlines()), roles=roles)
        after = None if postprocess == NONE else _like(after, postprocess, outputs, inputs, scales, hints)
        for line in look_again(package, after, postprocess) if after is not None else ():
            progress(line)
    declarations.check_sound(after, has_sound=audio is not None)
    if manifest.buckets is not None:
        from builder.compiling.bucket_plan import check_declared  # loads the compiler, which takes seconds

        check_declared(manifest.buckets, before, after)
    table = manifest.columns
    if columns is not None:
        nan = {each.input for each in table or () if each.missing}
        table = None if columns == NONE else declare_columns(read_names(columns), inputs, nan, _texts(table))
    if table is not None and (before is not None or audio is not None):
        raise ModelError(
            "expected columns or a preprocess, got both", hint="remove one: --columns none, --preprocess none"
        )
    members = _with_labels(package, labels, after)
    changes: Mapping[str, Any] = {
        "name": identity.name or manifest.name,
        "version": identity.version,
        "security_counter": identity.counter(),
        "counter_ahead_of_time": identity.counter_ahead_of_time or None,
        "compatible": tuple(identity.compatible or manifest.compatible),
        "preprocess": before,
        "audio": audio,
        "postprocess": after,
        "columns": table,
        "files": digests(members),
    }
    try:
        return Package(replace(manifest, **changes), members, uncovered=package.uncovered)
    except ValueError as error:
        raise ModelError(f"the bundle cannot be described: {error}", hint=DESCRIBABLE) from error


def _texts(declared: Sequence[InputColumns] | None) -> dict[str, list[Texts]]:
    """Return the texts of a bundle's columns, which new names keep."""
    return {
        each.input: [Texts(column.categories or (), column.unknown) for column in each.columns]
        for each in declared or ()
        if all(column.categories is not None for column in each.columns)
    }


def _like(
    before: Postprocess | None,
    text: str,
    outputs: Sequence[TensorSpec],
    inputs: Sequence[TensorSpec],
    scales: EdgeScales,
    hints: Hints,
) -> Postprocess:
    """Declare a postprocess; keywords keep the scale of a quantised output that early bundles have there."""
    after = declarations.postprocess(text, outputs, inputs, scales, hints)
    known = {step.output: step for step in (before.steps if before else ()) if isinstance(step, Keywords)}
    return Postprocess(
        tuple(
            replace(step, scale=known[step.output].scale, zero=known[step.output].zero)
            if isinstance(step, Keywords) and step.output in known
            else step
            for step in after.steps
        )
    )


def _with_labels(package: Package, labels: Labels | None, after: Postprocess | None) -> dict[str, bytes]:
    members = dict(package.members)
    old = members.pop(_LABELS, b"")
    outputs, counts = package.manifest.smallest_outputs, package.manifest.class_counts
    lines: bytes | None
    if labels is None and old:
        try:
            own = old.decode().removesuffix("\n").split("\n")
            kept = check_labels(own, outputs, after, "the bundle's labels", counts)
        except ModelError as error:
            raise ModelError(str(error), hint="add --labels FILE, or --labels none") from error
        lines = ("\n".join(kept) + "\n").encode()
    else:
        lines = read_named_labels(None if labels == NONE else labels, outputs, after, counts)
    return members if lines is None else {**members, _LABELS: lines}
