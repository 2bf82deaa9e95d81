"""Each block by itself: its own noise, and its own mean error."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from agent.bundle.tensor_spec import TensorSpec
from builder.quantising.blocks import isolated_sqnr, mean_errors
from builder.quantising.calibration import CalibrationData, open_calibration
from builder.quantising.placement import Placement, place
from builder.quantising.qdq import write_qdq
from builder.quantising.ranges import Range
from builder.quantising.session import Session
from builder.quantising.units import find_units
from tests.builder.quantising.networks import Network, samples


@pytest.fixture
def data() -> CalibrationData:
    return open_calibration({"x": samples(8, (3, 8, 8))}, [TensorSpec("x", "FP32", (1, 3, 8, 8))])


def chain(net: Network, middle: Range) -> tuple[onnx.ModelProto, Placement, list[str]]:
    x = net.op("Relu", net.conv(net.input("x", [1, 3, 8, 8]), 3, 4))
    y = net.op("HardSwish", net.conv(x, 4, 4))
    z = net.conv(y, 4, 4)
    model = net.model(z)
    units = find_units(model)
    ranges = {name: Range(-12, 12) for unit in units for name in (*unit.data, *unit.results)}
    placement = place(model, units, ranges | {"x": Range(-8, 8), x: middle})
    return model, placement, [unit.name for unit in placement.units]


def test_noise_of_one_block_is_not_that_of_the_next(network: Network, data: CalibrationData) -> None:
    """The first output is clipped hard: only the blocks that make or read it suffer."""
    model, placement, names = chain(network, Range(0, 10))
    good = isolated_sqnr(model, write_qdq(model, placement, "uint8").model, placement, data)
    model, placement, _ = chain(Network(), Range(0, 0.5))
    bad = isolated_sqnr(model, write_qdq(model, placement, "uint8").model, placement, data)
    assert list(good) == names
    assert min(good.values()) > 25
    assert bad[names[0]] < 12
    assert bad[names[1]] < 12
    assert [bad[name] for name in names[2:]] == [good[name] for name in names[2:]]


def test_correction_takes_the_mean_error_away(network: Network, data: CalibrationData) -> None:
    model, placement, names = chain(network, Range(0, 4))
    plain = write_qdq(model, placement, "uint8").model
    errors = mean_errors(model, plain, placement, data)
    assert list(errors) == [names[0], names[1], names[3]]
    assert np.abs(errors[names[1]]).max() > 0.01
    corrected = write_qdq(model, placement, "uint8", errors).model
    left = mean_errors(model, corrected, placement, data)
    for name, error in left.items():
        assert np.abs(error).max() < max(0.1 * np.abs(errors[name]).max(), 1e-3)


def test_mean_error_is_measured_before_the_clamp(data: CalibrationData) -> None:
    """With everything below 0, a Relu would hide it."""
    net = Network()
    weight, bias = net.rng.standard_normal((4, 3, 3, 3)), np.full(4, -1000.0)
    x = net.input("x", [1, 3, 8, 8])
    y = net.op("Relu", net.op("Conv", x, net.constant(weight), net.constant(bias), pads=[1] * 4))
    model = net.model(net.conv(y, 4, 4))
    units = find_units(model)
    placement = place(model, units, {"x": Range(-1, 1), y: Range(0, 1)})
    quantised = write_qdq(model, placement, "uint8").model
    [first, _] = mean_errors(model, quantised, placement, data).values()
    assert np.abs(first).max() > 0.05
    assert Session(quantised).run(data.read(0))[0].shape == (1, 4, 8, 8)
