"""The post transforms of ai.onnx.ml's operators, as ONNX Runtime computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import relax

# ONNX Runtime's approximation of the inverse error function.
_PI: float = float(np.float32(3.14159))
_A: float = float(np.float32(0.147))
# Scores closer to zero than this stay zero in SOFTMAX_ZERO.
_ZERO: float = 1e-7


def constant(array: NDArray[Any]) -> relax.Expr:
    """Return an array as a constant of its own type; TVM would make 32 bits of 64."""
    return relax.const(array, str(array.dtype))


def transform(bb: relax.BlockBuilder, scores: relax.Expr, name: str) -> relax.Expr:
    """Apply a transform to scores, `[samples, classes]`."""
    match name:
        case "NONE":
            return scores
        case "LOGISTIC":
            return bb.emit(relax.op.sigmoid(scores))
        case "SOFTMAX":
            return bb.emit(relax.op.nn.softmax(scores, axis=-1))
        case "SOFTMAX_ZERO":
            return _softmax_zero(bb, scores)
        case "PROBIT":
            return probit(bb, scores)
    raise ValueError(f"expected a post transform such as SOFTMAX, got {name:.40}")


def probit(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """Return the quantile of the normal distribution, by ONNX Runtime's approximation."""
    dtype = str(x.ty.dtype)

    def const(value: float) -> relax.Expr:
        return relax.const(value, dtype)

    op = relax.op
    y = bb.emit(op.subtract(bb.emit(op.multiply(x, const(2.0))), const(1.0)))
    sign = bb.emit(op.where(bb.emit(op.less(y, const(0.0))), const(-1.0), const(1.0)))
    product = bb.emit(op.multiply(bb.emit(op.subtract(const(1.0), y)), bb.emit(op.add(const(1.0), y))))
    log = bb.emit(op.log(product))
    v = bb.emit(op.add(const(2 / (_PI * _A)), bb.emit(op.multiply(log, const(0.5)))))
    square = bb.emit(op.subtract(bb.emit(op.multiply(v, v)), bb.emit(op.multiply(log, const(1 / _A)))))
    root = bb.emit(op.sqrt(bb.emit(op.subtract(bb.emit(op.sqrt(square)), v))))
    return bb.emit(op.multiply(bb.emit(op.multiply(sign, root)), const(2.0**0.5)))


def _softmax_zero(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """Return softmax over the scores that are not zero; the others stay about zero."""
    dtype = str(x.ty.dtype)
    op = relax.op
    highest = bb.emit(op.max(x, axis=-1, keepdims=True))
    powers = bb.emit(op.exp(bb.emit(op.subtract(x, highest))))
    zero = bb.emit(op.less_equal(bb.emit(op.abs(x)), relax.const(_ZERO, dtype)))
    kept = bb.emit(op.where(zero, relax.const(0.0, dtype), powers))
    scaled = bb.emit(op.multiply(x, bb.emit(op.exp(bb.emit(op.negative(highest))))))
    total = bb.emit(op.sum(kept, axis=-1, keepdims=True))
    return bb.emit(op.divide(bb.emit(op.where(zero, scaled, powers)), total))
