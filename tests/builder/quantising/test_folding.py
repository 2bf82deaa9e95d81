"""Factors and shifts of channels become part of the weights, and the results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from builder.importer.shapes import infer_shapes
from builder.quantising.folding import fold_into_weights
from builder.quantising.session import Session
from tests.builder.quantising.networks import Network, operators, samples

Build = Callable[[Network], str]
VALUES = np.linspace(0.5, 2, 4)


def convolution(net: Network, *, bias: bool = True) -> str:
    return net.conv(net.input("x", [1, 3, 5, 5]), 3, 4, bias=bias)


def normalised(net: Network) -> str:
    tables = [net.constant(v) for v in (VALUES, VALUES - 1, VALUES / 3, VALUES + 0.1)]
    return net.op("BatchNormalization", convolution(net, bias=False), *tables, epsilon=1e-3)


def column(net: Network, values: Any = VALUES) -> str:
    return net.constant(np.reshape(values, (-1, 1, 1)))


def gemm(net: Network, **more: Any) -> str:
    x, rng = net.input("x", [1, 3, 5, 5]), net.rng
    flat = net.op("Flatten", x)
    shape = (4, 75) if more.get("transB") else (75, 4)
    y = net.op("Gemm", flat, net.constant(rng.standard_normal(shape)), net.constant(VALUES), **more)
    return net.op("Div", net.op("Mul", y, net.constant(VALUES)), net.constant([[2.0]]))


@pytest.mark.parametrize(
    ("build", "left"),
    [
        (normalised, ["Conv"]),
        (lambda net: net.op("Mul", convolution(net), column(net)), ["Conv"]),
        (lambda net: net.op("Add", column(net), convolution(net, bias=False)), ["Conv"]),
        (lambda net: net.op("Sub", convolution(net), column(net)), ["Conv"]),
        (lambda net: net.op("Div", convolution(net), net.constant(0.3)), ["Conv"]),
        (lambda net: net.op("Add", net.op("Mul", convolution(net), column(net)), column(net)), ["Conv"]),
        (lambda net: gemm(net, transB=1, alpha=0.5, beta=3.0), ["Flatten", "Gemm"]),
        (gemm, ["Flatten", "Gemm"]),
        # These change more than channels, or something else reads the sums, too.
        (lambda net: net.op("Sub", column(net), convolution(net)), ["Conv", "Sub"]),
        (lambda net: net.op("Mul", convolution(net), net.constant(np.ones((1, 1, 5, 1)))), ["Conv", "Mul"]),
        (lambda net: net.op("Mul", convolution(net), net.constant(np.ones((4, 5, 5)))), ["Conv", "Mul"]),
        (lambda net: net.op("Div", convolution(net), column(net, [1, 0, 1, 1])), ["Conv", "Div"]),
    ],
)  # fmt: skip
def test_results_stay_the_same(build: Build, left: list[str], network: Network) -> None:
    model = network.model(build(network))
    x = samples(1, (3, 5, 5))
    before = Session(model).run({"x": x})[0]
    fold_into_weights(model)
    infer_shapes(model)
    assert operators(model) == left
    np.testing.assert_allclose(Session(model).run({"x": x})[0], before, rtol=2e-5, atol=1e-5)


def test_sums_that_are_read_elsewhere_are_kept(network: Network) -> None:
    y = convolution(network)
    z = network.op("Mul", y, column(network))
    model = network.model(y, z)
    assert fold_into_weights(model) == 0
    assert operators(model) == ["Conv", "Mul"]


def test_weights_that_two_convolutions_share_are_scaled_for_one(network: Network) -> None:
    x = network.input("x", [1, 3, 5, 5])
    weight = network.constant(network.rng.standard_normal((4, 3, 3, 3)))
    first = network.op("Mul", network.op("Conv", x, weight), network.constant(7))
    model = network.model(network.op("Add", first, network.op("Conv", x, weight)))
    value = samples(1, (3, 5, 5))
    before = Session(model).run({"x": value})[0]
    assert fold_into_weights(model) == 1
    np.testing.assert_allclose(Session(model).run({"x": value})[0], before, rtol=2e-5, atol=1e-5)
