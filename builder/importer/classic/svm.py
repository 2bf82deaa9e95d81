"""Support vector machines, converted to matrix products and votes.

Source: ONNX operator specification, ai.onnx.ml, SVMClassifier-1 and SVMRegressor-1; where it is silent, the
rules are ONNX Runtime's, which is the reference for each model. Probabilities of several classes are coupled
as in Wu, Lin and Weng, "Probability estimates for multi-class classification by pairwise coupling", 2004.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from tvm import relax

from builder.calls.coupling import CouplingCall
from builder.importer.classic.ensemble import attribute, floats, ints, text
from builder.importer.classic.transforms import constant, transform

OPERATORS: Final = frozenset({"SVMClassifier", "SVMRegressor"})
# Each pair of classes has a column of weights, and each class a column of votes.
MAX_CLASSES: Final = 256
MAX_WEIGHTS: Final = 1 << 26
# ONNX Runtime keeps the probability of a pair this far from 0 and 1.
_LEAST: Final = 1e-7


def score_count(node: onnx.NodeProto) -> int:
    """Return how many scores a node computes for a sample."""
    if node.op_type == "SVMRegressor":
        return 1
    classes = _class_count(node)
    vectors = int(ints(node, "vectors_per_class").sum())
    if vectors and not floats(node, "prob_a").size and classes > 2:
        return classes * (classes - 1) // 2
    return classes


def _class_count(node: onnx.NodeProto) -> int:
    found = attribute(node, "classlabels_strings")
    count = len(found.strings) if found is not None and found.strings else ints(node, "classlabels_ints").size
    if count < 2:
        raise ValueError(f"expected at least two classes, got {count}")
    return count


def convert(bb: relax.BlockBuilder, node: onnx.NodeProto, samples: relax.Expr) -> list[relax.Expr]:
    """Convert a node with one of `OPERATORS`; return its outputs."""
    shape = tuple(int(dim) for dim in samples.ty.shape)
    if len(shape) == 1:
        samples = bb.emit(relax.op.reshape(samples, (1, *shape)))
    if str(samples.ty.dtype) != "float32":
        samples = bb.emit(relax.op.astype(samples, "float32"))
    return [_regress(bb, node, samples)] if node.op_type == "SVMRegressor" else _classify(bb, node, samples)


def _regress(bb: relax.BlockBuilder, node: onnx.NodeProto, samples: relax.Expr) -> relax.Expr:
    found = attribute(node, "n_supports")
    count = int(found.i) if found is not None else 0
    coefficients, rho = floats(node, "coefficients"), floats(node, "rho")
    features = int(samples.ty.shape[1])
    if not rho.size:
        raise ValueError("expected rho, got none")
    if count > 0:
        vectors = _matrix(node, "support_vectors", count, features)
        weights = _sized(coefficients, count, "coefficients").reshape(-1, 1)
        sums = _decide(bb, node, samples, vectors, weights)
        product = bb.emit(relax.op.astype(sums, "float32"))
    else:
        weights = _sized(coefficients, features, "coefficients").reshape(-1, 1)
        product = bb.emit(relax.op.matmul(samples, constant(weights)))
    result = bb.emit(relax.op.add(product, constant(rho[:1])))
    one = attribute(node, "one_class")
    if one is not None and one.i:
        positive = bb.emit(relax.op.greater(result, relax.const(0.0, "float32")))
        return bb.emit(relax.op.where(positive, relax.const(1.0, "float32"), relax.const(-1.0, "float32")))
    if text(node, "post_transform", "NONE") not in ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"):
        raise ValueError("expected no post transform of a regression")
    return result


def _classify(bb: relax.BlockBuilder, node: onnx.NodeProto, samples: relax.Expr) -> list[relax.Expr]:
    labels = ints(node, "classlabels_ints")
    classes = labels.size
    if classes < 2:
        raise ValueError("expected integers as labels of at least two classes")
    counts = ints(node, "vectors_per_class")
    if not int(counts.sum()):
        return _linear(bb, node, samples, labels)
    if classes > MAX_CLASSES:
        raise ValueError(f"expected at most {MAX_CLASSES} classes, got {classes}")
    _sized(counts, classes, "vectors_per_class")
    if (counts < 0).any():
        raise ValueError("expected counts in vectors_per_class")
    vectors = int(counts.sum())
    if vectors * classes * (classes - 1) // 2 > MAX_WEIGHTS:
        raise ValueError(f"expected fewer support vectors of {classes} classes, got {vectors}")
    features = int(samples.ty.shape[1])
    support = _matrix(node, "support_vectors", vectors, features)
    pairs = classes * (classes - 1) // 2
    weights = _pair_weights(_matrix(node, "coefficients", classes - 1, vectors), counts)
    rho = _sized(floats(node, "rho"), pairs, "rho")
    product = _decide(bb, node, samples, support, weights)
    sums = bb.emit(relax.op.add(product, constant(rho.astype(np.float64))))
    scores = bb.emit(relax.op.astype(sums, "float32"))
    proba, probb = floats(node, "prob_a"), floats(node, "prob_b")
    after = text(node, "post_transform", "NONE")
    if proba.size:
        _sized(proba, pairs, "prob_a")
        _sized(probb, pairs, "prob_b")
        chosen = _vote(bb, sums, labels)
        return [chosen, transform(bb, _probabilities(bb, scores, proba, probb, classes), after)]
    if classes > 2:
        return [_vote(bb, sums, labels), transform(bb, scores, after)]
    if after != "NONE":
        raise ValueError("expected no post transform of a score of two classes")
    both = bb.emit(relax.op.concat([bb.emit(relax.op.negative(scores)), scores], 1))
    return [_vote(bb, sums, labels), both]


def _linear(
    bb: relax.BlockBuilder, node: onnx.NodeProto, samples: relax.Expr, labels: NDArray[np.int64]
) -> list[relax.Expr]:
    """A classifier without support vectors: a row of coefficients for each class."""
    features = int(samples.ty.shape[1])
    weights = _matrix(node, "coefficients", labels.size, features)
    rho = floats(node, "rho")
    if not rho.size:
        raise ValueError("expected rho, got none")
    if labels.size == 2:
        raise ValueError("expected support vectors, or more than two classes")
    product = bb.emit(relax.op.matmul(samples, constant(np.ascontiguousarray(weights.T))))
    scores = bb.emit(relax.op.add(product, constant(rho[:1])))
    index = bb.emit(relax.op.argmax(scores, axis=1, keepdims=False))
    chosen = bb.emit(relax.op.take(constant(labels), index, axis=0, mode="clip"))
    return [chosen, transform(bb, scores, text(node, "post_transform", "NONE"))]


def _pair_weights(coefficients: NDArray[np.float32], counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return `[vectors, pairs]`: each pair's weights of the vectors of its two classes.

    `coefficients` has, for each vector, a weight against each of the other classes.
    """
    classes = counts.size
    starts = np.concatenate([[0], np.cumsum(counts)])
    columns = []
    for first in range(classes - 1):
        for second in range(first + 1, classes):
            column = np.zeros(coefficients.shape[1], np.float32)
            a, b = (slice(starts[one], starts[one + 1]) for one in (first, second))
            column[a] = coefficients[second - 1, a]
            column[b] = coefficients[first, b]
            columns.append(column)
    return np.stack(columns, 1)


