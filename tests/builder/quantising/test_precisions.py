"""Weights of few bits in a model that is compiled at several sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.compiling.options import Options
from builder.errors import ModelError
from builder.importer import import_onnx
from builder.quantising.precisions import Quantiser
from builder.quantising.weights_only import WEIGHTS_PRECISIONS, WeightsPrecision, WeightsReport
from builder.running.local_run import Runner
from builder.target.device_target import resolve
from tests import changing_models

WIDTH = 64


def layers() -> onnx.ModelProto:
    """Two layers on each row of a batch: `x` [batch, 64] to `y` [batch, 64]."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for name in "ab"}
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", WIDTH))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", WIDTH))],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("precision", WEIGHTS_PRECISIONS)
def test_each_size_has_the_same_weights(precision: WeightsPrecision) -> None:
    weights = Quantiser(resolve("host"), Options(precision=precision), lambda _: None)
    models = [weights(import_onnx(layers(), input_shapes={"x": (batch, WIDTH)})) for batch in (4, 2, 1)]
    assert isinstance(weights.report, WeightsReport)
    assert weights.report.quantised == 2 * WIDTH * WIDTH
    stored = [sorted(t.raw_data for t in model.onnx.graph.initializer) for model in models]
    assert stored[0] == stored[1] == stored[2]
    x = np.random.default_rng(1).standard_normal((4, WIDTH)).astype(np.float32)
    whole = ort.InferenceSession(models[0].onnx.SerializeToString()).run(None, {"x": x})[0]
    for model, batch in zip(models[1:], (2, 1), strict=True):
        part = ort.InferenceSession(model.onnx.SerializeToString()).run(None, {"x": x[:batch]})[0]
        np.testing.assert_allclose(part, whole[:batch], rtol=1e-3, atol=1e-4)


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(ModelError, match="float32 weights of matrix products"):
        Quantiser(resolve("host"), Options(precision="weights-int8"), lambda _: None)(
            import_onnx(changing_models.largest(), input_shapes={"x": (1, 4)})
        )


@pytest.mark.slow
def test_a_bundle_of_buckets_with_weights_of_few_bits(tmp_path: Path) -> None:
    sizes = {"batch": (2, 4)}
    small = changing_models.compiled(
        layers(), tmp_path, "x:[1..4,64]", buckets=sizes, precision="weights-int8"
    )
    # Two layers of one byte for each weight, and the scales.
    assert len(small.members["mod.params"]) < 2 * WIDTH * WIDTH * 1.2
    runner = Runner(small)
    session = ort.InferenceSession(layers().SerializeToString())
    for batch in (1, 2, 3, 4):
        x = np.random.default_rng(batch).standard_normal((batch, WIDTH)).astype(np.float32)
        [got], [wanted] = runner({"x": x}).outputs.values(), session.run(None, {"x": x})
        assert got.shape == wanted.shape
        assert np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()
