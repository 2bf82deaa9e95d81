"""The declarations around a model: preprocess and postprocess, audio, columns, and states between its runs.

Promises declarations that fit the model and each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from builder.compiling.missing_values import takes_nan
from builder.compiling.pixel_steps import cut_off_note, on_scale
from builder.compiling.states import states as declare_states
from builder.errors import ModelError
from builder.importer import ImportedModel


@dataclass(frozen=True, slots=True)
class Declarations:
    """What a manifest declares around a model; None for what it does not.

    Attributes
    ----------
    preprocess, postprocess, states, audio
        The manifest's fields of these names.
    labels
        The labels of an audio preset, if the model has as many classes.
    columns
        The manifest's field of this name.
    """

    preprocess: Preprocess | None
    postprocess: Postprocess | None
    states: tuple[State, ...] | None
    audio: Audio | None
    labels: tuple[str, ...] | None = None
    columns: tuple[InputColumns, ...] | None = None


def over_time_of(
    model: ImportedModel,
    preprocess: str | None,
    postprocess: str | None,
    states: Sequence[str],
    columns: Names | None,
    progress: Callable[[str], None],
) -> Declarations:
    """Declare what surrounds a model.

    Parameters
    ----------
    model
        The model.
    preprocess, postprocess
        Presets or TOML files; None for what the model's file says, and for a preset's own postprocess.
    states
        As `builder.compiling.states` takes them; added to those that the model's file declares.
    columns
        As `builder.compiling.columns.read_names` takes them; None for the model's own.
    progress
        Told if the preprocess hardly fits a quantised input.

    Raises
    ------
    ModelError, ShapeError
        If a declaration cannot be used, or does not fit the model.
    """
    preset = audio_presets.preset_of(preprocess)
    names = [*(preset.states if preset is not None else ()), *states]
    kept = declare_states(names, model.inputs, model.outputs, model.states)
    inputs = requested(model.inputs, [state.input for state in kept or ()])
    outputs = requested(answered(model.outputs, model.lengths), [state.output for state in kept or ()])
    audio = None
    before = own_preprocess(model, inputs)
    if preset is not None and preprocess is not None:
        before, audio = None, audio_presets.audio(preprocess, inputs)
        postprocess = postprocess or preset.postprocess
    elif preprocess:
        before = declarations.preprocess(preprocess, inputs, model.scales)
    if before is not None:
        spec = next(spec for spec in inputs if spec.name == before.input)
        if note := cut_off_note(before, spec, by_name(model.scales.quantisation.inputs).get(spec.name)):
            progress(note)
    after = declarations.postprocess(postprocess, outputs, inputs, model.scales) if postprocess else None
    labels = None if preset is None else audio_presets.labels_for(preset, outputs)
    table = columns_of_model(model, inputs, columns, has_media=before is not None or audio is not None)
    return Declarations(before, after, kept, audio, labels, table)


def own_preprocess(model: ImportedModel, inputs: Sequence[TensorSpec]) -> Preprocess | None:
    """Return the preprocess that a model's file says itself, or None."""
    if model.preprocess is None:
        return None
    spec = next((spec for spec in inputs if spec.name == model.preprocess.input), None)
    return None if spec is None else on_scale(model.preprocess, spec, model.scales, "of the model's file")


def columns_of_model(
    model: ImportedModel, inputs: Sequence[TensorSpec], names: Names | None, *, has_media: bool
) -> tuple[InputColumns, ...] | None:
    """Declare the columns of a model: those that the user names, or its own; None if there are none.

    Parameters
    ----------
    model
        The model.
    inputs
        Its inputs in the shapes of the smallest request, without states.
    names
        The user's names, or None.
    has_media
        Whether an input takes a picture or a recording.

    Raises
    ------
    ModelError
        If the names do not fit the inputs, or an input takes a picture or a recording.
    """
    if has_media:
        if names is not None:
            raise ModelError(
                "--columns: expected a model without a preprocess, got one with it",
                hint="leave out --columns, or --preprocess: a row of a table is not a picture or a recording",
            )
        return None
    chosen = own_columns(model.columns, inputs) if names is None else read_names(names)
    if not chosen:
        return None
    nan = {spec.name for spec in inputs if spec.datatype.startswith("FP")}
    nan = {name for name in nan if name in model.nan_inputs or takes_nan(model.onnx, name)}
    return declare_columns(chosen, inputs, nan, model.texts)
