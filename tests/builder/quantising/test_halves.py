"""Which nodes stay in float32 because their numbers are too large for float16."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.compiler import compile
from builder.compiling.lower import lower
from builder.errors import TargetError
from builder.importer import import_onnx
from builder.kernels.passes.halves import floats_of
from builder.quantising.halves import to_halves
from builder.target.device_target import resolve


def network(factor: float = 1.0, weights: float = 0.1) -> onnx.ModelProto:
    """Return two 1x1 convolutions; the numbers between them are as large as `factor`."""
    rng = np.random.default_rng(0)
    first, second = (rng.choice([-1, 1], (16, 16, 1, 1)).astype("f4") * 0.1 for _ in range(2))
    constants = [
        numpy_helper.from_array(first * np.float32(factor), "w0"),
        numpy_helper.from_array(second * np.float32(weights * 10), "w1"),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c0"], name="first"),
        helper.make_node("Relu", ["c0"], ["r0"], name="relu"),
        helper.make_node("Conv", ["r0", "w1"], ["y"], name="second"),
    ]
    value = helper.make_tensor_value_info
    ends = [value(n, TensorProto.FLOAT, [1, 16, 4, 4]) for n in "xy"]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("factor", "weights", "floats"),
    [
        (1.0, 0.1, ()),
        (1e4, 1e-5, ("first", "relu", "second")),  # numbers between them are too large
        (100.0, 100.0, ("second",)),  # only sums could be
    ],
)
def test_large_numbers_stay_in_float32(factor: float, weights: float, floats: tuple[str, ...]) -> None:
    inputs = np.random.default_rng(1).standard_normal((4, 16, 4, 4)).astype("f4")
    found = to_halves(import_onnx(network(factor, weights)), resolve("rpi5"), calibration={"x": inputs})
    assert found.report.floats == floats
    assert floats_of(found.model.mod) == frozenset(floats)
    assert found.report.sampled
    assert found.report.samples == 4
    products = 2 - len({"first", "second"} & set(floats))
    assert found.report.half_macs * 2 == found.report.total_macs * products


@pytest.mark.parametrize(
    ("outputs", "mixed", "faster"), [(64, False, ("first",)), (64, True, ("first",)), (16, False, ())]
)
def test_first_layers_that_are_faster_in_float32_are_named(
    outputs: int, mixed: bool, faster: tuple[str, ...]
) -> None:
    """Also behind a convolution that mixes colours, and as the compiler then computes them."""
    rng = np.random.default_rng(2)
    shapes = (outputs, 3, 7, 7), (16, outputs, 1, 1), (3, 3, 1, 1)
    weights = [rng.standard_normal(shape).astype("f4") / 16 for shape in shapes]
    nodes = [
        *([helper.make_node("Conv", ["x", "w2"], ["m"], name="colours")] if mixed else []),
        helper.make_node(
            "Conv", ["m" if mixed else "x", "w0"], ["c"], name="first", strides=[2, 2], pads=[3] * 4
        ),
        helper.make_node("Conv", ["c", "w1"], ["y"], name="second"),
    ]
    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 64, 64]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 32, 32]),
    ]
    constants = [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    halves = to_halves(import_onnx(model), resolve("rpi5"))
    assert halves.report.faster == faster
    assert (halves.report.half_macs < halves.report.total_macs) == bool(faster)
    assert ("  first layers    first: faster in float32" in halves.report.lines()) == bool(faster)
    kernels = lower(halves.model.mod, resolve("rpi5")).kernels.functions.values()
    assert ("winograd" in {str(kernel.attrs["edge.schedule"]) for kernel in kernels}) == bool(faster)


def test_without_samples_random_inputs_are_used() -> None:
    report = to_halves(import_onnx(network()), resolve("rpi5")).report
    assert not report.sampled
    assert "random inputs" in report.lines()[1]
    assert report.document()["precision"] == "fp16"


@pytest.mark.parametrize("target", ["rpi4", "rpi-armv7", "x86-64-v3"])
def test_a_target_without_arithmetic_in_float16_is_refused(target: str) -> None:
    model = import_onnx(network())
    with pytest.raises(TargetError, match="expected a target that computes in float16") as caught:
        to_halves(model, resolve(target))
    assert "weights-fp16" in str(caught.value.hint)
    marked = to_halves(model, resolve("rpi5")).model
    with pytest.raises(TargetError, match="expected a target that computes in float16"):
        compile(marked, target)


def test_the_bundle_needs_the_feature() -> None:
    package = compile(to_halves(import_onnx(network()), resolve("rpi5")).model, "rpi5")
    assert "asimdhp" in package.manifest.target.features
    error = package.manifest.provenance.parity_error
    assert error is not None
    assert 0 < error < 1e-2
