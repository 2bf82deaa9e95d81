"""Presets of the postprocess: detectors and other models as their authors export them.

A preset fits itself to the shapes of the model's outputs and returns the manifest's step, in which every
value is written out: a device needs no table of names. Promises a step that decodes these outputs, or an
error that says what the preset expects. `builder.compiling.recognition` finds which preset fits a model.

Sources of the encodings: YOLOX (arXiv 2107.08430) and its `yolo_head.py`; Ultralytics' `Detect`, `Pose` and
`Segment` heads; NanoDet's `gfl_head.py` and `nanodet_plus_head.py`; SSD (arXiv 1512.02325); RetinaFace
(arXiv 1905.00641) with the priors of its PyTorch implementation; YuNet's `yunet_head.py`; DETR (arXiv
2005.12872); MoveNet's model cards. Thresholds are those of the authors' own demonstrations, if they publish
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from agent.bundle.audio import Keywords, Speech
from agent.bundle.detection import PROTOTYPE_ORDERS, Level, Objects, Part
from agent.bundle.processing import ClassMap, Ctc, Detect, Normalise, Pose, Step
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.signature import BOX, PYRAMIDS, Shape, Signature
from builder.errors import ModelError

NANODET_BINS: Final = 8
YOLO_MASK_FACTORS: Final = 32  # prototypes of Ultralytics' segmenters
YUNET_POINTS: Final = 5
COCO_POINTS: Final = 17  # key points of a person
_MAP: Final = 4  # dimensions: batch, height, width and channels
# Width and height of RetinaFace's square priors at each stride, in pixels.
_RETINAFACE_PRIORS: Final = MappingProxyType({8: (16, 32), 16: (64, 128), 32: (256, 512)})
# Names of outputs of finished detections; the converter of TensorFlow Lite numbers its own from the boxes on.
_TFLITE_DETECTION: Final = re.compile(r"tflite_detection_postprocess(?::([0-3]))?")
_WORD: Final = re.compile(r"[a-z]+")


class _MisfitError(Exception):
    """The outputs do not have the shapes that a preset expects; the message says which."""


def step_of(preset: str, signature: Signature) -> Step:
    """Return the step that a preset stands for.

    `preset`: one of `OUTPUT_PRESETS` or `SOUND_PRESETS`.
    Raises `ModelError` if the outputs do not have the preset's shapes.
    """
    try:
        return _PRESETS[preset](signature)
    except _MisfitError as error:
        size = "" if signature.size is None else f" and an input of {signature.size[1]}x{signature.size[0]}"
        raise ModelError(
            f"postprocess {preset}: expected {error}, got {signature.described()}{size}",
            hint="take the preset of the model's family, or a file as in docs/your-detector.md",
        ) from error


def _yolox(signature: Signature) -> Objects:
    spec, shape = _only(signature, 3, "[1, n, 5 + classes], one output")
    levels = signature.pyramid(shape[1])
    if not levels or shape[2] < 6:
        raise _MisfitError("[1, n, 5 + classes] with n cells of strides 8, 16, 32 (and 64)")
    return Objects(
        boxes=(Part(spec.name, 0, BOX),), coding="grid", levels=levels,
        scores=(Part(spec.name, 5, shape[2] - 5),), objectness=(Part(spec.name, 4, 1),),
        score_threshold=0.3,
    )  # fmt: skip


def _yolov5(signature: Signature, factors: int = 0) -> Objects:
    expected = "[1, n, 5 + classes] with n three times the cells of strides 8, 16, 32 (and 64)"
    spec, values, transposed = _rows(signature, expected, smallest=6 + factors)
    if signature.size is not None and not signature.pyramid(spec.shape[2 if transposed else 1] // 3):
        raise _MisfitError(expected)
    return Objects(
        boxes=(Part(spec.name, 0, BOX),), coding="centre", transposed=transposed,
        scores=(Part(spec.name, 5, values - 5 - factors),), objectness=(Part(spec.name, 4, 1),),
        mask_weights=(Part(spec.name, values - factors, factors),) if factors else (),
        **_prototypes(signature, factors),
    )  # fmt: skip


def _yolov8(signature: Signature, factors: int = 0) -> Objects:
    expected = "[1, 4 + classes, n] with n cells of strides 8, 16, 32 (and 4, or 64)"
    spec, values, transposed = _rows(signature, expected, smallest=5 + factors)
    is_named = signature.hints.task != "" and values == BOX + signature.hints.classes + factors
    rows = spec.shape[2 if transposed else 1]
    if signature.size is not None and not is_named and not signature.pyramid(rows):
        raise _MisfitError(expected)
    return Objects(
        boxes=(Part(spec.name, 0, BOX),), coding="centre", transposed=transposed,
        scores=(Part(spec.name, BOX, values - BOX - factors),),
        mask_weights=(Part(spec.name, values - factors, factors),) if factors else (),
        **_prototypes(signature, factors),
    )  # fmt: skip


def _yolov8_pose(signature: Signature) -> Objects:
    expected = "[1, 5 + 3 * points, n], of one class, or as the file says of its classes and points"
    spec, values, transposed = _rows(signature, expected, smallest=7)
    if (found := signature.points(values - BOX)) is None:
        raise _MisfitError(expected)
    classes, size = found
    first = BOX + classes
    return Objects(
        boxes=(Part(spec.name, 0, BOX),), coding="centre", transposed=transposed,
        scores=(Part(spec.name, BOX, classes),),
        keypoints=(Part(spec.name, first, values - first),), keypoint_values=size,
    )  # fmt: skip


def _yolox_decoded(signature: Signature) -> Objects:
    raw = _yolox(signature)
    return replace(raw, coding="centre", levels=())


def _end_to_end(signature: Signature, *, factors: int = 0, points: bool = False) -> Objects:
    values = f"{6 + factors}{' + 3 * points' if points else ''}"
    expected = f"[1, n, {values}]: corners, score and class of each object"
    expected += ", then its points" if points else ", then factors of its mask" if factors else ""
    found = [spec for spec in signature.outputs if len(spec.shape) == 3 and spec.shape[0] == 1]
    if len(found) != 1 or len(signature.outputs) != (2 if factors else 1):
        raise _MisfitError(expected)
    spec, more = found[0], found[0].shape[2] - 6 - factors
    count, size = signature.hints.points or (0, 3)
    if more < 0 or bool(more) != points or more % size or (count and points and more != count * size):
        raise _MisfitError(expected)
    return Objects(
        boxes=(Part(spec.name, 0, BOX),), coding="corners", scores=(Part(spec.name, 4, 1),),
        class_ids=(Part(spec.name, 5, 1),), iou_threshold=1.0,
        keypoints=(Part(spec.name, 6, more),) if points else (), keypoint_values=size if points else 2,
        mask_weights=(Part(spec.name, 6, factors),) if factors else (),
        **_prototypes(signature, factors),
    )  # fmt: skip


def _detections(signature: Signature, coding: str = "corners", *, normalised: bool = False) -> Objects:
    boxes, scores, classes = detections_of(signature)
    return Objects(
        boxes=_parts([boxes]), coding=coding, normalised=normalised,
        scores=(Part(scores.name, 0, 1),), class_ids=(Part(classes.name, 0, 1),),
        score_threshold=0.5, iou_threshold=1.0,
    )  # fmt: skip


def detections_of(signature: Signature) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """Return the outputs of boxes, scores and classes of a model whose last step is the suppression.

    Raises `ModelError` if there are none, or their names and datatypes do not say which is which.
    """
    expected = "boxes [1, n, 4], scores [1, n] and classes [1, n], with names that say which is which"
    found: dict[str, list[TensorSpec]] = {"boxes": [], "scores": [], "classes": []}
    for spec in signature.outputs:
        if (role := signature.hints.roles.get(spec.name) or _role(spec)) in found:
            found[role].append(spec)
    if found["classes"] and not found["scores"] and len(found["boxes"]) == 1:
        others = [spec for spec in signature.outputs if spec not in (*found["boxes"], *found["classes"])]
        found["scores"] = [spec for spec in others if spec.shape[-1:] == found["boxes"][0].shape[-2:-1]]
    if any(len(specs) != 1 for specs in found.values()):
        raise _MisfitError(expected)
    boxes, scores, classes = (specs[0] for specs in found.values())
    rows = boxes.shape[-2]
    if any(spec.shape not in ((rows,), (1, rows)) for spec in (scores, classes)):
        raise _MisfitError(expected)
    return boxes, scores, classes


def _role(spec: TensorSpec) -> str:
    """Return what an output of finished detections has: `boxes`, `scores`, `classes`, or nothing of these."""
    name = spec.name.lower()
    if (number := _TFLITE_DETECTION.fullmatch(name)) is not None:
        return ("boxes", "classes", "scores", "count")[int(number[1] or 0)]
    words = _WORD.findall(name)
    if spec.shape[-1:] == (BOX,) and (len(spec.shape) == 2 or (len(spec.shape) == 3 and spec.shape[0] == 1)):
        return "" if "raw" in words else "boxes"
    if len(spec.shape) > 2 or (len(spec.shape) == 2 and spec.shape[0] != 1):
        return ""
    if any(word.startswith(("class", "label", "cls")) for word in words):
        return "classes"
    if any(word.startswith(("score", "conf", "prob")) for word in words):
        return "scores"
    return ""


def _nanodet(signature: Signature) -> Objects:
    distances = BOX * NANODET_BINS
    expected = f"[1, n, classes + {distances}], or scores [1, n, classes] and distances [1, n, {distances}] "
    expected += "for each of the strides 8, 16, 32 (and 64)"
    if len(signature.outputs) == 1:
        spec, shape = _only(signature, 3, expected)
        rows, classes = shape[1], shape[2] - distances
        boxes: tuple[TensorSpec, ...] = (spec,)
        scores = boxes
        first = classes
    else:
        boxes, scores = _split_levels(signature, distances, expected)
        rows = sum(spec.shape[1] for spec in boxes)
        first, classes = 0, scores[0].shape[2]
    levels = signature.pyramid(rows)
    if not levels or classes < 1:
        raise _MisfitError(expected)
    return Objects(
        boxes=tuple(Part(spec.name, first, distances) for spec in boxes), coding="distances",
        bins=NANODET_BINS, levels=levels,
        # NanoDet has three levels and the middle of a cell, NanoDet-Plus four and its corner.
        offset=0.5 if len(levels) == 3 else 0.0,
        scores=tuple(Part(spec.name, 0, classes) for spec in scores),
        multi_label=True, score_threshold=0.35, iou_threshold=0.6, max_detections=100,
    )  # fmt: skip


def _yunet(signature: Signature) -> Objects:
    expected = (
        f"scores, objectness [1, n, 1], boxes [1, n, 4] and points [1, n, {2 * YUNET_POINTS}] for each "
    )
    expected += "of the strides 8, 16, 32"
    of_width: dict[int, list[TensorSpec]] = {1: [], BOX: [], 2 * YUNET_POINTS: []}
    for spec in signature.outputs:
        if len(spec.shape) != 3 or spec.shape[2] not in of_width:
            raise _MisfitError(expected)
        of_width[spec.shape[2]].append(spec)
    # A level's two scores have the same shape; their product does not depend on which is which.
    single = sorted(of_width[1], key=lambda spec: (-spec.shape[1], spec.name))
    scores, objectness = single[0::2], single[1::2]
    boxes, points = (sorted(of_width[w], key=lambda spec: -spec.shape[1]) for w in (BOX, 2 * YUNET_POINTS))
    counts = [[spec.shape[1] for spec in each] for each in (scores, objectness, boxes, points)]
    levels = signature.levels(PYRAMIDS[0])
    if any(count != [level.count for level in levels] for count in counts):
        raise _MisfitError(expected)
    return Objects(
        boxes=_parts(boxes), coding="grid", levels=levels,
        scores=_parts(scores), objectness=_parts(objectness), joint_score="geometric_mean",
        keypoints=_parts(points), score_threshold=0.6, iou_threshold=0.3, max_detections=200,
    )  # fmt: skip


def _retinaface(signature: Signature) -> Objects:
    expected = "boxes [1, n, 4], scores [1, n, 2] and points [1, n, 10], n priors of strides 8, 16, 32"
    found = {spec.shape[2]: spec for spec in signature.outputs if len(spec.shape) == 3}
    levels = tuple(
        Level(level.rows, level.columns, level.stride, tuple((float(s), float(s)) for s in sides))
        for level, sides in zip(signature.levels(PYRAMIDS[0]), _RETINAFACE_PRIORS.values(), strict=False)
    )
    rows = sum(level.count for level in levels)
    if set(found) != {2, 4, 10} or len(signature.outputs) != 3 or any(
        spec.shape[1] != rows for spec in found.values()
    ):  # fmt: skip
        raise _MisfitError(expected)
    return Objects(
        boxes=_parts([found[4]]), coding="anchors", levels=levels, offset=0.5, variances=(0.1, 0.2),
        scores=_parts([found[2]]), background="first", keypoints=_parts([found[10]]),
        score_threshold=0.6, iou_threshold=0.4, max_detections=200,
    )  # fmt: skip


def _ssd(signature: Signature) -> Objects:
    boxes, scores = _boxes_and_scores(signature, "boxes [1, n, 4] and scores [1, n, classes]")
    return Objects(
        boxes=_parts([boxes]), coding="corners", normalised=True, scores=_parts([scores]),
        background="first", multi_label=True, score_threshold=0.4, max_detections=200,
    )  # fmt: skip


def _ultraface(signature: Signature) -> Detect:
    boxes, scores = _boxes_and_scores(signature, "boxes [1, n, 4] and scores [1, n, classes]")
    return Detect(
        boxes=boxes.name, scores=scores.name, score_threshold=0.7, iou_threshold=0.3,
        max_detections=200, format="corners", normalised=True, background=True,
    )  # fmt: skip


def _detr(signature: Signature) -> Objects:
    boxes, scores = _boxes_and_scores(signature, "boxes [1, n, 4] and logits [1, n, classes + 1]")
    return Objects(
        boxes=_parts([boxes]), coding="centre", normalised=True, scores=_parts([scores]),
        activation="softmax", background="last", score_threshold=0.7, iou_threshold=1.0, max_detections=100,
    )  # fmt: skip


def _rtdetr(signature: Signature) -> Objects:
    if len(signature.outputs) == 1:  # as Ultralytics exports it, with the sigmoid
        spec, values, transposed = _rows(signature, "[1, n, 4 + classes]", smallest=5)
        boxes: tuple[Part, ...] = (Part(spec.name, 0, BOX),)
        scores: tuple[Part, ...] = (Part(spec.name, BOX, values - BOX),)
        activation = "none"
    else:
        box, score = _boxes_and_scores(signature, "boxes [1, n, 4] and logits [1, n, classes]")
        boxes, scores = _parts([box]), _parts([score])
        activation, transposed = "sigmoid", False
    # Transformers ranks the classes of all rows, Ultralytics the best one of each row.
    return Objects(
        boxes=boxes, coding="centre", normalised=True, scores=scores, activation=activation,
        multi_label=activation == "sigmoid", transposed=transposed, score_threshold=0.5, iou_threshold=1.0,
    )  # fmt: skip


def _movenet(signature: Signature) -> Objects | Pose:
    expected = f"[1, 1, points, 3], or [1, n, 5 + 3 * points] such as [1, 6, {5 + 3 * COCO_POINTS}]"
    if len(signature.outputs) != 1:
        raise _MisfitError(expected)
    spec, shape = signature.outputs[0], signature.outputs[0].shape
    if len(shape) == 4 and shape[0] == 1 and shape[3] == 3:
        return Pose(spec.name, order="yx", normalised=True)
    values = shape[2] - 5 if len(shape) == 3 and shape[0] == 1 else 0
    if values < 3 or values % 3:
        raise _MisfitError(expected)
    return Objects(
        boxes=(Part(spec.name, values, BOX),), coding="corners_yx", normalised=True,
        scores=(Part(spec.name, values + BOX, 1),), iou_threshold=1.0,
        keypoints=(Part(spec.name, 0, values),), keypoint_values=3, keypoint_order="yx",
    )  # fmt: skip


def _segmentation(signature: Signature) -> ClassMap:
    expected = "[1, classes, height, width] or [1, height, width, classes]"
    # Some exports have a second, auxiliary output of the same shape; the first one is the result.
    spec = next((spec for spec in signature.outputs if len(spec.shape) == 4), None)
    if spec is None:
        raise _MisfitError(expected)
    _, first, second, last = spec.shape
    channels_last = signature.channels_last(spec)
    if channels_last is None:
        channels_last = last < min(first, second)
    # One channel is the probability of one class.
    threshold = 0.5 if (last if channels_last else first) == 1 else None
    return ClassMap(spec.name, channels_last, threshold)


def _embedding(signature: Signature) -> Normalise:
    if len(signature.outputs) != 1:
        raise _MisfitError("one output")
    return Normalise(signature.outputs[0].name)


def _speech(signature: Signature) -> Speech:
    found = [spec for spec in signature.outputs if spec.nbytes == spec.itemsize]
    if len(found) != 1:
        raise _MisfitError("one output of one probability")
    return Speech(found[0].name)


def _keywords(signature: Signature) -> Keywords:
    found = [spec for spec in signature.outputs if spec.shape and spec.nbytes > spec.itemsize]
    found = found or list(signature.outputs)  # the probability of one word
    found = [spec for spec in found if spec.nbytes == spec.itemsize * spec.shape[-1]]
    if len(found) != 1:
        raise _MisfitError("one output [1, classes]")
    return Keywords(found[0].name)


def _ctc(signature: Signature) -> Ctc:
    spec, _ = _only(signature, 3, "[1, steps, classes] or [steps, 1, classes], one output")
    return Ctc(spec.name)


_PRESETS: Final[Mapping[str, Callable[[Signature], Step]]] = MappingProxyType(
    {
        "yolox": _yolox,
        "yolox-decoded": _yolox_decoded,
        "yolov5": _yolov5,
        "yolov5-seg": lambda signature: _yolov5(signature, YOLO_MASK_FACTORS),
        "yolov7": _yolov5,
        "yolov8": _yolov8,
        "yolov8-seg": lambda signature: _yolov8(signature, YOLO_MASK_FACTORS),
        "yolov8-pose": _yolov8_pose,
        "yolov9": _yolov8,
        "yolov10": _end_to_end,
        "yolo26": _end_to_end,
        "yolo26-seg": lambda signature: _end_to_end(signature, factors=YOLO_MASK_FACTORS),
        "yolo26-pose": lambda signature: _end_to_end(signature, points=True),
        "yolo11": _yolov8,
        "yolo11-seg": lambda signature: _yolov8(signature, YOLO_MASK_FACTORS),
        "yolo11-pose": _yolov8_pose,
        "yolo12": _yolov8,
        "nanodet": _nanodet,
        "ssd": _ssd,
        "detections": _detections,
        "tf-detections": lambda signature: _detections(signature, "corners_yx", normalised=True),
        "ultraface": _ultraface,
        "faces": _ultraface,
        "retinaface": _retinaface,
        "yunet": _yunet,
        "detr": _detr,
        "rtdetr": _rtdetr,
        "movenet": _movenet,
        "segmentation": _segmentation,
        "embedding": _embedding,
        "ctc": _ctc,
        "speech": _speech,
        "keywords": _keywords,
    }
)
# What comes of sound over time.
SOUND_PRESETS: Final = ("speech", "keywords")
OUTPUT_PRESETS: Final = tuple(name for name in _PRESETS if name not in SOUND_PRESETS)


def _only(signature: Signature, dimensions: int, expected: str) -> tuple[TensorSpec, Shape]:
    if len(signature.outputs) != 1 or len(signature.outputs[0].shape) != dimensions:
        raise _MisfitError(expected)
    return signature.outputs[0], signature.outputs[0].shape


def _rows(signature: Signature, expected: str, *, smallest: int) -> tuple[TensorSpec, int, bool]:
    """Return the output with a row for each candidate box, its values a row, and whether it is transposed."""
    found = [spec for spec in signature.outputs if len(spec.shape) == 3 and spec.shape[0] == 1]
    if len(found) != 1:
        raise _MisfitError(expected)
    transposed = signature.is_transposed(found[0].shape)
    values = found[0].shape[1 if transposed else 2]
    if values < smallest:
        raise _MisfitError(expected)
    return found[0], values, transposed


def _prototypes(signature: Signature, factors: int) -> dict[str, Any]:
    """Return the fields of an `Objects` that say where prototypes are; none without factors."""
    if not factors:
        return {}
    found = [spec for spec in signature.outputs if len(spec.shape) == 4 and factors in spec.shape[1::2]]
    if len(found) != 1:
        raise _MisfitError(
            f"prototypes [1, {factors}, height, width] or [1, height, width, {factors}] besides the boxes"
        )
    spec, order = found[0], None
    if spec.shape[1] == spec.shape[3]:  # the size of the input decides, the graph, or the user
        channels_last = signature.channels_last(spec)
        order = None if channels_last is None else PROTOTYPE_ORDERS[channels_last]
    return {"prototypes": spec.name, "prototype_order": order}


def is_ambiguous(step: Step, outputs: Sequence[TensorSpec]) -> bool:
    """Return whether a step's prototypes may have their factors first or last, and it does not say which."""
    if not isinstance(step, Objects) or step.prototypes is None or step.prototype_order is not None:
        return False
    shape = next(spec.shape for spec in outputs if spec.name == step.prototypes)
    return len(shape) == _MAP and shape[1] == shape[3] == step.mask_weights[0].count


