"""Products of matrices on the tiles of AMX, which `tiles.c` emulates, against exact integers."""

from __future__ import annotations

import pytest

from builder.kernels.spaces import integer_matmul, tile_matmul
from tests.builder.kernels.tile_machine import Case, Shared, exact_on_tiles

# Rows: whole pairs of tiles, an incomplete last tile, fewer than a tile. Columns: pairs of panels, one, many.
CASES = [
    Case((1, 64, 128), (128, 96), 0),
    Case((37, 100), (100, 40), 255),
    Case((2, 9, 64), (64, 16)),
    Case((16, 256), (256, 10)),
    Case((1, 3, 48, 70), (70, 33)),
    Case((8, 1), (1, 130)),
]


@pytest.mark.slow
def test_sums_are_exact(shared_file: Shared) -> None:
    for each, outcome in exact_on_tiles(CASES, shared_file):
        assert tile_matmul.KIND in outcome.schedules, each
        assert outcome.products > 0, each


@pytest.mark.slow
def test_every_point_of_the_space_is_valid(shared_file: Shared) -> None:
    cases = [Case((48, 128), (128, 96), seed=seed) for seed in range(4)]
    for each, outcome in exact_on_tiles(cases, shared_file):
        assert set(outcome.decided) == {"mt", "nt"}, each


@pytest.mark.slow
def test_few_rows_are_left_to_dot_products(shared_file: Shared) -> None:
    cases = [Case((1, 64), (64, 64)), Case((3, 1, 70), (70, 300)), Case((2, 7, 64), (64, 64))]
    for each, outcome in exact_on_tiles(cases, shared_file):
        assert integer_matmul.KIND in outcome.schedules, each
        assert outcome.products == 0, each
