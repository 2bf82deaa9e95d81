"""Numbers in float16 stay finite, and are limited only where they have to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tvm import relax
from tvm.ir import Call

from benchmarks.interpreter import Interpreter
from builder.calls.spans import bindings_of
from builder.compiling.lower import lower
from builder.compiling.parity import run_as_defined
from builder.importer import import_onnx
from builder.kernels.passes.canonical import canonicalise
from builder.kernels.passes.half_limits import ANY, Interval, growth_of_convolution, interval_of, most_for
from builder.kernels.passes.halves import mark, use_halves
from tests.builder.kernels.machines import element_machine
from tests.builder.kernels.signal_to_noise import decibels

Array = NDArray[np.float64]
SHAPE = [1, 16, 6, 6]
WINDOW = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}


def model(
    nodes: list[onnx.NodeProto], weights: dict[str, NDArray[np.float32]], shape: list[int]
) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    ends = [value("x", TensorProto.FLOAT, shape)], [value("y", TensorProto.FLOAT, None)]
    constants = [numpy_helper.from_array(each, name) for name, each in weights.items()]
    graph = helper.make_graph(nodes, "g", *ends, constants)
    return onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    )


def weights(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) / 3).astype("f4")


def residual() -> onnx.ModelProto:
    """Return two branches whose sum is read by a product, and a difference of two products."""
    node = helper.make_node
    return model(
        [
            node("Conv", ["x", "w0"], ["a"]),
            node("Relu", ["a"], ["b"]),
            node("Conv", ["b", "w1"], ["c"]),
            node("Add", ["c", "b"], ["d"]),
            node("Conv", ["d", "w2"], ["e"]),
            node("Conv", ["d", "w0"], ["f"]),
            node("Sub", ["e", "f"], ["g"]),
            node("Relu", ["g"], ["h"]),
            node("Conv", ["h", "w1"], ["y"]),
        ],
        {f"w{i}": weights(16, 16, 1, 1, seed=i) for i in range(3)},
        SHAPE,
    )


def windows() -> onnx.ModelProto:
    """Return convolutions with windows, by Winograd's algorithm, depthwise, strided, and a pooling."""
    node = helper.make_node
    return model(
        [
            node("Conv", ["x", "w0"], ["a"], **WINDOW),
            node("LeakyRelu", ["a"], ["b"], alpha=0.1),
            node("Conv", ["b", "w1"], ["c"], group=16, **WINDOW),
            node("Relu", ["c"], ["d"]),
            node("MaxPool", ["d"], ["e"], kernel_shape=[2, 2], strides=[2, 2]),
            node("Conv", ["e", "w2"], ["f"], strides=[2, 2], **WINDOW),
            node("Sigmoid", ["f"], ["s"]),
            node("Mul", ["f", "s"], ["g"]),
            node("Conv", ["g", "w3"], ["y"]),
        ],
        {
            "w0": weights(16, 16, 3, 3),
            "w1": weights(16, 1, 3, 3, seed=1),
            "w2": weights(24, 16, 3, 3, seed=2),
            "w3": weights(8, 24, 1, 1, seed=3),
        },
        SHAPE,
    )


def stride_2() -> onnx.ModelProto:
    """Return convolutions at stride 2, by Winograd's algorithm."""
    node = helper.make_node
    return model(
        [
            node("Conv", ["x", "w0"], ["a"], strides=[2, 2], **WINDOW),
            node("Relu", ["a"], ["b"]),
            node("Conv", ["b", "w1"], ["y"], strides=[2, 2], **WINDOW),
        ],
        {f"w{i}": weights(64, 64, 3, 3, seed=i) / np.float32(4) for i in range(2)},
        [1, 64, 56, 56],
    )


