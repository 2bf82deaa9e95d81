"""Which dequantised weights stay in few bits, and which become float32."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.kernels.rewriter import constant_of
from builder.kernels.spaces import blocked_matmul, convolution
from tests.builder.kernels.blocked import blocked_weights
from tests.builder.kernels.machines import Result, close, conv2d, machine, run

_WHOLE = 1024  # elements from which a float32 constant counts as weights that were not kept


def dequantised(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, axis: int) -> relax.Expr:
    """The numbers of a constant tensor of bytes."""
    bb = relax.BlockBuilder.current()
    return bb.emit(
        relax.op.dequantize(relax.const(codes), relax.const(scales), relax.const(zeros), axis=axis)
    )


def largest_float(result: Result) -> int:
    """Elements of the largest float32 constant."""
    sizes = [0]

    def visit(expr: relax.Expr) -> None:
        numbers = constant_of(expr)
        if numbers is not None and numbers.dtype == np.float32:
            sizes.append(numbers.size)

    relax.analysis.post_order_visit(result.lowered.main, visit)
    return max(sizes)


def test_a_matrix_of_bytes_stays_bytes() -> None:
    """One scale for each column, one for each row, or one; zero points; transposed."""
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 48)).astype("f4")
    codes = random.integers(-128, 128, (48, 40)).astype("int8")
    scales, zeros = random.uniform(0.5, 1, 40).astype("f4"), random.integers(-9, 9, 40).astype("int8")
    wanted = x.astype("f8") @ ((codes.astype("f8") - zeros) * scales)
    result = run(lambda v: relax.op.matmul(v, dequantised(codes, scales, zeros, 1)), {"x": x}, machine(8))
    close(result.outputs[0], wanted)
    assert blocked_matmul.KIND in result.schedules
    assert largest_float(result) < _WHOLE
    turned = np.ascontiguousarray(codes.T)

    def transposed(v: relax.Expr) -> relax.Expr:
        return relax.op.matmul(v, relax.op.permute_dims(dequantised(turned, scales, zeros, 0)))

    result = run(transposed, {"x": x}, machine(8))
    close(result.outputs[0], wanted)
    assert blocked_matmul.KIND in result.schedules


def test_a_scale_for_each_summed_row_is_no_scale_of_sums() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 48)).astype("f4")
    codes = random.integers(-128, 128, (48, 40)).astype("int8")
    scales = random.uniform(0.5, 1, 48).astype("f4")
    zeros = np.zeros(48, "int8")
    result = run(lambda v: relax.op.matmul(v, dequantised(codes, scales, zeros, 0)), {"x": x}, machine(8))
    close(result.outputs[0], x.astype("f8") @ (codes * scales[:, None].astype("f8")))
    assert blocked_matmul.KIND not in result.schedules


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [True, False])
def test_filters_of_bytes_are_stored_as_bytes(per_channel: bool) -> None:
    """Direct and by Winograd; a batch norm after the convolution does not make them floats."""
    random = np.random.default_rng(0)
    x = random.standard_normal((1, 16, 12, 12)).astype("f4")
    codes = random.integers(-127, 128, (16, 16, 3, 3)).astype("int8")
    scales = random.uniform(0.01, 0.02, 16 if per_channel else ()).astype("f4")
    zeros, factor = np.zeros_like(scales, "int8"), random.uniform(1, 2, (1, 16, 1, 1)).astype("f4")

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, dequantised(codes, scales, zeros, 0), padding=(1, 1))
        return relax.op.nn.relu(relax.op.multiply(y, relax.const(factor)))

    result = run(build, {"x": x}, machine(8))
    weights = codes * (scales.reshape(-1, 1, 1, 1) if per_channel else scales)
    close(result.outputs[0], np.maximum(conv2d(x, weights, padding=(1, 1, 1, 1)) * factor, 0), 1e-4)
    assert largest_float(result) < _WHOLE
    assert convolution.KIND in result.schedules or "winograd" in result.schedules


def test_a_product_of_two_quantised_tensors_is_left_to_integers() -> None:
    """Also if the left one was moved."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (2, 2, 24)).astype("uint8")
    codes = random.integers(-127, 128, (24, 40)).astype("int8")
    one, zero, scales = np.float32(0.1), np.uint8(9), random.uniform(0.5, 1, 40).astype("f4")

    def build(v: relax.Expr) -> relax.Expr:
        bb = relax.BlockBuilder.current()
        numbers = bb.emit(relax.op.dequantize(v, relax.const(one), relax.const(zero), axis=0))
        both = bb.emit(relax.op.concat([numbers, numbers], axis=1))
        rows = bb.emit(relax.op.strided_slice(both, [1], [1], [3]))
        return relax.op.matmul(rows, dequantised(codes, scales, np.zeros(40, "int8"), 1))

    result = run(build, {"x": x}, machine(8))
    moved = np.concatenate([x, x], 1)[:, 1:3]
    close(result.outputs[0], ((moved.astype("f8") - 9) * 0.1) @ (codes * scales.astype("f8")))
    assert "integer_matmul" in result.schedules
    assert blocked_matmul.KIND not in result.schedules


def test_other_readers_get_float32() -> None:
    """A sum, a reshape, a product from the left, and one that sums along the axis without blocks."""
    weights = blocked_weights((48, 32), 16, "int8", 4)
    x = np.random.default_rng(2).standard_normal((48, 32)).astype("f4")

    def build(v: relax.Expr) -> relax.Expr:
        bb = relax.BlockBuilder.current()
        w = weights.emit(bb)
        total = bb.emit(relax.op.add(w, v))
        left = bb.emit(relax.op.matmul(w, bb.emit(relax.op.permute_dims(total))))
        right = bb.emit(relax.op.matmul(left, bb.emit(relax.op.reshape(w, (48, 32)))))
        return relax.op.matmul(right, bb.emit(relax.op.permute_dims(w)))

    result = run(build, {"x": x}, machine(8))
    dense = weights.dense().astype("f8")
    close(result.outputs[0], dense @ (dense + x).T @ dense @ dense.T)
    assert blocked_matmul.KIND not in result.schedules


def test_readers_of_one_matrix_may_differ() -> None:
    """An embedding that is also, transposed, the last layer."""
    table = blocked_weights((40, 32), 8, "int8", 4, axis=1)
    indices = np.array([[3, 39]], "int64")

    def build(v: relax.Expr) -> relax.Expr:
        bb = relax.BlockBuilder.current()
        weights = table.emit(bb)
        rows = bb.emit(relax.op.take(weights, v, axis=0, mode="clip"))
        return relax.op.matmul(rows, bb.emit(relax.op.permute_dims(weights)))

    result = run(build, {"indices": indices}, machine(8))
    dense = table.dense().astype("f8")
    close(result.outputs[0], dense[indices] @ dense.T)
    assert blocked_matmul.KIND in result.schedules
    assert largest_float(result) < _WHOLE
