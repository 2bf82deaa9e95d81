"""From a detector's raw outputs to objects: the step `objects` of a manifest.

Promises at most `max_detections` objects, best first, in a time that the step's limits bound, whatever the
outputs hold: rows are ranked by their scores before their boxes are decoded, and only the best
`MAX_CANDIDATES` of them are. Outputs that are not numbers are an error. Leaves the way from the model's
input to the image as sent to `postprocess`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.bundle.detection import MAX_ROWS, Level, Objects, Part
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import ExecutionError, FormatError
from agent.runtime.storage import Array
from agent.runtime.suppression import MAX_CANDIDATES, non_maximum_suppression

# Coordinates are kept below this, so that areas are finite in float32, also if a size is infinite.
FAR: Final = 1e6


@dataclass(frozen=True, slots=True)
class Found:
    """Objects, best first.

    `boxes`: float32, shape (m, 4), corners x1, y1, x2, y2 in pixels, or fractions, of the model's input.
    `scores`: float32, and `classes`: int64, shape (m,). `keypoints`: float32, shape (m, points, 2 or 3) in
    the units of the boxes, and `mask_weights`: float32, shape (m, factors), or None.
    """

    boxes: Array
    scores: Array
    classes: Array
    keypoints: Array | None
    mask_weights: Array | None


class ObjectDecoder:
    """One step's decoding, set up once; an output of another shape than the step reads raises FormatError."""

    def __init__(self, step: Objects, specs: Mapping[str, TensorSpec]) -> None:
        self._step = step
        boxes = sum(_rows_of(part, specs[part.output], step) for part in step.boxes)
        self._vectors = frozenset(
            name
            for name, parts in step.quantities.items()
            if len(parts) == 1 and _is_vector(parts[0], specs[parts[0].output], boxes)
        )
        counts = {
            name: boxes
            if name in self._vectors
            else sum(_rows_of(part, specs[part.output], step) for part in parts)
            for name, parts in step.quantities.items()
            if parts
        }
        rows = counts["scores"]
        if rows > MAX_ROWS:
            raise FormatError(f"objects: expected at most {MAX_ROWS} rows, got {rows}")
        expected = {"levels": sum(level.count for level in step.levels)} if step.levels else {}
        for name, count in (counts | expected).items():
            if count != rows:
                raise FormatError(f"objects: expected {rows} rows, as the scores have, got {count} of {name}")
        if step.prototypes is not None:
            shape, factors = specs[step.prototypes].shape, step.mask_weights[0].count
            channels = shape[3 if step.channels_last(shape) else 1] if len(shape) == 4 else 0
            if channels != factors or shape[0] != 1 or 0 in shape:
                raise FormatError(
                    f"objects: expected prototypes [1,{factors},height,width] or [1,height,width,{factors}], "
                    f"got {specs[step.prototypes]}"
                )
        self._centres, self._sizes = _grid(step.levels, step.offset)
        self._bins = np.arange(step.bins, dtype=np.float32)

    def __call__(self, outputs: Mapping[str, Array]) -> Found:
        """Decode the outputs.

        A score that is NaN or infinite, a box that is NaN, or an id that is no class raises ExecutionError.
        """
        with np.errstate(all="ignore"):  # what becomes NaN is found below
            return self._decode(outputs)

    def _decode(self, outputs: Mapping[str, Array]) -> Found:
        step = self._step
        rows, classes, scores = self._candidates(outputs)
        boxes = self._boxes(outputs, rows)
        rivals = None if step.class_agnostic else classes
        kept = non_maximum_suppression(boxes, rivals, step.iou_threshold, step.max_detections)
        rows = rows[kept]
        keypoints = self._keypoints(outputs, rows) if step.keypoints else None
        weights = self._read(outputs, "mask_weights", rows) if step.mask_weights else None
        return Found(boxes[kept], scores[kept], classes[kept], keypoints, weights)

    def _candidates(self, outputs: Mapping[str, Array]) -> tuple[Array, Array, Array]:
        """Return row, class and score of each candidate, best first."""
        step = self._step
        scores = self._read(outputs, "scores")
        if step.activation == "softmax":
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
        first = 1 if step.background == "first" else 0
        scores = scores[:, first : scores.shape[1] - (step.background == "last")]
        objectness = self._read(outputs, "objectness")[:, 0] if step.objectness else None
        # Activations and joint scores grow with the class's value, so the best class is known before.
        best = self._score(scores.max(axis=1), objectness)
        if not (best < np.inf).all():
            raise ExecutionError(f"output {step.scores[0].output!r} has scores that are NaN or infinite")
        rows = _ranked(best, step.score_threshold)
        if step.multi_label:
            among = self._score(scores[rows], None if objectness is None else objectness[rows, None])
            which, classes = np.nonzero(among > step.score_threshold)
            values = among[which, classes]
            order = np.argsort(-values, kind="stable")[:MAX_CANDIDATES]
            rows, classes, values = rows[which[order]], classes[order], values[order]
        else:
            classes, values = scores[rows].argmax(axis=1), best[rows]
        if step.class_ids:
            classes = self._class_ids(outputs, rows)
        return rows, classes.astype(np.int64) + first, values.astype(np.float32)

    def _score(self, values: Array, objectness: Array | None) -> Array:
        if self._step.activation == "sigmoid":
            values = _sigmoid(values)
        if objectness is None:
            return values
        if self._step.joint_score == "geometric_mean":
            root: Array = np.sqrt(values.clip(0, 1) * objectness.clip(0, 1))
            return root
        product: Array = values * objectness
        return product

    def _class_ids(self, outputs: Mapping[str, Array], rows: Array) -> Array:
        ids = self._read(outputs, "class_ids", rows)[:, 0]
        if not ((ids >= 0) & (ids < MAX_ROWS)).all():
            raise ExecutionError(f"output {self._step.class_ids[0].output!r} has class ids that are no class")
        return np.rint(ids).astype(np.int64)

    def _boxes(self, outputs: Mapping[str, Array], rows: Array) -> Array:
        step = self._step
        values = self._read(outputs, "boxes", rows)
        if np.isnan(values).any():
            raise ExecutionError(f"output {step.boxes[0].output!r} has boxes that are NaN")
        if step.bins:
            values = self._mean_of_bins(values)
        values = values.clip(-FAR, FAR)
        match step.coding:
            case "corners":
                return values
            case "corners_yx":
                return values[:, [1, 0, 3, 2]]
            case "centre":
                centre, size = values[:, :2], values[:, 2:]
            case "distances":
                centre, stride = self._centres[rows], self._sizes[rows]
                corners = (centre - values[:, :2] * stride, centre + values[:, 2:] * stride)
                return np.concatenate(corners, axis=1).clip(-FAR, FAR)
            case _:  # grid, anchors
                centre = self._shifted(values[:, :2], rows)
                exponents = values[:, 2:] * np.float32(step.variances[1])
                size = self._sizes[rows] * np.exp(exponents)
        half = size / 2
        return np.concatenate((centre - half, centre + half), axis=1).clip(-FAR, FAR)

    def _keypoints(self, outputs: Mapping[str, Array], rows: Array) -> Array:
        step = self._step
        values = self._read(outputs, "keypoints", rows)
        if not np.isfinite(values).all():
            raise ExecutionError(f"output {step.keypoints[0].output!r} has key points that are not finite")
        size = step.keypoint_values
        points = values.reshape(len(rows), values.shape[1] // size, size).copy()
        if step.keypoint_order == "yx":
            points[:, :, :2] = points[:, :, 1::-1]
        if step.levels:
            count = points.shape[1]
            repeated = np.repeat(rows, count)
            points[:, :, :2] = self._shifted(points[:, :, :2].reshape(-1, 2), repeated).reshape(-1, count, 2)
        points[:, :, :2] = points[:, :, :2].clip(-FAR, FAR)
        return points

    def _shifted(self, values: Array, rows: Array) -> Array:
        """Return points that are relative to their rows' cells in pixels of the model's input."""
        steps = values * np.float32(self._step.variances[0]) * self._sizes[rows]
        shifted: Array = self._centres[rows] + steps
        return shifted

    def _mean_of_bins(self, values: Array) -> Array:
        # Generalized Focal Loss (arXiv 2006.04388), section 3: the expectation of the distribution.
        logits = values.reshape(len(values), 4, len(self._bins))
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        means: Array = (weights @ self._bins) / weights.sum(axis=2)
        if np.isnan(means).any():
            raise ExecutionError(f"output {self._step.boxes[0].output!r} has boxes that are not finite")
        return means

    def _read(self, outputs: Mapping[str, Array], quantity: str, rows: Array | None = None) -> Array:
        """Return a quantity, float32 of shape (rows, values), of all rows or only of some."""
        parts = self._step.quantities[quantity]
        if quantity in self._vectors:
            views = [outputs[parts[0].output].reshape(-1, 1)]
        else:
            views = [_view(outputs[part.output], part, self._step) for part in parts]
        if rows is None:
            joined = views[0] if len(views) == 1 else np.concatenate(views)
            return joined.astype(np.float32, copy=False)
        if len(views) == 1:
            return views[0][rows].astype(np.float32)
        found = np.empty((len(rows), views[0].shape[1]), np.float32)
        start = 0
        for view in views:
            here = (rows >= start) & (rows < start + len(view))
            found[here] = view[rows[here] - start]
            start += len(view)
        return found


def _ranked(scores: Array, threshold: float) -> Array:
    """Return the indices of the scores over a threshold, best first, at most `MAX_CANDIDATES`."""
    rows = np.flatnonzero(scores > threshold)
    if rows.size > MAX_CANDIDATES:
        # Only those that reach the last candidate's score are sorted.
        last = np.partition(scores[rows], rows.size - MAX_CANDIDATES)[rows.size - MAX_CANDIDATES]
        rows = rows[scores[rows] >= last]
    ranked: Array = rows[np.argsort(-scores[rows], kind="stable")[:MAX_CANDIDATES]]
    return ranked


def _sigmoid(values: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-values.clip(-80, 80)))
    return result


