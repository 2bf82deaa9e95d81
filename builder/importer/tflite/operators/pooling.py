"""Pooling: AVERAGE_POOL_2D, MAX_POOL_2D, L2_POOL_2D."""

from __future__ import annotations

from typing import Any

from builder.importer.tflite.operation import Operation
from builder.importer.tflite.operators.convolution import pads
from builder.importer.tflite.scope import Layout


def average_pool_2d(op: Operation) -> None:
    """AVERAGE_POOL_2D: the mean of the elements inside the picture."""
    _pool(op, "AveragePool", op.real(0, Layout.FIRST))


def max_pool_2d(op: Operation) -> None:
    """MAX_POOL_2D."""
    _pool(op, "MaxPool", op.real(0, Layout.FIRST))


def l2_pool_2d(op: Operation) -> None:
    """L2_POOL_2D: the square root of the mean of the squares inside the picture."""
    x = op.real(0, Layout.FIRST)
    _pool(op, "AveragePool", op.graph.node("Mul", x, x), root=True)


def _pool(op: Operation, operator: str, x: str, *, root: bool = False) -> None:
    options = op.options("Pool2DOptions")
    kernel = (options.FilterHeight(), options.FilterWidth())
    strides = (options.StrideH(), options.StrideW())
    border = pads(op.shape(0)[1:3], kernel, strides, (1, 1), options.Padding())
    attributes: dict[str, Any] = {"count_include_pad": 0} if operator == "AveragePool" else {}
    result = op.graph.node(
        operator, x, kernel_shape=list(kernel), strides=list(strides), pads=border, **attributes
    )
    if root:
        result = op.graph.node("Sqrt", result)
    op.put_real(op.activate(result, options.FusedActivationFunction()), Layout.FIRST)
