"""Histograms of what a model computes."""

from __future__ import annotations

import numpy as np
import pytest

from agent.bundle.tensor_spec import TensorSpec
from builder.quantising import observation
from builder.quantising.calibration import open_calibration
from builder.quantising.observation import observe
from tests.builder.quantising.networks import Network, samples


def test_histograms_hold_all_samples_but_zeros(network: Network) -> None:
    y = network.op("Relu", network.input("x", [1, 3, 8, 8]))
    values = samples(6, (3, 8, 8))
    data = open_calibration({"x": values}, [TensorSpec("x", "FP32", (1, 3, 8, 8))])
    found = observe(network.model(y), ["x", y], data, lambda _: None)
    assert (found["x"].low, found["x"].high) == (values.min(), values.max())
    assert found["x"].counts.sum() == values.size
    assert (found[y].low, found[y].high) == (0, values.max())
    assert found[y].counts.sum() == np.count_nonzero(values > 0)
    expected, _ = np.histogram(values[values > 0], len(found[y].counts), (0, values.max()))
    assert np.abs(found[y].counts - expected).sum() <= 0.01 * values.size  # the ends of bins round


def test_tensors_without_finite_values_have_no_histogram(network: Network) -> None:
    x = network.input("x", [1, 4])
    model = network.model(
        network.op("Log", x), network.op("Exp", x), network.op("Mul", x, network.constant(1e31))
    )
    names = [output.name for output in model.graph.output]
    data = open_calibration({"x": np.array([[-1, 0, 1, 100]], np.float32)}, [TensorSpec("x", "FP32", (1, 4))])
    assert list(observe(model, ["x", *names], data, lambda _: None)) == ["x"]


@pytest.mark.parametrize("shape", [(1, 64, 64), (8, 7, 49), (3, 5, 999)])
def test_large_tensors_are_thinned_and_keep_their_distribution(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, network: Network
) -> None:
    """A value for each column: a step that is a multiple of the row would see only some."""
    monkeypatch.setattr(observation, "MOST_VALUES", 500)
    network.input("x", shape)
    columns = np.broadcast_to(np.arange(1, shape[-1] + 1, dtype=np.float32), shape)
    data = open_calibration({"x": columns[None]}, [TensorSpec("x", "FP32", shape)])
    model = network.model(network.op("Relu", "x"))
    found = observe(model, ["x"], data, lambda _: None)["x"]
    assert 200 < found.counts.sum() <= 500
    seen = np.flatnonzero(found.counts)
    assert len(seen) > min(200, 0.9 * shape[-1])
    assert (found.low, found.high) == (0, shape[-1])