def _boxes_and_scores(signature: Signature, expected: str) -> tuple[TensorSpec, TensorSpec]:
    """Return the two outputs; if both have 4 values a row, the one whose name speaks of boxes is first."""
    found = [spec for spec in signature.outputs if len(spec.shape) == 3 and spec.shape[0] == 1]
    if len(found) != 2 or len(signature.outputs) != 2 or found[0].shape[1] != found[1].shape[1]:
        raise _MisfitError(expected)
    boxes = [spec for spec in found if spec.shape[2] == BOX]
    if len(boxes) == 2:
        boxes = [spec for spec in found if "box" in spec.name.lower() or "loc" in spec.name.lower()]
    if len(boxes) != 1:
        raise _MisfitError(expected)
    return boxes[0], found[1 - found.index(boxes[0])]


def _split_levels(
    signature: Signature, distances: int, expected: str
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the outputs of distances and of scores, the largest level first."""
    outputs = sorted(signature.outputs, key=lambda spec: spec.shape, reverse=True)
    if any(len(spec.shape) != 3 for spec in outputs):
        raise _MisfitError(expected)
    boxes = [spec for spec in outputs if spec.shape[2] == distances]
    if len(boxes) > len(outputs) // 2:  # as many classes as distances: the names decide
        boxes = [spec for spec in boxes if not any(word in spec.name.lower() for word in ("cls", "score"))]
    scores = [spec for spec in outputs if spec not in boxes]
    classes = {spec.shape[2] for spec in scores}
    if [b.shape[1] for b in boxes] != [s.shape[1] for s in scores] or len(classes) != 1:
        raise _MisfitError(expected)
    return tuple(boxes), tuple(scores)


def _parts(specs: Sequence[TensorSpec]) -> tuple[Part, ...]:
    return tuple(Part(spec.name, 0, spec.shape[-1]) for spec in specs)
