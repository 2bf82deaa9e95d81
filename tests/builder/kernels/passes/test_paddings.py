"""Which values are recognised as paddings that a kernel of bytes does itself."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.ir import Call

from builder.kernels.passes.paddings import Padding

X = relax.Var("x", relax.TensorType((1, 2, 3, 4), "uint8"))
PADDED = relax.Var("padded", relax.TensorType((1, 2, 4, 7), "uint8"))
Y = relax.Var("y", relax.TensorType((1, 2, 4, 7), "uint8"))
ZERO = relax.Var("zero", relax.TensorType((), "uint8"))
WIDTHS = [0, 0, 0, 0, 1, 0, 2, 1]


def around(mask: np.ndarray) -> dict[relax.Expr, Call]:
    bb = relax.BlockBuilder()
    padded = relax.op.nn.pad(X, WIDTHS, pad_value=0)
    return {PADDED: bb.normalize(padded), Y: bb.normalize(relax.op.where(relax.const(mask), PADDED, ZERO))}


def inside() -> np.ndarray:
    return np.pad(np.ones((3, 4), np.bool_), ((1, 0), (2, 1)))[None, None]


def test_a_constant() -> None:
    call = relax.BlockBuilder().normalize(relax.op.nn.pad(X, WIDTHS, pad_value=9))
    found = Padding.of(PADDED, {PADDED: call})
    assert found is not None
    assert (found.widths, found.number, found.scalar) == ((1, 2, 0, 1), 9, None)


def test_a_computed_zero_point() -> None:
    found = Padding.of(Y, around(inside()))
    assert found is not None
    assert found.data.same_as(X)
    assert found.scalar is not None
    assert found.scalar.same_as(ZERO)
    assert found.widths == (1, 2, 0, 1)


@pytest.mark.parametrize("at", [(0, 0), (1, 2)])
def test_another_mask_is_no_padding(at: tuple[int, int]) -> None:
    mask = inside()
    mask[(0, 0, *at)] ^= True
    assert Padding.of(Y, around(mask)) is None


def test_other_values_are_no_paddings() -> None:
    assert Padding.of(X, around(inside())) is None
