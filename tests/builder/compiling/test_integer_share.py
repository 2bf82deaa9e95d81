"""Which layers of a quantised model are named as computed in float32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from builder import compile
from builder.importer import import_onnx
from tests.builder.quantising.networks import Network


def quantised(largest: int = 127) -> onnx.ModelProto:
    """A network in QDQ form: a dense convolution, a depthwise one, and a matrix product with a float one."""
    network = Network()
    scale, zero = network.constant(0.05), network.constant(120, np.uint8)

    def pair(x: str) -> str:
        return network.op("DequantizeLinear", network.op("QuantizeLinear", x, scale, zero), scale, zero)

    def weight(*shape: int) -> str:
        codes = network.rng.integers(-largest, largest + 1, shape)
        return network.op(
            "DequantizeLinear",
            network.constant(codes, np.int8),
            network.constant(0.002),
            network.constant(0, np.int8),
        )

    x = pair(network.input("x", [1, 16, 6, 6], TensorProto.FLOAT))
    x = pair(network.op("Conv", x, weight(16, 16, 3, 3), pads=[1] * 4))
    x = pair(network.op("Conv", x, weight(16, 1, 3, 3), pads=[1] * 4, group=16))
    x = network.op("Flatten", network.op("GlobalAveragePool", x))
    y = network.op("MatMul", pair(x), weight(16, 4))
    return network.model(network.op("MatMul", y, network.constant(np.ones((4, 4)))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "named"), [("x86-64-v3", True), ("llvm -mtriple=x86_64-linux-gnu -mcpu=cascadelake", False)]
)
def test_float_layers_of_a_quantised_model_are_named(target: str, *, named: bool) -> None:
    """A depthwise convolution is computed with integers only where that is faster."""
    work = compile(import_onnx(quantised()), target).integers
    assert work is not None
    assert work.in_twos == 0
    depthwise, last = 36 * 16 * 9, 16
    assert work.multiply_adds == 36 * 16 * 16 * 9 + depthwise + 16 * 4 + last
    assert [(layer.operator, layer.multiply_adds) for layer in work.floats] == [
        *([("Conv", depthwise)] if named else []),
        ("MatMul", last),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("largest", "in_twos"), [(127, 36 * 16 * 16 * 9 + 16 * 4), (60, 0)])
def test_weights_too_large_for_sums_of_16_bits_are_told(largest: int, in_twos: int) -> None:
    """Those of the dense convolution and of the matrix product; the depthwise one adds rows."""
    work = compile(import_onnx(quantised(largest)), "rpi4").integers
    assert work is not None
    assert work.in_twos == in_twos
    told = "too large to add four products in 16 bits"
    assert (told in work.summary(3)) == bool(in_twos)


@pytest.mark.slow
def test_a_float_model_has_no_share() -> None:
    network = Network()
    x = network.input("x", [1, 8])
    model = network.model(network.op("MatMul", x, network.constant(np.ones((8, 4)))))
    assert compile(import_onnx(model), "host").integers is None
