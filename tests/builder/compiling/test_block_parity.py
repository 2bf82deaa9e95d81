"""What is taken for rounding in a quantised model, and what for a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tvm import te, tirx

from builder import compile, load
from builder.codegen.graph_codegen import generate
from builder.codegen.kernel_object import compile_object
from builder.codegen.link.linker import link
from builder.compiling import parity, tolerances
from builder.compiling.block_agreement import Step
from builder.compiling.block_parity import UNEXPLAINED, Blocks, Cuts, compare_blocks, is_quantised
from builder.compiling.lower import lower
from builder.errors import FAULT, ParityError
from builder.importer import import_onnx
from builder.kernels.decisions import Schedules
from builder.kernels.passes import integer_products
from builder.kernels.passes.integer_forms import Sum
from builder.kernels.spaces import integer_convolution, integer_winograd, quantisation
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.padded_copy import pad
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.compiling.debugging import debug_run
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write
from tests.builder.quantising.networks import Network
from tests.quantised_graphs import QuantisedGraph, random_model

# Each runs here in the arithmetic form; together they have every instruction, layout and byte type.
TARGETS = ("host", "rpi5", "rpi4", "llvm -mtriple=x86_64-linux-gnu -mcpu=cascadelake", "rpi-armv7")


def network(padding: int = 1) -> onnx.ModelProto:
    """Two convolutions of bytes with a zero point in the middle, and what is between them."""
    g = QuantisedGraph(np.random.default_rng(3), "int8")
    x = g.input(1, 16, 9, 7)
    shape = (1, 24, 7 + 2 * padding, 5 + 2 * padding)
    y = g.op(
        "Conv", x, g.weight((24, 16, 3, 3), 0), g.bias(24), shape=shape,
        kernel_shape=[3, 3], pads=[padding] * 4,
    )  # fmt: skip
    y = g.quantise(g.op("Relu", y, shape=shape), 3.0)
    shape = (1, 8, *shape[2:])
    y = g.op("Conv", y, g.weight((8, 24, 1, 1), 0), shape=shape, kernel_shape=[1, 1])
    return g.model(g.quantise(y, 3.0))


def compared(model: onnx.ModelProto, target: DeviceTarget | None = None, seed: int = 0) -> Blocks:
    """Compile a model, run it here, and compare it with the reference."""
    imported = import_onnx(model)
    lowered = lower(imported.mod, target or resolve("host"), Schedules(strict=True))
    names = [s.name for s in imported.inputs], [s.name for s in imported.outputs]
    graph = generate(lowered.main, *names)
    host = resolve("host")
    code = link(compile_object(lowered.kernels, host), host)
    rng = np.random.default_rng(seed)
    inputs = {s.name: rng.standard_normal(s.shape).astype("float32") * 2 for s in imported.inputs}
    steps, outputs = debug_run(code, graph, inputs)
    blocks = compare_blocks(imported.onnx, inputs, steps, outputs)
    blocks.check()
    assert blocks.agreement(names[1], outputs).error <= 1e-4
    return blocks


@pytest.mark.slow
def test_tensors_are_found_and_agree() -> None:
    blocks = compared(network())
    assert len(blocks.found) == 4  # the last is an output too
    assert not blocks.hidden
    assert blocks.worst is not None
    assert blocks.worst.unexplained == 0
    assert "4 quantised tensors agree" in blocks.summary()


Patch = Callable[[pytest.MonkeyPatch], None]


def wrong_zero_point(patch: pytest.MonkeyPatch) -> None:
    zero = integer_products.Products._preferred_zero
    patch.setattr(integer_products.Products, "_preferred_zero", lambda self, x: zero(self, x) + 1)


def wrong_scale_of_a_channel(patch: pytest.MonkeyPatch) -> None:
    write = Sum.write

    def wrong(self: Sum, bb: Any) -> object:
        scale = np.array(np.broadcast_to(self.scale, (int(np.prod(self.shape)),)))
        scale[5] *= 1.02
        return write(replace(self, scale=scale), bb)

    patch.setattr(Sum, "write", wrong)


def truncation(patch: pytest.MonkeyPatch) -> None:
    def wrong(x: tirx.Expr, added: tirx.Expr | None = None) -> tirx.Expr:
        return tirx.floor(x if added is None else x + added).astype("int32")

    patch.setattr(quantisation, "_rounded", wrong)


def no_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quantisation, "_limited", lambda x, *_: x)


def padding_with_zeros(patch: pytest.MonkeyPatch) -> None:
    def wrong(x: te.Tensor, op: Conv2d, _: tirx.Expr, dtype: str) -> te.Tensor:
        return pad(x, op, None, dtype)

    patch.setattr(integer_convolution, "pad", wrong)
    patch.setattr(integer_winograd, "output_tile", lambda *_: None)


def swapped_axis(patch: pytest.MonkeyPatch) -> None:
    pack = integer_convolution.pack_weights
    turned = lambda w, *rest: pack(np.ascontiguousarray(w.swapaxes(2, 3)), *rest)  # noqa: E731
    patch.setattr(integer_convolution, "pack_weights", turned)
    patch.setattr(integer_winograd, "output_tile", lambda *_: None)


def lost_bias(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sum, "with_bias", lambda layer, _: layer)


FAULTS = (
    wrong_zero_point,
    wrong_scale_of_a_channel,
    truncation,
    no_limit,
    padding_with_zeros,
    swapped_axis,
    lost_bias,
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_refused(fault: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(ParityError, match="halfway between two steps"):
        compared(network())


@pytest.mark.slow
@pytest.mark.parametrize(("target", "seed"), list(zip(TARGETS, (210, 34, 48, 11, 87), strict=True)))
def test_random_models_agree_on_every_target(target: str, seed: int) -> None:
    """Hundreds of others were tried; these have what was once wrong: gaps, residuals, ties."""
    kind = ("uint8", "int8", "uint16", "uint8")[seed % 4]
    compared(random_model(seed, 2, activations=kind), resolve(target), seed)


@pytest.mark.slow
def test_a_concatenation_beyond_the_bytes_is_limited_by_the_next_kernel() -> None:
    """Its real numbers go on to the kernel that rounds them; the tensor in between is right, not wrong."""
    compared(random_model(5), resolve("rpi4"), 5)


@pytest.mark.slow
def test_products_of_a_tile_beyond_an_odd_width_are_left_out() -> None:
    compared(random_model(303, 3, activations="int8"), resolve("rpi4"), 303)


def test_the_self_test_does_not_follow_from_roundings_of_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Integer outputs of which the reference rounds one otherwise have no relative error."""
    compare = parity.compare
    monkeypatch.setattr(parity, "compare", lambda *given: replace(compare(*given), error=float("inf")))
    model = import_onnx(random_model(1))
    assert compile(model).manifest.samples.rtol == tolerances.STEP


