"""Tree ensembles in a Relax module: one call for the sums, then operators for labels and probabilities.

The model that ONNX Runtime runs as the reference keeps the node as it is. So what is written here, ONNX
Runtime's rules for two classes and its transforms, is compared with ONNX Runtime for each model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from tvm import relax

from builder.calls.trees import Ensemble, EnsembleCall, Floats
from builder.importer.classic.ensemble import (
    OPERATORS,
    TRANSFORMS,
    ClassWeights,
    attribute,
    floats,
    ints,
    read_class_weights,
    read_ensemble,
    target_count,
    text,
)
from builder.importer.classic.transforms import constant, probit, transform

Labels: TypeAlias = NDArray[np.int64]


def convert(bb: relax.BlockBuilder, node: onnx.NodeProto, samples: relax.Expr) -> list[relax.Expr]:
    """Convert a node with one of `OPERATORS`; return its outputs."""
    assert node.op_type in OPERATORS
    dtype = np.dtype(str(samples.ty.dtype))
    shape = tuple(int(dim) for dim in samples.ty.shape)
    if len(shape) == 1:  # ONNX Runtime takes a vector for one sample
        shape = (1, *shape)
        samples = bb.emit(relax.op.reshape(samples, shape))
    ensemble = read_ensemble(node, dtype, shape[-1])
    if str(ensemble.threshold.dtype) != str(dtype):
        samples = bb.emit(relax.op.astype(samples, str(ensemble.threshold.dtype)))
    if node.op_type == "TreeEnsembleClassifier":
        weights = read_class_weights(node, ensemble)
        counts = _depends_on_presence(node, weights)
        if counts:
            both = np.concatenate([ensemble.values, weights.present], 1)
            ensemble = replace(ensemble, values=both)
        scores = EnsembleCall(samples, ensemble).emit(bb)
        if counts:
            return _classify_present(bb, node, scores, weights)
        return _classify(bb, node, scores, weights)
    scores = EnsembleCall(samples, ensemble).emit(bb)
    return [_regress(bb, node, scores, ensemble, dtype)]


def _regress(
    bb: relax.BlockBuilder, node: onnx.NodeProto, scores: relax.Expr, ensemble: Ensemble, dtype: np.dtype[Any]
) -> relax.Expr:
    number = attribute(node, "post_transform")
    if node.op_type == "TreeEnsemble":
        index = 0 if number is None else int(number.i)
        if not 0 <= index < len(TRANSFORMS):
            raise ValueError(f"expected a post transform from 0 to {len(TRANSFORMS) - 1}, got {index}")
        after = TRANSFORMS[index]
    else:
        after = text(node, "post_transform", "NONE")
    work = str(ensemble.threshold.dtype)
    if ensemble.aggregate == "AVERAGE":
        scores = bb.emit(relax.op.divide(scores, relax.const(float(ensemble.roots.size), work)))
    base = floats(node, "base_values") if node.op_type != "TreeEnsemble" else np.zeros(0)
    if base.size not in (0, ensemble.targets):
        raise ValueError(f"expected {ensemble.targets} base values, got {base.size}")
    if base.size:
        scores = bb.emit(relax.op.add(scores, constant(base.astype(work))))
    if ensemble.targets > 1 or after == "PROBIT":  # ONNX Runtime leaves a single target as it is
        scores = transform(bb, scores, after)
    result = dtype if node.op_type == "TreeEnsemble" else np.dtype(np.float32)
    return scores if work == str(result) else bb.emit(relax.op.astype(scores, str(result)))


def class_labels(node: onnx.NodeProto, name: str) -> Labels:
    """Return a classifier's labels.

    Raises `ValueError` if they are strings: `strings` should have replaced them.
    """
    labels = ints(node, name)
    if not labels.size:
        raise ValueError(f"expected labels in {name}")
    return labels


def _depends_on_presence(node: onnx.NodeProto, weights: ClassWeights) -> bool:
    """Whether ONNX Runtime's answer depends on which classes the reached leaves have weights for.

    Of more than two classes, it chooses only among those; base values are weights for all. Of two, the second
    has a score of its own only with a weight.
    """
    outside, classes = weights.classes - weights.always, target_count(node)
    if classes == 2:
        return 1 in outside
    positive = weights.nonnegative and bool(np.all(floats(node, "class_weights") > 0))
    return bool(outside) and classes > 2 and not positive and not floats(node, "base_values").size


def _classify_present(
    bb: relax.BlockBuilder, node: onnx.NodeProto, sums: relax.Expr, weights: ClassWeights
) -> list[relax.Expr]:
    """Return labels and scores from the classes' sums and how many weights each got, `[samples, 2 classes]`.

    Raises `ValueError` if two classes have base values, or a transform that ONNX Runtime applies to a single
        score.
    """
    labels = class_labels(node, "classlabels_int64s")
    after = text(node, "post_transform", "NONE")
    classes, work = target_count(node), str(sums.ty.dtype)
    scores, counts = (
        bb.emit(relax.op.strided_slice(sums, [1], [first], [first + classes])) for first in (0, classes)
    )
    present = bb.emit(relax.op.greater(counts, relax.const(0.0, work)))
    if classes > 2:
        chosen = bb.emit(relax.op.where(present, scores, relax.const(-np.inf, work)))
        return [_highest(bb, chosen, labels), _float32(bb, transform(bb, scores, after))]
    if floats(node, "base_values").size:
        raise ValueError("expected no base values, because class 1 has weights in only some leaves")
    if after == "PROBIT":
        raise ValueError("expected another transform than PROBIT for a score of two classes")
    first, second = _column(bb, scores, 0), _column(bb, scores, 1)
    has_second = _column(bb, present, 1)
    single = len(weights.classes) == 1
    rule = weights if single else replace(weights, nonnegative=False)
    of_first = _both(bb, first, rule.nonnegative, after)
    both = bb.emit(relax.op.where(has_second, transform(bb, scores, after), of_first))
    decisive = bb.emit(relax.op.where(has_second, second, first))
    # With weights for both classes, ONNX Runtime answers 1 or 0, whatever the labels are.
    chosen = _positive(bb, decisive, labels if single else np.array([0, 1]), rule)
    return [chosen, _float32(bb, both)]


def _classify(
    bb: relax.BlockBuilder, node: onnx.NodeProto, scores: relax.Expr, weights: ClassWeights
) -> list[relax.Expr]:
    """Return the labels, `[samples]`, and the scores of the classes, `[samples, classes]`."""
    labels = class_labels(node, "classlabels_int64s")
    base = floats(node, "base_values")
    after = text(node, "post_transform", "NONE")
    work = str(scores.ty.dtype)
    classes = target_count(node)
    if classes > 2 or (classes == 2 and 1 in weights.classes and base.size != 2):
        if classes > 2 and base.size not in (0, classes):
            raise ValueError(f"expected {classes} base values, got {base.size}")
        # Of two classes, ONNX Runtime adds a single base value to the first, if that has a score.
        if classes == 2 and 0 not in weights.classes:
            base = np.zeros(0, base.dtype)
        base = np.concatenate([base, np.zeros(classes - base.size)])
        scores = bb.emit(relax.op.add(scores, constant(base.astype(work))))
        chosen = _highest(bb, scores, labels) if classes > 2 else _second(bb, scores, labels, weights)
        return [chosen, _float32(bb, transform(bb, scores, after))]
    if classes == 2 and base.size == 2:
        if 1 in weights.classes:
            return _mirrored(bb, scores, base, labels, weights, after)
        # The second class has no score, so it keeps none.
        scores = bb.emit(relax.op.add(scores, constant(np.array([base[0], 0], work))))
        chosen = _positive(bb, _column(bb, scores, 0), labels, weights)
        return [chosen, _float32(bb, transform(bb, scores, after))]
    score = _column(bb, scores, 0)
    if base.size == 1:
        score = bb.emit(relax.op.add(score, constant(base.astype(work))))
    if classes == 1:
        rule = replace(weights, nonnegative=False)
        chosen = _positive(bb, score, np.array([0, 1]), rule)
        return [chosen, _float32(bb, probit(bb, score) if after == "PROBIT" else score)]
    chosen = _positive(bb, score, labels, weights)
    if after == "PROBIT":
        raise ValueError("expected another transform than PROBIT for a score of two classes")
    return [chosen, _float32(bb, _both(bb, score, weights.nonnegative, after))]


def _both(bb: relax.BlockBuilder, score: relax.Expr, nonnegative: bool, after: str) -> relax.Expr:
    """Return the scores of both classes from that of the second."""
    if after == "LOGISTIC":
        return transform(bb, bb.emit(relax.op.concat([bb.emit(relax.op.negative(score)), score], 1)), after)
    if nonnegative:
        first = bb.emit(relax.op.subtract(relax.const(1.0, str(score.ty.dtype)), score))
    else:
        first = bb.emit(relax.op.negative(score))
    return bb.emit(relax.op.concat([first, score], 1))


def _mirrored(
    bb: relax.BlockBuilder,
    scores: relax.Expr,
    base: Floats,
    labels: Labels,
    weights: ClassWeights,
    after: str,
) -> list[relax.Expr]:
    """Two classes with two base values: ONNX Runtime adds the second to the first class's score."""
    second = _column(bb, scores, 0)
    second = bb.emit(relax.op.add(second, constant(base[1:].astype(str(scores.ty.dtype)))))
    first = bb.emit(relax.op.negative(second)) if 0 in weights.classes else _column(bb, scores, 0)
    both = bb.emit(relax.op.concat([first, second], 1))
    return [_second(bb, both, labels, weights), _float32(bb, transform(bb, both, after))]


