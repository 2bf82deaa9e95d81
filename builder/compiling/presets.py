"""What is done before and after a model: presets and small TOML files become the manifest's declarations.

`imagenet` and friends are names for people; the manifest holds the expanded form, so that a device needs
no table of names and an old bundle keeps its meaning. Checks that a declaration fits the model's tensors;
doing it is the agent's part.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Final

from agent.bundle.processing import Detect, Postprocess, Preprocess, Softmax, Step, TopK
from agent.bundle.tensor_spec import TensorSpec
from builder.errors import ModelError, ShapeError

MAX_DECLARATION_BYTES: Final = 64 << 10  # a dozen lines in practice
MAX_LABELS_BYTES: Final = 16 << 20  # ImageNet-21k's labels take 0.5 MiB
IMAGE_DIMENSIONS: Final = 4

# mean and std are torchvision's for ImageNet; ultraface is (rgb - 127) / 128, as its authors publish it.
_PREPROCESS: Mapping[str, Mapping[str, Any]] = {
    "imagenet": {
        "colour": "RGB",
        "resize_mode": "stretch",
        "scale": 1 / 255,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    },
    "imagenet-crop": {
        "colour": "RGB",
        "resize_mode": "shortest",
        "resize": [256, 256],
        "crop": "model",
        "scale": 1 / 255,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    },
    "unit": {"scale": 1 / 255, "mean": [0.0], "std": [1.0]},
    "symmetric": {"scale": 1 / 127.5, "mean": [1.0], "std": [1.0]},
    "ultraface": {"colour": "RGB", "scale": 1.0, "mean": [127.0], "std": [128.0]},
    "raw-bgr": {"colour": "BGR", "scale": 1.0, "mean": [0.0], "std": [1.0]},
}
PREPROCESS_PRESETS: Final = tuple(_PREPROCESS)


def preprocess(text: str, inputs: Sequence[TensorSpec]) -> Preprocess:
    """Expand a preset or read a TOML file.

    Parameters
    ----------
    text
        One of `PREPROCESS_PRESETS`, or the path of a TOML file with the fields of
        `agent.bundle.processing.Preprocess`; what it leaves out follows from the model's input.
    inputs
        The model's inputs. The image goes to the only one with 4 dimensions unless `input` names one.

    Raises
    ------
    ModelError
        If no such preset or file, or a field that is unknown or out of range.
    ShapeError
        If the declaration cannot produce the input's shape.
    """
    fields = (
        dict(_PREPROCESS[text]) if text in _PREPROCESS else _read_toml(text, "preprocess", PREPROCESS_PRESETS)
    )
    spec = _image_input(fields, inputs)
    layout = fields.get("layout") or (
        "NHWC" if spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3) else "NCHW"
    )
    channels, height, width = spec.shape[1:] if layout == "NCHW" else (spec.shape[3], *spec.shape[1:3])
    if channels not in (1, 3):
        raise ShapeError(
            f"preprocess: expected an input of 1 or 3 channels, {spec.name} has {channels} ({layout})"
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
            }
        )
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"preprocess {text}: {error}", hint="fields: " + ", ".join(_fields(Preprocess))
        ) from error
    if (declared.colour == "GRAY") != (channels == 1):
        raise ShapeError(f"preprocess: {declared.colour} does not fit {spec.name} with {channels} channels")
    made = declared.crop or declared.resize
    if made != (height, width):
        raise ShapeError(f"preprocess makes {made} pixels, {spec.name} takes {(height, width)}")
    return declared


def postprocess(text: str, outputs: Sequence[TensorSpec]) -> Postprocess:
    """Read `softmax,top5` or a TOML file with `[[steps]]`.

    Parameters
    ----------
    text
        A list of `softmax`, `topK` and `faces` (boxes and scores, as SSD-like detectors give them)
        for the model's outputs, or a TOML file's path. In the file each step has `kind` and the fields of
        `agent.bundle.processing`.
    outputs
        The model's outputs.

    Raises
    ------
    ModelError
        If an unknown step, a field out of range, or outputs that the step does not fit.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"softmax|top\d+|faces", word) for word in words):
        if not text.endswith(".toml"):
            raise ModelError(
                f"postprocess: expected softmax, topK, faces or a .toml file, got {text[:80]!r}",
                hint="for example --postprocess softmax,top5",
            )
        return _postprocess_file(text)
    try:
        return Postprocess(tuple(_step(word, outputs) for word in words))
    except ValueError as error:
        raise ModelError(f"postprocess {text[:80]}: {error}") from error