def test_a_scalar_of_integers_is_compared(tmp_path: Path) -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((3, 5), "int8", scales=[0.02], zeros=[3])]
    total = graph.tensor((), "int8", scales=[0.1], zeros=[0])
    graph.outputs = [graph.tensor((), "uint8", scales=[0.1], zeros=[128])]
    graph.op("SUM", [*graph.inputs, graph.constant([0, 1])], [total], "ReducerOptions")
    graph.op("QUANTIZE", [total], graph.outputs)
    (tmp_path / "sum.tflite").write_bytes(write(graph))
    compile(load(tmp_path / "sum.tflite"), target="host")


def test_a_model_without_rounding_is_not_quantised() -> None:
    assert is_quantised(network())
    weights_only = network()
    for node in weights_only.graph.node:
        if node.op_type == "QuantizeLinear":
            node.op_type = "Identity"
    assert not is_quantised(weights_only)


def step_model() -> onnx.ModelProto:
    """One tensor that is quantised with a scale of 1."""
    g = QuantisedGraph(np.random.default_rng(0), "int8")
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 1000])
    names = [g.constant(np.float32(1)), g.constant(np.int8(0))]
    g.shapes["x"] = (1, 1000)
    g.inputs.append(x)
    q = g.op("QuantizeLinear", "x", *names, shape=(1, 1000))
    return g.model(g.op("DequantizeLinear", q, *names, shape=(1, 1000)))


