"""RMS norm: one kernel, however it is written out."""

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
from builder.kernels.spaces import rows
from tests.builder.kernels.machines import Randn, Result, close, in_turn, machine, run

op = relax.op
EPSILON = 1e-5


def normal(x: np.ndarray, axes: int = 1) -> np.ndarray:
    x = x.astype("f8")
    return np.asarray(x / np.sqrt(np.square(x).mean(tuple(range(-axes, 0)), keepdims=True) + EPSILON))


def number(value: float) -> relax.Expr:
    return relax.const(np.float32(value))


def written(x: relax.Expr, square: str, root: str, axes: int = 1) -> relax.Expr:
    """Return an RMS norm without a gain, in one of the forms that exporters write."""
    squares = {
        "power": lambda: op.power(x, number(2)),
        "product": lambda: op.multiply(x, x),
        "square": lambda: op.square(x),
    }[square]()
    total = op.add(op.mean(squares, list(range(-axes, 0)), keepdims=True), number(EPSILON))
    return {
        "divided": lambda: op.divide(x, op.sqrt(total)),
        "rsqrt": lambda: op.multiply(x, op.rsqrt(total)),
        "reciprocal": lambda: op.multiply(op.divide(number(1), op.sqrt(total)), x),
        "power": lambda: op.multiply(x, op.power(total, number(-0.5))),
    }[root]()


def is_one_kernel(result: Result) -> bool:
    return result.schedules == {rows.KIND} and len(result.lowered.kernels.functions) == 1


@pytest.mark.parametrize("square", ["power", "product", "square"])
@pytest.mark.parametrize("root", ["divided", "rsqrt", "reciprocal", "power"])
def test_any_form_is_one_kernel(square: str, root: str, randn: Randn) -> None:
    x, gain = randn(2, 5, 48), randn(48)
    for build, want in (
        (lambda v: written(v, square, root), normal(x)),
        (lambda v: op.multiply(written(v, square, root), relax.const(gain)), normal(x) * gain),
        (lambda v: op.multiply(relax.const(gain), written(v, square, root)), normal(x) * gain),
    ):
        result = run(build, {"x": x}, machine(8))
        close(result.outputs[0], want)
        assert is_one_kernel(result)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    lead=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    columns=st.integers(1, 200),
    lanes=st.sampled_from([4, 8, 16]),
    gains=st.booleans(),
)
def test_any_rows(lead: list[int], columns: int, lanes: int, *, gains: bool) -> None:
    state = np.random.RandomState(columns)
    x, gain = state.randn(*lead, columns).astype("f4") * 3, state.randn(columns).astype("f4")

    def build(v: relax.Expr) -> relax.Expr:
        y = written(v, "power", "reciprocal")
        return op.multiply(relax.const(gain), y) if gains else y

    close(run(build, {"x": x}, machine(lanes)).outputs[0], normal(x) * (gain if gains else 1))


@pytest.mark.parametrize(("axes", "lanes"), in_turn([1, 2, 3]))
def test_several_axes_are_one_row(axes: int, lanes: int, randn: Randn) -> None:
    x, gain = randn(3, 4, 5, 7), randn(*(3, 4, 5, 7)[-axes:])
    result = run(
        lambda v: op.nn.rms_norm(v, relax.const(gain), list(range(-axes, 0)), EPSILON),
        {"x": x},
        machine(lanes),
    )
    close(result.outputs[0], normal(x, axes) * gain)
    assert is_one_kernel(result)
    result = run(lambda v: written(v, "power", "rsqrt", axes), {"x": x}, machine(lanes))
    close(result.outputs[0], normal(x, axes))
    assert is_one_kernel(result)


def test_a_computed_gain(randn: Randn) -> None:
    x, gain = randn(3, 20), randn(20)
    result = run(lambda v, g: op.nn.rms_norm(v, g, -1, EPSILON), {"x": x, "g": gain}, machine(8))
    close(result.outputs[0], normal(x) * gain)
    assert is_one_kernel(result)


def test_what_resembles_a_norm_stays_as_it_is(randn: Randn) -> None:
    """The root of another tensor's squares, a mean over another axis, a second gain, and a shift."""
    x, y, gain = randn(6, 6), randn(6, 6), randn(6)

    def of_another(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.divide(a, op.sqrt(op.add(op.mean(op.square(b), -1, keepdims=True), number(EPSILON))))

    want = x / np.sqrt(np.square(y.astype("f8")).mean(-1, keepdims=True) + EPSILON)
    close(run(of_another, {"x": x, "y": y}, machine(8)).outputs[0], want)

    def of_columns(a: relax.Expr) -> relax.Expr:
        return op.divide(a, op.sqrt(op.add(op.mean(op.square(a), 0, keepdims=True), number(EPSILON))))

    close(run(of_columns, {"x": x}, machine(8)).outputs[0], normal(x.T).T)

    def twice(a: relax.Expr) -> relax.Expr:
        y = op.multiply(op.multiply(written(a, "power", "divided"), relax.const(gain)), relax.const(gain))
        return op.add(y, relax.const(gain))

    close(run(twice, {"x": x}, machine(8)).outputs[0], normal(x) * gain * gain + gain)


def exported(kind: str, shape: list[int], gain: np.ndarray, skip: bool) -> onnx.ModelProto:
    """Return a model of one norm as ONNX, or as ONNX Runtime's optimiser writes it."""
    names, domain, inputs = ["x", "gain"], "", ["x"]
    opset = 23 if kind == "RMSNormalization" else 17
    if kind != "RMSNormalization":
        domain = "com.microsoft" if skip else ""
    if skip:
        names, inputs = ["x", "s", "gain"], ["x", "s"]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in inputs]
    node = helper.make_node(kind, names, ["y"], domain=domain, epsilon=EPSILON)
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    graph = helper.make_graph([node], "g", values, [out], [numpy_helper.from_array(gain, "gain")])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize(
    "kind", ["RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"]
)
def test_a_norm_of_a_model_is_one_kernel(kind: str, randn: Randn) -> None:
    skip = kind.startswith("Skip")
    x, s, gain = randn(2, 7, 40), randn(2, 7, 40), randn(40)
    model = exported(kind, [2, 7, 40], gain, skip)
    lowered = lower(import_onnx(model).mod, machine(8), Schedules(strict=True))
    names = [name.name_hint for name in lowered.kernels.functions]
    assert [name for name in names if "rms_norm" in name]
    assert len(names) == 1 + skip
    feeds = {"x": x, "s": s} if skip else {"x": x}
    close(run_as_shipped(model, feeds)[0], normal(x + s if skip else x) * gain)
