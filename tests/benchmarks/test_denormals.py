"""Benchmarks compute as the agent does: zeros stand for denormal numbers, until they are done."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.denormals import flushed
from builder.target.device_target import resolve


def product() -> float:
    """Return a product whose result is denormal, computed by this thread."""
    small = np.full(64, 1e-30, "f4")
    return float((small * np.float32(1e-10)).max())


@pytest.mark.slow
def test_denormal_numbers_are_zeros_inside_and_not_after() -> None:
    assert 0 < product() < np.finfo("f4").tiny
    with flushed(resolve("host")):
        assert product() == 0
        with flushed(resolve("host")):
            assert product() == 0
        assert product() == 0, "the inner one restores what the outer one set"
    assert product() > 0