@pytest.mark.parametrize(
    ("value", "moved", "count", "accepted"),
    [
        (2.5, 1, 1000, True),  # all are halfway
        (2.501, 1, 1000, True),  # almost
        (2.5, 2, 1000, False),  # by two steps
        (2.4, 1, 1000, False),
        (2.4, 1, 3, False),
        (2.4, 1, 2, True),  # two may come from a tensor that is not visible
    ],
)
def test_differences_must_be_halfway_and_by_one_step(
    value: float, moved: int, count: int, *, accepted: bool
) -> None:
    model, x = step_model(), np.full((1, 1000), value, "float32")
    ours = np.round(x).astype("int8")
    ours[0, :count] += moved
    blocks = compare_blocks(model, {"x": x}, [Step(ours)], [ours.astype("float32")])
    if accepted:
        blocks.check()
    else:
        with pytest.raises(ParityError):
            blocks.check()


def test_a_tensor_that_is_not_found_shows_at_the_output() -> None:
    model, x = step_model(), np.linspace(-50, 50, 1000, dtype="float32").reshape(1, 1000)
    wrong = np.roll(np.round(x), 500).astype("int8")
    blocks = compare_blocks(model, {"x": x}, [Step(wrong)], [wrong.astype("float32")])
    assert len(blocks.hidden) == 1
    with pytest.raises(ParityError):
        blocks.check()


def test_a_tensor_that_no_kernel_wrote_is_not_taken_for_a_fault() -> None:
    """Small numbers before and after an activation resemble each other; only the second are in a kernel."""
    g = QuantisedGraph(np.random.default_rng(0), "int8")
    x = (np.arange(1000, dtype="float32") % 7 - 3).reshape(1, 1000)
    g.shapes["x"] = x.shape
    g.inputs.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape))
    names = [g.constant(np.float32(1)), g.constant(np.int8(0))]
    y = "x"
    for op in ("Neg", "Relu"):
        y = g.op("QuantizeLinear", g.op(op, y, shape=x.shape), *names, shape=x.shape)
        y = g.op("DequantizeLinear", y, *names, shape=x.shape)
    model = g.model(g.op("Mul", y, g.constant(np.float32(3)), shape=x.shape))
    ours = np.maximum(-x, 0).astype("int8")
    blocks = compare_blocks(model, {"x": x}, [Step(ours)], [ours * np.float32(3)])
    blocks.check()
    assert (len(blocks.found), len(blocks.hidden)) == (1, 1)
    ours[0, :5] += 1
    assert (
        compare_blocks(model, {"x": x}, [Step(ours)], [ours * np.float32(3)])
        .agreement([model.graph.output[0].name], [ours * np.float32(3)])
        .error
        > 0.01
    )
    made = Step(ours, tuple(node.name for node in model.graph.node[3:5]))
    with pytest.raises(ParityError) as caught:
        compare_blocks(model, {"x": x}, [made], [ours * np.float32(3)]).check()
    assert caught.value.hint == FAULT


def test_an_output_of_another_shape_is_refused() -> None:
    model, x = step_model(), np.zeros((1, 1000), "float32")
    with pytest.raises(ParityError, match="expected float32"):
        compare_blocks(model, {"x": x}, [], [np.zeros((1, 999), "float32")])


@pytest.mark.slow
def test_a_clamp_after_the_last_levels_is_no_fault() -> None:
    # The levels are hidden in the kernel that also clamps. Its result is close to them, but not equal.
    network = Network()
    scale, zero = network.constant(0.05), network.constant(121, np.uint8)

    def pair(x: str) -> str:
        return network.op("DequantizeLinear", network.op("QuantizeLinear", x, scale, zero), scale, zero)

    codes = network.constant(network.rng.integers(-100, 100, (12, 1, 3, 3)), np.int8)
    weight = network.op("DequantizeLinear", codes, network.constant(0.001), network.constant(0, np.int8))
    x = pair(network.input("x", [1, 12, 7, 7]))
    y = network.op("Relu", pair(network.op("Conv", x, weight, pads=[1] * 4, group=12)))
    assert compile(import_onnx(network.model(y)), "host").integers is not None


