"""Declare how a device prepares a model's input and processes its outputs, from presets and small TOML files.

Presets such as `yolox` are names for people. The manifest holds the expanded form, so a device needs no table
of names, and an old bundle keeps its meaning. Promises a declaration that fits the model's tensors: the
device's own `Postprocessor` is built for it. Leaves carrying it out to `agent.runtime`, the presets to
`builder.compiling.input_presets` and `output_presets`, and labels to `builder.compiling.labels`.

A preset's name may be followed by options, `yolox,score_threshold=0.5`. A TOML file has the same options, and
`preset` if it begins with one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from agent.bundle import canonical_json
from agent.bundle.audio import Keywords, Speech
from agent.bundle.detection import Level, Objects, Part
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
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EdgeError
from agent.runtime.postprocess import Postprocessor
from builder.compiling import audio_presets
from builder.compiling.declaration_file import read_toml
from builder.compiling.hints import NO_HINTS, Hints
from builder.compiling.input_presets import INPUT_PRESETS, PICTURES, SAME_PICTURES
from builder.compiling.output_presets import OUTPUT_PRESETS, SOUND_PRESETS, is_ambiguous, step_of
from builder.compiling.pixel_steps import on_scale
from builder.compiling.recognition import recognise
from builder.compiling.signature import Signature
from builder.errors import ModelError, ShapeError
from builder.importer.edge_scales import NO_SCALES, EdgeScales

if TYPE_CHECKING:
    from builder.compiling.labels import Labels

_DECLARATION: Final = "docs/your-detector.md shows files of declarations, and what each field takes"

IMAGE_DIMENSIONS: Final = 4

POSTPROCESS_WORDS: Final = ("softmax", "topK", *OUTPUT_PRESETS, *SOUND_PRESETS)
_WORDS: Final = ("softmax", *OUTPUT_PRESETS, *SOUND_PRESETS)
# Words whose answers have no classes, whatever the model.
_NAMELESS: Final = frozenset({"softmax", "embedding", "speech"})
_NO_PRESET: Final = (
    "leave out --postprocess for the model's own outputs, "
    "or declare them in a TOML file (docs/your-detector.md)"
)
_STEPS: Final[Mapping[str, type[Step]]] = {
    step.kind: step
    for step in (Softmax, TopK, Detect, Objects, Pose, ClassMap, Normalise, Ctc, Speech, Keywords)
}
_TOP: Final = re.compile(r"top(\d{1,6})")


def check_names(preprocess: str | None, postprocess: str | None) -> None:
    """Check, without a model, that presets have known names and that files can be read.

    Raises `ModelError` if a name is unknown, or a file does not exist or is not TOML.
    """
    if preprocess is not None and not audio_presets.is_audio(preprocess):
        _fields_of(preprocess)
    if postprocess is not None and not postprocess.endswith(".toml"):
        _words(postprocess)
    elif postprocess is not None:
        read_toml(postprocess, _DECLARATION)


def check_sound(declared: Postprocess | None, *, has_sound: bool) -> None:
    """Check that a postprocess has the steps of recordings for a model that takes them, and only for it.

    Raises `ModelError` if it has others.
    """
    for step in declared.steps if declared is not None else ():
        if has_sound and not isinstance(step, Softmax | Speech | Keywords):
            raise ModelError(
                f"--postprocess: expected softmax, speech or keywords for a recording, got {step.kind}",
                hint="write keywords (or softmax,keywords), or leave it out for the outputs of all windows",
            )
        if not has_sound and isinstance(step, Speech | Keywords):
            raise ModelError(
                f"--postprocess {step.kind}: expected a preprocess for recordings, got none",
                hint=f"add --preprocess, one of {', '.join(audio_presets.AUDIO_PRESETS)} (docs/audio.md)",
            )


def check_labels_are_used(labels: Labels, postprocess: str) -> None:
    """Check, without a model, that a postprocess may name classes."""
    if postprocess.endswith(".toml"):
        return
    words = [word for word, _ in _words(postprocess)]
    if set(words) <= _NAMELESS:
        raise ModelError(
            f"--labels {labels!s:.80}: expected a postprocess that names classes, got {','.join(words)[:80]}",
            hint="leave out --labels, or add a --postprocess such as softmax,top5",
        )


def preprocess(text: str, inputs: Sequence[TensorSpec], scales: EdgeScales = NO_SCALES) -> Preprocess:
    """Declare how an image becomes an input, from a preset or a TOML file.

    Parameters
    ----------
    text
        One of `INPUT_PRESETS`, with options or without; or the path of a TOML file with fields of
        `agent.bundle.processing.Preprocess`. Missing fields follow from the model's input.
    inputs
        The model's inputs. The image goes to the one named by the field `input`, otherwise to the only one
        with 4 dimensions.
    scales
        The scales at the model's edges: a quantised input gets real numbers.

    Raises
    ------
    ModelError
        If the preset or the file does not exist, or a field is unknown or out of range.
    ShapeError
        If the declaration cannot produce the input's shape.
    """
    fields = _fields_of(text)
    known = _fields(Preprocess)
    if unknown := sorted(fields.keys() - set(known)):
        raise ModelError(
            f"preprocess {text[:80]}: unknown field {unknown[0]!r:.80}",
            hint=_did_you_mean(unknown[0], known),
        )
    spec = _image_input(fields, inputs)
    layout = fields.get("layout") or (
        "NHWC" if spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3) else "NCHW"
    )
    channels, height, width = spec.shape[1:] if layout == "NCHW" else (spec.shape[3], *spec.shape[1:3])
    if channels not in (1, 3):
        raise ShapeError(
            f"preprocess: expected an input with 1 or 3 channels, got {spec.name} with {channels} ({layout})",
            hint="leave out --preprocess, and send this input as a tensor",
        )
    crop = fields.get("crop")
    try:
        declared = Preprocess(
            **fields
            | {
                "input": spec.name,
                "layout": layout,
                "colour": fields.get("colour") or ("GRAY" if channels == 1 else "RGB"),
                "resize": _pair("resize", fields.get("resize") or (height, width)),
                "resize_mode": fields.get("resize_mode", "stretch"),
                "interpolation": fields.get("interpolation", "bilinear"),
                "crop": (height, width) if crop == "model" else _pair("crop", crop) if crop else None,
                "scale": float(fields.get("scale", 1.0)),
                "mean": tuple(float(v) for v in _sequence(fields.get("mean", [0.0]))),
                "std": tuple(float(v) for v in _sequence(fields.get("std", [1.0]))),
                # Left out if it is off, as early bundles leave it out.
                "reduce": fields.get("reduce", True) or None,
            }
        )
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"preprocess {text[:80]}: {error}", hint="fields: " + ", ".join(_fields(Preprocess))
        ) from error
    _check_types(declared, f"preprocess {text[:80]}")
    if (declared.colour == "GRAY") != (channels == 1):
        expected = "GRAY" if channels == 1 else "RGB or BGR"
        right = "GRAY" if channels == 1 else "RGB"
        raise ShapeError(
            f"preprocess: expected colour {expected} for {spec.name} (channels: {channels}), "
            f"got {declared.colour}",
            hint=f'write colour = "{right}" in the file, or colour={right} behind the preset',
        )
    made = declared.crop or declared.resize
    if made != (height, width):
        raise ShapeError(
            f"preprocess: expected {(height, width)} pixels for {spec.name}, got {made}",
            hint=f"write resize = [{height}, {width}], or a crop of that size",
        )
    return on_scale(declared, spec, scales, text)


def postprocess(
    text: str,
    outputs: Sequence[TensorSpec],
    inputs: Sequence[TensorSpec] = (),
    scales: EdgeScales = NO_SCALES,
    hints: Hints = NO_HINTS,
) -> Postprocess:
    """Declare how outputs become an answer, from words such as `softmax,top5` or a TOML file.

    `text`: `softmax`, `topK` (`top5`) and names of `OUTPUT_PRESETS`, separated by commas, each followed by
        its options (`yolox,score_threshold=0.5`); or the path of a TOML file with `[[steps]]`, each with
        `kind` and the fields of that step in `agent.bundle.processing`, or with `preset` and fields that
        differ from it.
    `outputs`, `inputs`: the model's tensors. Some presets need the size of the image input.
    `scales`: the scales at the model's edges: steps read real numbers.
    `hints`: what the model's file says about its outputs.
    Raises `ModelError` if a step is unknown or does not fit the outputs, or a field is out of range.
    """
    signature = Signature.of(inputs, outputs, hints)
    try:
        if text.endswith(".toml"):
            declared = _postprocess_file(text, signature)
        else:
            steps = [_step(word, options, signature) for word, options in _words(text)]
            declared = Postprocess(tuple(steps))
    except ModelError as error:
        raise _with_proposal(error, inputs, outputs) from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"postprocess {text[:80]}: {error}", hint=_DECLARATION) from error
    _check_types(declared, f"postprocess {text[:80]}")
    if any(is_ambiguous(step, outputs) for step in declared.steps):
        raise ModelError(
            f"postprocess {text[:80]}: expected to know which axis of the prototypes has the factors, "
            f"got {signature.described()}",
            hint="add prototype_order=channels_first (PyTorch, ONNX) or prototype_order=channels_last "
            "(TensorFlow); compile without --postprocess proposes the one that the graph shows",
        )
    for name in sorted(declared.outputs & scales.obstacles.keys()):
        raise ModelError(
            f"postprocess {text[:80]}: expected one scale for output {name!r:.80}, "
            f"got {scales.obstacles[name]}",
            hint="leave out --postprocess for the model's own integers",
        )
    if not any(isinstance(step, Ctc) for step in declared.steps):  # which needs its labels
        try:
            Postprocessor(declared, outputs)
        except EdgeError as error:
            raise _with_proposal(
                ModelError(f"postprocess {text[:80]}: {error}", hint=error.hint or _DECLARATION),
                inputs,
                outputs,
            ) from error
    return declared


def _with_proposal(
    error: ModelError, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> ModelError:
    if error.hint:
        return error
    return ModelError(str(error), hint=str(recognise(inputs, outputs) or _NO_PRESET))


def _words(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Split `yolox,score_threshold=0.5` into words, each with its options.

    Raises `ModelError` if a word is unknown, or an option has no word before it or no value.
    """
    words: list[tuple[str, dict[str, Any]]] = []
    for item in _split(text):
        name, is_option, value = item.partition("=")
        if not is_option:
            if item not in _WORDS and not _TOP.fullmatch(item):
                raise ModelError(
                    f"postprocess: expected a preset, softmax, topK or a .toml file, got {text[:80]!r}",
                    hint=_did_you_mean(item, POSTPROCESS_WORDS),
                )
            words.append((item, {}))
        elif not words:
            raise ModelError(
                f"postprocess: expected a preset before the option {item[:80]!r}",
                hint="write the preset first: yolov8,score_threshold=0.5",
            )
        else:
            words[-1][1][name.strip()] = _option(item, value)
    return words