def cut_windows() -> onnx.ModelProto:
    """Return a window of which only 3x3 taps read the picture."""
    node = helper.make_node
    return model(
        [node("Conv", ["x", "w0"], ["a"], pads=[2] * 4), node("Conv", ["a", "w1"], ["y"])],
        {"w0": weights(16, 16, 5, 5) / np.float32(3000), "w1": weights(8, 16, 1, 1, seed=1)},
        [1, 16, 2, 2],
    )


def rows() -> onnx.ModelProto:
    """Return products of rows, with a transpose and a concatenation between them."""
    node = helper.make_node
    return model(
        [
            node("MatMul", ["x", "w0"], ["a"]),
            node("MatMul", ["x", "w1"], ["b"]),
            node("Concat", ["a", "b"], ["c"], axis=1),
            node("Transpose", ["c"], ["d"], perm=[1, 0]),
            node("MatMul", ["d", "w2"], ["e"]),
            node("Mul", ["e", "e"], ["f"]),
            node("MatMul", ["f", "w3"], ["y"]),
        ],
        {
            "w0": weights(40, 24),
            "w1": weights(40, 24, seed=1),
            "w2": weights(9, 32, seed=2),
            "w3": weights(32, 8, seed=3),
        },
        [9, 40],
    )


@pytest.mark.slow
@pytest.mark.parametrize("network", [residual, windows, stride_2, cut_windows, rows])
def test_no_input_makes_an_infinity(network: Callable[[], onnx.ModelProto]) -> None:
    made = network()
    shape = [d.dim_value for d in made.graph.input[0].type.tensor_type.shape.dim]
    rng = np.random.default_rng(7)
    small = rng.standard_normal(shape).astype("f4")
    lowered = lower(mark(import_onnx(made).mod, ()), element_machine())
    kinds = [str(function.attrs["edge.schedule"]) for function in lowered.kernels.functions.values()]
    assert kinds.count("half_winograd") == {windows: 1, stride_2: 2}.get(network, 0)
    interpreter = Interpreter(lowered, element_machine().tvm_target)
    large = [small * 1e5, np.full(shape, 1e5, "f4"), np.full(shape, -3e38, "f4"), np.sign(small) * 3e38]
    for value in (v.astype("f4") for v in large):
        assert np.isfinite(np.asarray(interpreter.run({"x": value})[0])).all()
    (want,) = run_as_defined(made, {"x": small})
    assert decibels(np.asarray(interpreter.run({"x": small})[0]), want) > 40


def clips(network: onnx.ModelProto) -> list[tuple[float, float]]:
    """Return the bounds of all clips, in order."""
    mod = use_halves(canonicalise(mark(import_onnx(network).mod, ())))
    calls = [binding.value for binding in bindings_of(mod) if isinstance(binding.value, Call)]
    return [
        (float(call.args[1].value), float(call.args[2].value))
        for call in calls
        if str(call.op.name) == "relax.clip"
    ]


def bounded() -> onnx.ModelProto:
    """Return products after clips of the model's own."""
    node = helper.make_node
    return model(
        [
            node("Conv", ["x", "w0"], ["a"]),
            node("Clip", ["a", "low", "high"], ["b"]),
            node("Conv", ["b", "w1"], ["c"]),
            node("Conv", ["c", "w2"], ["d"]),
            node("Add", ["c", "d"], ["e"]),
            node("Conv", ["e", "w0"], ["y"]),
        ],
        {
            **{f"w{i}": weights(16, 16, 1, 1, seed=i) for i in range(3)},
            "low": np.array(0, "f4"),
            "high": np.array(6, "f4"),
        },
        SHAPE,
    )


def test_what_is_bounded_is_not_limited() -> None:
    """Only the input is, of which nothing is known."""
    [given, own] = clips(bounded())
    most = most_for(growth_of_convolution(weights(16, 16, 1, 1)))
    assert given == pytest.approx((-most, most))
    assert own == (0.0, 6.0)


