"""Declare how a device prepares a model's input and processes its outputs, from presets and small TOML files.

Presets such as `imagenet` are names for people. The manifest holds the expanded form, so a device needs no
table of names, and an old bundle keeps its meaning. Promises that a declaration fits the model's tensors.
Leaves carrying it out to `agent.runtime`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Final

from agent.bundle.archive import MAX_MEMBER_BYTES
from agent.bundle.processing import Detect, Postprocess, Preprocess, Softmax, Step, TopK
from agent.bundle.tensor_spec import TensorSpec
from builder.errors import ModelError, ShapeError

MAX_DECLARATION_BYTES: Final = 64 << 10  # a dozen lines in practice
MAX_LABELS_BYTES: Final = MAX_MEMBER_BYTES["labels.txt"]
IMAGE_DIMENSIONS: Final = 4

# torchvision's mean and std for ImageNet; for ultraface (rgb - 127) / 128, as published by its authors.
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
    """Declare how an image becomes an input, from a preset or a TOML file.

    Parameters
    ----------
    text
        One of `PREPROCESS_PRESETS`, or the path of a TOML file with fields of
        `agent.bundle.processing.Preprocess`. Missing fields follow from the model's input.
    inputs
        The model's inputs. The image goes to the one named by the field `input`, otherwise to the only one
        with 4 dimensions.

    Raises
    ------
    ModelError
        If the preset or the file does not exist, or a field is unknown or out of range.
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
            f"preprocess: expected an input with 1 or 3 channels, got {spec.name} with {channels} ({layout})"
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
        expected = "GRAY" if channels == 1 else "RGB or BGR"
        raise ShapeError(
            f"preprocess: expected colour {expected} for {spec.name} (channels: {channels}), "
            f"got {declared.colour}"
        )
    made = declared.crop or declared.resize
    if made != (height, width):
        raise ShapeError(f"preprocess: expected {(height, width)} pixels for {spec.name}, got {made}")
    return declared


def postprocess(text: str, outputs: Sequence[TensorSpec]) -> Postprocess:
    """Declare how outputs become an answer, from words such as `softmax,top5` or a TOML file.

    Parameters
    ----------
    text
        `softmax`, `topK` (`top5`) and `faces` (boxes and scores of an SSD-like detector), separated by
        commas; or the path of a TOML file with `[[steps]]`, each with `kind` and the fields of that step in
        `agent.bundle.processing`.
    outputs
        The model's outputs.

    Raises
    ------
    ModelError
        If a step is unknown or does not fit the outputs, or a field is out of range.
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
    """Read a labels file: UTF-8, one label per line.

    Parameters
    ----------
    path
        The file.
    outputs
        The model's outputs.
    declared
        The postprocess, or None. Each output that it ranks must have one element per label.

    Returns
    -------
    bytes
        The labels, each followed by a line feed.

    Raises
    ------
    ModelError
        If the file is not UTF-8 text, is empty, or does not have one label per class.
    """
    raw = _read(path, MAX_LABELS_BYTES)
    try:
        lines = [line.strip() for line in raw.decode("utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path}: expected UTF-8 text, one label per line ({error.reason} at byte {error.start})"
        ) from error
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise ModelError(f"{path}: expected one label per line, got an empty file")
    for spec in _unlike(lines, outputs, declared):
        raise ModelError(f"{path}: expected {spec.shape[-1]} labels for {spec.name}, got {len(lines)}")
    return ("\n".join(lines) + "\n").encode()


def own_labels(
    tables: Mapping[str, Sequence[str]], outputs: Sequence[TensorSpec], declared: Postprocess | None
) -> bytes | None:
    """Return the labels that a model has itself.

    Parameters
    ----------
    tables
        Output -> names, as `ImportedModel.labels` has them.
    outputs, declared
        As in `labels`.

    Returns
    -------
    bytes or None
        The labels, each followed by a line feed; None if the model has none or different ones, if one is
        empty, or if a ranked output has another number of elements.
    """
    distinct = {tuple(table) for table in tables.values()}
    if len(distinct) != 1:
        return None
    (lines,) = distinct
    text = ("\n".join(lines) + "\n").encode()
    if not all(line.strip() for line in lines) or len(text) > MAX_LABELS_BYTES:
        return None
    return None if _unlike(lines, outputs, declared) else text


def _unlike(
    lines: Sequence[str], outputs: Sequence[TensorSpec], declared: Postprocess | None
) -> list[TensorSpec]:
    """Return the outputs that are ranked and do not have an element for each label."""
    ranked = {step.output for step in declared.steps if isinstance(step, TopK)} if declared else set()
    return [spec for spec in outputs if spec.name in ranked and spec.shape and spec.shape[-1] != len(lines)]


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
                f"{text}: unknown field {next(iter(fields))!r}", hint="write each step as a [[steps]] table"
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
            f"postprocess {word}: expected one output, got {names[:300]}", hint="use a TOML file"
        )
    return Softmax(outputs[0].name) if word == "softmax" else TopK(outputs[0].name, int(word[3:]))


def _detect(outputs: Sequence[TensorSpec]) -> Detect:
    """Detections from boxes, the only output of shape [1, n, 4], and scores, the only [1, n, classes]."""
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
            f"{what}: unknown preset {text[:80]!r}", hint=f"use {', '.join(presets)} or a .toml file"
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
        raise ValueError(f"{name}: expected a height and a width, got {value!r:.80}")
    return (int(value[0]), int(value[1]))


def _sequence(value: object) -> Sequence[float]:
    return value if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]


def _fields(cls: type[Preprocess]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclass_fields(cls))
