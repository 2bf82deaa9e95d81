"""Whole models give the same results after import."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from benchmarks.architectures import generate
from builder.errors import ShapeError
from builder.importer import ImportedModel, import_onnx

pytestmark = pytest.mark.slow

# A folder of published ONNX models, which the project may not redistribute.
MODELS_VARIABLE = "EDGEBUNDLE_MODELS"
RELATIVE_ERROR = 1e-4
BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")

# Each network is generated once: its random weights take a second or two.
network = functools.cache(generate)

# Narrow networks have all layers of the published ones, and a sixteenth of their weights.
SMALL: dict[str, dict[str, int]] = {
    "resnet18": {"size": 32, "classes": 10, "width": 16},
    "resnet50-v2": {"size": 32, "classes": 10, "width": 16},
    "mobilenetv2": {"size": 32, "classes": 10},
}


def relative_error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Largest difference divided by the largest magnitude, or by 1e-2 if that is larger.

    A detector that finds nothing returns far smaller probabilities, and ONNX Runtime's sigmoid has an
    absolute error of 1e-7.
    """
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-2))


def assert_same(
    run_onnx: Any, original: onnx.ModelProto, model: ImportedModel, feeds: Mapping[str, Any]
) -> None:
    expected = run_onnx(original, feeds)
    found = run_onnx(model.onnx, feeds)
    assert [spec.name for spec in model.outputs] == [value.name for value in original.graph.output]
    for want, got, spec in zip(expected, found, model.outputs, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape == spec.shape
        assert relative_error(got, want) < RELATIVE_ERROR


def assert_built_the_same(
    run_onnx: Any, run_relax: Any, original: onnx.ModelProto, model: ImportedModel, feeds: Mapping[str, Any]
) -> None:
    found = run_relax(model.mod, [feeds[spec.name] for spec in model.inputs])
    for want, got in zip(run_onnx(original, feeds), found, strict=True):
        assert relative_error(got, want) < RELATIVE_ERROR


def noise(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "width"), [("resnet18", 64), ("resnet50", 16), ("resnet50-v2", 16), ("mobilenetv2", None)]
)
def test_image_networks_of_full_depth_and_resolution_keep_their_numbers(
    name: str, width: int | None, run_onnx: Any
) -> None:
    original = network(name, **({} if width is None else {"width": width}))
    model = import_onnx(original)
    assert model.inputs[0].shape == (1, 3, 224, 224)
    assert model.outputs[0].shape == (1, 1000)
    assert_same(run_onnx, original, model, {model.inputs[0].name: noise(1, 3, 224, 224)})


@pytest.mark.parametrize("name", SMALL)
def test_small_image_networks_build_to_the_same_numbers(name: str, run_onnx: Any, run_relax: Any) -> None:
    original = network(name, **SMALL[name])
    model = import_onnx(original)
    feeds = {model.inputs[0].name: noise(1, 3, 32, 32)}
    assert_built_the_same(run_onnx, run_relax, original, model, feeds)


def test_resnet50_v2_needs_no_shape_and_notes_the_chosen_batch() -> None:
    lines: list[str] = []
    model = import_onnx(network("resnet50-v2", **SMALL["resnet50-v2"]), progress=lines.append)
    assert [(spec.name, spec.datatype, spec.shape) for spec in model.inputs] == [
        ("data", "FP32", (1, 3, 32, 32))
    ]
    assert model.notes == tuple(lines)
    assert len(lines) == 1
    assert "'data' [N,3,32,32]" in lines[0]


def test_batch_norms_that_follow_a_convolution_are_folded_and_the_others_stay() -> None:
    def count(name: str) -> int:
        nodes = import_onnx(network(name, **SMALL[name])).onnx.graph.node
        return sum(node.op_type == "BatchNormalization" for node in nodes)

    assert count("resnet18") == 0
    assert count("resnet50-v2") == 18


def test_a_given_batch_is_used(run_onnx: Any) -> None:
    original = network("resnet50-v2", **SMALL["resnet50-v2"])
    model = import_onnx(original, input_shapes={"data": (2, 3, 32, 32)})
    assert model.outputs[0].shape == (2, 10)
    assert model.notes == ()
    assert_same(run_onnx, original, model, {"data": noise(2, 3, 32, 32)})


@pytest.fixture(scope="module")
def bert() -> onnx.ModelProto:
    return network("bert", layers=2, hidden=48, heads=4, vocabulary=100, positions=64)


