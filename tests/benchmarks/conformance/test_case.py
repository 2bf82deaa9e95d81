"""Cases go through a folder unchanged."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.conformance.case import Array, Case, is_written, read, write


def test_every_kind_of_tensor_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "some.onnx"
    path.write_bytes(b"model")
    inputs: dict[str, Array] = {
        "float": np.array([1.5, np.nan], np.float32),
        "scalar": np.array(3, np.int64),
        "text": np.array(["a", "bc"], object),
        "bfloat": np.array([1.5, -2], ml_dtypes.bfloat16),
        "eight bits": np.array([[0.5]], ml_dtypes.float8_e4m3fn),
        "flags": np.array([True]),
    }
    folder = tmp_path / "case"
    assert not is_written(folder)
    write(folder, Case("onnx_nodes", "a/b", "Add", path, inputs, [np.zeros((0, 2))], 1e-3, 1e-7, "why"))
    assert is_written(folder)
    found = read(folder)
    assert (found.name, found.operator, found.apart) == ("a/b", "Add", "why")
    assert (found.rtol, found.atol) == (1e-3, 1e-7)
    assert found.model.read_bytes() == b"model"
    assert list(found.inputs) == list(inputs)
    for name, value in inputs.items():
        assert found.inputs[name].shape == value.shape
        if value.dtype.kind != "O":
            assert found.inputs[name].dtype == value.dtype
        np.testing.assert_array_equal(found.inputs[name], value)
    [output] = found.outputs
    assert output.shape == (0, 2)
    assert output.dtype == np.float64