def _split(text: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items]


def _option(item: str, value: str) -> Any:  # noqa: ANN401 - a value of TOML
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        if re.fullmatch(r"[\w.-]+", value.strip()):
            return value.strip()  # a word, which TOML would have in quotes
        raise ModelError(
            f"expected an option such as score_threshold=0.5, got {item[:80]!r}",
            hint="write each option behind the preset as NAME=VALUE",
        ) from None


def _postprocess_file(text: str, signature: Signature) -> Postprocess:
    fields = read_toml(text, _DECLARATION)
    steps = fields.pop("steps", [])
    if fields:
        raise ModelError(
            f"{text}: unknown field {next(iter(fields))!r:.80}", hint="write each step as a [[steps]] table"
        )
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ModelError(
            f"{text}: expected [[steps]] tables, got {steps!r:.80}",
            hint="write each step as a [[steps]] table",
        )
    made: list[Step] = []
    try:
        for step in steps:
            preset, kind = step.pop("preset", None), step.pop("kind", None)
            if preset is not None:
                if preset not in POSTPROCESS_WORDS and not _TOP.fullmatch(str(preset)):
                    raise ModelError(
                        f"{text}: unknown preset {preset!r:.80}",
                        hint=_did_you_mean(str(preset), POSTPROCESS_WORDS),
                    )
                made.append(_step(preset, step, signature))
            elif kind not in _STEPS:
                raise ModelError(
                    f"{text}: expected kind to be one of {', '.join(_STEPS)}, got {kind!r:.80}",
                    hint="or begin with a preset: preset = 'yolox'",
                )
            else:
                made.append(_STEPS[kind](**_plain(step)))
        return Postprocess(tuple(made))
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{text}: {error}", hint=_DECLARATION) from error


