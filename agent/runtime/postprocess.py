"""From a model's outputs to the answer: the manifest's declared steps.

Promises results by name, in a fixed order. A top-k or a detection replaces the outputs that it reads; other
outputs are returned unchanged.
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

# Candidates for non-maximum suppression, best first: its time grows with their square, and more candidates
# than this above the threshold are noise.
MAX_CANDIDATES: Final = 4096

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

    Raises
    ------
    FormatError
        If a step reads an output that does not exist or has the wrong shape, or if there are fewer labels
        than classes.
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
        # If several steps make lists, each result's name begins with its output's name.
        self._prefixes = ["" if len(lists) == 1 else f"{_reads(step)[0]}_" for step in self._steps]

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
            gives `boxes` (float32, shape (m, 4), corners x0, y0, x1, y1), `scores` (float32, shape (m,)),
            `classes` (int64, shape (m,)) and `labels`.

        Raises
        ------
        ExecutionError
            If the scores that a step ranks contain NaN.
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
            raise FormatError(f"postprocess reads output {missing[0]!r}, which the model does not have")
        shape = specs[names[-1]].shape
        if isinstance(step, Softmax):
            if not -len(shape) <= step.axis < len(shape):
                raise FormatError(f"softmax: expected an axis of {specs[names[0]]}, got {step.axis}")
            return
        if isinstance(step, TopK):
            classes = shape[-1] if shape else 0
            if specs[step.output].nbytes // specs[step.output].itemsize != classes or step.k > classes:
                raise FormatError(
                    f"top-k: expected one row of at least {step.k} values, got {specs[step.output]}"
                )
        else:
            boxes = specs[step.boxes].shape
            if len(boxes) != 3 or len(shape) != 3 or boxes[0] != 1 or boxes[:2] != shape[:2] or boxes[2] != 4:
                raise FormatError(
                    f"detect: expected boxes [1,n,4] and scores [1,n,classes], got {specs[step.boxes]} and "
                    f"{specs[step.scores]}"
                )
            classes = shape[2]
        if self._labels and len(self._labels) < classes:
            raise FormatError(
                f"labels.txt: expected a line for each of {classes} classes, got {len(self._labels)}"
            )


def softmax(values: Array, axis: int) -> Array:
    """Return the softmax along an axis, in the dtype and shape of `values`.

    It is computed from differences from the largest value, so that nothing overflows.
    """
    wide = values.astype(np.float64)
    exponentials = np.exp(wide - wide.max(axis=axis, keepdims=True))
    result: Array = (exponentials / exponentials.sum(axis=axis, keepdims=True)).astype(values.dtype)
    return result


def top_k(scores: Array, k: int) -> Array:
    """Return the indices of the k largest scores, largest first; of equal scores, the lower index first.

    Parameters
    ----------
    scores
        Shape (n,), without NaN.
    k
        1 to n.

    Returns
    -------
    Array
        int64, shape (k,).
    """
    # Partitioning finds the k-th value without sorting; then only the scores that reach it are sorted.
    threshold = np.partition(scores, scores.size - k)[scores.size - k]
    reached = np.flatnonzero(scores >= threshold)
    order = np.argsort(-(scores[reached].astype(np.float64)), kind="stable")[:k]
    indices: Array = reached[order].astype(np.int64)
    return indices


def detect(boxes: Array, scores: Array, step: Detect) -> tuple[Array, Array, Array]:
    """Drop scores up to the threshold, then boxes that overlap a better box of their class.

    Parameters
    ----------
    boxes
        float32, shape (n, 4), in the format of `step`.
    scores
        float32, shape (n, classes).
    step
        Thresholds and limits.

    Returns
    -------
    boxes, scores, classes
        Best first: float32 (m, 4) as corners in the model's own units, float32 (m,), int64 (m,).
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
    """Return the indices of the boxes to keep, chosen greedily, best first, within each class.

    Parameters
    ----------
    corners
        float32, shape (n, 4), best first.
    classes
        Integers, shape (n,).
    iou_threshold
        A box is dropped if its intersection over union with a better box of its class is larger than this.
    limit
        Largest number of boxes to keep.
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
        # Compared without a division, so that boxes without area need no special case.
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
        raise ExecutionError(f"output {name!r} contains NaN, which cannot be ranked")


def _reads(step: Step) -> tuple[str, ...]:
    return (step.boxes, step.scores) if isinstance(step, Detect) else (step.output,)
