from __future__ import annotations

import numpy as np
import pytest

from agent.bundle.buckets import EDGE, InputAxis
from builder.compiling.padding import PaddingDifference, pad


def test_padding_is_what_a_device_does() -> None:
    x = np.array([[1, 2], [3, 4]], np.float32)
    axes = (InputAxis("x", 0, "b", value=7.0), InputAxis("x", 1, "s", EDGE))
    padded = pad({"x": x, "z": x}, axes, {"x": (3, 4), "z": (2, 2)})
    np.testing.assert_array_equal(padded["x"], [[1, 2, 2, 2], [3, 4, 4, 4], [7, 7, 7, 7]])
    assert padded["z"] is x


def test_padding_keeps_the_datatype() -> None:
    mask = np.ones((1, 2), np.bool_)
    padded = pad({"mask": mask}, (InputAxis("mask", 1, "s"),), {"mask": (1, 3)})["mask"]
    assert padded.dtype == np.bool_
    assert padded.tolist() == [[True, True, False]]


@pytest.mark.parametrize(("error", "words"), [(0.25, "by 2.5e-01"), (float("inf"), "its integers")])
def test_a_fault_names_the_output_and_the_sizes(error: float, words: str) -> None:
    fault = str(PaddingDifference("s", "y", error, 9, 16))
    assert fault == f"padding s from 9 to 16 changes output 'y' ({words})"