def _step(word: str, options: Mapping[str, Any], signature: Signature) -> Step:
    if word in (*OUTPUT_PRESETS, *SOUND_PRESETS):
        if options.get("keypoint_values") == 2 and signature.hints.points is None:
            signature = replace(signature, hints=replace(signature.hints, points=(0, 2)))
        step = step_of(word, signature)
    else:
        scores = scored_outputs(signature.outputs)
        if len(scores) != 1:
            raise ModelError(
                f"postprocess {word}: expected one output, got {signature.described()}",
                hint="use a TOML file, which names the output of each step",
            )
        name, top = scores[0].name, _TOP.fullmatch(word)
        step = TopK(name, int(top[1])) if top is not None else Softmax(name)
    if not options:
        return step
    known = [field.name for field in dataclass_fields(step)]
    for name in options:
        if name not in known:
            raise ModelError(
                f"postprocess {word}: unknown option {name[:80]!r}", hint=_did_you_mean(name, known)
            )
    changed: Step = replace(step, **_plain(options))
    return changed


def scored_outputs(outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the outputs that may have the scores of classes.

    Of two outputs of which one is a single whole number, as a classifier of scikit-learn, XGBoost or LightGBM
    has it for the best class, that is the other one.
    """
    others = tuple(spec for spec in outputs if spec.datatype.startswith("FP") or spec.nbytes != spec.itemsize)
    return others if len(outputs) == 2 and len(others) == 1 else tuple(outputs)


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's values as the steps declare them: records and tuples instead of tables and arrays."""
    found = dict(fields)
    for name in ("boxes", "scores", "objectness", "class_ids", "keypoints", "mask_weights"):
        if isinstance(found.get(name), list):
            found[name] = tuple(Part(**part) for part in found[name])
    if isinstance(found.get("levels"), list):
        levels = [dict(level) for level in found["levels"]]
        for level in levels:
            level["anchors"] = tuple(tuple(size) for size in level.get("anchors", ()))
        found["levels"] = tuple(Level(**level) for level in levels)
    for name in ("variances", "ignore"):
        if isinstance(found.get(name), list):
            found[name] = tuple(found[name])
    return found


def _check_types(declared: Preprocess | Postprocess, what: str) -> None:
    """Check that a device reads what is written: TOML's types are not checked before.

    Raises `ModelError` if a value has another type than its field.
    """
    try:
        document = canonical_json.parse(canonical_json.encode(canonical_json.to_json(declared)), what)
        canonical_json.from_json(type(declared), document, what)
    except (EdgeError, TypeError, ValueError) as error:
        raise ModelError(str(error), hint=_DECLARATION) from error


def _fields_of(text: str) -> dict[str, Any]:
    """Return the fields of a preprocess: of a preset with options, or of a TOML file."""
    if text.endswith(".toml"):
        fields = read_toml(text, _DECLARATION)
        preset = fields.pop("preset", None)
    else:
        preset, *items = _split(text)
        fields = {}
        for item in items:
            name, is_option, value = item.partition("=")
            if not is_option:
                raise ModelError(
                    f"preprocess: expected an option such as pad=0, got {item[:80]!r}",
                    hint="write each option behind the preset as NAME=VALUE",
                )
            fields[name.strip()] = _option(item, value)
    if preset is None:
        return fields
    name = SAME_PICTURES.get(preset, preset) if isinstance(preset, str) else preset
    if name not in PICTURES:
        raise ModelError(
            f"preprocess: unknown preset {preset!r:.80}",
            hint=_did_you_mean(str(preset), (*INPUT_PRESETS, *audio_presets.AUDIO_PRESETS)),
        )
    base = dict(PICTURES[name])
    if fields.get("resize_mode", base.get("resize_mode")) != base.get("resize_mode"):
        base = {key: value for key, value in base.items() if key not in ("pad", "position")}
    return base | fields


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    begun = [name for name in known if name.startswith(f"{word.lower()}_")]
    close = begun[:1] or get_close_matches(word.lower(), known, n=1)
    listed = f"one of {', '.join(known)}"
    return f"did you mean {close[0]}? ({listed})" if close else f"use {listed}"


def _image_input(fields: Mapping[str, Any], inputs: Sequence[TensorSpec]) -> TensorSpec:
    named = fields.get("input")
    images = [s for s in inputs if (s.name == named if named else len(s.shape) == IMAGE_DIMENSIONS)]
    if len(images) != 1 or len(images[0].shape) != IMAGE_DIMENSIONS or images[0].shape[0] != 1:
        found = ", ".join(f"{s.name}{list(s.shape)}" for s in inputs)
        wanted = f"input {named!r} with" if named else "one input with"
        raise ShapeError(
            f"preprocess: expected {wanted} 4 dimensions and a batch of 1, got {found[:300]}",
            hint="set the batch with --input-shapes, or leave out the preprocess and give prepared arrays",
        )
    return images[0]


def _pair(name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{name}: expected a height and a width, got {value!r:.80}")
    return (int(value[0]), int(value[1]))


def _sequence(value: object) -> Sequence[float]:
    return value if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]


def _fields(cls: type[Preprocess]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclass_fields(cls))
