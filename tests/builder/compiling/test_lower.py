"""Lowered modules: the properties that code generation relies on, and the results of small networks."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from tvm import relax, tirx
from tvm.ir import Call
from tvm_ffi import structural_hash

from builder.compiling.lower import is_reshape, lower
from builder.importer import import_onnx
from builder.kernels.decisions import Schedules
from builder.kernels.rewriter import op_name
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Result, close, conv2d, machine, run

pytestmark = pytest.mark.slow

X = np.random.RandomState(3).randn(1, 16, 10, 10).astype("f4")
W = np.random.RandomState(4).randn(16, 16, 3, 3).astype("f4")


@pytest.fixture(params=[4, 16])
def target(request: pytest.FixtureRequest) -> DeviceTarget:
    return machine(request.param)


def values(result: Result) -> list[relax.Expr]:
    return [b.value for block in result.lowered.main.body.blocks for b in block.bindings]


def padded(v: relax.Expr) -> relax.Expr:
    return relax.op.nn.conv2d(v, relax.const(W), padding=(1, 1, 1, 1))


@pytest.mark.slow
def test_main_contains_only_calls_of_kernels_and_reshapes(target: DeviceTarget) -> None:
    def build(v: relax.Expr) -> relax.Expr:
        pooled = relax.op.mean(relax.op.nn.relu(padded(v)), [2, 3], keepdims=True)
        return relax.op.nn.softmax(relax.op.reshape(pooled, (1, 16)))

    result = run(build, {"x": X}, target)
    for value in values(result):
        assert is_reshape(value) or (isinstance(value, Call) and op_name(value) == "relax.call_tir")
    called = {v.args[0].name_hint for v in values(result) if not is_reshape(v)}
    assert called == {g.name_hint for g in result.lowered.kernels.functions}
    for var, func in result.lowered.kernels.functions.items():
        assert isinstance(func, tirx.PrimFunc)
        assert func.attrs["global_symbol"] == var.name_hint


@pytest.mark.slow
def test_equal_layers_share_a_kernel(target: DeviceTarget) -> None:
    def build(v: relax.Expr) -> relax.Expr:
        for _ in range(4):
            v = relax.op.nn.relu(padded(v))
        return v

    result = run(build, {"x": X}, target)
    called = [v.args[0].name_hint for v in values(result) if not is_reshape(v)]
    assert len(called) > len(set(called))
    want = X.astype("f8")
    for _ in range(4):
        want = np.maximum(conv2d(want, W, padding=(1, 1, 1, 1)), 0)
    close(result.outputs[0], want, 5e-5)


@pytest.mark.slow
def test_batch_norm_disappears_into_the_convolution(target: DeviceTarget) -> None:
    state = np.random.RandomState(5)
    gamma, beta, mean = (state.randn(16).astype("f4") for _ in range(3))
    variance, bias = state.rand(16).astype("f4") + 0.5, state.randn(1, 16, 1, 1).astype("f4")

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.add(padded(v), relax.const(bias))
        constants = [relax.const(c) for c in (gamma, beta, mean, variance)]
        norm = relax.op.nn.batch_norm(y, *constants, axis=1, epsilon=1e-5, training=False)
        return relax.op.nn.relu(relax.TupleGetItem(norm, 0))

    result = run(build, {"x": X}, target)
    y = conv2d(X, W, padding=(1, 1, 1, 1)) + bias
    shaped = [c.reshape(1, 16, 1, 1).astype("f8") for c in (gamma, beta, mean, variance)]
    close(
        result.outputs[0],
        np.maximum((y - shaped[2]) / np.sqrt(shaped[3] + 1e-5) * shaped[0] + shaped[1], 0),
        5e-5,
    )
    # Pack, (transform the weights,) convolve, unpack.
    assert len(result.lowered.kernels.functions) <= 4


@pytest.mark.slow
def test_a_value_that_two_layouts_read_is_converted_once(target: DeviceTarget) -> None:
    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.relu(padded(v))
        a = relax.op.permute_dims(y, [0, 2, 3, 1])
        b = relax.op.permute_dims(y, [0, 3, 2, 1])
        return relax.op.concat([a, b], axis=3)

    result = run(build, {"x": X}, target)
    y = np.maximum(conv2d(X, W, padding=(1, 1, 1, 1)), 0)
    close(result.outputs[0], np.concatenate([y.transpose(0, 2, 3, 1), y.transpose(0, 3, 2, 1)], 3), 5e-5)
    assert sum("unpack" in v.args[0].name_hint for v in values(result) if not is_reshape(v)) <= 1


def test_residual_of_channels_that_fill_no_block(target: DeviceTarget) -> None:
    state = np.random.RandomState(6)
    x, w = state.randn(1, 6, 5, 5).astype("f4"), state.randn(6, 6, 1, 1).astype("f4")

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w))
        z = relax.op.divide(
            relax.op.add(relax.op.nn.conv2d(y, relax.const(w)), y), relax.const(np.float32(3))
        )
        return relax.op.nn.conv2d(relax.op.sigmoid(z), relax.const(w))

    y = conv2d(x, w)
    z = 1 / (1 + np.exp(-(conv2d(y, w) + y) / 3))
    close(run(build, {"x": x}, target).outputs[0], conv2d(z, w))


def test_an_index_out_of_range_reads_no_other_memory(target: DeviceTarget) -> None:
    table = np.arange(12, dtype="f4").reshape(4, 3)
    ids = np.array([[0, 3, 4, 1 << 40]], "i8")
    result = run(lambda v: relax.op.take(relax.const(table), v, axis=0), {"ids": ids}, target)
    assert (result.outputs[0] == table[[[0, 3, 3, 3]]]).all()


def test_every_kernel_is_parallel_or_small(target: DeviceTarget) -> None:
    x = np.random.RandomState(8).randn(1, 16, 64, 64).astype("f4")
    result = run(
        lambda v: relax.op.permute_dims(relax.op.sqrt(relax.op.abs(v)), [0, 2, 3, 1]), {"x": x}, target
    )
    close(result.outputs[0], np.sqrt(np.abs(x)).transpose(0, 2, 3, 1))
    for func in result.lowered.kernels.functions.values():
        assert "T.parallel" in func.script()
        assert "T.vectorized" in func.script()


def network(kind: int, blocks: int = 2) -> onnx.ModelProto:
    """Convolutions with residual sums, then attention and a layer norm, in float32 or a half precision."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
    random = np.random.RandomState(7)
    shapes = {"w0": (16, 3, 3, 3), "q": (16, 16), "k": (16, 16), "scale": (16,), "head": (16, 10)}
    shapes |= {f"w{i}": (16, 16, 3, 3) for i in range(1, blocks + 1)}
    weights = [
        onnx.numpy_helper.from_array(random.randn(*s).astype("f4").astype(dtype), n)
        for n, s in shapes.items()
    ]
    weights.append(onnx.numpy_helper.from_array(np.array([1, 16, 64]), "rows"))
    node = onnx.helper.make_node
    nodes = [node("Conv", ["x", "w0"], ["c0"], pads=[1, 1, 1, 1])]
    for i in range(1, blocks + 1):
        nodes += [
            node("Conv", [f"c{i - 1}", f"w{i}"], [f"d{i}"], pads=[1, 1, 1, 1]),
            node("Add", [f"d{i}", f"c{i - 1}"], [f"e{i}"]),
            node("Relu", [f"e{i}"], [f"c{i}"]),
        ]
    nodes += [
        node("Reshape", [f"c{blocks}", "rows"], ["flat"]),
        node("Transpose", ["flat"], ["t"], perm=[0, 2, 1]),
        node("LayerNormalization", ["t", "scale"], ["n"]),
        node("MatMul", ["n", "q"], ["nq"]),
        node("MatMul", ["n", "k"], ["nk"]),
        node("Transpose", ["nk"], ["kt"], perm=[0, 2, 1]),
        node("MatMul", ["nq", "kt"], ["scores"]),
        node("Softmax", ["scores"], ["p"]),
        node("MatMul", ["p", "n"], ["mixed"]),
        node("MatMul", ["mixed", "head"], ["y"]),
    ]
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes, "network", [info("x", kind, [1, 3, 8, 8])], [info("y", kind, [1, 64, 10])], weights
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
def test_a_half_precision_model_has_the_kernels_of_its_float32_form(target: DeviceTarget, kind: int) -> None:
    """All are equal, schedules included, but those at the edges, and those that widen weights at load."""
    modules = [
        lower(import_onnx(network(k)).mod, target, Schedules(strict=True)).kernels
        for k in (onnx.TensorProto.FLOAT, kind)
    ]
    whole, half = ({k.with_attr("global_symbol", "kernel") for k in m.functions.values()} for m in modules)
    hashes = {structural_hash(kernel) for kernel in whole}
    others = [kernel for kernel in half if structural_hash(kernel) not in hashes]
    widening = [kernel for kernel in others if '"uint16"' in kernel.script()]
    assert widening
    others = [kernel for kernel in others if kernel not in widening]
    edges = 2 if kind == onnx.TensorProto.FLOAT16 else 0
    assert len(others) == edges
    assert all('"float16"' in kernel.script() for kernel in others)
    assert len(whole) - edges <= len(half) - len(widening) <= len(whole) + edges
