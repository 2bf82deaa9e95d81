"""Softmax and layer norm."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.kernels.spaces import rows
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shape", [(4, 128, 128), (2, 3, 50), (1, 10), (6, 1)])
def test_softmax_of_rows(shape: tuple[int, ...], target: DeviceTarget, randn: Randn) -> None:
    x = randn(*shape) * 20
    result = run(lambda v: relax.op.nn.softmax(v, axis=-1), {"x": x}, target)
    e = np.exp(x.astype("f8") - x.max(-1, keepdims=True))
    close(result.outputs[0], e / e.sum(-1, keepdims=True), 1e-6)
    assert shape[-1] % target.simd.lanes or result.schedules == {rows.KIND}


def test_softmax_of_columns(target: DeviceTarget, randn: Randn) -> None:
    x = randn(3, 5, 7)
    e = np.exp(x.astype("f8"))
    close(
        run(lambda v: relax.op.nn.softmax(v, axis=1), {"x": x}, target).outputs[0],
        e / e.sum(1, keepdims=True),
    )


def test_masked_scores_become_almost_zero(target: DeviceTarget) -> None:
    x = np.array([[1.0, 2.0, -1e9, -np.inf]] * 4, "f4")
    got = run(lambda v: relax.op.nn.softmax(v, axis=-1), {"x": x}, target).outputs[0]
    assert (got[:, 2:] < 1e-37).all()
    assert np.allclose(got.sum(-1), 1)


@pytest.mark.parametrize("shape", [(1, 128, 768), (2, 3, 50), (8, 17)])
def test_layer_norm(shape: tuple[int, ...], target: DeviceTarget, randn: Randn) -> None:
    x, g, b = randn(*shape) * 3 + 5, randn(shape[-1]), randn(shape[-1])
    build = lambda v: relax.op.nn.layer_norm(v, relax.const(g), relax.const(b), axes=[-1], epsilon=1e-5)  # noqa: E731
    result = run(build, {"x": x}, target)
    d = x.astype("f8")
    want = (d - d.mean(-1, keepdims=True)) / np.sqrt(d.var(-1, keepdims=True) + 1e-5) * g + b
    close(result.outputs[0], want, 2e-6)
    assert rows.KIND in result.schedules
