"""Comparison of a rewritten model with the original in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from builder.importer import import_onnx

RTOL, ATOL = 1e-4, 1e-5


@pytest.fixture
def agrees(run_onnx: Any, run_relax: Any) -> Callable[..., onnx.ModelProto]:
    """Import a model; compare the normalised form and the Relax module with the original in ONNX Runtime."""

    def check(model: onnx.ModelProto, *inputs: NDArray[Any], atol: float = ATOL) -> onnx.ModelProto:
        imported = import_onnx(model)
        assert imported.unrewritten == ()
        weights = {tensor.name for tensor in model.graph.initializer}
        names = [value.name for value in model.graph.input if value.name not in weights]
        assert [spec.name for spec in imported.inputs] == names
        feeds = dict(zip(names, inputs, strict=True))
        expected = run_onnx(model, feeds)
        for got in (run_onnx(imported.onnx, feeds), run_relax(imported.mod, inputs)):
            for found, wanted, spec in zip(got, expected, imported.outputs, strict=True):
                assert found.dtype == wanted.dtype
                assert found.shape == wanted.shape == spec.shape
                np.testing.assert_allclose(found, wanted, rtol=RTOL, atol=atol)
        return imported.onnx

    return check


@pytest.fixture
def noise() -> Callable[..., NDArray[np.float32]]:
    random = np.random.default_rng(7)
    return lambda *shape: random.standard_normal(shape).astype(np.float32)