def test_bytes_of_one_channel_that_pixels_of_several_become() -> None:
    """A network that enlarges pictures ends so: each pixel's channels become places of one channel."""
    g = QuantisedGraph(np.random.default_rng(5))
    y = g.op("Conv", g.input(1, 3, 5, 4), g.weight((4, 3, 1, 1), 0), shape=(1, 4, 5, 4))
    y = g.op("DepthToSpace", y, shape=(1, 1, 10, 8), blocksize=2)
    assert compared(g.model(g.quantise(y, 3.0))).found


def test_a_scale_for_each_channel_of_an_activation() -> None:
    """Its dequantised form is close to the tensor before it, and no fault."""
    g = QuantisedGraph(np.random.default_rng(6))
    x = g.input(2, 5, 6, 6)
    names = [
        g.constant((g.rng.random(5) * 0.1).astype("float32")),
        g.constant(g.rng.integers(100, 156, 5).astype("uint8")),
    ]
    y = g.op("QuantizeLinear", x, *names, shape=(2, 5, 6, 6), axis=1)
    y = g.op("DequantizeLinear", y, *names, shape=(2, 5, 6, 6), axis=1)
    y = g.op("Conv", y, g.weight((5, 5, 3, 3), 0), shape=(2, 5, 4, 4))
    compared(g.model(g.quantise(y, 3.0)))


def test_small_numbers_of_16_bits_are_not_taken_for_zeros() -> None:
    """A few steps are granted to tensors of 16 bits, so that threes are near the zeros of another tensor."""
    g = QuantisedGraph(np.random.default_rng(0), "int16")
    x = np.full((1, 6), 3e-3, "float32")
    g.shapes["x"] = x.shape
    g.inputs.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape))
    zero, coarse, fine = g.constant(np.int16(0)), g.constant(np.float32(1)), g.constant(np.float32(1e-3))
    y = g.op("QuantizeLinear", g.op("Sub", "x", "x", shape=x.shape), coarse, zero, shape=x.shape)
    y = g.op("Add", g.op("DequantizeLinear", y, coarse, zero, shape=x.shape), "x", shape=x.shape)
    y = g.op("QuantizeLinear", y, fine, zero, shape=x.shape)
    model = g.model(g.op("DequantizeLinear", y, fine, zero, shape=x.shape))
    made = Step(np.full(x.shape, 3, "int16"), tuple(node.name for node in model.graph.node[:4]))
    compare_blocks(model, {"x": x}, [made], [x]).check()


def two_levels() -> tuple[onnx.ModelProto, np.ndarray, np.ndarray, np.ndarray]:
    """Return a model that rounds twice, an input, and what the two levels are."""
    g = QuantisedGraph(np.random.default_rng(0), "int8")
    x = np.random.default_rng(1).normal(0, 9, (1, 1000)).astype("float32")
    g.shapes["x"] = x.shape
    g.inputs.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape))
    names = [g.constant(np.float32(1)), g.constant(np.int8(0))]
    y = g.op("QuantizeLinear", "x", *names, shape=x.shape)
    y = g.op("DequantizeLinear", y, *names, shape=x.shape)
    y = g.op("QuantizeLinear", g.op("Neg", y, shape=x.shape), *names, shape=x.shape)
    y = g.op("DequantizeLinear", y, *names, shape=x.shape)
    first = np.round(x).astype("int8")
    return g.model(y), x, first, -first


def test_what_agrees_after_a_tensor_shows_that_it_was_another() -> None:
    """Where the provenance of a tensor is wrong, everything after it agrees, and would not with it."""
    model, x, first, second = two_levels()
    made, later = model.graph.node[0].name, model.graph.node[3].name
    other = Step(np.roll(first, 1), (made,))
    blocks = compare_blocks(model, {"x": x}, [other, Step(second, (later,))], [second.astype("float32")])
    blocks.check()
    assert blocks.hidden == (model.graph.node[0].output[0],)


