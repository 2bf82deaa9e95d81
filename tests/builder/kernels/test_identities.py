"""Maxima of numbers that are all minus infinity, and minima of infinities."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from benchmarks.conformance.unchecked import run_as_shipped

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'
REDUCED = [
    ("4,2", "ReduceMax<axes=[1],keepdims=0>(x)"),  # fewer columns than a vector has lanes
    ("7,19", "ReduceMax<axes=[1],keepdims=0>(x)"),  # a row that is completed to whole vectors
    ("40,3", "ReduceMax<axes=[0],keepdims=0>(x)"),
    ("7,19", "ReduceMin<axes=[1],keepdims=0>(x)"),
    ("40,3", "ReduceMin<axes=[0],keepdims=0>(x)"),
    ("1,3,6,6", "MaxPool<kernel_shape=[3,3],pads=[1,1,1,1]>(x)"),  # TVM's own border
    ("1,16,6,6", "MaxPool<kernel_shape=[3,3],pads=[1,1,1,1]>(x)"),
    ("1,3,4,4,4", "MaxPool<kernel_shape=[3,3,3],pads=[1,1,1,1,1,1]>(x)"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "call"), REDUCED, ids=[f"{call.split('<')[0]} {s}" for s, call in REDUCED])
def test_an_extreme_of_infinities_is_infinite(shape: str, call: str) -> None:
    dims = ",".join("abcde"[: shape.count(",") + 1 if "Pool" in call else 1])
    text = f"{HEAD} g (float[{shape}] x) => (float[{dims}] y) {{ y = {call} }}"
    number = np.float32(np.inf if "Min" in call else -np.inf)
    x = np.full([int(extent) for extent in shape.split(",")], number)
    [y] = run_as_shipped(onnx.parser.parse_model(text), {"x": x})
    assert (y == number).all()


@pytest.mark.slow
def test_a_row_without_a_finite_number_is_found() -> None:
    """As Attention finds rows that its mask hides; a mask with the most negative number hides none."""
    text = f"""{HEAD} g (float[3,5] x, float low) => (bool[3,1] y) {{
        top = ReduceMax<axes = [1]>(x) y = Equal(top, low) }}"""
    x = np.full((3, 5), -np.inf, np.float32)
    x[1, 2] = np.finfo(np.float32).min
    [y] = run_as_shipped(onnx.parser.parse_model(text), {"x": x, "low": np.float32(-np.inf)})
    assert y.ravel().tolist() == [True, False, True]
