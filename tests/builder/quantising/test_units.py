"""Which nodes are one unit, and how much work it is."""

from __future__ import annotations

import numpy as np
import pytest

from builder.importer.multiply_adds import multiply_adds
from builder.quantising.units import Unit, find_units
from tests.builder.quantising.networks import Network


def units(net: Network, *outputs: str) -> list[Unit]:
    return find_units(net.model(*outputs))


def test_convolution_ends_with_its_clamp_if_nothing_else_reads_the_sums(network: Network) -> None:
    y = network.conv(network.input("x", [1, 3, 8, 8]), 3, 4)
    relu = network.op("Relu", y)
    [unit] = units(network, relu)
    assert (unit.kind, len(unit.nodes), unit.results) == ("Conv", 2, (relu,))
    assert unit.clamp == unit.nodes[-1]
    assert unit.macs == 4 * 64 * 27
    assert [u.kind for u in units(network, relu, y)] == ["Conv", "Relu"]


@pytest.mark.parametrize("form", ["operator", "spelled out"])
def test_function_of_one_tensor_is_one_unit(form: str, network: Network) -> None:
    y = network.conv(network.input("x", [1, 3, 8, 8]), 3, 4)
    if form == "operator":
        z, kind = network.op("HardSwish", y), "HardSwish"
    else:
        inner = network.op("Add", y, network.constant(3))
        inner = network.op("Clip", inner, network.constant(0), network.constant(6))
        z, kind = network.op("Div", network.op("Mul", y, inner), network.constant(6)), "Add+Clip+Mul+Div"
    _, unit, _ = units(network, network.conv(z, 4, 4))
    assert (unit.kind, unit.data, unit.results) == (kind, (y,), (z,))


def test_constants_that_are_no_single_number_make_no_table(network: Network) -> None:
    y = network.op("Relu", network.op("MaxPool", network.input("x", [1, 3, 8, 8]), kernel_shape=[2, 2]))
    z = network.op("Mul", y, network.constant(np.ones((3, 1, 1))))
    assert [u.kind for u in units(network, z)] == ["MaxPool", "Relu"]


def test_what_may_make_new_values_does_not_keep_levels(network: Network) -> None:
    x = network.input("x", [1, 3, 8, 8])
    pads = network.constant([0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    scales = network.constant([1, 1, 2, 2])
    ones = network.constant(1.0)
    cubic = network.op("Resize", x, "", scales, mode="cubic")
    padded = network.op("Pad", x, pads, ones)
    zeros, linear = network.op("Pad", x, pads), network.op("Resize", x, "", scales, mode="linear")
    found = units(network, cubic, padded, zeros, linear)
    assert [unit.results[0] for unit in found] == [zeros, linear]
    assert all(unit.keeps_levels for unit in found)


def test_products_without_constant_weights_are_no_units(network: Network) -> None:
    x, y = network.input("x", [1, 4, 8]), network.input("y", [1, 8, 4])
    w = network.constant(network.rng.standard_normal((4, 4)))
    products = [
        network.op("MatMul", x, y),
        network.op("MatMul", w, x),
        network.op("MatMul", x, network.constant(network.rng.standard_normal((1, 8, 4)))),
        network.op("MatMul", y, network.constant(np.full((4, 4), np.inf))),
    ]
    model = network.model(*products)
    assert find_units(model) == []
    assert multiply_adds(model) == 4 * 4 * 8 + 4 * 8 * 4 + 4 * 4 * 8 + 8 * 4 * 4


def test_constant_that_is_added_to_more_than_columns_is_no_bias(network: Network) -> None:
    x, weight = network.input("x", [2, 6, 4]), network.constant(network.rng.standard_normal((4, 6)))
    product = network.op("MatMul", x, weight)
    for shape in ((6, 6), (6, 1), (1,), ()):
        net = Network()
        net.inputs, net.nodes, net.constants = network.inputs, list(network.nodes), list(network.constants)
        found = find_units(net.model(net.op("Add", product, net.constant(np.ones(shape)))))
        assert [len(unit.nodes) for unit in found if unit.kind == "MatMul"] == [1]


def test_constant_that_adds_a_dimension_makes_no_table(network: Network) -> None:
    y = network.conv(network.input("x", [1, 3, 8, 8]), 3, 4)
    wider = network.op("Mul", y, network.constant(np.full((1, 1, 1, 1, 1), 2)))
    assert [unit.kind for unit in units(network, wider)] == ["Conv"]
