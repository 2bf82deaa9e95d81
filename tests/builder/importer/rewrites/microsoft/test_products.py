"""Convolutions and products of com.microsoft."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from builder.errors import UnsupportedOperatorError
from builder.importer import import_onnx
from tests.builder.importer.rewrites.microsoft.contrib import Node, check, randn, run_unoptimised

PADDED: dict[str, Any] = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}


def conv(activation: str, parameters: list[float], *more: NDArray[Any]) -> Node:
    how: dict[str, Any] = {"activation": activation, **PADDED}
    if parameters:
        how["activation_params"] = parameters
    return Node("FusedConv", [randn(1, 4, 7, 8), randn(6, 4, 3, 3), randn(6), *more], (1, 2), attributes=how)


def gemm(activation: str) -> Node:
    how = {"activation": activation, "activation_alpha": 0.3, "activation_beta": 0.4}
    inputs = [randn(3, 4), randn(5, 4), randn(5)]
    return Node("FusedGemm", inputs, (1, 2), attributes={"transB": 1, "alpha": 0.5, **how})


CASES = {
    "conv relu": conv("Relu", []),
    "conv leaky": conv("LeakyRelu", [0.1]),
    "conv clip": conv("Clip", [0.0, 6.0]),
    "conv hard sigmoid": conv("HardSigmoid", [0.2, 0.5]),
    "conv hard swish": conv("HardSwish", [1 / 6, 0.5]),
    "conv tanh": conv("Tanh", []),
    "conv with a sum": conv("Relu", [], randn(1, 6, 7, 8)),
    **{f"gemm {name}": gemm(name) for name in ("Relu", "LeakyRelu", "Tanh", "Elu", "HardSigmoid")},
    "vector times matrix": Node("FusedMatMul", [randn(5), randn(5, 6)], attributes={"transA": 1}),
    "old name": Node("TransposeMatMul", [randn(2, 5, 4), randn(2, 5, 6)], attributes={"transA": 1}),
    "max pool": Node("NhwcMaxPool", [(randn(1, 7, 8, 4) * 50).astype("i1")], attributes=PADDED),
    "trilu": Node("Trilu", [randn(3, 4)], attributes={"upper": 0}),
    "expand dims": Node("ExpandDims", [randn(3, 4), np.array(1, "i4")], (1,)),
    "gather": Node("GatherND", [randn(3, 4), np.array([[0, 1], [2, 3]])]),
    "grid": Node("GridSample", [randn(1, 2, 5, 5), randn(1, 4, 4, 2)]),
    "cubic grid": Node("GridSample", [randn(1, 2, 5, 5), randn(1, 4, 4, 2)], attributes={"mode": "bicubic"}),
    "pad": Node("Pad", [randn(3, 4), np.array([0, 1, 1, 0]), np.array([2.0], "f4")], (1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_onnx_runtime(case: str) -> None:
    check(CASES[case])


@pytest.mark.parametrize("flags", list(itertools.product((0, 1), repeat=4)), ids=str)
def test_fused_matmul_with_operands_of_any_order(flags: tuple[int, ...]) -> None:
    def operand(rows: int, columns: int, swap: int, batch: int) -> NDArray[Any]:
        x = randn(2, 3, rows, columns)
        x = x.swapaxes(-1, -2) if swap else x
        return np.ascontiguousarray(np.moveaxis(x, 2, 0) if batch else x)

    names = ("transA", "transB", "transBatchA", "transBatchB")
    how = dict(zip(names, flags, strict=True))
    a, b = operand(4, 5, flags[0], flags[2]), operand(5, 6, flags[1], flags[3])
    check(Node("FusedMatMul", [a, b], attributes={"alpha": 0.7, **how}))


def test_nhwc_conv_is_a_convolution_of_the_other_layout() -> None:
    plain = conv("Relu", [], randn(1, 6, 7, 8))
    x, w, b, z = (np.asarray(a) for a in plain.inputs)
    [wanted] = run_unoptimised(plain.model(), plain.feeds())
    last = [np.ascontiguousarray(np.moveaxis(a, 1, -1)) for a in (x, w, z, wanted)]
    node = Node("NhwcFusedConv", [last[0], last[1], b, last[2]], (1, 2), attributes=plain.attributes)
    check(node, [last[3]])


def test_an_unknown_activation_is_refused() -> None:
    node = conv("Snake", [])
    with pytest.raises(UnsupportedOperatorError, match=r"com.microsoft.FusedConv \(node\)"):
        import_onnx(node.model([randn(1, 6, 7, 8)]))