def test_a_fault_that_the_next_kernel_reads_is_found_even_if_the_outputs_agree() -> None:
    """The next rounding hides it: the limit of a byte, for instance."""
    model, x, first, second = two_levels()
    low = onnx.numpy_helper.from_array(np.float32(1000), "low")
    model.graph.initializer.append(low)
    model.graph.node[2].op_type = "Add"
    model.graph.node[2].input.append("low")
    second = np.full_like(second, 127)
    made, later = model.graph.node[0].name, model.graph.node[3].name
    steps = [Step(first + np.int8(1), (made,)), Step(second, (later,))]
    with pytest.raises(ParityError) as caught:
        compare_blocks(model, {"x": x}, steps, [second.astype("float32")]).check()
    assert caught.value.hint == FAULT


def test_a_difference_that_nothing_explains_is_not_called_a_fault() -> None:
    model, x, first, second = two_levels()
    made = model.graph.node[0].name
    wrong = np.roll(second, 3).astype("float32")
    with pytest.raises(ParityError) as caught:
        compare_blocks(model, {"x": x}, [Step(np.roll(first, 1), (made,))], [wrong]).check()
    assert caught.value.hint == UNEXPLAINED


def test_identical_branches_have_each_their_own_tensor() -> None:
    """The second kernel is wrong; the first one's tensor has the numbers that the second should have."""
    g = QuantisedGraph(np.random.default_rng(0), "int8")
    x = np.random.default_rng(1).normal(0, 9, (1, 1000)).astype("float32")
    g.shapes["x"] = x.shape
    g.inputs.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape))
    names = [g.constant(np.float32(1)), g.constant(np.int8(0))]
    ends = []
    for _ in range(2):
        y = g.op("QuantizeLinear", "x", *names, shape=x.shape)
        ends.append(g.op("Abs", g.op("DequantizeLinear", y, *names, shape=x.shape), shape=x.shape))
    model = g.model(*ends)
    made = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    right = np.round(x).astype("int8")
    wrong = right + np.int8(1)
    for own in (right, wrong):
        steps = [Step(right, (made[0].name,)), Step(own, (made[1].name,))]
        outputs = [np.abs(each.astype("float32")) for each in (right, own)]
        blocks = compare_blocks(model, {"x": x}, steps, outputs)
        assert [block.is_rounding for block in blocks.found] == [True, own is right]
        assert blocks.faults == (frozenset() if own is right else {made[1].output[0]})


@pytest.mark.parametrize("fill", ["halfway", "background", "constant"])
def test_a_transposed_tensor_is_not_taken_for_the_one_before_it(fill: str) -> None:
    """A kernel quantises and transposes; its numbers resemble those in the other order."""
    g = QuantisedGraph(np.random.default_rng(0), "int8")
    rng, shape = np.random.default_rng(1), (2, 30, 20)
    x = {
        "halfway": rng.integers(0, 2, shape) + 0.5,
        "background": (rng.random(shape) < 0.01) * 90.0,
        "constant": np.full(shape, 3.0),
    }[fill].astype("float32")
    g.shapes["x"] = shape
    g.inputs.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape))
    names = [g.constant(np.float32(1)), g.constant(np.int8(0))]
    turned = (2, 20, 30)
    y = g.op("DequantizeLinear", g.op("QuantizeLinear", "x", *names, shape=shape), *names, shape=shape)
    y = g.op("Transpose", y, shape=turned, perm=[0, 2, 1])
    scale = rng.random((30,)).astype("float32")
    model = g.model(g.op("Mul", y, g.constant(scale), shape=turned))
    quantised, _, transposed, multiplied = (node.name for node in model.graph.node)
    up = fill == "halfway"  # the other way than the reference rounds
    ours = (np.floor(x) + 1 if up else np.round(x)).transpose(0, 2, 1).astype("int8")
    output = ours * scale
    step = Step(ours, (quantised, transposed, multiplied))
    blocks = compare_blocks(model, {"x": x}, [step], [output])
    blocks.check()
    assert blocks.agreement([model.graph.output[0].name], [output]).error < 1e-6


