"""From a model's outputs to what is answered: the manifest's declared steps.

Promises results by name, in a fixed order. What a top-k or a detection is made of is replaced by it; other
outputs are answered as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from agent.bundle.processing import Detect, Postprocess, Softmax, Step, TopK
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import ExecutionError, FormatError
from agent.runtime.placement import Placement
from agent.runtime.storage import Array

# Candidates that enter non-maximum suppression, best first: its time grows with their square, and a model
# that finds more than this above its threshold finds nothing.
MAX_CANDIDATES: Final = 4096

# A numeric array, or for BYTES the elements.
Value = Array | tuple[bytes, ...]


class Postprocessor:
    """One model's declared postprocessing, set up once.

    Parameters
    ----------
    declared
        The manifest's, or None.
    outputs
        The model's outputs.
    labels
        Names of the classes, or empty.

    Raises
    ------
    FormatError
        If a step does not fit its output's shape, or there are fewer labels than classes.
    """

    def __init__(
        self, declared: Postprocess | None, outputs: Sequence[TensorSpec], labels: Sequence[bytes] = ()
    ) -> None:
        self._steps: tuple[Step, ...] = declared.steps if declared is not None else ()
        self._labels = tuple(labels)
        specs = {spec.name: spec for spec in outputs}
        lists = [step for step in self._steps if not isinstance(step, Softmax)]
        self._consumed = frozenset(name for step in lists for name in _reads(step))
        for step in self._steps:
            self._check(step, specs)
        # Names carry their output's where there are several lists to tell apart.
        self._prefixes = ["" if len(lists) == 1 else f"{_reads(step)[0]}_" for step in self._steps]

    def __call__(self, outputs: Mapping[str, Array], placement: Placement | None = None) -> dict[str, Value]:
        """Apply the steps.

        Parameters
        ----------
        outputs
            The model's outputs by name; they are not changed.
        placement
            Where the image lay in the input, for boxes in pixels of the image as sent. Without it, they are
            in pixels of the model's input if they are normalised and it is known, else as the model gives
            them.

        Returns
        -------
        dict
            What is answered, in order.

        Raises
        ------
        ExecutionError
            If the scores that a step ranks hold NaN.
        """
        values = dict(outputs)
        results: dict[str, Value] = {}
        for step, prefix in zip(self._steps, self._prefixes, strict=True):
            match step:
                case Softmax():
                    values[step.output] = softmax(values[step.output], step.axis)
                case TopK():
                    results |= self._top_k(step, values[step.output], prefix)
                case Detect():
                    results |= self._detect(step, values[step.boxes], values[step.scores], prefix, placement)
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

    def _named(self, classes: Array, prefix: str) -> dict[str, Value]:
        return {f"{prefix}labels": tuple(self._labels[i] for i in classes)} if self._labels else {}

    def _check(self, step: Step, specs: Mapping[str, TensorSpec]) -> None:
        names = _reads(step)
        missing = [name for name in names if name not in specs]
        if missing:
            raise FormatError(f"postprocess reads output {missing[0]!r}, which the model has not")
        shape = specs[names[-1]].shape
        if isinstance(step, Softmax):
            if not -len(shape) <= step.axis < len(shape):
                raise FormatError(f"softmax along axis {step.axis} does not fit {specs[names[0]]}")
            return
        if isinstance(step, TopK):
            classes = shape[-1] if shape else 0
            if specs[step.output].nbytes // specs[step.output].itemsize != classes or step.k > classes:
                raise FormatError(
                    f"top-k of {step.k} does not fit {specs[step.output]}: one row of at least k values"
                )
        else:
            boxes = specs[step.boxes].shape
            if len(boxes) != 3 or len(shape) != 3 or boxes[0] != 1 or boxes[:2] != shape[:2] or boxes[2] != 4:
                raise FormatError(
                    f"detections are of [1,n,4] boxes and [1,n,classes] scores, not {specs[step.boxes]} and "
                    f"{specs[step.scores]}"
                )
            classes = shape[2]
        if self._labels and len(self._labels) < classes:
            raise FormatError(f"labels.txt has {len(self._labels)} lines for {classes} classes")


def softmax(values: Array, axis: int) -> Array:
    """Return the softmax along an axis, in the values' own dtype.

    Computed from differences to the largest value, so that nothing overflows.
    """
    wide = values.astype(np.float64)
    exponentials = np.exp(wide - wide.max(axis=axis, keepdims=True))
    result: Array = (exponentials / exponentials.sum(axis=axis, keepdims=True)).astype(values.dtype)
    return result


def top_k(scores: Array, k: int) -> Array:
    """Return the indices of the k largest scores, largest first and the lower index first among equals.

    Parameters
    ----------
    scores
        One dimension, no NaN.

    Returns
    -------
    Array
        int64, shape (k,).
    """
    # Partitioning finds the k-th value without sorting; all that reach it are then sorted stably.
    threshold = np.partition(scores, scores.size - k)[scores.size - k]
    reached = np.flatnonzero(scores >= threshold)
    order = np.argsort(-(scores[reached].astype(np.float64)), kind="stable")[:k]
    indices: Array = reached[order].astype(np.int64)
    return indices


def detect(boxes: Array, scores: Array, step: Detect) -> tuple[Array, Array, Array]:
    """Threshold, then suppress within each class every box that overlaps a better one.

    Parameters
    ----------
    boxes
        float32, shape (n, 4), as `step` declares them.
    scores
        float32, shape (n, classes).

    Returns
    -------
    boxes, scores, classes
        float32 (m, 4) as corners in the model's own units, float32 (m,), int64 (m,), best first.
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


