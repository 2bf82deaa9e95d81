"""From a model's outputs to the answer: the manifest's declared steps.

Promises results by name, in a fixed order. A softmax and a normalisation change an output; each other step
replaces the outputs that it reads. All others are returned unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from agent.bundle.audio import Keywords, Speech
from agent.bundle.detection import MAX_ROWS, Objects
from agent.bundle.processing import (
    ClassMap,
    Ctc,
    Detect,
    Normalise,
    Pose,
    Postprocess,
    Softmax,
    Step,
    TopK,
    outputs_of,
)
from agent.bundle.quantisation import Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import ExecutionError, FormatError
from agent.runtime.masks import area_of_cells, cells_of_image, encode_masks
from agent.runtime.objects import FAR, ObjectDecoder
from agent.runtime.placement import Placement
from agent.runtime.quantisation import to_real
from agent.runtime.storage import Array
from agent.runtime.suppression import MAX_CANDIDATES, non_maximum_suppression

# A numeric array, or the elements of a BYTES tensor.
Value = Array | tuple[bytes, ...]


class Postprocessor:
    """One model's declared postprocessing, set up once.

    Parameters
    ----------
    declared
        The manifest's `postprocess`, or None.
    outputs
        The model's outputs.
    labels
        Names of the classes in UTF-8, or empty.
    real
        The quantised outputs that are made real before any step, by name, as in `Manifest.real_outputs`.

    Raises
    ------
    FormatError
        If a step reads an output that does not exist or has the wrong shape, or if there are fewer labels
        than classes.
    """

    def __init__(
        self,
        declared: Postprocess | None,
        outputs: Sequence[TensorSpec],
        labels: Sequence[bytes] = (),
        real: Mapping[str, Quantised] = MappingProxyType({}),
    ) -> None:
        self._steps: tuple[Step, ...] = declared.steps if declared is not None else ()
        self._labels = tuple(labels)
        specs = {spec.name: spec for spec in outputs}
        makers = [step for step in self._steps if not isinstance(step, Softmax | Normalise)]
        self._consumed = frozenset(name for step in makers for name in outputs_of(step))
        for step in self._steps:
            self._check(step, specs)
        self._real = dict(real)
        self._decoders = {
            step: ObjectDecoder(step, specs) for step in self._steps if isinstance(step, Objects)
        }
        # If several steps make results, each result's name begins with its output's name.
        self._prefixes = ["" if len(makers) == 1 else f"{outputs_of(step)[0]}_" for step in self._steps]

    def __call__(self, outputs: Mapping[str, Array], placement: Placement | None = None) -> dict[str, Value]:
        """Apply the steps.

        Parameters
        ----------
        outputs
            The model's outputs by name, which are not changed.
        placement
            Where the image is in the model's input; boxes are then in pixels of the image as sent. Without
            it, boxes keep the model's own units.

        Returns
        -------
        dict
            Name -> result, in the order of the answer. A top-k of an output gives `labels` (if there are
            any), `scores` (float32, shape (k,)) and `indices` (int64, shape (k,)). A detection of m objects
            gives `boxes` (float32, shape (m, 4), corners x1, y1, x2, y2), `scores` (float32, shape (m,)),
            `classes` (int64, shape (m,)) and `labels`; with key points `keypoints` (float32, shape (m,
            points, 2 or 3)); with masks, of an image only, `masks` (run lengths, see `agent.runtime.masks`),
            `mask_size` (int64, height and width) and `mask_area`. A class map gives `class_map` (uint8 or
            uint16, shape (height, width)), `classes` (int64, those in the map, most frequent first), `shares`
            (float32, of the map), `labels`, and for an image `area`. An area (float32, x1, y1, x2, y2) is the
            part of the image as sent that the map or the masks cover. Text gives `text` and `scores`
            (float32, shape (1,), the mean score of its characters, or 0 without any).

        Raises
        ------
        ExecutionError
            If the scores that a step ranks contain NaN, or decoded values are not finite.
        """
        values = dict(outputs)
        for name, quantised in self._real.items():
            values[name] = to_real(values[name], quantised)
        results: dict[str, Value] = {}
        for step, prefix in zip(self._steps, self._prefixes, strict=True):
            match step:
                case Softmax():
                    values[step.output] = softmax(values[step.output], step.axis)
                case TopK():
                    results |= self._top_k(step, values[step.output], prefix)
                case Normalise():
                    values[step.output] = normalise(values[step.output], step.axis)
                case Detect():
                    results |= self._detect(step, values[step.boxes], values[step.scores], prefix, placement)
                case Objects():
                    results |= self._objects(step, values, prefix, placement)
                case Pose():
                    results |= self._pose(step, values[step.output], prefix, placement)
                case ClassMap():
                    results |= self._class_map(step, values[step.output], prefix, placement)
                case Ctc():
                    results |= self._text(step, values[step.output], prefix)
        return results | {name: value for name, value in values.items() if name not in self._consumed}

    def _top_k(self, step: TopK, values: Array, prefix: str) -> dict[str, Value]:
        scores = values.reshape(-1)
        _refuse_nan(scores, step.output)
        indices = top_k(scores, step.k)
        return self._named(indices, prefix) | {
            f"{prefix}scores": scores[indices].astype(np.float32),
            f"{prefix}indices": indices,
        }

    def _detect(
        self, step: Detect, boxes: Array, scores: Array, prefix: str, placement: Placement | None
    ) -> dict[str, Value]:
        scores = scores[0].astype(np.float32)
        _refuse_nan(scores, step.scores)
        found = detect(boxes[0].astype(np.float32), scores, step)
        return {
            f"{prefix}boxes": _to_sent(found[0], step.normalised, placement),
            f"{prefix}scores": found[1],
            f"{prefix}classes": found[2],
        } | self._named(found[2], prefix)

    def _objects(
        self, step: Objects, values: Mapping[str, Array], prefix: str, placement: Placement | None
    ) -> dict[str, Value]:
        found = self._decoders[step](values)
        if self._labels and found.classes.max(initial=0) >= len(self._labels):
            raise ExecutionError(
                f"expected classes below {len(self._labels)}, the number of labels, got {found.classes.max()}"
            )
        results: dict[str, Value] = {
            f"{prefix}boxes": _to_sent(found.boxes, step.normalised, placement),
            f"{prefix}scores": found.scores,
            f"{prefix}classes": found.classes,
        }
        results |= self._named(found.classes, prefix)
        if found.keypoints is not None:
            results[f"{prefix}keypoints"] = _points_to_sent(found.keypoints, step.normalised, placement)
        if found.mask_weights is not None and step.prototypes is not None and placement is not None:
            size = placement.input_height, placement.input_width
            boxes = found.boxes * np.array(size[::-1] * 2, np.float32) if step.normalised else found.boxes
            cells = cells_of_image(placement, *size)
            prototypes = values[step.prototypes][0]
            if step.channels_last(values[step.prototypes].shape):
                prototypes = np.moveaxis(prototypes, -1, 0)
            top, bottom, left, right = cells
            results |= {
                f"{prefix}masks": encode_masks(found.mask_weights, prototypes, boxes, size, cells),
                f"{prefix}mask_size": np.array([bottom - top, right - left], np.int64),
                f"{prefix}mask_area": area_of_cells(placement, *size, cells),
            }
        return results

    def _pose(self, step: Pose, values: Array, prefix: str, placement: Placement | None) -> dict[str, Value]:
        if not np.isfinite(values).all():
            raise ExecutionError(f"output {step.output!r} has key points that are not finite")
        boxes, scores, points = poses(values[0], step)
        classes = np.zeros(len(scores), np.int64)
        return {
            f"{prefix}boxes": _to_sent(boxes, step.normalised, placement),
            f"{prefix}scores": scores,
            f"{prefix}classes": classes,
            **self._named(classes, prefix),
            f"{prefix}keypoints": _points_to_sent(points, step.normalised, placement),
        }

    def _class_map(
        self, step: ClassMap, values: Array, prefix: str, placement: Placement | None
    ) -> dict[str, Value]:
        scores = values[0]
        axis = 2 if step.channels_last else 0
        if step.threshold is not None:
            classes, best = 2, scores.squeeze(axis) > step.threshold
            _refuse_nan(scores, step.output)
        else:
            classes, best = scores.shape[axis], scores.argmax(axis=axis)
            # Of a pixel with NaN, argmax returns the index of the NaN.
            _refuse_nan(np.take_along_axis(scores, np.expand_dims(best, axis), axis), step.output)
        class_map = best.astype(np.uint8 if classes <= 1 << 8 else np.uint16)
        area: dict[str, Value] = {}
        if placement is not None:
            rows, columns = class_map.shape
            cells = cells_of_image(placement, rows, columns)
            area = {f"{prefix}area": area_of_cells(placement, rows, columns, cells)}
            top, bottom, left, right = cells
            class_map = np.ascontiguousarray(class_map[top:bottom, left:right])
        counts = np.bincount(class_map.ravel(), minlength=classes)
        found = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].astype(np.int64)
        results: dict[str, Value] = {
            f"{prefix}class_map": class_map,
            f"{prefix}classes": found,
            f"{prefix}shares": (counts[found] / class_map.size).astype(np.float32),
        }
        return results | self._named(found, prefix) | area

    def _text(self, step: Ctc, values: Array, prefix: str) -> dict[str, Value]:
        scores = values.reshape(max(values.shape[:2]), values.shape[2])
        _refuse_nan(scores, step.output)
        if step.activation == "softmax":
            scores = softmax(scores, -1)
        best = scores.argmax(axis=1)
        blank = 0 if step.blank == "first" else scores.shape[1] - 1
        begins = np.concatenate(([True], best[1:] != best[:-1])) & (best != blank)
        # The labels may leave out the blank.
        skipped = 1 if step.blank == "first" and len(self._labels) < scores.shape[1] else 0
        mean = scores.max(axis=1)[begins].mean(dtype=np.float64) if begins.any() else 0.0
        return {
            f"{prefix}text": (b"".join(self._labels[i - skipped] for i in best[begins]),),
            f"{prefix}scores": np.array([mean], np.float32),
        }

    def _named(self, classes: Array, prefix: str) -> dict[str, Value]:
        return {f"{prefix}labels": tuple(self._labels[i] for i in classes)} if self._labels else {}

    def _check(self, step: Step, specs: Mapping[str, TensorSpec]) -> None:
        missing = [name for name in outputs_of(step) if name not in specs]
        if missing:
            raise FormatError(f"postprocess reads output {missing[0]!r}, which the model does not have")
        classes = class_count(step, specs)
        if isinstance(step, Ctc):
            if len(self._labels) not in (classes, classes - 1):
                raise FormatError(
                    f"labels.txt: expected a line for each of {classes - 1} characters, with or without the "
                    f"blank, got {len(self._labels)}"
                )
        elif self._labels and len(self._labels) < classes:
            raise FormatError(
                f"labels.txt: expected a line for each of {classes} classes, got {len(self._labels)}"
            )


def class_count(step: Step, specs: Mapping[str, TensorSpec]) -> int:
    """Return how many classes a step can name; 0 if it names none, or its model does.

    Raises
    ------
    FormatError
        If an output does not have the shape that the step reads.
    """
    spec = specs[outputs_of(step)[-1]]
    shape = spec.shape
    match step:
        case Softmax() | Normalise():
            if not -len(shape) <= step.axis < len(shape):
                raise FormatError(f"{step.kind}: expected an axis of {spec}, got {step.axis}")
            return 0
        case TopK():
            classes = shape[-1] if shape else 0
            if spec.nbytes // spec.itemsize != classes or step.k > classes:
                raise FormatError(f"top-k: expected one row of at least {step.k} values, got {spec}")
            return classes
        case Detect():
            boxes = specs[step.boxes].shape
            if len(boxes) != 3 or len(shape) != 3 or boxes[0] != 1 or boxes[:2] != shape[:2] or boxes[2] != 4:
                raise FormatError(
                    f"detect: expected boxes [1,n,4] and scores [1,n,classes], got {specs[step.boxes]} and "
                    f"{spec}"
                )
            return shape[2]
        case Speech() | Keywords():  # `agent.runtime.audio` carries them out
            count = spec.nbytes // spec.itemsize
            if isinstance(step, Speech) and count != 1:
                raise FormatError(f"speech: expected one probability, got {spec}")
            return 0 if isinstance(step, Speech) else count
        case Objects():
            return (step.classes or 0) - (step.background == "last")
        case Pose():
            if len(shape) != 4 or shape[0] != 1 or shape[3] != 3 or 0 in shape or shape[1] > MAX_ROWS:
                raise FormatError(f"pose: expected [1,persons,points,3], got {spec}")
            return 1
        case ClassMap():
            classes = shape[3 if step.channels_last else 1] if len(shape) == 4 and shape[0] == 1 else 0
            least, most = (1, 1) if step.threshold is not None else (2, 1 << 16)
            if not least <= classes <= most or 0 in shape:
                order = "[1,height,width,classes]" if step.channels_last else "[1,classes,height,width]"
                wanted = f"{least} to {most} classes" if most > 1 else "one class, which a threshold needs"
                raise FormatError(f"class_map: expected {order} with {wanted}, got {spec}")
            return 2 if step.threshold is not None else classes
        case Ctc():
            if len(shape) != 3 or 1 not in shape[:2] or shape[2] < 2 or 0 in shape:
                raise FormatError(f"ctc: expected [1,steps,classes] or [steps,1,classes], got {spec}")
            return shape[2]


def softmax(values: Array, axis: int) -> Array:
    """Return the softmax along an axis, in the dtype and shape of `values`.

    It is computed from differences from the largest value, so that nothing overflows.
    """
    wide = values.astype(np.float64)
    exponentials = np.exp(wide - wide.max(axis=axis, keepdims=True))
    result: Array = (exponentials / exponentials.sum(axis=axis, keepdims=True)).astype(values.dtype)
    return result


def normalise(values: Array, axis: int) -> Array:
    """Return values divided by their Euclidean length along an axis; a length of 0 gives zeros."""
    wide = values.astype(np.float64)
    length = np.sqrt((wide * wide).sum(axis=axis, keepdims=True))
    result: Array = (wide / np.where(length > 0, length, 1)).astype(np.float32)
    return result


def top_k(scores: Array, k: int) -> Array:
    """Return the indices of the k largest scores, largest first; of equal scores, the lower index first.

    `scores` have the shape (n,) and no NaN; k is 1 to n. The indices are int64.
    """
    # Partitioning finds the k-th value without sorting; then only the scores that reach it are sorted.
    threshold = np.partition(scores, scores.size - k)[scores.size - k]
    reached = np.flatnonzero(scores >= threshold)
    order = np.argsort(-(scores[reached].astype(np.float64)), kind="stable")[:k]
    indices: Array = reached[order].astype(np.int64)
    return indices


def detect(boxes: Array, scores: Array, step: Detect) -> tuple[Array, Array, Array]:
    """Drop scores up to the threshold, then boxes that overlap a better box of their class.

    `boxes`: float32, shape (n, 4), in the format of `step`; `scores`: float32, shape (n, classes). Return
    boxes, scores and classes, best first: float32 (m, 4) as corners in the model's own units, float32 (m,),
    int64 (m,).
    """
    first = 1 if step.background else 0
    rows, classes = np.nonzero(scores[:, first:] > step.score_threshold)
    classes += first
    best = scores[rows, classes]
    order = np.argsort(-best, kind="stable")[:MAX_CANDIDATES]
    rows, classes, best = rows[order], classes[order], best[order]
    corners = boxes[rows]
    if step.format == "centre":
        half = corners[:, 2:] / 2
        corners = np.concatenate((corners[:, :2] - half, corners[:, :2] + half), axis=1)
    kept = non_maximum_suppression(corners, classes, step.iou_threshold, step.max_detections)
    return corners[kept], best[kept], classes[kept].astype(np.int64)


def poses(rows: Array, step: Pose) -> tuple[Array, Array, Array]:
    """Return boxes, scores and points of the persons whose score is over the threshold, best first.

    `rows` are finite and have the shape (persons, points, 3). The results are in the model's own units:
    float32 of shape (m, 4) as corners, (m,), and (m, points, 3) with x first.
    """
    points = rows.astype(np.float32)
    points[..., :2] = points[..., 1::-1] if step.order == "yx" else points[..., :2]
    points[..., :2] = points[..., :2].clip(-FAR, FAR)
    seen = points[..., 2] > step.point_threshold
    sums = np.where(seen, points[..., 2], 0).sum(axis=1, dtype=np.float64)
    scores = (sums / np.maximum(seen.sum(axis=1), 1)).astype(np.float32)
    low = np.where(seen[..., None], points[..., :2], np.inf).min(axis=1)
    high = np.where(seen[..., None], points[..., :2], -np.inf).max(axis=1)
    kept = np.flatnonzero(seen.any(axis=1) & (scores > step.score_threshold))
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    return np.concatenate((low, high), axis=1)[kept], scores[kept], points[kept]


def _to_sent(boxes: Array, normalised: bool, placement: Placement | None) -> Array:
    if placement is None:
        return boxes
    corners = _points_to_sent(boxes.reshape(-1, 2, 2), normalised, placement)
    return corners.clip(0, [placement.width, placement.height]).astype(np.float32).reshape(-1, 4)


def _points_to_sent(points: Array, normalised: bool, placement: Placement | None) -> Array:
    """Return points, shape (m, k, 2 or more) with x and y first, in pixels of the image as sent."""
    if placement is None:
        return points
    size = [placement.input_width, placement.input_height] if normalised else 1.0
    offset = [placement.offset_x, placement.offset_y]
    scale = [placement.scale_x, placement.scale_y]
    sent: Array = points.astype(np.float64)
    sent[..., :2] = (sent[..., :2] * size - offset) / scale
    return sent.astype(np.float32)


def _refuse_nan(scores: Array, name: str) -> None:
    if np.isnan(scores).any():
        raise ExecutionError(f"output {name!r} contains NaN, which cannot be ranked")
