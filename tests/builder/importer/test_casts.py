"""Casts of floats to integers, behind operators that they must not write out again."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from builder.importer import import_onnx


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_numbers_are_cut_towards_zero_and_wrap(
    make_model: Any, run_onnx: Any, run_relax: Any, name: str
) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(name))
    nodes = [helper.make_node("Neg", ["x"], ["z"]), helper.make_node("Cast", ["z"], ["y"], to=kind)]
    x = np.array([-0.3, 1.5, -300, -17, 90, -1e4, 0, 0.99], np.float32)
    model = make_model(nodes, {"x": [8]}, {"y": ([8], kind)})
    imported = import_onnx(model)
    (found,) = run_relax(imported.mod, [x])
    np.testing.assert_array_equal(found, run_onnx(model, {"x": x})[0])


def test_a_cast_reads_a_number_once(make_model: Any) -> None:
    nodes = [
        helper.make_node("Neg", ["x"], ["z"]),
        helper.make_node("Cast", ["z"], ["y"], to=onnx.TensorProto.INT8),
    ]
    text = import_onnx(make_model(nodes, {"x": [8]}, {"y": ([8], onnx.TensorProto.INT8)})).mod.script()
    assert text.count("R.astype") == 2
    assert "where" not in text
