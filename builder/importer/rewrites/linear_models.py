"""Linear models of ai.onnx.ml, and distances, as matrix products.

Source: ONNX operator specification, ai.onnx.ml-1, LinearClassifier and LinearRegressor; where it is silent,
the rules are ONNX Runtime's. CDist is ONNX Runtime's own operator, as skl2onnx writes nearest neighbours.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from builder.importer.rewrites.loops import unroll_scan
from builder.importer.rewrites.replacement import Nodes, Replacement

# From differences, distances are exact for equal points. Beyond this many, they come from a matrix product.
MAX_DIFFERENCES: Final = 1 << 26


def linear_regressor(new: Replacement) -> Nodes | None:
    """A matrix product; the transforms concern several targets only."""
    given = new.attributes
    targets = int(given.get("targets", 1))
    scores = _scores(new, given, targets)
    after = given.get("post_transform", "NONE")
    if scores is None or after not in ("NONE", "SOFTMAX", "LOGISTIC"):
        return None
    _transform(new, scores, after if targets > 1 else "NONE", new.outputs[0])
    return new.nodes


def linear_classifier(new: Replacement) -> Nodes | None:
    """A matrix product, the highest score's label, and a transform."""
    given = new.attributes
    labels = given.get("classlabels_ints")
    shape = new.graph.shape_of(new.inputs[0])
    if not labels or not shape:
        return None
    rows = len(given.get("coefficients", [])) // shape[-1]
    after = given.get("post_transform", "NONE")
    if after not in ("NONE", "SOFTMAX", "LOGISTIC"):
        return None
    scores = _scores(new, given, rows)
    if scores is None or (rows == 1 and len(labels) != 2) or (rows > 1 and len(labels) != rows):
        return None
    chosen, probabilities = new.outputs[0], new.outputs[1] if len(new.outputs) > 1 else ""
    table = new.ints(*labels)
    if rows > 1:
        index = new.op("ArgMax", scores, axis=1, keepdims=0)
        new.op("Gather", table, index, to=chosen, axis=0)
        if probabilities:
            _transform(new, scores, after, probabilities)
        return new.nodes
    above = new.op("Greater", scores, new.constant(0, np.float32))
    samples = shape[0] if len(shape) > 1 else 1
    index = new.op("Reshape", new.cast(above, TensorProto.INT64), new.ints(samples))
    new.op("Gather", table, index, to=chosen, axis=0)
    if probabilities:
        second = new.op("Sigmoid", scores) if after == "LOGISTIC" else scores
        first = new.op("Sub", new.constant(1, np.float32), second)
        new.op("Concat", first, second, to=probabilities, axis=1)
    return new.nodes


def _scores(new: Replacement, given: dict[str, Any], rows: int) -> str | None:
    """Add the product, `[samples, rows]`; None if the numbers do not fit."""
    shape = new.graph.shape_of(new.inputs[0])
    coefficients = np.array(given.get("coefficients", []), np.float32)
    intercepts = np.array(given.get("intercepts", []), np.float32)
    if not shape or not rows or coefficients.size != rows * shape[-1] or intercepts.size not in (0, rows):
        return None
    x = new.cast(new.inputs[0], TensorProto.FLOAT)
    if len(shape) == 1:
        x = new.op("Reshape", x, new.ints(1, shape[0]))
    weights = new.constant(np.ascontiguousarray(coefficients.reshape(rows, -1).T), np.float32)
    product = new.op("MatMul", x, weights)
    return new.op("Add", product, new.constant(intercepts, np.float32)) if intercepts.size else product


def _transform(new: Replacement, scores: str, name: str, to: str) -> None:
    match name:
        case "NONE":
            new.op("Identity", scores, to=to)
        case "LOGISTIC":
            new.op("Sigmoid", scores, to=to)
        case "SOFTMAX":
            new.op("Softmax", scores, to=to, axis=-1)


def distances(new: Replacement) -> Nodes | None:
    """CDist: the distances of each row of one matrix from each row of another."""
    metric = new.attributes.get("metric", "sqeuclidean")
    if metric not in ("euclidean", "sqeuclidean"):
        return None
    squares = _squares(new, new.inputs[0], new.inputs[1])
    if squares is None:
        return None
    return new.result("Sqrt" if metric == "euclidean" else "Identity", squares)


def scan(new: Replacement) -> Nodes | None:
    """Scan; distances, which skl2onnx writes as a scan over all neighbours, become one operator."""
    return _scanned_distances(new) or unroll_scan(new)


def _scanned_distances(new: Replacement) -> Nodes | None:
    """Replace a scan whose body is a squared distance: sum((carried - scanned)^2)."""
    options = new.attributes
    body: onnx.GraphProto = options["body"]
    if len(new.inputs) != 2 or len(new.outputs) != 2 or set(options) != {"body", "num_scan_inputs"}:
        return None
    if [one.op_type for one in body.node] != ["Identity", "Sub", "ReduceSumSquare", "Identity"]:
        return None
    keep, difference, total, give = body.node
    names = [value.name for value in body.input]
    linked = (
        list(keep.input) == names[:1]
        and sorted(difference.input) == sorted(names)
        and total.input[0] == difference.output[0]
        and list(give.input) == list(total.output)
        and [value.name for value in body.output] == [keep.output[0], give.output[0]]
    )
    axes = next((one.ints for one in total.attribute if one.name == "axes"), None)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in body.initializer}
    if axes is None and len(total.input) > 1 and total.input[1] in weights:
        axes = weights[total.input[1]].reshape(-1)
    kept = next((one.i for one in total.attribute if one.name == "keepdims"), 1)
    if not linked or axes is None or list(axes) != [1] or kept:
        return None
    squares = _squares(new, new.inputs[1], new.inputs[0])
    if squares is None:
        return None
    new.op("Identity", new.inputs[0], to=new.outputs[0])
    new.op("Identity", squares, to=new.outputs[1])
    return new.nodes


def _squares(new: Replacement, a: str, b: str) -> str | None:
    """Add the squared distances of each row of `a` from each row of `b`."""
    first, second, found = new.graph.shape_of(a), new.graph.shape_of(b), new.graph.type_of(a)
    if found is None or not first or not second or len(first) != 2 or len(second) != 2:
        return None
    if math.prod(first) * second[0] <= MAX_DIFFERENCES:
        difference = new.op("Sub", new.op("Unsqueeze", a, new.ints(1)), new.op("Unsqueeze", b, new.ints(0)))
        return new.reduce("ReduceSum", new.op("Mul", difference, difference), [2], keep=False)
    product = new.op("MatMul", a, new.op("Transpose", b, perm=[1, 0]))
    left = new.reduce("ReduceSumSquare", a, [1], keep=True)
    right = new.op("Unsqueeze", new.reduce("ReduceSumSquare", b, [1], keep=False), new.ints(0))
    total = new.op("Sub", new.op("Add", left, right), new.op("Add", product, product))
    return new.op("Max", total, new.constant(0, found.dtype))
