"""Which products are computed in bfloat16, and what the report and the bundle say about it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from agent.errors import SelfTestError
from agent.runtime.self_test import check_samples
from builder.codegen.kernel_object import compile_object
from builder.codegen.link.linker import link
from builder.compiling.compilation import compile
from builder.compiling.lower import lower
from builder.errors import ModelError, TargetError
from builder.importer import import_onnx
from builder.kernels.passes.bfloats import rounds_products
from builder.quantising.bfloats import FloatLayers, Reason, to_bfloats
from builder.running.in_memory import executor
from builder.target.device_target import resolve
from tests.builder.kernels.tile_machine import require_x86

COOPERLAKE = "llvm -mtriple=x86_64-linux-gnu -mcpu=cooperlake"
value = helper.make_tensor_value_info


def network(rows: int = 8) -> onnx.ModelProto:
    """Return two products of `rows` with constant weights, and one of computed matrices."""
    rng = np.random.default_rng(0)
    weights = {"w0": (64, 32), "w1": (32, 64), "b1": (64,)}
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"], name="first"),
        helper.make_node("Gelu", ["h"], ["g"], name="gelu"),
        helper.make_node("Gemm", ["g", "w1", "b1"], ["d"], name="second"),
        helper.make_node("Transpose", ["d"], ["t"], perm=[1, 0], name="turn"),
        helper.make_node("MatMul", ["d", "t"], ["y"], name="scores"),
    ]
    constants = [
        numpy_helper.from_array((rng.standard_normal(shape) / 8).astype("f4"), name)
        for name, shape in weights.items()
    ]
    ends = [value("x", TensorProto.FLOAT, [rows, 64]), value("y", TensorProto.FLOAT, [rows, rows])]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def convolutions(rows: int | None = None) -> onnx.ModelProto:
    """Return two convolutions, and for `rows` pictures the product of their means with a matrix."""
    rng = np.random.default_rng(0)
    constants = [
        numpy_helper.from_array((rng.standard_normal(shape) / 4).astype("f4"), name)
        for name, shape in (("w0", (16, 4, 3, 3)), ("w1", (16, 16, 1, 1)), ("w2", (16, 10)))
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c"], name="first", pads=[1] * 4),
        helper.make_node("Conv", ["c", "w1"], ["y" if rows is None else "d"], name="pointwise"),
    ]
    if rows is not None:
        nodes += [
            helper.make_node("GlobalAveragePool", ["d"], ["p"]),
            helper.make_node("Flatten", ["p"], ["f"]),
            helper.make_node("MatMul", ["f", "w2"], ["y"], name="scores"),
        ]
    count = rows or 1
    ends = [
        value("x", TensorProto.FLOAT, [count, 4, 8, 8]),
        value("y", TensorProto.FLOAT, [count, 16, 8, 8] if rows is None else [count, 10]),
    ]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants[: len(nodes)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_the_report_says_what_stays_in_float32() -> None:
    found = to_bfloats(import_onnx(network()), resolve(COOPERLAKE))
    assert rounds_products(found.model.mod)
    assert found.report.total_macs == 8 * (2 * 64 * 32 + 8 * 64)
    assert found.report.bfloat_macs == 8 * 2 * 64 * 32
    assert found.report.floats == (FloatLayers("MatMul", Reason.FORM, 1, 8 * 8 * 64),)
    assert found.report.lines() == [
        "  work in bfloat16  88.9 % of 0.0 million multiply-adds",
        "  in float32        1 MatMul (11.1 %): not rows times a constant matrix",
    ]
    document = json.loads(json.dumps(found.report.document()))
    assert document["precision"] == "bf16"
    assert document["floats"][0]["reason"] == "not rows times a constant matrix"


@pytest.mark.parametrize(
    ("cpu", "advice"),
    [
        ("cooperlake", "--precision int8"),
        ("sapphirerapids", "int8, whose convolutions run on tiles too, or fp16"),
    ],
)
def test_convolutions_stay_in_float32_and_the_report_says_so(cpu: str, advice: str) -> None:
    target = resolve(f"llvm -mtriple=x86_64-linux-gnu -mcpu={cpu}")
    report = to_bfloats(import_onnx(convolutions(2)), target).report
    assert report.bfloat_macs == 2 * 16 * 10
    [layers] = report.floats
    assert (layers.operator, layers.reason, layers.nodes) == ("Conv", Reason.OPERATOR, 2)
    _, conv, note = report.lines()
    assert conv.endswith("2 Conv (99.7 %): only matrix products are computed in bfloat16")
    assert note.startswith("  note: less than half of the work is in bfloat16")
    assert advice in note


def test_what_the_report_says_is_what_was_compiled() -> None:
    model = to_bfloats(import_onnx(convolutions(2)), resolve(COOPERLAKE)).model
    package = compile(model, COOPERLAKE)
    kernels = {node.name: str(node.kernels) for node in package.nodes}
    assert "bfloat_matmul" in kernels["scores"]
    assert "bfloat" not in kernels["first"] + kernels["pointwise"]


def test_a_bundle_has_half_the_weights_and_needs_the_feature() -> None:
    told: list[str] = []
    model = import_onnx(network())
    package = compile(to_bfloats(model, resolve(COOPERLAKE)).model, COOPERLAKE, progress=told.append)
    floats = compile(model, COOPERLAKE)
    sizes = [len(each.members["mod.params"]) for each in (package, floats)]
    assert 0.45 < sizes[0] / sizes[1] < 0.6
    assert "avx512_bf16" in package.manifest.target.features
    error = package.manifest.provenance.parity_error
    assert error is not None
    assert 1e-4 < error < 5e-2
    assert any("agree in 16 bits" in line for line in told)


@pytest.mark.parametrize("name", ["host", "x86-64-v3"])
def test_a_self_test_passes_with_the_instruction_and_with_its_twin(name: str) -> None:
    """The limits in the manifest are those that were granted when the bundle was compiled."""
    require_x86()
    model = to_bfloats(import_onnx(network()), resolve(COOPERLAKE)).model
    package, device = compile(model, COOPERLAKE), resolve(name)
    kernels = lower(model.mod, resolve(COOPERLAKE)).kernels
    code = link(compile_object(kernels, device), device)
    members, samples = package.members, package.manifest.samples
    module = executor(code, members["mod.json"], members["mod.params"])
    recorded = members["samples/inputs.params"], members["samples/outputs.params"]
    error = check_samples(module, package.manifest.outputs, samples, *recorded)
    assert 1e-4 < error <= samples.rtol
    with pytest.raises(SelfTestError):
        check_samples(module, package.manifest.outputs, replace(samples, rtol=error / 2), *recorded)


def test_tiles_of_bfloat16_are_a_feature_of_the_bundle() -> None:
    assert "amx_bf16" in resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=sapphirerapids").features


@pytest.mark.parametrize("target", ["rpi5", "x86-64-v3", "llvm -mtriple=x86_64-linux-gnu -mcpu=cascadelake"])
def test_a_target_without_the_instruction_is_refused(target: str) -> None:
    model = import_onnx(network())
    with pytest.raises(TargetError, match="expected a target that multiplies bfloat16") as caught:
        to_bfloats(model, resolve(target))
    assert ("--precision fp16" if target == "rpi5" else "weights-fp16") in str(caught.value.hint)
    marked = to_bfloats(model, resolve(COOPERLAKE)).model
    with pytest.raises(TargetError, match="expected a target that multiplies bfloat16"):
        compile(marked, target)


def test_products_that_would_be_slower_are_not_counted() -> None:
    target = resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=emeraldrapids -mattr=-amx-tile")
    with pytest.raises(ModelError, match="of at most 4 rows, got none") as caught:
        to_bfloats(import_onnx(network()), target)
    assert "--precision fp16" in str(caught.value.hint)
    with_tiles = resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=emeraldrapids")
    report = to_bfloats(import_onnx(network()), with_tiles).report
    assert [(layers.operator, layers.reason) for layers in report.floats] == [("MatMul", Reason.FORM)]
    with pytest.raises(ModelError, match="of at most 4 or at least 8 rows, got none"):
        to_bfloats(import_onnx(network(6)), with_tiles)


def test_a_model_without_products_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"expected matrix products with constant weights \(MatMul, Gemm\), got"
    ):
        to_bfloats(import_onnx(convolutions()), resolve(COOPERLAKE))
    tiles = resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=sapphirerapids")
    with pytest.raises(ModelError, match="of at most 4 or at least 8 rows, got none"):
        to_bfloats(import_onnx(convolutions()), tiles)


def test_a_product_that_would_be_slower_is_named() -> None:
    rng = np.random.default_rng(0)
    constants = [
        numpy_helper.from_array(rng.standard_normal(shape).astype("f4"), name)
        for name, shape in (("w0", (64, 32)), ("w1", (32, 64)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"], name="six rows"),
        helper.make_node("ReduceMax", ["h"], ["m"], axes=[0], keepdims=1),
        helper.make_node("MatMul", ["m", "w1"], ["y"], name="one row"),
    ]
    ends = [value("x", TensorProto.FLOAT, [6, 64]), value("y", TensorProto.FLOAT, [1, 64])]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    xeon = resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=emeraldrapids")
    report = to_bfloats(import_onnx(model), xeon).report
    assert report.floats == (FloatLayers("MatMul", Reason.SLOWER, 1, 6 * 64 * 32),)
    assert report.lines()[1].endswith("1 MatMul (85.7 %): bfloat16 would be slower")
