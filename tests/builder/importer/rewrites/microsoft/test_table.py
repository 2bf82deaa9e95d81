"""Models as ONNX Runtime's own optimisers save them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from benchmarks.architectures import generate
from benchmarks.conformance.unchecked import run_as_shipped
from builder.errors import UnsupportedOperatorError
from builder.importer import import_onnx
from builder.importer.rewrites.microsoft import CONTRIB, DOMAIN
from tests.builder.importer.rewrites.microsoft.contrib import run_unoptimised

LEVEL = onnxruntime.GraphOptimizationLevel


def optimised(
    model: onnx.ModelProto, level: onnxruntime.GraphOptimizationLevel, folder: Path
) -> onnx.ModelProto:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimised.onnx")


def domains(model: onnx.ModelProto) -> set[str]:
    return {node.domain for node in model.graph.node}


def small_bert() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = generate("bert", layers=2, hidden=32, heads=4, vocabulary=50, positions=16)
    random = np.random.RandomState(0)
    feeds = {
        value.name: np.ones((1, 6), "i8") if "mask" in value.name else random.randint(0, 2, (1, 6))
        for value in model.graph.input
    }
    return model, feeds


def test_the_table_names_operators_of_onnx_runtime() -> None:
    known = {(s.domain, s.name) for s in runtime.get_all_operator_schema()}
    ours = {"LayerNormalization", "SimplifiedLayerNormalization"}
    assert {name for name in CONTRIB if (DOMAIN, name) not in known} <= ours


@pytest.mark.slow
def test_a_transformer_that_onnx_runtime_optimised_ships(tmp_path: Path) -> None:
    model, feeds = small_bert()
    [wanted, *_] = run_unoptimised(model, feeds)
    fused = optimised(model, LEVEL.ORT_ENABLE_EXTENDED, tmp_path)
    assert DOMAIN in domains(fused)
    np.testing.assert_allclose(run_as_shipped(fused, feeds)[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_transformer_with_whole_attentions_in_float16_ships(tmp_path: Path) -> None:
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    model, feeds = small_bert()
    [wanted, *_] = run_unoptimised(model, feeds)
    onnx.save(model, tmp_path / "bert.onnx")
    path = str(tmp_path / "bert.onnx")
    fused = optimizer.optimize_model(path, model_type="bert", num_heads=4, hidden_size=32, opt_level=0)
    fused.convert_float_to_float16(keep_io_types=True)
    assert {"Attention", "EmbedLayerNormalization"} <= {node.op_type for node in fused.model.graph.node}
    np.testing.assert_allclose(run_as_shipped(fused.model, feeds)[0], wanted, rtol=0.02, atol=0.02)


def test_fused_convolutions_are_imported(tmp_path: Path) -> None:
    model = generate("mobilenetv2", size=32, classes=4)
    fused = optimised(model, LEVEL.ORT_ENABLE_EXTENDED, tmp_path)
    assert DOMAIN in domains(fused)
    imported = import_onnx(fused)
    x = {imported.inputs[0].name: np.random.RandomState(0).randn(1, 3, 32, 32).astype("f4")}
    wanted = run_unoptimised(model, x)[0]
    np.testing.assert_allclose(run_unoptimised(imported.onnx, x)[0], wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("domain", ["com.microsoft.nchwc", "com.ms.internal.nhwc"])
def test_a_layout_for_one_processor_is_refused_with_what_to_do(domain: str) -> None:
    # As ONNX Runtime writes it with ORT_ENABLE_ALL, on processors for which it blocks channels.
    nodes = [
        onnx.helper.make_node("ReorderInput", ["x"], ["blocked"], name="reorder", domain=domain),
        onnx.helper.make_node("Conv", ["blocked", "w"], ["conv"], name="conv", domain=domain),
        onnx.helper.make_node("ReorderOutput", ["conv"], ["y"], name="back", domain=domain, channels=8),
    ]
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [1, 8, 4, 4]) for name in "xy")
    weight = onnx.numpy_helper.from_array(np.ones((8, 8, 1, 1), np.float32), "w")
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(domain, 1)]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], [weight])
    with pytest.raises(UnsupportedOperatorError, match="made for one processor") as caught:
        import_onnx(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8))
    assert "ORT_ENABLE_EXTENDED" in (caught.value.hint or "")


def test_a_refused_operator_does_not_accuse_its_readers() -> None:
    nodes = [
        onnx.helper.make_node("Sampling", ["x"], ["s"], name="sample", domain=DOMAIN),
        onnx.helper.make_node("Add", ["s", "s"], ["t"], name="add"),
        onnx.helper.make_node("Relu", ["t"], ["y"], name="relu"),
    ]
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [2, 3]) for name in "xy")
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(DOMAIN, 1)]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y])
    with pytest.raises(UnsupportedOperatorError, match="1 operator cannot be imported") as caught:
        import_onnx(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8))
    assert "Sampling (sample)" in str(caught.value)