def _vote(bb: relax.BlockBuilder, scores: relax.Expr, labels: NDArray[np.int64]) -> relax.Expr:
    """Return the label of the class that most pairs vote for; of equal ones, the first."""
    classes = labels.size
    # Counts are small integers, exact in float32: a product with the pairs of each class.
    wins = np.zeros((classes * (classes - 1) // 2, classes), np.float32)
    losses = np.zeros_like(wins)
    pair = 0
    for first in range(classes - 1):
        for second in range(first + 1, classes):
            wins[pair, first] = losses[pair, second] = 1
            pair += 1
    positive = bb.emit(relax.op.greater(scores, relax.const(0.0, str(scores.ty.dtype))))
    votes = bb.emit(relax.op.astype(positive, "float32"))
    counted = bb.emit(relax.op.matmul(votes, constant(wins - losses)))
    counted = bb.emit(relax.op.add(counted, constant(losses.sum(0))))
    index = bb.emit(relax.op.argmax(counted, axis=1, keepdims=False))
    return bb.emit(relax.op.take(constant(labels), index, axis=0, mode="clip"))


def _probabilities(
    bb: relax.BlockBuilder, scores: relax.Expr, proba: NDArray[Any], probb: NDArray[Any], classes: int
) -> relax.Expr:
    """Return `[samples, classes]`: Platt's sigmoid for each pair, then all pairs coupled."""
    samples = int(scores.ty.shape[0])
    op = relax.op
    scaled = bb.emit(op.add(bb.emit(op.multiply(scores, constant(proba))), constant(probb)))
    first = bb.emit(op.sigmoid(bb.emit(op.negative(scaled))))
    most = float(np.float32(1) - np.float32(_LEAST))
    first = bb.emit(op.maximum(first, relax.const(_LEAST, "float32")))
    first = bb.emit(op.minimum(first, relax.const(most, "float32")))
    second = bb.emit(op.subtract(relax.const(1.0, "float32"), first))
    both = bb.emit(op.concat([first, second], 1))
    pairs = proba.size
    places = np.zeros((classes, classes), np.int64)
    pair = 0
    for a in range(classes - 1):
        for b in range(a + 1, classes):
            places[a, b], places[b, a] = pair, pairs + pair
            pair += 1
    matrix = bb.emit(op.take(both, constant(places.reshape(-1)), axis=1, mode="clip"))
    matrix = bb.emit(op.reshape(matrix, (samples, classes, classes)))
    return CouplingCall(matrix).emit(bb)


def _decide(
    bb: relax.BlockBuilder,
    node: onnx.NodeProto,
    samples: relax.Expr,
    vectors: NDArray[np.float32],
    weights: NDArray[np.float32],
) -> relax.Expr:
    """Return the weighted sums of the kernel over the support vectors, `[samples, columns]`, as float64.

    ONNX Runtime adds them in double precision, too. So terms that cancel give exactly 0, in any order, and
    classes that tie get the same votes.
    """
    op = relax.op
    if text(node, "kernel_type", "LINEAR") == "LINEAR":
        # The vectors can be added up beforehand.
        combined = vectors.T.astype(np.float64) @ weights.astype(np.float64)
        return bb.emit(op.matmul(bb.emit(op.astype(samples, "float64")), constant(combined)))
    count = vectors.shape[0]
    rows = int(samples.ty.shape[0])
    kernel = bb.emit(op.reshape(_kernel(bb, node, samples, vectors), (rows, 1, count)))
    terms = bb.emit(op.multiply(kernel, constant(np.ascontiguousarray(weights.T)[None])))
    return bb.emit(op.sum(bb.emit(op.astype(terms, "float64")), axis=-1))


def _kernel(
    bb: relax.BlockBuilder, node: onnx.NodeProto, samples: relax.Expr, vectors: NDArray[np.float32]
) -> relax.Expr:
    """Return the kernel of each sample with each vector, `[samples, vectors]`."""
    kind = text(node, "kernel_type", "LINEAR")
    parameters = floats(node, "kernel_params")
    if not parameters.size:
        parameters = np.zeros(3, np.float32)
    gamma, offset, degree = (float(value) for value in _sized(parameters, 3, "kernel_params"))
    op = relax.op

    def const(value: float) -> relax.Expr:
        return relax.const(np.float32(value), "float32")

    if kind == "RBF":
        # As ONNX Runtime does it: from the differences, because expanding the square cancels digits.
        count, features = vectors.shape
        rows = bb.emit(op.reshape(samples, (int(samples.ty.shape[0]), 1, features)))
        difference = bb.emit(op.subtract(rows, constant(vectors.reshape(1, count, features))))
        square = bb.emit(op.sum(bb.emit(op.multiply(difference, difference)), axis=-1))
        return bb.emit(op.exp(bb.emit(op.multiply(square, const(-gamma)))))
    product = bb.emit(op.matmul(samples, constant(np.ascontiguousarray(vectors.T))))
    scaled = bb.emit(op.add(bb.emit(op.multiply(product, const(gamma))), const(offset)))
    if kind == "SIGMOID":
        return bb.emit(op.tanh(scaled))
    if kind != "POLY":
        raise ValueError(f"expected a kernel such as RBF, got {kind:.40}")
    if degree == int(degree) and 1 <= degree <= 8:
        power = scaled
        for _ in range(int(degree) - 1):
            power = bb.emit(op.multiply(power, scaled))
        return power
    return bb.emit(op.power(scaled, const(degree)))


def _matrix(node: onnx.NodeProto, name: str, rows: int, columns: int) -> NDArray[np.float32]:
    return _sized(floats(node, name), rows * columns, name).astype(np.float32).reshape(rows, columns)


def _sized(values: NDArray[Any], count: int, name: str) -> NDArray[Any]:
    if values.size != count:
        raise ValueError(f"expected {count} numbers in {name}, got {values.size}")
    return values
