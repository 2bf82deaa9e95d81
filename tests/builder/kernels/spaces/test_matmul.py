"""Matrix products with constant weights, and of two computed matrices."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from tvm import relax

from builder.codegen.lowering import lower_kernels
from builder.kernels.rewriter import constant_of
from builder.kernels.spaces import matmul, transpose
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.kernels.machines import Randn, close, element_machine, lower_expression, machine, run


@pytest.mark.slow
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


@pytest.mark.slow
def test_gelu_is_fused_after_the_product(target: DeviceTarget, randn: Randn) -> None:
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


@pytest.mark.slow
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


def test_broadcast_batches_fall_back_to_tvm(target: DeviceTarget, randn: Randn) -> None:
    a, b = randn(3, 4, 5), randn(1, 5, 6)
    close(run(relax.op.matmul, {"a": a, "b": b}, target).outputs[0], a.astype("f8") @ b)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 3])
def test_attention_with_other_weights_needs_one_transpose(
    heads: int, target: DeviceTarget, randn: Randn
) -> None:
    """With a softmax it is one kernel; see `test_attention`."""
    rows, size, op = 12, 16, relax.op
    q, k, v = (randn(2, rows, heads * size) for _ in range(3))

    def build(*tensors: relax.Expr) -> relax.Expr:
        a, b, c = (op.reshape(t, (2, rows, heads, size)) for t in tensors)
        a, b, c = (
            op.permute_dims(t, p)
            for t, p in zip((a, b, c), (_HEAD_SWAP, (0, 2, 3, 1), _HEAD_SWAP), strict=True)
        )
        scores = op.divide(op.matmul(a, b), relax.const(np.float32(4)))
        context = op.matmul(op.sigmoid(scores), c)
        return op.reshape(op.permute_dims(context, _HEAD_SWAP), (2, rows, heads * size))

    result = run(build, {"q": q, "k": k, "v": v}, target)
    a, b, c = (t.astype("f8").reshape(2, rows, heads, size).transpose(_HEAD_SWAP) for t in (q, k, v))
    scores = a @ b.transpose(0, 1, 3, 2) / 4
    want = (1 / (1 + np.exp(-scores))) @ c
    close(result.outputs[0], want.transpose(_HEAD_SWAP).reshape(2, rows, heads * size))
    assert result.schedules == {matmul.BATCHED, transpose.KIND}
    assert len(result.lowered.kernels.functions) == 3


_HEAD_SWAP = (0, 2, 1, 3)


@pytest.mark.slow
def test_a_product_that_is_read_with_heads_swapped_and_not(target: DeviceTarget, randn: Randn) -> None:
    a, b = randn(1, 2, 8, 4), randn(1, 2, 4, 16)

    def build(x: relax.Expr, y: relax.Expr) -> relax.Expr:
        product = relax.op.matmul(x, y)
        swapped = relax.op.permute_dims(product, _HEAD_SWAP)
        return relax.op.add(relax.op.reshape(swapped, (1, 2, 8, 16)), product)

    product = a.astype("f8") @ b
    want = product.transpose(_HEAD_SWAP).reshape(1, 2, 8, 16) + product
    close(run(build, {"a": a, "b": b}, target).outputs[0], want)


@pytest.mark.slow
@pytest.mark.parametrize("lead", [(2, 3, 11), (4, 9), (3, 1, 8)])
def test_rows_counted_in_several_axes(lead: tuple[int, ...], target: DeviceTarget, randn: Randn) -> None:
    x, w, residual = randn(*lead, 48), randn(48, 48), randn(*lead, 48)
    build = lambda v, r: relax.op.add(relax.op.matmul(v, relax.const(w)), r)  # noqa: E731
    result = run(build, {"x": x, "r": residual}, target)
    close(result.outputs[0], x.astype("f8") @ w + residual)
    assert len(result.lowered.kernels.functions) == 1
    assert "fallback" not in result.schedules


def test_a_single_row_has_many_accumulators() -> None:
    pi, x86, avx2 = element_machine(), machine(16), machine(8)
    assert [matmul.panel_width(768, 1, m) for m in (pi, x86, avx2)] == [32, 128, 64]
    assert [matmul.panel_width(768, 9, m) for m in (pi, x86, avx2)] == [8, 48, 24]
    assert [matmul.panel_width(1000, 1, m) for m in (pi, x86, avx2)] == [20, 128, 40]
    assert [matmul.panel_width(10, 1, m) for m in (pi, x86, avx2)] == [12, 16, 16]


def test_weights_that_are_halves_are_read_as_halves_by_few_rows(target: DeviceTarget, randn: Randn) -> None:
    """Subnormal numbers of float16 included; with many rows they are widened once."""
    w = randn(48, 40).astype("f2")
    w[0, :4] = np.array([2**-24, -(2**-20), 65504, -0.0], "f2")
    for rows in (1, 5, 20):
        x = randn(rows, 48)
        result = run(lambda v: relax.op.matmul(v, relax.const(w.astype("f4"))), {"x": x}, target)
        close(result.outputs[0], x.astype("f8") @ w.astype("f8"))
        types: set[str] = set()

        def visit(expr: relax.Expr, types: set[str] = types) -> None:
            if (numbers := constant_of(expr)) is not None:
                types.add(str(numbers.dtype))

        relax.analysis.post_order_visit(result.lowered.main, visit)
        in_registers = rows <= matmul.FEW_ROWS and "f16c" in target.features
        assert types == {"float16" if in_registers else "uint16"}


def small_caches(target: DeviceTarget) -> DeviceTarget:
    """Return `target` with caches so small that a panel of 48 columns and a depth of 400 is long."""
    return replace(target, core=replace(target.core, l1_bytes=32 << 10, l2_bytes=256 << 10, prefetches=True))


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize(
    ("lead", "depth", "columns"), [((128,), 2048, 768), ((3, 17), 1536, 100), ((2, 1, 70), 1000, 333)]
)
def test_a_great_depth_is_divided_into_blocks(
    lead: tuple[int, ...], depth: int, columns: int, lanes: int, randn: Randn
) -> None:
    """With a bias and a residual; where cores cannot share the panels evenly, they share the rows."""
    target = small_caches(machine(lanes))
    x, w, b, r = randn(*lead, depth), randn(depth, columns), randn(columns), randn(*lead, columns)

    def build(v: relax.Expr, residual: relax.Expr) -> relax.Expr:
        sums = relax.op.add(relax.op.matmul(v, relax.const(w)), relax.const(b))
        return relax.op.add(relax.op.nn.gelu(sums), residual)

    result = run(build, {"x": x, "r": r}, target)
    sums = x.astype("f8") @ w + b
    close(result.outputs[0], sums * 0.5 * (1 + np.vectorize(math.erf)(sums / math.sqrt(2))) + r)
    assert result.schedules == {matmul.KIND}
    (func,) = result.lowered.kernels.functions.values()
    stores = [line for line in func.script().splitlines() if "_rf" in line]
    assert stores, "no sums of a block"


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("columns", [7.3, 22.3])
def test_sums_stay_in_registers_beside_an_incomplete_panel(columns: float, lanes: int, randn: Randn) -> None:
    """`columns` are counted in vectors: the last panel has fewer of them, and the last vector a part."""
    target = machine(lanes)
    target = replace(target, core=replace(target.core, prefetches=True))
    w, b = randn(30, round(columns * lanes)), randn(round(columns * lanes))
    build = lambda v: relax.op.add(relax.op.matmul(v, relax.const(w)), relax.const(b))  # noqa: E731
    lowered = lower_expression(build, {"x": randn(70, 30)}, target)
    text = str(lower_kernels(lowered.kernels, target.tvm_target))
    assert "prefetch" in text
    assert "TVMBackendAllocWorkspace(" not in text, "the sums are in memory of the launcher"


def test_blocks_follow_the_caches() -> None:
    x86, pi = machine(16), resolve("rpi5")
    big = replace(x86, core=replace(x86.core, l1_bytes=48 << 10, l2_bytes=2 << 20, prefetches=True))
    assert matmul.blocks_of_depth(128, 3072, 48, 8, big) == 6
    assert matmul.blocks_of_depth(16, 3072, 48, 8, big) == 6
    assert matmul.blocks_of_depth(8, 3072, 48, 8, big) == 1, "one tile reads each weight once"
    assert matmul.blocks_of_depth(128, 2048, 48, 8, big) == 1, "the panel is short"
    assert matmul.blocks_of_depth(512, 3072, 48, 8, big) == 1, "the sums would leave the L1 cache"
    assert matmul.blocks_of_depth(128, 3079, 48, 8, big) == 1, "a prime number has no blocks"
    assert matmul.blocks_of_depth(128, 3072, 8, 8, pi) == 1
