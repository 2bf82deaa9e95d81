"""Activations and normalisations: RELU and its kin, PRELU, GELU, SOFTMAX, L2_NORMALIZATION ..."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation, channel_axis
from builder.importer.tflite.scope import Layout

Converter = Callable[[Operation], None]
# l2normalization.cc: the least sum of squares.
_L2_EPSILON: Final = 1e-6


def clamp(low: float | None, high: float | None) -> Converter:
    """RELU, RELU6, RELU_N1_TO_1 and RELU_0_TO_1: numbers limited to a range."""

    def convert(op: Operation) -> None:
        layout = op.layout()
        op.put_real(op.clamp(op.real(0, layout), low, high), layout)

    return convert


def leaky_relu(op: Operation) -> None:
    """LEAKY_RELU: negative numbers times alpha."""
    layout = op.layout()
    alpha = op.options("LeakyReluOptions").Alpha()
    op.put_real(op.graph.node("LeakyRelu", op.real(0, layout), alpha=float(alpha)), layout)


def elu(op: Operation) -> None:
    """ELU: exp(x) - 1 for negative numbers."""
    layout = op.layout()
    op.put_real(op.graph.node("Elu", op.real(0, layout), alpha=1.0), layout)


def prelu(op: Operation) -> None:
    """PRELU: negative numbers times alpha, which is broadcast."""
    layout = op.layout()
    rank = op.scope.rank(op.input(0))
    if op.scope.rank(op.input(1)) > rank:
        raise RefusalError("its slope has more dimensions than its input")
    slope = op.scope.operand(op.input(1), rank, layout)
    op.put_real(op.graph.node("PRelu", op.real(0, layout), slope), layout)


def gelu(op: Operation) -> None:
    """GELU, exact or approximated with tanh."""
    layout = op.layout()
    how = "tanh" if op.options("GeluOptions").Approximate() else "none"
    op.put_real(op.graph.node("Gelu", op.real(0, layout), approximate=how), layout)


def softmax(op: Operation) -> None:
    """SOFTMAX of beta * x over the last axis."""
    layout = op.layout()
    rank = op.scope.rank(op.input(0))
    if not rank:
        raise RefusalError("expected at least one dimension")
    x = op.real(0, layout)
    beta = float(op.options("SoftmaxOptions").Beta())
    if beta != 1:
        x = op.graph.node("Mul", x, op.graph.constant(beta, "float32"))
    op.put_real(op.graph.node("Softmax", x, axis=channel_axis(layout, rank)), layout)


def log_softmax(op: Operation) -> None:
    """LOG_SOFTMAX over the last axis."""
    layout = op.layout()
    rank = op.scope.rank(op.input(0))
    op.put_real(op.graph.node("LogSoftmax", op.real(0, layout), axis=channel_axis(layout, rank)), layout)


def l2_normalization(op: Operation) -> None:
    """L2_NORMALIZATION: x over the root of the sum of squares of the last axis."""
    layout = op.layout()
    rank = op.scope.rank(op.input(0))
    x = op.real(0, layout)
    axes = op.graph.constant([channel_axis(layout, rank)])
    total = op.graph.node("ReduceSum", op.graph.node("Mul", x, x), axes, keepdims=1)
    floor = op.graph.constant(_L2_EPSILON, "float32")
    norm = op.graph.node("Sqrt", op.graph.node("Max", total, floor))
    result = op.graph.node("Div", x, norm)
    op.put_real(op.activate(result, op.options("L2NormOptions").FusedActivationFunction()), layout)


def local_response_normalization(op: Operation) -> None:
    """LOCAL_RESPONSE_NORMALIZATION: x / (bias + alpha * the sum of squares of the channels near)^beta."""
    options = op.options("LocalResponseNormalizationOptions")
    size = 2 * options.Radius() + 1
    if size < 1:
        raise RefusalError(f"expected a radius of 0 or more, got {options.Radius()}")
    result = op.graph.node(
        "LRN",
        op.real(0, Layout.FIRST),
        size=size,
        alpha=float(np.float32(options.Alpha()) * size),
        beta=float(options.Beta()),
        bias=float(options.Bias()),
    )
    op.put_real(result, Layout.FIRST)