def _is_vector(part: Part, spec: TensorSpec, rows: int) -> bool:
    """Return whether an output has one value for each box, without an axis for it."""
    return (part.first, part.count) == (0, 1) and spec.shape in ((rows,), (1, rows))


def _rows_of(part: Part, spec: TensorSpec, step: Objects) -> int:
    shape = spec.shape
    if len(shape) in (3, 4):  # more than one image gets no rows
        shape = shape[1:] if shape[0] == 1 else ()
    if len(shape) == 3:
        values, rows = shape[0], shape[1] * shape[2]
    elif len(shape) == 2:
        values, rows = shape if step.transposed else shape[::-1]
    else:
        values, rows = 0, 0
    if part.first + part.count > values or not rows:
        order = "[1,values,n]" if step.transposed else "[1,n,values]"
        raise FormatError(
            f"objects: expected {order} or [1,values,height,width] with at least {part.first + part.count} "
            f"values, got {spec}"
        )
    return rows


def _view(array: Array, part: Part, step: Objects) -> Array:
    plain = array[0] if array.ndim > 2 else array
    if plain.ndim == 3:
        return plain[part.first : part.first + part.count].reshape(part.count, -1).T
    rows = plain.T if step.transposed else plain
    return rows[:, part.first : part.first + part.count]


def _grid(levels: Sequence[Level], offset: float) -> tuple[Array, Array]:
    """Return the centre, and the anchor's size or the stride, of each row: float32, shape (rows, 2)."""
    centres, sizes = [np.empty((0, 2))], [np.empty((0, 2))]
    for level in levels:
        y, x = np.mgrid[0 : level.rows, 0 : level.columns]
        cells = (np.stack((x, y), axis=-1).reshape(-1, 2) + offset) * level.stride
        anchors = np.array(level.anchors or [(level.stride, level.stride)], np.float64)
        centres.append(np.repeat(cells, len(anchors), axis=0))
        sizes.append(np.tile(anchors, (len(cells), 1)))
    return np.concatenate(centres).astype(np.float32), np.concatenate(sizes).astype(np.float32)
