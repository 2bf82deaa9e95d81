"""What surrounds a model: preprocess and postprocess, audio, columns, labels, and states between its runs.

Promises declarations that fit the model and each other, by one order of checks: early, for what the model's
file says of its tensors, and again for the imported model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.bundle.audio import Audio
from agent.bundle.columns import InputColumns
from agent.bundle.output_length import answered
from agent.bundle.processing import Postprocess, Preprocess
from agent.bundle.quantisation import by_name
from agent.bundle.state import State, requested
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling import audio_presets, declarations
from builder.compiling.columns import Names, declare_columns, own_columns, read_names
from builder.compiling.labels import label_lines
from builder.compiling.options import Options
from builder.compiling.outline import Outline
from builder.compiling.pixel_steps import cut_off_note, on_scale
from builder.compiling.recognition import check_hints, recognise
from builder.compiling.states import states as declare_states
from builder.errors import ModelError


@dataclass(frozen=True, slots=True)
class Declared:
    """What a manifest declares around a model; None for what it does not.

    `inputs`, `outputs`: the tensors of a request and of its answer, without those of states.
    `preprocess`, `postprocess`, `states`, `audio`, `columns`: the manifest's fields of these names.
    `labels`: the content of `labels.txt`.
    `notes`: what the user may want to know.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    preprocess: Preprocess | None
    postprocess: Postprocess | None
    states: tuple[State, ...] | None
    audio: Audio | None
    columns: tuple[InputColumns, ...] | None
    labels: bytes | None
    notes: tuple[str, ...]


def declare(outline: Outline, options: Options) -> Declared:
    """Declare what surrounds a model.

    Parameters
    ----------
    outline
        The model's tensors, and what its file says about them.
    options
        What the user declares.

    Raises
    ------
    ModelError, ShapeError
        If a declaration cannot be used, or does not fit the model.
    """
    notes: list[str | None] = []
    preset = audio_presets.preset_of(options.preprocess)
    names = [*(preset.states if preset is not None else ()), *options.states]
    kept = declare_states(names, outline.inputs, outline.outputs, outline.states)
    inputs = requested(outline.inputs, [state.input for state in kept or ()])
    outputs = requested(answered(outline.outputs, outline.lengths), [state.output for state in kept or ()])
    text = options.postprocess
    audio = None
    before = _own_preprocess(outline, inputs)
    if preset is not None and options.preprocess is not None:
        before, audio = None, audio_presets.audio(options.preprocess, inputs)
        text = text or preset.postprocess
    elif options.preprocess:
        before = declarations.preprocess(options.preprocess, inputs, outline.scales)
    if before is not None:
        spec = next(spec for spec in inputs if spec.name == before.input)
        if note := cut_off_note(before, spec, by_name(outline.scales.quantisation.inputs).get(spec.name)):
            notes.append(note)
    has_media = before is not None or audio is not None
    table = _columns(outline, inputs, options.columns, has_media=has_media)
    if options.labels is not None and text is None:
        proposal = recognise(inputs, outputs, outline.hints)
        raise ModelError(
            "--labels: expected a --postprocess that names classes, got none",
            hint=str(proposal) if proposal else "for example --postprocess softmax,top5",
        )
    after = declarations.postprocess(text, outputs, inputs, outline.scales, outline.hints) if text else None
    declarations.check_sound(after, has_sound=audio is not None)
    is_preset = text is not None and not text.endswith(".toml")
    is_explicit = text is not None and ("normalised" in text or not is_preset)
    check_hints(
        outline.hints, after, is_explicit=is_explicit, is_preset=is_preset and "scores=" not in str(text)
    )
    labels = options.labels or (None if preset is None else audio_presets.labels_for(preset, outputs))
    lines = label_lines(labels, outline.labels, outline.outputs, after, outline.class_counts)
    if labels is None and outline.labels and after is not None:
        fit = "" if lines is not None else " do not fit this postprocess, and are left out"
        notes.append(f"labels: the {len(outline.labels)} names in the model file{fit}")
    return Declared(inputs, outputs, before, after, kept, audio, table, lines, tuple(filter(None, notes)))


def _own_preprocess(outline: Outline, inputs: Sequence[TensorSpec]) -> Preprocess | None:
    """Return the preprocess that a model's file says itself, or None."""
    if outline.preprocess is None:
        return None
    spec = next((spec for spec in inputs if spec.name == outline.preprocess.input), None)
    return None if spec is None else on_scale(outline.preprocess, spec, outline.scales, "of the model's file")


def _columns(
    outline: Outline, inputs: Sequence[TensorSpec], names: Names | None, *, has_media: bool
) -> tuple[InputColumns, ...] | None:
    """Declare the columns of a model: those that the user names, or its own; None if there are none.

    `inputs` are in the shapes of the smallest request, without states; `has_media` is whether one of them
    takes a picture or a recording.
    """
    if has_media:
        if names is not None:
            raise ModelError(
                "--columns: expected a model without a preprocess, got one with it",
                hint="leave out --columns, or --preprocess: a row of a table is not a picture or a recording",
            )
        return None
    chosen = own_columns(outline.columns, inputs) if names is None else read_names(names)
    if not chosen:
        return None
    nan = {spec.name for spec in inputs if spec.datatype.startswith("FP") and outline.takes_nan(spec.name)}
    return declare_columns(chosen, inputs, nan, outline.texts)
