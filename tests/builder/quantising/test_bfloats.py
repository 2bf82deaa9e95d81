"""Which products are computed in bfloat16, and what the report and the bundle say about it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.compiling.compilation import compile
from builder.errors import ModelError, TargetError
from builder.importer import import_onnx
from builder.kernels.passes.bfloats import rounds_products
from builder.quantising.bfloats import to_bfloats
from builder.target.device_target import resolve

COOPERLAKE = "llvm -mtriple=x86_64-linux-gnu -mcpu=cooperlake"
value = helper.make_tensor_value_info


def network() -> onnx.ModelProto:
    """Return two products with constant weights, and one of computed matrices."""
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
    ends = [value("x", TensorProto.FLOAT, [8, 64]), value("y", TensorProto.FLOAT, [8, 8])]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def convolution() -> onnx.ModelProto:
    """Return a model without matrix products."""
    weight = numpy_helper.from_array(np.ones((4, 4, 1, 1), "f4"), "w")
    ends = [value(name, TensorProto.FLOAT, [1, 4, 4, 4]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], name="only")], "net", ends[:1], ends[1:], [weight]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_the_report_says_what_stays_in_float32() -> None:
    found = to_bfloats(import_onnx(network()), resolve(COOPERLAKE))
    assert rounds_products(found.model.mod)
    assert found.report.total_macs == 8 * (2 * 64 * 32 + 8 * 64)
    assert found.report.bfloat_macs == 8 * 2 * 64 * 32
    assert found.report.floats == {"MatMul": 1}
    assert found.report.lines() == [
        "  work in bfloat16  88.9 % of 0.0 million multiply-adds",
        "  in float32        1 MatMul",
    ]
    assert found.report.document()["precision"] == "bf16"


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


def test_tiles_of_bfloat16_are_a_feature_of_the_bundle() -> None:
    assert "amx_bf16" in resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=sapphirerapids").features


@pytest.mark.parametrize("target", ["rpi5", "x86-64-v3", "llvm -mtriple=x86_64-linux-gnu -mcpu=cascadelake"])
def test_a_target_without_the_instruction_is_refused(target: str) -> None:
    model = import_onnx(network())
    with pytest.raises(TargetError, match="expected a target that multiplies bfloat16") as caught:
        to_bfloats(model, resolve(target))
    assert "weights-fp16" in str(caught.value.hint)
    marked = to_bfloats(model, resolve(COOPERLAKE)).model
    with pytest.raises(TargetError, match="expected a target that multiplies bfloat16"):
        compile(marked, target)


def test_products_that_would_be_slower_are_not_counted() -> None:
    target = resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=emeraldrapids -mattr=-amx-tile")
    with pytest.raises(ModelError, match="of at most 4 rows, got none"):
        to_bfloats(import_onnx(network()), target)
    with_tiles = resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=emeraldrapids")
    assert to_bfloats(import_onnx(network()), with_tiles).report.floats == {"MatMul": 1}


def test_a_model_without_products_is_refused() -> None:
    with pytest.raises(ModelError, match="expected matrix products with constant weights"):
        to_bfloats(import_onnx(convolution()), resolve(COOPERLAKE))
