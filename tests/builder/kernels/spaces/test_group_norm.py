"""Group norm of packed channels, with any number of groups."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from benchmarks.conformance.unchecked import run_as_shipped
from builder.compiling.lower import lower
from builder.importer import import_onnx
from builder.kernels.decisions import Schedules
from builder.kernels.spaces import group_norm, planes
from tests.builder.kernels.machines import Result, close, conv2d, machine, run

op = relax.op
EPSILON = 1e-5


def by_definition(y: np.ndarray, groups: int) -> np.ndarray:
    rows = y.astype("f8").reshape(y.shape[0], groups, -1)
    normal = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + EPSILON)
    return np.asarray(normal.reshape(y.shape))


def normalise(x: np.ndarray, weight: np.ndarray, groups: int, lanes: int, *, then: str = "SiLU") -> Result:
    """Run a convolution, a group norm as exporters write it, and an activation; compare with NumPy."""
    y = conv2d(x, weight)
    n, c, h, w = y.shape
    gain = np.linspace(0.5, 2, c, dtype="f4").reshape(c, 1, 1)

    def build(x: relax.Expr) -> relax.Expr:
        y = op.reshape(op.nn.conv2d(x, relax.const(weight)), (n, groups, c // groups * h * w))
        centred = op.subtract(y, op.mean(y, [2], keepdims=True))
        variance = op.mean(op.multiply(centred, centred), [2], keepdims=True)
        y = op.divide(centred, op.sqrt(op.add(variance, relax.const(EPSILON, "float32"))))
        y = op.reshape(y, (n, c, h, w))
        if then == "nothing":
            return y
        y = op.add(op.multiply(y, relax.const(gain)), relax.const(gain))
        return op.multiply(y, op.sigmoid(y))

    result = run(build, {"x": x}, machine(lanes))
    want = by_definition(y, groups)
    if then != "nothing":
        want = want * gain + gain
        want = want / (1 + np.exp(-want))
    close(result.outputs[0], want, 2e-5)
    return result


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    batch=st.integers(1, 2),
    groups=st.integers(1, 9),
    size=st.integers(1, 17),
    rows=st.integers(1, 7),
    columns=st.integers(2, 19),
    lanes=st.sampled_from([4, 8, 16]),
    then=st.sampled_from(["nothing", "SiLU"]),
)
def test_any_groups(
    batch: int, groups: int, size: int, rows: int, columns: int, lanes: int, then: str
) -> None:
    state = np.random.RandomState(size)
    x, weight = state.randn(batch, 8, rows, columns), state.randn(groups * size, 8, 1, 1)
    normalise(x.astype("f4"), weight.astype("f4"), groups, lanes, then=then)


@pytest.mark.parametrize("groups", [1, 4, 16, 32])
def test_channels_stay_packed(groups: int) -> None:
    state = np.random.RandomState(3)
    x, weight = state.randn(1, 16, 12, 12).astype("f4"), state.randn(32, 16, 1, 1).astype("f4")
    kinds = normalise(x, weight, groups, 8).schedules
    assert planes.KIND in kinds
    assert (group_norm.KIND in kinds) == (groups < 32)
    # Anything that leaves the packed layout in between would need the `unpack` of the end before it.
    names = [name.name_hint for name in normalise(x, weight, groups, 8).lowered.kernels.functions]
    assert len([name for name in names if "unpack" in name]) <= 1


def test_a_mean_far_from_zero_loses_no_digits() -> None:
    """The mean of the squares less the square of the mean would be wrong in the first digit."""
    state = np.random.RandomState(0)
    x = (1000 + state.randn(1, 8, 9, 9)).astype("f4")
    weight = np.eye(8, dtype="f4").reshape(8, 8, 1, 1)
    result = run(
        lambda v: op.reshape(
            op.nn.layer_norm(
                op.reshape(op.nn.conv2d(v, relax.const(weight)), (1, 2, 324)),
                relax.const(np.ones(324, "f4")),
                relax.const(np.zeros(324, "f4")),
                axes=[-1],
                epsilon=EPSILON,
                center=False,
                scale=False,
            ),
            (1, 8, 9, 9),
        ),
        {"x": x},
        machine(8),
    )
    assert group_norm.KIND in result.schedules
    close(result.outputs[0], by_definition(x, 2), 1e-4)


def exported(kind: str, groups: int) -> onnx.ModelProto:
    """Return two convolutions with a norm between them, as exporters write it."""
    rng, c, shape = np.random.default_rng(0), 24, [2, 6, 7, 5]

    def random(*extents: int) -> np.ndarray:
        return (rng.standard_normal(extents) * 0.3).astype("f4")

    weights = {"w0": random(c, 6, 1, 1), "w1": random(5, c, 1, 1), "g": random(c) + 1, "b": random(c)}
    if kind == "LayerNormalization":
        weights |= {"g": random(c, 7, 5) + 1, "b": random(c, 7, 5)}
        norm = [helper.make_node(kind, ["a", "g", "b"], ["n"], axis=1)]
    elif kind == "GroupNormalization":
        norm = [helper.make_node(kind, ["a", "g", "b"], ["n"], num_groups=groups)]
    else:
        weights |= {
            "flat": np.array([0, groups, -1]), "image": np.array([2, c, 7, 5]),
            "one": np.ones(groups, "f4"), "zero": np.zeros(groups, "f4"),
            "g": weights["g"].reshape(c, 1, 1), "b": weights["b"].reshape(c, 1, 1),
        }  # fmt: skip
        norm = [
            helper.make_node("Reshape", ["a", "flat"], ["r"]),
            helper.make_node(kind, ["r", "one", "zero"], ["i"]),
            helper.make_node("Reshape", ["i", "image"], ["j"]),
            helper.make_node("Mul", ["j", "g"], ["k"]),
            helper.make_node("Add", ["k", "b"], ["n"]),
        ]
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"]),
        *norm,
        helper.make_node("Relu", ["n"], ["z"]),
        helper.make_node("Conv", ["z", "w1"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    ends = value("x", TensorProto.FLOAT, shape), value("y", TensorProto.FLOAT, [2, 5, 7, 5])
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", [ends[0]], [ends[1]], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("kind", "groups"),
    [("LayerNormalization", 1), ("GroupNormalization", 1), ("GroupNormalization", 6),
     ("InstanceNormalization", 1), ("InstanceNormalization", 3)],
)  # fmt: skip
def test_between_convolutions_nothing_is_unpacked(kind: str, groups: int) -> None:
    model = exported(kind, groups)
    lowered = lower(import_onnx(model).mod, machine(8), Schedules(strict=True))
    names = [name.name_hint for name in lowered.kernels.functions]
    assert {"moments", "group_moments"} < set(names)
    assert len([name for name in names if "unpack" in name]) == 1  # of the output
    x = np.random.default_rng(1).standard_normal((2, 6, 7, 5)).astype("f4")
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    y = by_definition(conv2d(x, weights["w0"]), groups)
    y = y * weights["g"].reshape(24, *weights["g"].shape[1:] or (1, 1))
    y = np.maximum(y + weights["b"].reshape(24, *weights["b"].shape[1:] or (1, 1)), 0)
    close(run_as_shipped(model, {"x": x})[0], conv2d(y, weights["w1"]), 2e-5)