def _second(bb: relax.BlockBuilder, scores: relax.Expr, labels: Labels, weights: ClassWeights) -> relax.Expr:
    """Return the label by the sign of the second class's score.

    If the leaves have weights for both classes, ONNX Runtime answers 1 or 0, whatever the labels are.
    """
    single = len(weights.classes) == 1
    rule = weights if single else replace(weights, nonnegative=False)
    return _positive(bb, _column(bb, scores, 1), labels if single else np.array([0, 1]), rule)


def _positive(bb: relax.BlockBuilder, score: relax.Expr, labels: Labels, weights: ClassWeights) -> relax.Expr:
    """Return the second label where a score, `[samples, 1]`, is above the limit for such weights."""
    limit = 0.5 if weights.nonnegative else 0.0
    samples = int(score.ty.shape[0])
    flat = bb.emit(relax.op.reshape(score, (samples,)))
    above = bb.emit(relax.op.greater(flat, relax.const(limit, str(score.ty.dtype))))
    no, yes = (constant(np.full(samples, label, np.int64)) for label in labels[:2])
    return bb.emit(relax.op.where(above, yes, no))


def _highest(bb: relax.BlockBuilder, scores: relax.Expr, labels: Labels) -> relax.Expr:
    """Return the label of the highest score; of equal ones, the first."""
    index = bb.emit(relax.op.argmax(scores, axis=1, keepdims=False))
    if np.array_equal(labels, np.arange(labels.size)):
        return index
    return bb.emit(relax.op.take(constant(labels), index, axis=0, mode="clip"))


def _column(bb: relax.BlockBuilder, scores: relax.Expr, column: int) -> relax.Expr:
    samples = int(scores.ty.shape[0])
    return bb.emit(relax.op.strided_slice(scores, [0, 1], [0, column], [samples, column + 1]))


def _float32(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    return x if str(x.ty.dtype) == "float32" else bb.emit(relax.op.astype(x, "float32"))