def labels(path: Path, outputs: Sequence[TensorSpec], declared: Postprocess | None) -> bytes:
    """Read a labels file: one label a line, UTF-8, as many as the classes that `declared` ranks.

    Raises
    ------
    ModelError
        If not text, empty, or another number of labels than classes.
    """
    raw = _read(path, MAX_LABELS_BYTES)
    try:
        lines = [line.strip() for line in raw.decode("utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path}: expected UTF-8 text, one label a line ({error.reason} at byte {error.start})"
        ) from error
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise ModelError(f"{path}: expected one label a line, the file is empty")
    ranked = {step.output for step in declared.steps if isinstance(step, TopK)} if declared else set()
    for spec in outputs:
        if spec.name in ranked and spec.shape and spec.shape[-1] != len(lines):
            raise ModelError(
                f"{path}: expected {spec.shape[-1]} labels for {spec.name}, the file has {len(lines)}"
            )
    return ("\n".join(lines) + "\n").encode()


def _postprocess_file(text: str) -> Postprocess:
    fields = _read_toml(text, "postprocess", ("softmax", "topK", "faces"))
    kinds: dict[str, type[Softmax | TopK | Detect]] = {k.kind: k for k in (Softmax, TopK, Detect)}
    steps: list[Step] = []
    try:
        for step in fields.pop("steps", []):
            kind = step.pop("kind", None)
            if kind not in kinds:
                raise ModelError(f"{text}: expected kind to be one of {', '.join(kinds)}, got {kind!r}")
            steps.append(kinds[kind](**step))
        if fields:
            raise ModelError(
                f"{text}: unknown field {next(iter(fields))!r}", hint="steps stand in [[steps]] tables"
            )
        return Postprocess(tuple(steps))
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{text}: {error}") from error


def _step(word: str, outputs: Sequence[TensorSpec]) -> Step:
    if word == "faces":
        return _detect(outputs)
    if len(outputs) != 1:
        names = ", ".join(o.name for o in outputs)
        raise ModelError(
            f"postprocess {word}: expected one output, the model has {names[:300]}", hint="use a TOML file"
        )
    return Softmax(outputs[0].name) if word == "softmax" else TopK(outputs[0].name, int(word[3:]))


def _detect(outputs: Sequence[TensorSpec]) -> Detect:
    """Detections from the one output [1, n, 4] and the one [1, n, classes] beside it."""
    boxes = [o for o in outputs if len(o.shape) == 3 and o.shape[2] == 4]
    scores = [o for o in outputs if len(o.shape) == 3 and o.shape[2] != 4]
    if len(boxes) != 1 or len(scores) != 1 or boxes[0].shape[1] != scores[0].shape[1]:
        found = ", ".join(f"{o.name}{list(o.shape)}" for o in outputs)
        raise ModelError(
            f"postprocess faces: expected outputs [1, n, 4] and [1, n, classes], got {found[:300]}"
        )
    return Detect(
        boxes=boxes[0].name, scores=scores[0].name, score_threshold=0.7, iou_threshold=0.3,
        max_detections=200, format="corners", normalised=True, background=True,
    )  # fmt: skip


def _image_input(fields: Mapping[str, Any], inputs: Sequence[TensorSpec]) -> TensorSpec:
    named = fields.get("input")
    images = [s for s in inputs if (s.name == named if named else len(s.shape) == IMAGE_DIMENSIONS)]
    if len(images) != 1 or len(images[0].shape) != IMAGE_DIMENSIONS or images[0].shape[0] != 1:
        found = ", ".join(f"{s.name}{list(s.shape)}" for s in inputs)
        wanted = f"input {named!r} with" if named else "one input with"
        raise ShapeError(f"preprocess: expected {wanted} 4 dimensions and a batch of 1, got {found[:300]}")
    return images[0]


def _read_toml(text: str, what: str, presets: Sequence[str]) -> dict[str, Any]:
    path = Path(text)
    if path.suffix != ".toml":
        raise ModelError(
            f"{what}: no preset {text[:80]!r}", hint=f"presets: {', '.join(presets)}; or a .toml file"
        )
    try:
        return tomllib.loads(_read(path, MAX_DECLARATION_BYTES).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: expected TOML ({error})") from error


def _read(path: Path, limit: int) -> bytes:
    try:
        if path.stat().st_size > limit:
            raise ModelError(f"{path}: expected at most {limit} bytes, got {path.stat().st_size}")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error


def _pair(name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{name} is a height and a width, not {value!r:.80}")
    return (int(value[0]), int(value[1]))


def _sequence(value: object) -> Sequence[float]:
    return value if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]


def _fields(cls: type[Preprocess]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclass_fields(cls))
