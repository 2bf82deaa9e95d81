"""Limits carry NaN and infinity as ONNX Runtime's do, on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from builder.codegen.lowering import lower_kernels
from builder.kernels.spaces import limits
from builder.target.device_target import resolve
from tests.builder.kernels.machines import lower_expression, machine, run

NAN, INF = np.nan, np.inf
X: Final = np.array([[1, NAN, -2, INF, -INF, 0, 3, -1], [5, -NAN, 0.5, INF, 2, NAN, -7, 9]], np.float32)
Y: Final = np.roll(X, 1, axis=1)
Z: Final = np.array([[NAN], [2]], np.float32)


def reference(kind: str, inputs: Mapping[str, np.ndarray], bounds: tuple[float, ...] = ()) -> np.ndarray:
    names = [f"bound{at}" for at in range(len(bounds))]
    weights = [numpy_helper.from_array(np.float32(b), n) for b, n in zip(bounds, names, strict=True)]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(kind, [*inputs, *names], ["out"])],
        "g",
        [info(name, TensorProto.FLOAT, value.shape) for name, value in inputs.items()],
        [info("out", TensorProto.FLOAT, None)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, dict(inputs))
    return np.asarray(result)


@pytest.mark.parametrize("lanes", [4, 16])
@pytest.mark.parametrize("kind", ["Relu", "Sign"])
def test_a_function_of_nan_is_nan(kind: str, lanes: int) -> None:
    build = {"Relu": relax.op.nn.relu, "Sign": relax.op.sign}[kind]
    (got,) = run(build, {"x": X}, machine(lanes)).outputs
    np.testing.assert_array_equal(got, reference(kind, {"x": X}))


@pytest.mark.parametrize("bounds", [(0.0, 6.0), (-1.0, 1.0)])
def test_clipping_nan_is_nan(bounds: tuple[float, float]) -> None:
    (got,) = run(lambda x: relax.op.clip(x, *bounds), {"x": X}, machine(8)).outputs
    np.testing.assert_array_equal(got, reference("Clip", {"x": X}, bounds))


@pytest.mark.parametrize("other", [Y, Z], ids=["same shape", "broadcast"])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kind", ["Max", "Min"])
def test_of_two_tensors_either_may_be_nan(kind: str, swapped: bool, other: np.ndarray) -> None:
    build = {"Max": relax.op.maximum, "Min": relax.op.minimum}[kind]
    inputs = dict(zip("xy", (other, X) if swapped else (X, other), strict=True))
    (got,) = run(build, inputs, machine(8)).outputs
    np.testing.assert_array_equal(got, reference(kind, inputs))


@pytest.mark.parametrize("kind", ["Max", "Min"])
@pytest.mark.parametrize(
    "number",
    [np.float32(1), np.full((1, 8), 1, np.float32), np.float32(NAN), Y[:1], Z],
    ids=["number", "vector", "NaN", "row with NaN", "column with NaN"],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_of_a_tensor_and_a_constant(kind: str, number: np.ndarray, swapped: bool) -> None:
    build = {"Max": relax.op.maximum, "Min": relax.op.minimum}[kind]
    constant = relax.const(number)
    (got,) = run(
        lambda x: build(constant, x) if swapped else build(x, constant), {"x": X}, machine(8)
    ).outputs
    np.testing.assert_array_equal(got, {"Max": np.maximum, "Min": np.minimum}[kind](X, number))


def spoilt(*shape: int) -> np.ndarray:
    """Return numbers, some NaN of either sign and infinities."""
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    flat = x.reshape(-1)
    flat[:: max(2, flat.size // 5)], flat[1 :: max(3, flat.size // 3)] = NAN, -NAN
    flat[2::7], flat[3::11] = INF, -INF
    return x


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((5, 64), [1]),  # rows
        ((5, 50), [1]),
        ((3, 4096), None),  # in parts
        ((3, 6, 40), [1]),  # columns
        ((4, 5, 6, 7), [0, 2]),  # neither
        ((9, 5), [1]),
        ((3, 5), None),
    ],
)
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_a_reduction_of_nan_is_nan(shape: tuple[int, ...], axes: list[int], lanes: int) -> None:
    x = spoilt(*shape)
    build = lambda v: relax.Tuple([relax.op.max(v, axes), relax.op.min(v, axes)])  # noqa: E731
    for definition, got in zip((np.max, np.min), run(build, {"x": x}, machine(lanes)).outputs, strict=True):
        np.testing.assert_array_equal(got, definition(x, axis=None if axes is None else tuple(axes)))


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("axes", [[1], [2], [2, 3]])
def test_a_reduction_of_packed_channels_with_nan_is_nan(name: str, axes: list[int]) -> None:
    x = spoilt(2, 20, 7, 9)
    build = lambda v: getattr(relax.op, name)(relax.op.nn.avg_pool2d(v), axes)  # noqa: E731 - which packs
    result = run(build, {"x": x}, machine(8))
    np.testing.assert_array_equal(result.outputs[0], getattr(np, name)(x, axis=tuple(axes)))
    assert result.schedules & {"pixels", "pool"}


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_reduction_of_another_type_with_nan_is_nan(dtype: str) -> None:
    x = spoilt(5, 64).astype(dtype)
    (got,) = run(lambda v: relax.op.max(v, [1]), {"x": x}, machine(8)).outputs
    np.testing.assert_array_equal(got, np.max(x, axis=1))


def test_integers_are_limited_too() -> None:
    x = np.arange(-4, 4, dtype=np.int32)
    (got,) = run(
        lambda x: relax.op.maximum(relax.op.nn.relu(x), relax.const(np.int32(2))), {"x": x}, machine(8)
    ).outputs
    assert got.tolist() == [2, 2, 2, 2, 2, 2, 2, 3]


@pytest.mark.parametrize(("target", "written"), [("rpi4", True), ("rpi-armv7", True), ("host", False)])
def test_arm_has_one_instruction_that_carries_nan(target: str, written: bool) -> None:
    device = resolve(target)
    kernels = lower_expression(relax.op.nn.relu, {"x": X}, device).kernels
    code = str(lower_kernels(kernels, device.tvm_target))
    assert ("call_llvm_pure_intrin" in code) == written
    assert ("T.max(" in code) != written


@pytest.mark.parametrize(
    ("target", "dtype", "asks"),
    [("rpi-armv7", "float64", True), ("rpi4", "float16", True), ("rpi4", "float64", False)],
)
def test_nan_is_asked_for_where_no_instruction_carries_it(target: str, dtype: str, asks: bool) -> None:
    x, y = (relax.Var(name, relax.TensorType((4,), dtype)) for name in "xy")
    bb = relax.BlockBuilder()
    legal = limits.legalisations(resolve(target))["relax.maximum"](bb, bb.normalize(relax.op.maximum(x, y)))
    assert ("reinterpret" in str(bb.get()[legal.args[0]])) == asks
