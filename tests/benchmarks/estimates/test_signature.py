"""A kernel's signature: the anchor's loops, operands and marks, whatever is fused around it."""

from __future__ import annotations

import pytest
from tvm import s_tir as st
from tvm import te, tirx, topi

from benchmarks.estimates.signature import signature_of
from builder.kernels.decisions import SPACE_MARK


def product(rows: int = 3, dtype: str = "float32", *, bias: bool = False, **marks: int) -> tirx.PrimFunc:
    """Return a matrix product as an anchor, with a bias and a ReLU after it if `bias`."""
    a, b = te.placeholder((rows, 4), dtype, name="a"), te.placeholder((4, 5), dtype, name="b")
    k = te.reduce_axis((0, 4), "k")
    attrs = {SPACE_MARK: "matmul", **{f"edge.{name}": value for name, value in marks.items()}}
    y = te.compute((rows, 5), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="product", attrs=attrs)
    if not bias:
        return te.create_prim_func([a, b, y])
    shift = te.placeholder((5,), dtype, name="shift")
    return te.create_prim_func([a, b, shift, topi.nn.relu(topi.add(y, shift))])


def signature(func: tirx.PrimFunc, kind: str = "matmul") -> str:
    sch = st.Schedule(func)
    return signature_of(sch, sch.get_sblock("product"), kind)


def test_signature_has_kind_loops_operands_and_dtype() -> None:
    assert signature(product()) == "matmul 3x5x4 of 3x4 4x5 float32"
    assert signature(product(), kind="other").startswith("other ")


def test_marks_are_sorted_and_the_space_mark_is_left_out() -> None:
    assert signature(product(stride=2, dilation=1)) == "matmul 3x5x4 of 3x4 4x5 float32 dilation=1 stride=2"


def test_a_fused_epilogue_does_not_change_the_signature() -> None:
    assert signature(product(bias=True)) == signature(product())


@pytest.mark.parametrize(
    "other", [product(rows=4), product(dtype="float64"), product(stride=1)], ids=["rows", "dtype", "mark"]
)
def test_another_anchor_has_another_signature(other: tirx.PrimFunc) -> None:
    assert signature(other) != signature(product())
