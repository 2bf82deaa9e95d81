"""What is taken for rounding in a quantised model, and what for a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from tvm import te, tirx

from builder import compile
from builder.codegen.graph_codegen import generate
from builder.codegen.kernel_object import compile_object
from builder.codegen.link.linker import link
from builder.compiling import parity, tolerances
from builder.compiling.block_parity import Blocks, compare_blocks, is_quantised
from builder.compiling.lower import lower
from builder.errors import ParityError
from builder.importer import import_onnx
from builder.kernels.decisions import Schedules
from builder.kernels.passes import integer_products
from builder.kernels.passes.integer_forms import Sum
from builder.kernels.spaces import integer_convolution, integer_winograd, quantisation
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.padded_copy import pad
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.compiling.debugging import debug_run
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


def test_the_self_test_does_not_follow_from_roundings_of_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Integer outputs of which the reference rounds one otherwise have no relative error."""
    compare = parity.compare
    monkeypatch.setattr(parity, "compare", lambda *given: replace(compare(*given), error=float("inf")))
    model = import_onnx(random_model(1))
    assert compile(model).manifest.samples.rtol == tolerances.STEP


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
    blocks = compare_blocks(model, {"x": x}, [ours], [ours.astype("float32")])
    if accepted:
        blocks.check()
    else:
        with pytest.raises(ParityError):
            blocks.check()


def test_a_tensor_that_is_not_found_shows_at_the_output() -> None:
    model, x = step_model(), np.linspace(-50, 50, 1000, dtype="float32").reshape(1, 1000)
    wrong = np.roll(np.round(x), 500).astype("int8")
    blocks = compare_blocks(model, {"x": x}, [wrong], [wrong.astype("float32")])
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
    blocks = compare_blocks(model, {"x": x}, [ours], [ours * np.float32(3)])
    blocks.check()
    assert (len(blocks.found), len(blocks.hidden)) == (1, 1)
    ours[0, :5] += 1
    with pytest.raises(ParityError):
        compare_blocks(model, {"x": x}, [ours], [ours * np.float32(3)]).check()


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
