from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.kernels import matmul
from builder.target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, run


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(128, 96, 144), (1, 50, 1000), (7, 33, 64), (13, 5, 10), (2, 3, 1)]
)
def test_product_with_constant_weights(
    rows: int, depth: int, columns: int, target: DeviceTarget, randn: Randn
) -> None:
    x, w, b = randn(1, rows, depth), randn(depth, columns), randn(columns)
    build = lambda v: relax.op.add(relax.op.matmul(v, relax.const(w)), relax.const(b))  # noqa: E731
    result = run(build, {"x": x}, target)
    close(result.outputs[0], x.astype("f8") @ w + b)
    if columns % target.simd.lanes == 0:
        assert result.schedules == {matmul.KIND}


def test_gelu_is_fused_behind_the_product(target: DeviceTarget, randn: Randn) -> None:
    from scipy.special import erf

    x, w = randn(1, 16, 32), randn(32, 48)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.matmul(v, relax.const(w))
        e = relax.op.erf(relax.op.divide(y, relax.const(np.float32(2**0.5))))
        return relax.op.multiply(
            relax.op.multiply(y, relax.op.add(e, relax.const(np.float32(1)))), relax.const(np.float32(0.5))
        )

    result = run(build, {"x": x}, target)
    y = x.astype("f8") @ w
    close(result.outputs[0], y * (erf(y / 2**0.5) + 1) * 0.5)
    assert len(result.lowered.kernels.functions) == 1
    assert result.schedules == {matmul.KIND}


@pytest.mark.parametrize(
    ("batch", "rows", "depth", "columns"), [((1, 3), 16, 8, 32), ((2,), 5, 7, 9), ((), 4, 4, 4)]
)
def test_product_of_two_computed_matrices(
    batch: tuple[int, ...], rows: int, depth: int, columns: int, target: DeviceTarget, randn: Randn
) -> None:
    a, b = randn(*batch, rows, depth), randn(*batch, depth, columns)
    result = run(relax.op.matmul, {"a": a, "b": b}, target)
    close(result.outputs[0], a.astype("f8") @ b)
    assert result.schedules == {matmul.BATCHED}


def test_broadcast_batches_fall_back_and_are_right(target: DeviceTarget, randn: Randn) -> None:
    a, b = randn(3, 4, 5), randn(1, 5, 6)
    close(run(relax.op.matmul, {"a": a, "b": b}, target).outputs[0], a.astype("f8") @ b)