def tokens(length: int) -> dict[str, NDArray[np.int64]]:
    random = np.random.default_rng(2)
    mask = np.ones((1, length), np.int64)
    mask[0, length // 2 :] = 0
    return {
        "input_ids": random.integers(0, 100, (1, length)),
        "attention_mask": mask,
        "token_type_ids": random.integers(0, 2, (1, length)),
    }


def test_bert_with_three_shapes(bert: onnx.ModelProto, run_onnx: Any, run_relax: Any) -> None:
    model = import_onnx(bert, input_shapes=dict.fromkeys(BERT_INPUTS, (1, 12)))
    assert [(spec.name, spec.datatype, spec.shape) for spec in model.inputs] == [
        (name, "INT64", (1, 12)) for name in BERT_INPUTS
    ]
    assert [spec.shape for spec in model.outputs] == [(1, 12, 48), (1, 48)]
    assert not {"Shape", "ConstantOfShape", "Range"} & {node.op_type for node in model.onnx.graph.node}
    assert_same(run_onnx, bert, model, tokens(12))
    assert_built_the_same(run_onnx, run_relax, bert, model, tokens(12))


def test_one_shape_of_bert_gives_the_other_two(bert: onnx.ModelProto) -> None:
    model = import_onnx(bert, input_shapes={"input_ids": (1, 12)})
    assert {spec.shape for spec in model.inputs} == {(1, 12)}


def test_bert_without_shapes_names_the_missing_ones(bert: onnx.ModelProto) -> None:
    with pytest.raises(ShapeError) as caught:
        import_onnx(bert)
    assert all(name in str(caught.value) for name in BERT_INPUTS)
    assert "attention_mask:[batch_size,sequence_length]" in (caught.value.hint or "")


def test_a_sequence_longer_than_the_positions_is_refused(bert: onnx.ModelProto) -> None:
    with pytest.raises(Exception, match="shape"):
        import_onnx(bert, input_shapes=dict.fromkeys(BERT_INPUTS, (1, 65)))


def test_importing_twice_gives_the_same_bytes() -> None:
    models = [import_onnx(network("mobilenetv2", **SMALL["mobilenetv2"])) for _ in range(2)]
    first, second = (model.onnx.SerializeToString(deterministic=True) for model in models)
    assert first == second
    assert models[0].source_sha256 == models[1].source_sha256


def test_an_unused_input_stays(make_model: Any) -> None:
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    model = import_onnx(make_model([node], {"x": [3], "unused": [2]}, {"y": [3]}))
    assert [spec.name for spec in model.inputs] == ["x", "unused"]
    assert len(model.mod["main"].params) == 2


def test_an_output_may_be_an_input_or_a_constant_of_the_model(make_model: Any, run_relax: Any) -> None:
    nodes = [
        onnx.helper.make_node("Identity", ["x"], ["same"]),
        onnx.helper.make_node("Add", ["w", "w"], ["fixed"]),
    ]
    weights = {"w": np.array([1, 2], np.float32)}
    model = import_onnx(make_model(nodes, {"x": [3]}, {"same": [3], "fixed": [2]}, weights))
    same, fixed = run_relax(model.mod, [np.array([5, 6, 7], np.float32)])
    assert same.tolist() == [5, 6, 7]
    assert fixed.tolist() == [2, 4]


def test_import_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    import_onnx(network("mobilenetv2", **SMALL["mobilenetv2"]))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


PUBLISHED = ("mnist", "slim-320", "RFB-320", "yunet_n_320")


@pytest.mark.models
@pytest.mark.skipif(
    MODELS_VARIABLE not in os.environ,
    reason=f"{MODELS_VARIABLE} does not name the folder with {', '.join(PUBLISHED)}",
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_keep_their_numbers(name: str, run_onnx: Any) -> None:
    path = Path(os.environ[MODELS_VARIABLE]) / f"{name}.onnx"
    model = import_onnx(path)
    assert model.name == name
    assert model.notes == ()
    feeds = {spec.name: noise(*spec.shape) for spec in model.inputs}
    assert_same(run_onnx, onnx.load(path), model, feeds)


@pytest.mark.models
@pytest.mark.skipif(MODELS_VARIABLE not in os.environ, reason=f"{MODELS_VARIABLE} is not set")
@pytest.mark.parametrize("name", ["mnist", "slim-320", "yunet_n_320"])
def test_published_models_build_to_the_same_numbers(name: str, run_onnx: Any, run_relax: Any) -> None:
    path = Path(os.environ[MODELS_VARIABLE]) / f"{name}.onnx"
    model = import_onnx(path)
    feeds = {spec.name: noise(*spec.shape) for spec in model.inputs}
    assert_built_the_same(run_onnx, run_relax, onnx.load(path), model, feeds)


def calls(model: ImportedModel) -> set[str]:
    from tvm import relax
    from tvm.ir import Op

    found: set[str] = set()

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, Op):
            found.add(expr.op.name)

    relax.analysis.post_order_visit(model.mod["main"], visit)
    return found


def test_the_maximum_of_two_tensors_is_one_operator(make_model: Any, run_onnx: Any, run_relax: Any) -> None:
    nodes = [
        onnx.helper.make_node("Max", ["x", "w"], ["a"]),
        onnx.helper.make_node("Min", ["a", "x", "v"], ["y"]),
    ]
    weights = {"w": noise(3), "v": np.array(0.5, np.float32)}
    original = make_model(nodes, {"x": [2, 3]}, {"y": [2, 3]}, weights)
    model = import_onnx(original)
    assert calls(model) == {"relax.maximum", "relax.minimum"}
    assert_built_the_same(run_onnx, run_relax, original, model, {"x": noise(2, 3)})


def test_a_gather_has_no_code_that_computes_shapes(make_model: Any) -> None:
    node = onnx.helper.make_node("Gather", ["t", "i"], ["y"])
    inputs = {"i": ([2], onnx.TensorProto.INT64)}
    model = import_onnx(make_model([node], inputs, {"y": [2, 3]}, {"t": noise(5, 3)}))
    assert not {"relax.shape_of", "relax.shape_to_tensor"} & calls(model)
