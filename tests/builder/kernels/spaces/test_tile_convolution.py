"""Convolution on the tiles of AMX, against exact integers, by a processor that `tiles.c` emulates."""

from __future__ import annotations

import pytest

from builder.kernels.spaces import tile_convolution
from builder.kernels.spaces.geometry import Conv2d, Rows
from builder.target.dot import TILE
from tests.builder.kernels.integer_machines import device
from tests.builder.kernels.tile_machine import Case, Shared, exact_on_tiles


def case(
    shape: tuple[int, int, int, int],
    filters: tuple[int, int, int],
    zero: int = 7,
    seed: int | None = None,
    **how: tuple[int, ...],
) -> Case:
    """Return a case: the input, and the output channels and the window."""
    outputs, *window = filters
    return Case(shape, (outputs, shape[1], *window), zero, dict(how), seed)


# Output columns: whole tiles, two of them, an incomplete last one, fewer than a tile, few rows, one row; four
# tiles of rows that do not divide the height.
CASES = [
    case((1, 64, 14, 14), (128, 3, 3), 0, padding=(1, 1, 1, 1)),
    case((2, 128, 5, 32), (64, 1, 1), 255),
    case((1, 128, 9, 33), (96, 1, 1), strides=(2, 2)),
    case((1, 64, 7, 7), (192, 3, 3), 128, padding=(1, 1, 1, 1)),
    case((1, 64, 13, 5), (70, 3, 2), strides=(2, 1), padding=(0, 1, 2, 0)),
    case((1, 128, 4, 2), (64, 3, 3), padding=(1, 1, 1, 1)),
    case((1, 64, 8, 19), (64, 2, 3), dilation=(2, 3)),
    case((1, 64, 1, 40), (64, 1, 1)),
    case((1, 64, 3, 25), (16, 1, 1)),
    case((1, 384, 14, 14), (96, 1, 1)),
]


@pytest.mark.slow
def test_sums_are_exact(shared_file: Shared) -> None:
    for each, outcome in exact_on_tiles(CASES, shared_file):
        assert tile_convolution.KIND in outcome.schedules, each
        assert outcome.products > 0, each


@pytest.mark.slow
def test_every_point_of_the_space_is_valid(shared_file: Shared) -> None:
    cases = [case((1, 64, 9, 24), (128, 3, 3), seed=seed, padding=(1, 1, 1, 1)) for seed in range(5)]
    cases += [case((1, 64, 6, 7), (128, 1, 1), seed=seed) for seed in range(3)]
    for each, outcome in exact_on_tiles(cases, shared_file):
        assert outcome.products > 0, each
        assert set(outcome.decided) >= {"zt", "yt", "nt", "oh"}


@pytest.mark.parametrize(
    ("name", "shape", "in_block", "dtype", "expected"),
    [
        ("sapphirerapids", (14, 14), 64, "uint8", True),
        ("sapphirerapids", (2, 4), 64, "uint8", True),
        ("sapphirerapids", (1, 7), 64, "uint8", False),
        ("sapphirerapids", (14, 14), 16, "uint8", False),
        ("sapphirerapids", (14, 14), 64, "int8", False),
        ("cascadelake", (14, 14), 64, "uint8", False),
    ],
)
def test_what_takes_tiles(
    name: str, shape: tuple[int, int], in_block: int, dtype: str, expected: bool
) -> None:
    op = Conv2d(1, 64, *shape, 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    assert tile_convolution.fits(op, in_block, dtype, device(name)) is expected


@pytest.mark.parametrize("width", [1, 4, 7, 8, 13, 14, 16, 17, 19, 28, 33, 56, 100, 112])
@pytest.mark.parametrize("height", [1, 2, 7, 56])
@pytest.mark.parametrize("out_block", [16, 64])
def test_all_points_fit_the_registers(width: int, height: int, out_block: int) -> None:
    space = tile_convolution.space(height, width, out_block, device("sapphirerapids"), Rows(height, 1000))
    shape = space.default
    assert 1 <= shape.m <= TILE.rows
    assert max(space.zt) * max(space.yt) * max(space.nt) <= 4
    assert width % shape.m == 0 or max(space.zt) == 1
    assert (shape.zt, shape.yt, shape.nt) == (max(space.zt), max(space.yt), max(space.nt))
    assert width % (shape.m * shape.zt) == 0 or shape.zt == 1
    assert all(-(-height // shape.yt) % oh == 0 for oh in (*space.oh, shape.oh))
