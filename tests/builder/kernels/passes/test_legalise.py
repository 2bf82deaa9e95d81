"""Operators that no layout pass replaces."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, run


@pytest.mark.parametrize(("axis", "exclusive"), [(1, False), (0, True), (-1, True)])
def test_cumulative_sums(axis: int, exclusive: bool, target: DeviceTarget, randn: Randn) -> None:
    x = randn(3, 40)
    result = run(lambda v: relax.op.cumsum(v, axis, exclusive=exclusive), {"x": x}, target)
    want = np.cumsum(x.astype("f8"), axis)
    close(result.outputs[0], want - x if exclusive else want)


def test_an_index_out_of_range_takes_the_nearest_element(target: DeviceTarget, randn: Randn) -> None:
    x, at = randn(4, 3), np.array([0, 3, 7, -9], "i8")
    result = run(lambda v, i: relax.op.take(v, i, axis=0), {"x": x, "at": at}, target)
    assert np.array_equal(result.outputs[0], x[[0, 3, 3, 0]])