def attention() -> onnx.ModelProto:
    """One head whose queries and keys are quantised between transpositions, as exporters write it."""
    g = QuantisedGraph(np.random.default_rng(8), "int8", per_channel=False)
    x = g.input(1, 12, 16)
    parts = []
    for perm in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)):
        y = g.op("MatMul", x, g.weight((16, 16), 1), shape=(1, 12, 16))
        y = g.op("Reshape", g.quantise(y, 3.0), g.constant(np.array([1, 12, 2, 8])), shape=(1, 12, 2, 8))
        shape = tuple((1, 12, 2, 8)[axis] for axis in perm)
        parts.append(g.op("Transpose", y, shape=shape, perm=list(perm)))
    y = g.op("MatMul", parts[0], parts[1], shape=(1, 2, 12, 12))
    y = g.quantise(g.op("Softmax", g.quantise(y, 9.0), shape=(1, 2, 12, 12)), 1.0)
    y = g.quantise(g.op("MatMul", y, parts[2], shape=(1, 2, 12, 8)), 2.0)
    y = g.op("Transpose", y, shape=(1, 12, 2, 8), perm=[0, 2, 1, 3])
    y = g.op("Reshape", y, g.constant(np.array([1, 12, 16])), shape=(1, 12, 16))
    return g.model(g.quantise(g.op("MatMul", y, g.weight((16, 16), 1), shape=(1, 12, 16)), 3.0))


def detector_block() -> onnx.ModelProto:
    """A part of a YOLO in full integers: SiLU, a split, two equal branches and a concatenation."""
    g = QuantisedGraph(np.random.default_rng(9), "int8", per_channel=False)

    def silu(x: str, out: int, kernel: int, weight: str | None = None) -> str:
        n, c, h, w = g.shapes[x]
        weight = weight or g.weight((out, c, kernel, kernel), 0)
        y = g.op("Conv", x, weight, shape=(n, out, h, w), kernel_shape=[kernel] * 2, pads=[kernel // 2] * 4)
        y = g.quantise(y, 6.0)
        gate = g.quantise(g.op("Sigmoid", y, shape=g.shapes[y]), 1.0)
        return g.quantise(g.op("Mul", y, gate, shape=g.shapes[y]), 6.0)

    x = silu(g.input(1, 3, 12, 10), 16, 3)
    half = (1, 8, 12, 10)
    parts = []
    for start in (0, 8):
        bounds = [g.constant(np.array([v])) for v in (start, start + 8, 1)]
        parts.append(g.op("Slice", x, *bounds, shape=half))
    shared = g.weight((8, 8, 3, 3), 0)
    one, other = (silu(parts[1], 8, 3, shared) for _ in range(2))
    total = g.quantise(g.op("Add", parts[1], silu(one, 8, 3), shape=half), 6.0)
    y = g.op("Concat", *parts, total, other, shape=(1, 32, 12, 10), axis=1)
    y = silu(g.quantise(y, 6.0), 16, 1)
    return g.model(g.quantise(g.op("Conv", y, g.weight((5, 16, 1, 1), 0), shape=(1, 5, 12, 10)), 6.0))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["host", "rpi4"])
@pytest.mark.parametrize("made", [attention, detector_block], ids=lambda made: made.__name__)
def test_tensors_that_resemble_each_other_are_no_faults(
    made: Callable[[], onnx.ModelProto], target: str
) -> None:
    blocks = compared(made(), resolve(target))
    assert len(blocks.found) >= len(blocks.hidden)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("made", [attention, detector_block], ids=lambda made: made.__name__)
def test_one_faulty_layer_is_found(
    made: Callable[[], onnx.ModelProto], layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scale is wrong by two percent."""
    write, calls = Sum.write, []

    def wrong(self: Sum, bb: Any) -> object:
        calls.append(self)
        return write(replace(self, scale=self.scale * 1.02) if len(calls) == layer else self, bb)

    monkeypatch.setattr(Sum, "write", wrong)
    with pytest.raises(ParityError, match="halfway between two steps"):
        compared(made())
    assert len(calls) >= layer


def test_a_part_may_call_a_function_of_the_model() -> None:
    """A suppression of boxes is one, in each quantised SSD."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 17, "own": 1]>
        g (float[3] x) => (float[3] y) { z = Abs(x) y = own.Twice(z) }
        <domain: "own", opset_import: ["": 17]>
        Twice (a) => (b) { b = Add(a, a) }
    """)
    z = np.arange(3, dtype=np.float32)
    (found,) = Cuts(model).compute(["y"], {"z": z})
    np.testing.assert_array_equal(found, 2 * z)
