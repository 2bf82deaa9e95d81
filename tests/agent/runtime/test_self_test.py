from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent.bundle.manifest import Samples
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import SelfTestError
from agent.runtime import graph_executor
from agent.runtime.self_test import check_samples, relative_error
from tests.fake_module import FakeModule, GraphBuilder, params

OUTPUTS = (TensorSpec("y", "FP32", (3,)),)
X = np.array([1, -2, 4], np.float32)


def module() -> graph_executor.GraphModule:
    g = GraphBuilder()
    return graph_executor.create(g.graph(g.call("double", [g.input("x", (3,))], (3,))), FakeModule())


def check(expected: dict[str, np.ndarray], count: int = 1, **inputs: np.ndarray) -> float:
    inputs = inputs or {"0/x": X}
    samples = Samples(count, 1e-3, 1e-6)
    return check_samples(module(), OUTPUTS, samples, params(**inputs), params(**expected))


def test_matching_samples_pass_and_their_error_is_returned() -> None:
    assert check({"0/y": X * 2}) == 0
    # 1e-3 of the largest value is 8e-3, for every element.
    assert check({"0/y": X * 2 + np.array([0.007, 0, 0], np.float32)}) == pytest.approx(0.007 / 8, rel=1e-3)
    two = {"0/x": X, "1/x": -X}
    assert check({"0/y": X * 2, "1/y": -X * 2}, 2, **two) == 0


def test_without_samples_nothing_is_read() -> None:
    assert check_samples(module(), OUTPUTS, Samples(0, 0, 0), b"", b"") == 0


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"0/y": X * 2 + np.float32(0.009)}, "expected a relative error up to 0.001, got 0.00112"),
        ({"0/y": np.array([2, -4, np.nan], np.float32)}, "got inf"),
        ({"0/y": np.zeros(3, np.float32)}, "got inf"),
        ({"0/z": X * 2}, "sample 0 has no tensor 'y'"),
        ({"0/y": X[:2] * 2}, r"expected float32\(2,\), got float32\(3,\)"),
        ({"0/y": (X * 2).astype(np.float64)}, "expected float64"),
    ],
)
def test_mismatching_samples_are_refused(expected: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(SelfTestError, match=words):
        check(expected)


def test_a_result_that_is_not_a_number_never_passes() -> None:
    with pytest.raises(SelfTestError, match="got nan"):
        changed: dict[str, Any] = {"0/x": np.array([1, -2, np.nan], np.float32)}
        check({"0/y": X * 2}, **changed)


def test_the_error_is_relative_to_the_largest_value() -> None:
    a = np.array([100.0, 0.0])
    assert relative_error(a, np.array([100.0, 1.0])) == 0.01
    assert relative_error(np.array([np.inf, 1.0]), np.array([np.inf, 1.5])) == 0.5
    assert relative_error(np.array([np.inf, 1.0]), np.array([1.0, 1.0])) == np.inf
    assert relative_error(np.array([1, 2]), np.array([1, 3])) == 0.5
    assert relative_error(np.array([True]), np.array([True])) == 0
    assert relative_error(np.zeros((0,)), np.zeros((0,))) == 0
