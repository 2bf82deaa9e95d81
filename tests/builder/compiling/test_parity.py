"""The error of outputs against the reference, and when it is too large."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from builder.compiling.parity import Parity, check, compare, reference_outputs
from builder.errors import ModelError, ParityError


def error_of(ours: object, theirs: object, dtype: str = "float32") -> float:
    return compare(["y"], [np.array(ours, dtype)], [np.array(theirs, dtype)]).error


def test_the_error_is_relative_to_the_largest_value() -> None:
    assert error_of([10.0, 0.001], [10.0, 0.002]) == pytest.approx(1e-4, rel=1e-3)


def test_equal_outputs_have_no_error_even_infinities_and_nans() -> None:
    assert error_of([1, np.inf, np.nan], [1, np.inf, np.nan]) == 0


@pytest.mark.parametrize(("ours", "theirs"), [([np.nan], [1.0]), ([1.0], [np.nan]), ([np.inf], [-np.inf])])
def test_a_nan_or_a_wrong_infinity_never_passes(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ParityError):
        check(Parity(error_of(ours, theirs), "y", "reference"), 1e9)


def test_an_output_that_is_tiny_throughout_is_measured_against_the_floor() -> None:
    assert error_of([1.1e-5], [1.0e-5]) == pytest.approx(1e-4, rel=1e-3)


def test_integers_must_agree_exactly() -> None:
    assert error_of([1, 2], [1, 2], "int64") == 0
    assert error_of([1, 2], [1, 3], "int64") == np.inf


def test_the_worst_output_is_named() -> None:
    a, b = np.ones(2, "float32"), np.zeros(2, "float32")
    assert compare(["good", "bad"], [a, a], [a, b]).worst_output == "bad"


def test_another_shape_or_dtype_is_refused() -> None:
    with pytest.raises(ParityError, match=r"expected float32\[2\], got float32\[1, 2\]"):
        compare(["y"], [np.ones((1, 2), "float32")], [np.ones(2, "float32")])


def test_an_error_beyond_the_tolerance_is_refused_with_figures() -> None:
    with pytest.raises(ParityError, match=r"at most 0.0001 against onnxruntime 1, got 0.1") as caught:
        check(Parity(0.1, "y", "onnxruntime 1"), 1e-4)
    assert caught.value.hint is not None


def test_a_model_that_the_reference_refuses_is_a_model_error() -> None:
    graph = helper.make_graph(
        [helper.make_node("Nonsense", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])],
    )
    with pytest.raises(ModelError, match="ONNX Runtime refused"):
        reference_outputs(helper.make_model(graph), {"x": np.ones(1, "float32")})
