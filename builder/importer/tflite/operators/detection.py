"""Non-maximum suppression: TFLite_Detection_PostProcess and NON_MAX_SUPPRESSION_V4 and _V5.

The greedy choice is one node, `builder.importer.bounded.suppression`: take the best box that is left, drop
all that overlap it. Where a choice lowers scores, it is written out step by step. So all tensors have fixed
shapes, and the results are those of the interpreter: `max_detections` places, of which the last ones are
zeros if there are fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from flatbuffers import flexbuffers

from builder.errors import RefusalError
from builder.importer.bounded.suppression import MAX_PLACES
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.schema import MALFORMED

POST_PROCESS: Final = "TFLite_Detection_PostProcess"
SUPPRESSIONS: Final = ("NON_MAX_SUPPRESSION_V4", "NON_MAX_SUPPRESSION_V5")
# Each step of a choice that lowers scores adds some twenty nodes.
MAX_STEPS: Final = 200
_SCALES: Final = ("y_scale", "x_scale", "h_scale", "w_scale")
_REQUIRED: Final = (
    *("max_detections", "max_classes_per_detection", "num_classes"),
    *("nms_iou_threshold", "nms_score_threshold", *_SCALES),
)
_DEFAULTS: Final = MappingProxyType({"detections_per_class": 100.0, "use_regular_nms": 0.0})
_MAX_OPTIONS_BYTES: Final = 4096  # a few hundred in practice
# Marks boxes that are chosen or dropped; no score is so low.
_GONE: Final = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Corners of n boxes, [n, 4]; each side and the area, [1, n]."""

    top: str
    left: str
    bottom: str
    right: str
    area: str
    corners: str


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What was chosen, in places of which the last are empty: class, box, score, whether there is one."""

    classes: str
    boxes: str
    scores: str
    is_there: str


def detection_post_process(op: Operation) -> None:
    """TFLite_Detection_PostProcess of box encodings [1, n, 4], class scores [1, n, k] and anchors [n, 4].

    Source of the formulas: tensorflow/lite/kernels/detection_postprocess.cc.
    """
    options = _options(op.operator.custom)
    shape, classes_shape = op.shape(0), op.shape(1)
    if len(op.outputs) != 4 or len(shape) != 3 or shape[0] != 1 or shape[2] != 4 or len(classes_shape) != 3:
        raise RefusalError(f"expected boxes [1, n, 4] and four outputs, got {list(shape)}")
    count, classes = shape[1], int(options["num_classes"])
    steps = int(options["max_detections"])
    offset = classes_shape[2] - classes
    each = min(int(options["max_classes_per_detection"]), classes)
    if not 1 <= steps <= MAX_PLACES or offset not in (0, 1) or each < 1 or count < 1:
        raise RefusalError(
            f"expected 1 to {MAX_PLACES} detections and {classes} classes, got {steps} and {classes_shape[2]}"
        )
    if options["nms_iou_threshold"] < 0:
        raise RefusalError(f"expected an overlap of at least 0, got {options['nms_iou_threshold']:g}")
    corners = _decoded(op, options, count)
    scores = op.reshape(op.real(1), (count, classes_shape[2]))
    if offset:
        scores = _slice(op, scores, 1, 1, classes_shape[2])
    limits = options["nms_iou_threshold"], options["nms_score_threshold"]
    if options["use_regular_nms"]:
        _put_regular(op, corners, scores, steps, min(int(options["detections_per_class"]), steps), limits)
    else:
        _put_fast(op, corners, scores, steps, each, limits)


def class_count(custom: bytes) -> int:
    """How many classes TFLite_Detection_PostProcess chooses from, without the background.

    Raises `RefusalError` if the options cannot be read.
    """
    return int(_options(custom)["num_classes"])


def places_filled(custom: bytes, number: float) -> int:
    """How many places TFLite_Detection_PostProcess fills with `number` detections.

    The interpreter leaves the other places as they were in memory.
    """
    options = _options(custom)
    each = min(options["max_classes_per_detection"], options["num_classes"])
    return int(number * (1 if options["use_regular_nms"] else each))


def _put_fast(
    op: Operation, corners: str, scores: str, steps: int, each: int, limits: tuple[float, float]
) -> None:
    """Boxes are chosen by their best class; each gives its `each` best classes."""
    graph = op.graph
    values, classes = graph.nodes("TopK", [scores, graph.constant([each])], 2, axis=1)
    count = graph.shape_of(scores)[0]
    best = op.reshape(_slice(op, values, 1, 0, 1), (1, count))
    chosen = _choose(op, corners, best, steps, steps, limits)
    there = op.reshape(chosen.is_there, (steps, 1))
    corners = graph.node("Gather", corners, chosen.boxes, axis=0)
    if each > 1:
        corners = graph.node("Tile", corners, graph.constant([1, each]))
    kinds = op.cast(graph.node("Gather", classes, chosen.boxes, axis=0), "float32")
    results = [corners, kinds, graph.node("Gather", values, chosen.boxes, axis=0)]
    _put(op, results, steps * each, there)


def _put_regular(
    op: Operation, corners: str, scores: str, steps: int, per_class: int, limits: tuple[float, float]
) -> None:
    """Boxes are chosen in each class by itself; the best of all classes count."""
    graph = op.graph
    if per_class < 1:
        raise RefusalError(f"expected at least one detection of each class, got {per_class}")
    count, classes = graph.shape_of(scores)
    per_class = min(per_class, count)
    capacity = max(classes * per_class, steps)
    scores = graph.node("Transpose", scores, perm=[1, 0])
    chosen = _choose(op, corners, scores, per_class, capacity, limits)
    gone = graph.constant(_GONE, "float32")
    found = graph.node("Where", chosen.is_there, chosen.scores, gone)
    values, places = graph.nodes("TopK", [found, graph.constant([steps])], 2, axis=0)
    there = op.reshape(graph.node("Gather", chosen.is_there, places, axis=0), (steps, 1))
    boxes, kinds = (graph.node("Gather", each, places, axis=0) for each in (chosen.boxes, chosen.classes))
    results = [
        graph.node("Gather", corners, boxes, axis=0),
        op.reshape(op.cast(kinds, "float32"), (steps, 1)),
        op.reshape(values, (steps, 1)),
    ]
    _put(op, results, steps, there)


def _put(op: Operation, results: list[str], places: int, there: str) -> None:
    zero = op.graph.constant(0, "float32")
    results = [op.graph.node("Where", there, result, zero) for result in results]
    boxes, classes, scores, number = op.outputs
    op.scope.put_real(boxes, op.reshape(results[0], (1, places, 4)))
    op.scope.put_real(classes, op.reshape(results[1], (1, places)))
    op.scope.put_real(scores, op.reshape(results[2], (1, places)))
    op.scope.put_real(number, op.cast(_total(op, there), "float32"))


def non_max_suppression(op: Operation) -> None:
    """NON_MAX_SUPPRESSION_V4 and _V5 of boxes [n, 4], scores [n], a number of results and two limits."""
    shape = op.shape(0)
    if len(shape) != 2 or shape[1] != 4 or not shape[0]:
        raise RefusalError(f"expected boxes [n, 4], got {list(shape)}")
    [steps] = op.integers(2, "number of results")
    overlap, score = (float(op.scope.known(op.input(i), "limit").reshape(-1)[0]) for i in (3, 4))
    tensor = op.optional(5)
    sigma = 0.0 if tensor is None else float(op.scope.known(tensor, "sigma").reshape(-1)[0])
    if not 0 <= sigma < math.inf:
        raise RefusalError(f"expected a sigma of at least 0, got {sigma:g}")
    # Without overlap, boxes do not count as overlapping, unless the limit is 0.
    is_soft = sigma > 0 or overlap <= 0
    most = MAX_STEPS if is_soft else MAX_PLACES
    if not 1 <= steps <= most:
        raise RefusalError(f"expected 1 to {most} results, got {steps}")
    graph = op.graph
    first, second = (_slice(op, op.real(0), 1, i, i + 2) for i in (0, 2))
    corners = graph.node("Concat", graph.node("Min", first, second), graph.node("Max", first, second), axis=1)
    scores = op.reshape(op.real(1), (1, shape[0]))
    # Here the limits belong to the other side: a score must be above, an overlap below.
    below, above = np.float32(-np.inf), np.float32(np.inf)
    limits = (float(np.nextafter(np.float32(overlap), below)), float(np.nextafter(np.float32(score), above)))
    if is_soft:
        decay = -0.5 / sigma if sigma else 0.0
        chosen = _choose_softly(op, _boxes(op, corners), scores, steps, limits, decay)
    else:
        chosen = _choose(op, corners, scores, steps, steps, limits)
    zero = graph.constant(np.zeros((), np.int64))
    results = [op.cast(graph.node("Where", chosen.is_there, chosen.boxes, zero), "int32")]
    if len(op.outputs) == 3:
        found = graph.node("Where", chosen.is_there, chosen.scores, graph.constant(0, "float32"))
        results.append(found)
    results.append(op.reshape(_total(op, chosen.is_there), ()))
    if len(results) != len(op.outputs):
        raise RefusalError(f"expected {len(results)} outputs, got {len(op.outputs)}")
    for tensor, value in zip(op.outputs, results, strict=True):
        op.scope.put(tensor, value)


def _total(op: Operation, there: str) -> str:
    """How many places are filled, int32 [1]."""
    flat = op.cast(there, "int32")
    axes = op.graph.constant(list(range(len(op.graph.shape_of(flat)))))
    return op.reshape(op.graph.node("ReduceSum", flat, axes, keepdims=0), (1,))


def _options(custom: bytes) -> Mapping[str, float]:
    """The options, a FlexBuffer: only the numbers that are needed are read."""
    if len(custom) > _MAX_OPTIONS_BYTES:
        raise RefusalError(f"expected options of at most {_MAX_OPTIONS_BYTES} bytes, got {len(custom)}")
    options = dict(_DEFAULTS)
    try:
        found = flexbuffers.GetRoot(custom).AsMap
        for name in (*_REQUIRED, *_DEFAULTS):
            try:
                entry = found[name]
            except KeyError:
                continue
            options[name] = float(entry.AsBool if entry.IsBool else entry.AsFloat)
    except MALFORMED as error:
        raise RefusalError("its options cannot be read") from error
    for name in _REQUIRED:
        if not math.isfinite(options.get(name, math.nan)):
            raise RefusalError(f"expected a number as its option {name}, got none")
    if 0 in (options[name] for name in _SCALES):
        raise RefusalError("expected scales other than 0")
    return options


def _decoded(op: Operation, options: Mapping[str, float], count: int) -> str:
    """Corners [n, 4] from encodings relative to anchors, which have a centre and a size."""
    graph = op.graph
    encodings = op.reshape(op.real(0), (count, 4))
    anchors = op.reshape(op.real(2), (count, 4))
    scales = np.asarray([1 / options["y_scale"], 1 / options["x_scale"]], np.float32)
    sizes = np.asarray([1 / options["h_scale"], 1 / options["w_scale"]], np.float32)
    anchor, extent = (_slice(op, anchors, 1, i, i + 2) for i in (0, 2))
    moved = graph.node("Mul", _slice(op, encodings, 1, 0, 2), graph.constant(scales))
    centre = graph.node("Add", graph.node("Mul", moved, extent), anchor)
    grown = graph.node("Exp", graph.node("Mul", _slice(op, encodings, 1, 2, 4), graph.constant(sizes)))
    half = graph.node("Mul", graph.node("Mul", grown, graph.constant(0.5, "float32")), extent)
    return graph.node("Concat", graph.node("Sub", centre, half), graph.node("Add", centre, half), axis=1)


def _boxes(op: Operation, corners: str) -> _Boxes:
    count = op.graph.shape_of(corners)[0]
    top, left, bottom, right = (op.reshape(_slice(op, corners, 1, i, i + 1), (1, count)) for i in range(4))
    height = op.graph.node("Sub", bottom, top)
    width = op.graph.node("Sub", right, left)
    return _Boxes(top, left, bottom, right, op.graph.node("Mul", height, width), corners)


def _choose(
    op: Operation, corners: str, scores: str, most: int, capacity: int, limits: tuple[float, float]
) -> _Chosen:
    """Choose up to `most` boxes in each class.

    `corners`: the n boxes, the same in each class, [n, 4].
    `scores`: [classes, n].
    `most`: how many are chosen in each class.
    `capacity`: places for the chosen boxes of all classes.
    `limits`: a box is dropped if it overlaps a chosen one by more than the first; its score must reach the
        second.
    """
    graph = op.graph
    classes, count = graph.shape_of(scores)
    graph.check_made(classes * count)
    if capacity > MAX_PLACES:
        raise RefusalError(f"expected at most {MAX_PLACES} detections of all classes, got {capacity}")
    gone = graph.constant(_GONE, "float32")
    reach = graph.node("GreaterOrEqual", scores, graph.constant(limits[1], "float32"))
    scores = graph.node("Where", reach, scores, gone)
    # A box whose corners are exchanged has no area: it overlaps no other.
    low, high = (_slice(op, corners, 1, i, i + 2) for i in (0, 2))
    boxes = op.reshape(graph.node("Concat", low, graph.node("Max", low, high), axis=1), (1, count, 4))
    chosen, number = graph.suppress(
        boxes, op.reshape(scores, (1, classes, count)), most, (limits[0], _GONE), capacity
    )
    kinds, places = (op.reshape(_slice(op, chosen, 1, i, i + 1), (capacity,)) for i in (1, 2))
    there = graph.node("Less", graph.constant(np.arange(capacity)), number)
    return _Chosen(kinds, places, graph.node("GatherND", scores, _slice(op, chosen, 1, 1, 3)), there)


def _choose_softly(
    op: Operation, boxes: _Boxes, scores: str, steps: int, limits: tuple[float, float], decay: float
) -> _Chosen:
    """Choose up to `steps` boxes, whose overlap lowers the scores of the others.

    `scores`: [1, n].
    `steps`: how many are chosen.
    `limits`: a box is dropped if it overlaps a chosen one by more than the first; its score must reach the
        second.
    `decay`: the score of a box that is left is multiplied by exp(decay * overlap²).
    """
    graph = op.graph
    count = graph.shape_of(scores)[1]
    graph.check_made(count)
    zero, gone = graph.constant(0, "float32"), graph.constant(_GONE, "float32")
    lowest = graph.constant(max(limits[1], _GONE / 2), "float32")
    places = graph.constant(np.arange(count, dtype=np.int64)[np.newaxis])
    reach = graph.node("GreaterOrEqual", scores, graph.constant(limits[1], "float32"))
    scores = graph.node("Where", reach, scores, gone)
    real = graph.node("Greater", boxes.area, zero)
    indices, values = [], []
    for _ in range(steps):
        values.append(graph.node("ReduceMax", scores, graph.constant([1]), keepdims=1))
        indices.append(graph.node("ArgMax", scores, axis=1, keepdims=1))
        box = graph.node("Gather", boxes.corners, op.reshape(indices[-1], (1,)), axis=0)
        sides = [_slice(op, box, 1, i, i + 1) for i in range(4)]
        high = graph.node(
            "Sub", graph.node("Min", boxes.bottom, sides[2]), graph.node("Max", boxes.top, sides[0])
        )
        wide = graph.node(
            "Sub", graph.node("Min", boxes.right, sides[3]), graph.node("Max", boxes.left, sides[1])
        )
        shared = graph.node("Mul", graph.node("Max", high, zero), graph.node("Max", wide, zero))
        area = graph.node("Mul", graph.node("Sub", sides[2], sides[0]), graph.node("Sub", sides[3], sides[1]))
        union = graph.node("Sub", graph.node("Add", area, boxes.area), shared)
        both = graph.node("And", real, graph.node("Greater", area, zero))
        shares = graph.node("Where", both, graph.node("Div", shared, union), zero)
        over = graph.node("Greater", shares, graph.constant(limits[0], "float32"))
        power = graph.node("Mul", graph.node("Mul", shares, shares), graph.constant(decay, "float32"))
        lower = graph.node("Mul", scores, graph.node("Exp", power))
        below = graph.node("Less", graph.node("Min", scores, lower), lowest)
        drop = graph.node("Or", graph.node("Or", over, graph.node("Equal", places, indices[-1])), below)
        scores = graph.node("Where", drop, gone, lower)
    found = op.reshape(graph.node("Concat", *values, axis=1), (steps,))
    there = graph.node("Greater", found, graph.constant(_GONE / 2, "float32"))
    chosen = op.reshape(graph.node("Concat", *indices, axis=1), (steps,))
    return _Chosen(graph.constant(np.zeros(steps, np.int64)), chosen, found, there)


def _slice(op: Operation, value: str, axis: int, start: int, end: int) -> str:
    return op.graph.node(
        "Slice", value, op.graph.constant([start]), op.graph.constant([end]), op.graph.constant([axis])
    )
