"""The QDQ model that is written for a placement."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from builder.quantising.placement import place
from builder.quantising.qdq import write_qdq
from builder.quantising.ranges import Range
from builder.quantising.units import find_units
from tests.builder.quantising.networks import Network, constants, maker, node, operators


def written(model: onnx.ModelProto, ranges: dict[str, Range]) -> onnx.ModelProto:
    return write_qdq(model, place(model, find_units(model), ranges), "uint8").model


@pytest.mark.parametrize(
    ("kind", "bounds", "chosen", "kept"),
    [
        ("Relu", (), Range(0, 3), False),
        ("Relu", (), Range(-1, 3), True),
        ("Clip", (0, 6), Range(0, 6), False),
        ("Clip", (0, 6), Range(0, 4), False),
        ("Clip", (0, 6), Range(0, 6.02), True),  # its highest level is beyond the clamp, by most of a level
        ("Clip", (0, 6), Range(0, 6.01), False),
        ("Clip", (-1, 1), Range(-0.9, 0.9), False),
        ("Clip", (None, 2), Range(-5, 2), False),  # the zero point rounds, by less than half a level
        ("Clip", (1, 2), Range(0, 2), True),
        ("Clip", (None, None), Range(-5, 5), False),
    ],
)
def test_clamp_disappears_if_the_levels_end_where_it_clamps(
    kind: str, bounds: tuple[float | None, ...], chosen: Range, kept: bool, network: Network
) -> None:
    limits = ["" if bound is None else network.constant(bound) for bound in bounds]
    x = network.op(kind, network.conv(network.input("x", [1, 3, 8, 8]), 3, 4), *limits)
    model = written(network.model(network.conv(x, 4, 4)), {"x": Range(-1, 1), x: chosen})
    assert (kind in operators(model)) == kept
    onnx.checker.check_model(model)


def test_float_reader_of_a_quantised_tensor_reads_its_levels(network: Network) -> None:
    """So that the kernel that makes it writes it once, in one type."""
    x = network.conv(network.input("x", [1, 3, 8, 8]), 3, 4)
    shape = {"axis": 1}
    model = network.model(network.conv(x, 4, 4), network.op("Softmax", x, **shape))
    result = written(model, {"x": Range(-1, 1), x: Range(-2, 2)})
    assert maker(result, node(result, "Softmax").input[0]) == "DequantizeLinear"


def test_float_tensor_is_only_quantised_for_those_that_multiply(network: Network) -> None:
    x = network.op("Softmax", network.input("x", [1, 3, 8, 8]), axis=1)
    model = network.model(network.conv(x, 3, 4), network.op("Softmax", x, axis=2))
    result = written(model, {x: Range(0, 1)})
    assert maker(result, node(result, "Softmax", 1).input[0]) == "Softmax"
    assert maker(result, node(result, "Conv").input[0]) == "DequantizeLinear"


def test_output_that_is_also_read_inside_keeps_its_name_and_its_float_values(network: Network) -> None:
    x = network.op("Relu", network.conv(network.input("x", [1, 3, 8, 8]), 3, 4))
    out = network.conv(x, 4, 4)
    result = written(network.model(x, out), {"x": Range(-1, 1), x: Range(0, 2)})
    assert [output.name for output in result.graph.output] == [x, out]
    assert maker(result, x) == "Relu"
    assert maker(result, node(result, "Conv", 1).input[0]) == "DequantizeLinear"


def test_shared_weights_are_quantised_for_each_reader(network: Network) -> None:
    x = network.input("x", [1, 4, 8, 8])
    weight, bias = network.constant(network.rng.standard_normal((4, 4, 1, 1))), network.constant(np.ones(4))
    y = network.op("Conv", x, weight, bias)
    model = network.model(network.op("Conv", y, weight, bias))
    result = written(model, {"x": Range(-1, 1), y: Range(-8, 8)})
    biases = [v for v in constants(result).values() if v.dtype == np.int32]
    assert len(biases) == 2
    assert (biases[0] != biases[1]).any()  # their inputs have other scales


def test_nothing_else_of_the_model_changes(network: Network) -> None:
    model = network.model(network.conv(network.input("x", [1, 3, 8, 8]), 3, 4))
    before = model.SerializeToString()
    result = written(model, {"x": Range(-1, 1)})
    assert model.SerializeToString() == before
    assert result.graph.input == model.graph.input
    assert [o.name for o in result.graph.output] == [o.name for o in model.graph.output]
    assert len([v for v in constants(result).values() if v.dtype == np.float32 and v.ndim == 4]) == 0