def non_maximum_suppression(corners: Array, classes: Array, iou_threshold: float, limit: int) -> list[int]:
    """Return which boxes stay: greedily, best first, within each class.

    Parameters
    ----------
    corners
        float32, shape (n, 4), best first.
    classes
        Integers, shape (n,).
    iou_threshold
        A box goes whose intersection over union with a better one of its class is larger than this.
    limit
        Stop after so many.
    """
    areas = (corners[:, 2] - corners[:, 0]).clip(0) * (corners[:, 3] - corners[:, 1]).clip(0)
    alive = np.ones(len(corners), dtype=bool)
    kept: list[int] = []
    for i in range(len(corners)):
        if not alive[i]:
            continue
        kept.append(i)
        if len(kept) == limit:
            break
        low = np.maximum(corners[i, :2], corners[i + 1 :, :2])
        high = np.minimum(corners[i, 2:], corners[i + 1 :, 2:])
        shared = (high - low).clip(0).prod(axis=1)
        # Compared without a division, so that boxes without area are no special case.
        overlaps = shared > iou_threshold * (areas[i] + areas[i + 1 :] - shared)
        alive[i + 1 :] &= ~(overlaps & (classes[i + 1 :] == classes[i]))
    return kept


def _to_sent(boxes: Array, normalised: bool, placement: Placement | None) -> Array:
    if placement is None:
        return boxes
    size = np.array([placement.input_width, placement.input_height] * 2, dtype=np.float64)
    offset = np.array([placement.offset_x, placement.offset_y] * 2)
    scale = np.array([placement.scale_x, placement.scale_y] * 2)
    pixels = boxes * size if normalised else boxes
    limit = np.array([placement.width, placement.height] * 2, dtype=np.float64)
    sent: Array = np.clip((pixels - offset) / scale, 0, limit).astype(np.float32)
    return sent


def _refuse_nan(scores: Array, name: str) -> None:
    if np.isnan(scores).any():
        raise ExecutionError(f"output {name!r} holds NaN, which cannot be ranked")


def _reads(step: Step) -> tuple[str, ...]:
    return (step.boxes, step.scores) if isinstance(step, Detect) else (step.output,)
