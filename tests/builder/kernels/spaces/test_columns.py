"""Softmax along an axis before the last."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.kernels.spaces import columns
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((3, 5, 7), 1),
        ((3, 5, 7), 0),
        ((2, 21, 9, 16), 1),
        ((1, 4, 8400), -2),
        ((2, 3, 6, 49), 2),
        ((19, 3), 0),
    ],
)
def test_softmax_of_columns(shape: tuple[int, ...], axis: int, target: DeviceTarget, randn: Randn) -> None:
    x = randn(*shape) * 20
    result = run(lambda v: relax.op.nn.softmax(v, axis=axis), {"x": x}, target)
    e = np.exp(x.astype("f8") - x.max(axis, keepdims=True))
    close(result.outputs[0], e / e.sum(axis, keepdims=True), 1e-6)
    assert result.schedules == {columns.KIND}


def test_masked_scores_become_exactly_zero(target: DeviceTarget, randn: Randn) -> None:
    x = randn(2, 5, 40)
    x[:, 3, ::2] = -np.inf
    x[0, 1, 1] = np.nan
    got = run(lambda v: relax.op.nn.softmax(v, axis=1), {"x": x}, target).outputs[0]
    assert (got[:, 3, ::2] == 0).all()
    assert np.isnan(got[0, :, 1]).all()
    assert np.isfinite(got[1]).all()


def test_softmax_is_fused_with_what_follows(target: DeviceTarget, randn: Randn) -> None:
    x = randn(2, 5, 40)
    result = run(
        lambda v: relax.op.multiply(relax.op.nn.softmax(relax.op.nn.relu(v), axis=1), v), {"x": x}, target
    )
    e = np.exp(np.maximum(x, 0).astype("f8"))
    close(result.outputs[0], e / e.sum(1, keepdims=True) * x)
