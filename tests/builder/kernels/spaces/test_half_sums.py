"""How a reduction is divided into chunks that are summed in float16."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.kernels.spaces.half_sums import LONGEST, MOST, chunk_of


@pytest.mark.parametrize(
    ("extents", "whole", "parts"),
    [
        ((8, 1, 1), 8, (8, 1, 1)),
        ((64, 1, 1), 8, (8, 1, 1)),
        ((7, 1, 1), 8, (7, 1, 1)),
        ((11, 1, 1), 8, (11, 1, 1)),  # 88 products rather than 8
        ((3, 7, 7), 1, (1, 7, 7)),
        ((1, 1, 1), 8, (1, 1, 1)),
    ],
)
def test_chunks_are_as_long_as_they_may_be(
    extents: tuple[int, ...], whole: int, parts: tuple[int, ...]
) -> None:
    assert chunk_of(extents, whole) == parts


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from([1, 4, 8]))
def test_chunks_divide_each_axis_and_are_never_longer_than_necessary(extents: list[int], whole: int) -> None:
    parts = chunk_of(extents, whole)
    assert all(extent % part == 0 for extent, part in zip(extents, parts, strict=True))
    assert prod(parts) * whole <= LONGEST
    assert MOST <= LONGEST
