"""Packed channels: the size of a block, and constants in packed form."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.kernels.passes import packed
from builder.kernels.passes.packed import Packed, channel_block, pack_array
from builder.kernels.rewriter import shape_of


def test_half_a_vector_takes_as_long_as_a_whole_one() -> None:
    assert [channel_block(c, 16) for c in (3, 8, 16, 24, 40, 96)] == [4, 8, 16, 16, 16, 16]
    assert [channel_block(c, 4) for c in (3, 24)] == [4, 4]


def test_a_packed_constant_broadcasts_as_before_and_fills_the_last_block() -> None:
    packed = pack_array(np.arange(5, dtype="f4").reshape(5, 1, 1), 4, 1.0, 5)
    assert packed.shape == (1, 2, 1, 1, 4)
    assert packed.ravel().tolist() == [0, 1, 2, 3, 4, 1, 1, 1]
    gaps = pack_array(np.arange(6, dtype="f4").reshape(6, 1, 1), 4, 1.0, 3)
    assert gaps.ravel().tolist() == [0, 1, 2, 1, 3, 4, 5, 1]
    assert pack_array(np.full((1, 1), 7, "f4"), 4, 0.0, 1).shape == (1, 1, 1, 1, 1)


def test_the_places_of_channels_count_the_padding_of_each_group() -> None:
    value = Packed(relax.Var("x", relax.TensorType((1, 4, 2, 2, 4), "float32")), channels=12, group=6)

    assert value.places == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]


def test_the_places_of_many_channels_need_the_shape_no_more_often_than_those_of_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[relax.Expr] = []

    def counted(expr: relax.Expr) -> tuple[int, ...]:
        reads.append(expr)
        return shape_of(expr)

    monkeypatch.setattr(packed, "shape_of", counted)

    def count(channels: int) -> int:
        reads.clear()
        expr = relax.Var("x", relax.TensorType((1, channels // 4, 2, 2, 4), "float32"))
        assert len(Packed.dense(expr, channels).places) == channels
        return len(reads)

    assert count(1024) == count(8) > 0
