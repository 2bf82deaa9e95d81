"""Models of ai.onnx.ml, and their comparison with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.importer import ImportedModel, import_onnx
from tests.builder.importer.classic.reference import register

NUMBERS = {"f4": TensorProto.FLOAT, "f8": TensorProto.DOUBLE, "i8": TensorProto.INT64}
LABELS = (TensorProto.INT64, TensorProto.STRING)


def model_of(
    nodes: Sequence[onnx.NodeProto], x: np.ndarray, outputs: Mapping[str, int], ml: int = 3
) -> onnx.ModelProto:
    """A model of nodes that read `x`; outputs have unknown shapes: labels one axis, scores two."""
    kind = NUMBERS[x.dtype.str[1:]]
    graph = helper.make_graph(
        list(nodes),
        "classic",
        [helper.make_tensor_value_info("x", kind, [None, *x.shape[1:]])],
        [
            helper.make_tensor_value_info(name, kind, [None] if kind in LABELS else [None, None])
            for name, kind in outputs.items()
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", ml)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.fixture
def equal_to_ort(run_onnx: Any, run_relax: Any) -> Callable[..., ImportedModel]:
    """Import a model for the size of `x`, and compare it with the original in ONNX Runtime."""
    register()

    def check(model: onnx.ModelProto, x: np.ndarray, rtol: float = 1e-5, atol: float = 1e-6) -> ImportedModel:
        expected = run_onnx(model, {"x": x})
        imported = import_onnx(model, input_shapes={"x": x.shape})
        found = run_relax(imported.mod, [x])
        for output, got, want in zip(imported.outputs, found, expected, strict=True):
            assert got.dtype == want.dtype, output.name
            assert got.shape == want.shape == output.shape, output.name
            np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=output.name)
        return imported

    return check
