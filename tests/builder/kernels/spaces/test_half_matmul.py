"""Products in float16, against double precision."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.kernels.spaces import half_matmul
from tests.builder.kernels.machines import element_machine, machine, run
from tests.builder.kernels.signal_to_noise import decibels


@pytest.mark.parametrize(
    ("lead", "depth", "columns"),
    [((1,), 64, 40), ((7,), 96, 16), ((2, 3), 70, 17), ((1, 1), 5, 3), ((33,), 200, 24)],
)
def test_products_are_right_as_chunks_in_float16(lead: tuple[int, ...], depth: int, columns: int) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((*lead, depth)).astype("f2")
    w = (rng.standard_normal((depth, columns)) / depth**0.5).astype("f2")
    b = np.linspace(-1, 1, columns).astype("f4")

    def build(v: relax.Expr) -> relax.Expr:
        product = relax.op.matmul(v, relax.const(w), out_dtype="float32")
        return relax.op.nn.relu(relax.op.add(product, relax.const(b)))

    result = run(build, {"x": x}, element_machine())
    assert half_matmul.KIND in result.schedules
    want = np.maximum(x.astype("f8") @ w.astype("f8") + b, 0)
    assert result.outputs[0].shape == want.shape
    # Cores differ: some round each product before they add it.
    roundings = [np.maximum(sums_of_halves(x, w, fused=fused) + b, 0) for fused in (True, False)]
    assert decibels(result.outputs[0], want) > min(decibels(each, want) for each in roundings) - 0.5


def sums_of_halves(x: np.ndarray, w: np.ndarray, *, fused: bool) -> np.ndarray:
    """Return a product whose chunks of 64 steps are summed in float16, one step after the other."""
    total = np.zeros((*x.shape[:-1], w.shape[1]), "f4")
    for begin in range(0, len(w), 64):
        chunk = np.zeros(total.shape, "f2")
        for k in range(begin, min(begin + 64, len(w))):
            product = x[..., k, None].astype("f8") * w[k]
            chunk = (chunk + (product if fused else product.astype("f2"))).astype("f2")
        total += chunk
    return total


def test_a_core_that_broadcasts_factors_from_memory() -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((5, 64)).astype("f2")
    w = (rng.standard_normal((64, 33)) / 8).astype("f2")
    result = run(lambda v: relax.op.matmul(v, relax.const(w), out_dtype="float32"), {"x": x}, machine(16))
    assert half_matmul.KIND in result.schedules
    assert decibels(result.outputs[0], x.astype("f8") @ w.astype("f8")) > 56