def test_a_limit_takes_the_place_of_a_relu() -> None:
    """Limited are the input, the first ReLU, the sum of the branches, and the last ReLU."""
    found = clips(residual())
    assert [low < 0 for low, _ in found] == [True, False, True, False]
    assert all(high < 65504 for _, high in found)


def test_growth_of_sums() -> None:
    weight = np.zeros((2, 200, 1, 1), "f4")
    weight[0], weight[1, :50] = 1, -4
    assert growth_of_convolution(weight) == 200  # 128 of the first, or all 50 of the second
    assert most_for(0) == 65504
    window = np.zeros((1, 1, 3, 3), "f4")
    window[0, 0, 1, 1] = 1e-6
    assert growth_of_convolution(window) >= 1  # the picture's transform is rounded too
    assert growth_of_convolution(window, (2, 2)) == 4  # of differences of two numbers along both axes
    window[0, 0, 0, 0] = 3
    assert growth_of_convolution(window, (2, 2)) == 12
    assert growth_of_convolution(window, (2, 1)) == pytest.approx(3)


def _span(spans: Mapping[str, Interval], variable: relax.Var) -> Interval:
    return spans[str(variable.name)]


def _silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


@pytest.mark.parametrize(
    ("build", "values"),
    [
        (relax.op.add, np.add),
        (relax.op.subtract, np.subtract),
        (relax.op.multiply, np.multiply),
        (relax.op.maximum, np.maximum),
        (relax.op.minimum, np.minimum),
        (lambda x, _: relax.op.negative(x), lambda x, _: -x),
        (lambda x, _: relax.op.abs(x), lambda x, _: np.abs(x)),
        (lambda x, _: relax.op.clip(x, -1.5, 2.5), lambda x, _: x.clip(-1.5, 2.5)),
        (lambda x, _: relax.op.nn.relu(x), lambda x, _: x.clip(0)),
        (lambda x, _: relax.op.nn.leakyrelu(x, 0.5), lambda x, _: np.where(x > 0, x, 0.5 * x)),
        (lambda x, _: relax.op.nn.leakyrelu(x, -3.0), lambda x, _: np.where(x > 0, x, -3 * x)),
        (lambda x, _: relax.op.nn.silu(x), lambda x, _: _silu(x)),
        (lambda x, _: relax.op.sigmoid(x), lambda x, _: 1 / (1 + np.exp(-x))),
        (lambda x, _: relax.op.tanh(x), lambda x, _: np.tanh(x)),
        (lambda x, _: relax.op.matmul(x, relax.const(weights(12, 5))), lambda x, _: x @ weights(12, 5)),
        (lambda x, y: relax.op.concat([x, y], axis=0), lambda x, y: np.concatenate([x, y])),
        (lambda x, _: relax.op.strided_slice(x, [0], [0], [2]), lambda x, _: x[:2]),
    ],
)
def test_results_are_within_their_intervals(
    build: Callable[[relax.Expr, relax.Expr], Call], values: Callable[[Array, Array], Array]
) -> None:
    rng = np.random.default_rng(8)
    other = Interval(-2.0, 0.5)
    for own in (Interval(-4.0, 9.0), Interval(-5.0, -1.0), Interval(0.5, 3.0)):
        x, y = (relax.Var(name, relax.TensorType((8, 12), "float32")) for name in "xy")
        found = interval_of(build(x, y), partial(_span, {"x": own, "y": other}))
        got = values(*(rng.uniform(span.low, span.high, (8, 12)) for span in (own, other)))
        assert found.low - 1e-5 <= got.min()
        assert got.max() <= found.high + 1e-5
        assert found.size < 200


def test_intervals_of_what_is_unknown() -> None:
    assert ANY + Interval(0, 1) == ANY
    assert ANY + -ANY == ANY
    assert ANY * Interval(0, 1) == ANY  # infinity times zero
    assert math.isinf(ANY.size)
    assert ANY.within(5) == Interval(-5, 5)
    assert Interval(7, 9).within(5) == Interval(5, 5)
