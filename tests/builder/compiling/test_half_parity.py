"""Parity in float16: rounding passes, faults of the compiler do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from builder.compiling.half_parity import HalfParity, compare_halves, decibels
from builder.compiling.parity import run_as_defined
from builder.errors import ParityError

Array = NDArray[Any]
CHANNELS = 20


def network() -> onnx.ModelProto:
    """Return convolution, ReLU, convolution, and scores."""
    rng = np.random.default_rng(0)
    constants = [
        numpy_helper.from_array((rng.standard_normal((CHANNELS, i, 3, 3)) / 6).astype("f4"), f"w{n}")
        for n, i in enumerate((4, CHANNELS))
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c"], name="first", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Conv", ["r", "w1"], ["d"], name="second", pads=[1] * 4),
        helper.make_node("Relu", ["d"], ["y"], name="scores"),
    ]
    value = helper.make_tensor_value_info
    ends = [value(n, TensorProto.FLOAT, [1, c, 8, 8]) for n, c in (("x", 4), ("y", CHANNELS))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def pack(value: Array, block: int = 8) -> Array:
    """Return `[1, C, H, W]` in blocks of channels, as kernels store it."""
    _, c, h, w = value.shape
    full = np.full((1, -(-c // block) * block, h, w), 7.0, value.dtype)
    full[:, :c] = value
    return full.reshape(1, -1, block, h, w).transpose(0, 1, 3, 4, 2)


def compare(fault: Callable[[Array], Array]) -> HalfParity:
    """Compare a run in float16 whose first layer has a fault."""
    model = network()
    inputs = {"x": np.random.default_rng(1).standard_normal((1, 4, 8, 8)).astype("f4")}
    (reference,) = run_as_defined(model, inputs)
    inner, second = onnx.ModelProto(), onnx.ModelProto()
    inner.CopyFrom(model)
    inner.graph.output[0].CopyFrom(helper.make_tensor_value_info("r", TensorProto.FLOAT, None))
    (value,) = run_as_defined(inner, inputs)
    own = fault(value.astype("f2")).astype("f2")
    second.CopyFrom(model)
    del second.graph.node[:2]
    second.graph.input[0].CopyFrom(helper.make_tensor_value_info("r", TensorProto.FLOAT, value.shape))
    (output,) = run_as_defined(second, {"r": own.astype("f4")})
    return compare_halves(model, inputs, [inputs["x"].astype("f2"), pack(own)], [output], [reference])


def test_rounding_passes() -> None:
    found = compare(lambda value: value)
    found.check()
    assert [block.name for block in found.blocks] == ["r"]
    assert found.blocks[0].decibels > 60
    assert "1 tensors agree in 16 bits" in found.summary()


def _scaled(value: Array) -> Array:
    value[:, 5] *= np.float16(1.05)
    return value


def _shifted(value: Array) -> Array:
    value[:, 7] += np.float16(0.1)
    return value


def _unlimited(value: Array) -> Array:
    value[value == 0] = np.float16(-0.2)
    return value


def _without_border(value: Array) -> Array:
    value[:, :, 0] = 0
    return value


def _swapped(value: Array) -> Array:
    return np.ascontiguousarray(value.swapaxes(2, 3))


def _overflown(value: Array) -> Array:
    value[0, 2, 3, 3] = np.inf
    return value


@pytest.mark.parametrize(
    "fault", [_scaled, _shifted, _unlimited, _without_border, _swapped, _overflown], ids=lambda f: f.__name__
)
def test_faults_are_found(fault: Callable[[Array], Array]) -> None:
    with pytest.raises(ParityError):
        compare(fault).check()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_found_where_the_outputs_hide_it(wrong: float) -> None:
    model = network()
    inputs = {"x": np.random.default_rng(1).standard_normal((1, 4, 8, 8)).astype("f4")}
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    tapped.graph.output.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, None))
    output, own = run_as_defined(tapped, inputs)
    compare_halves(model, inputs, [pack(own)], [output], [output]).check()
    own[0, 4, 2, 2] = wrong
    with pytest.raises(ParityError, match="tensor r"):
        compare_halves(model, inputs, [pack(own)], [output], [output]).check()


def test_infinities_and_nans_that_both_have_are_no_noise() -> None:
    one, other = np.array([1, 2, np.inf, np.nan], "f4"), np.array([1, 2.002, np.inf, np.nan], "f4")
    assert decibels(one, one) == np.inf
    assert decibels(one, other) == pytest.approx(61, abs=1)
    for place in (2, 3):
        wrong = one.copy()
        wrong[place] = 3
        assert decibels(wrong, one) == decibels(one, wrong) == -np.inf


def test_what_is_stored_after_a_relu_is_no_wrong_form_of_what_is_before_it() -> None:
    """Nearly all numbers are positive: both are similar, but only one is stored."""
    model = network()
    inputs = {"x": np.random.default_rng(1).standard_normal((1, 4, 8, 8)).astype("f4")}
    bias = numpy_helper.from_array(np.full(CHANNELS, 1.5, "f4"), "b")
    model.graph.initializer.append(bias)
    model.graph.node[0].input.append("b")
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    for name in ("c", "r"):
        tapped.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    output, before, after = run_as_defined(tapped, inputs)
    assert 10 < decibels(after, before) < 38
    found = compare_halves(model, inputs, [pack(after.astype("f2"))], [output], [output])
    found.check()
    assert [block.name for block in found.blocks] == ["r", "y"]
    # Without the ReLU, the second convolution has no reason for its numbers.
    second = onnx.ModelProto()
    second.CopyFrom(model)
    del second.graph.node[:2]
    second.graph.node[0].input[0] = "c"
    second.graph.input[0].CopyFrom(helper.make_tensor_value_info("c", TensorProto.FLOAT, before.shape))
    (wrong,) = run_as_defined(second, {"c": before})
    with pytest.raises(ParityError):
        compare_halves(model, inputs, [pack(before.astype("f2"))], [wrong], [output]).check()


def scaled_rows(factor: float) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return a model that scales rows by little, gives them another shape and multiplies them, and inputs."""
    rng = np.random.default_rng(3)
    constants = {
        "f": np.array(factor, "f4"),
        "s": np.array([32, 64]),
        "w": (rng.standard_normal((64, 16)) / 8).astype("f4"),
    }
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Mul", ["a", "f"], ["n"]),
        helper.make_node("Reshape", ["n", "s"], ["m"]),
        helper.make_node("MatMul", ["m", "w"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    ends = [value("x", TensorProto.FLOAT, [1, 32, 64]), value("y", TensorProto.FLOAT, [32, 16])]
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model, {"x": rng.standard_normal((1, 32, 64)).astype("f4")}


def test_one_of_ours_is_the_tensor_that_it_is_like_most() -> None:
    """Not the one before it, which it is like to 40 dB: that would pass for rounding."""
    model, inputs = scaled_rows(1.01)
    (reference,) = run_as_defined(model, inputs)
    rows = (np.maximum(inputs["x"], 0) * np.float32(1.01)).astype("f2")
    found = compare_halves(model, inputs, [rows], [reference], [reference])
    found.check()
    assert [block.name for block in found.blocks] == ["n", "m", "y"]
    assert min(block.decibels for block in found.blocks) > 55


def test_ours_may_have_another_shape() -> None:
    """A tensor in the shape of another one, which it is like to 26 dB, is no wrong form of that."""
    model, inputs = scaled_rows(1.05)
    (reference,) = run_as_defined(model, inputs)
    before = np.maximum(inputs["x"], 0)
    ours = [before.reshape(32, 64).astype("f2"), (before * np.float32(1.05)).astype("f2")]
    found = compare_halves(model, inputs, ours, [reference], [reference])
    found.check()
    assert [block.name for block in found.blocks] == ["a", "n", "m", "y"]
    # A product of the rows before they were scaled is still seen.
    wrong: Array = np.divide(reference, 1.05, dtype=np.float32)
    with pytest.raises(ParityError, match="tensor y"):
        compare_halves(model, inputs, ours[:1], [wrong], [reference]).check()


def test_an_output_is_no_wrong_form_of_a_tensor_that_it_is_like() -> None:
    """The tensor before it is not stored."""
    model, inputs = scaled_rows(1.05)
    del model.graph.node[2:]
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("n", TensorProto.FLOAT, [1, 32, 64]))
    (reference,) = run_as_defined(model, inputs)
    ours = reference.astype("f2")
    found = compare_halves(model, inputs, [ours], [ours], [reference])
    found.check()
    assert [block.name for block in found.blocks] == ["n"]


def test_a_model_of_one_node_has_no_tensors_inside() -> None:
    model, inputs = scaled_rows(1.0)
    del model.graph.node[1:]
    model.graph.node[0].output[0] = "y"
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    (reference,) = run_as_defined(model, inputs)
    found = compare_halves(model, inputs, [inputs["x"]], [reference.astype("f2")], [reference])
    found.check()
    assert found.blocks == ()
    with pytest.raises(ParityError, match="output y"):
        compare_halves(model, inputs, [inputs["x"]], [inputs["x"]], [reference]).check()
