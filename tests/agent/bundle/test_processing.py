from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.bundle.processing import Detect, Preprocess, Softmax, TopK


@pytest.mark.parametrize(
    "make",
    [
        lambda: Preprocess("x", "RGBA", None, "stretch", "bilinear", None, 1.0, (0.0,), (1.0,), "NCHW"),
        lambda: Preprocess("x", "RGB", None, "fill", "bilinear", None, 1.0, (0.0,), (1.0,), "NCHW"),
        lambda: Preprocess("x", "RGB", None, "stretch", "lanczos", None, 1.0, (0.0,), (1.0,), "NCHW"),
        lambda: Preprocess("x", "RGB", None, "stretch", "bilinear", (0, 1), 1.0, (0.0,), (1.0,), "NCHW"),
        lambda: Preprocess(
            "x", "RGB", None, "stretch", "bilinear", None, float("inf"), (0.0,), (1.0,), "NCHW"
        ),
        lambda: Preprocess("x", "GRAY", None, "stretch", "bilinear", None, 1.0, (0.0,) * 3, (1.0,), "NCHW"),
        lambda: Preprocess("x", "RGB", None, "stretch", "bilinear", None, 1.0, (0.0,), (1.0,), "CHW"),
        lambda: TopK("y", 0),
        lambda: Softmax("y", 16),
        lambda: Detect("b", "s", 1.5, 0.5, 10, "corners", True),
        lambda: Detect("b", "s", 0.5, 0.5, 0, "corners", True),
        lambda: Detect("b", "s", 0.5, 0.5, 10, "polar", True),
    ],
)
def test_processing_out_of_range_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"expected .*, got "):
        make()
