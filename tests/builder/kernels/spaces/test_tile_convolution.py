"""Convolution on the tiles of AMX, against exact integers, by a processor that `tiles.c` emulates."""

from __future__ import annotations

from typing import Any

import pytest

from builder.kernels.spaces import tile_convolution
from builder.kernels.spaces.geometry import Conv2d, Rows
from builder.kernels.spaces.tile_convolution import Flat
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


def geometry(each: Case) -> Conv2d:
    """Return the geometry of a case."""
    n, c, h, w = each.shape
    outputs, _, kernel_h, kernel_w = each.weights
    how: dict[str, Any] = each.how or {}
    strides, dilation = how.get("strides", (1, 1)), how.get("dilation", (1, 1))
    return Conv2d(
        n, c, h, w, outputs, (kernel_h, kernel_w), strides, how.get("padding", (0, 0, 0, 0)), dilation, 1
    )


# Output columns: whole tiles, two of them, an incomplete last one, fewer than a tile, few rows, one row.
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
    # Four rows of tiles at once, of which the last has two.
    case((1, 64, 14, 14), (16, 1, 1)),
]
# Small images in one row: with and without columns beside them, several images, strides, gaps in the window.
FLAT = [
    case((1, 128, 7, 7), (128, 1, 1)),
    case((2, 64, 7, 7), (70, 3, 3), 0, padding=(1, 1, 1, 1)),
    case((1, 64, 14, 14), (64, 3, 3), 255, strides=(2, 2), padding=(1, 1, 1, 1)),
    case((1, 128, 13, 15), (64, 1, 1), strides=(2, 3)),
    case((1, 64, 9, 12), (16, 1, 1), strides=(2, 3), padding=(1, 1, 0, 0)),
    case((1, 64, 16, 5), (64, 5, 3), strides=(3, 1), padding=(0, 2, 1, 1)),
    case((1, 64, 6, 5), (64, 3, 5), padding=(1, 0, 2, 3), dilation=(2, 1)),
    case((1, 64, 11, 12), (64, 3, 2), strides=(2, 3), dilation=(1, 2)),
    case((3, 64, 4, 4), (64, 2, 2), padding=(0, 0, 1, 1)),
]
# First layers: whole tiles, an incomplete last one, several rows at once, four channels, the widest window.
FIRST = [
    case((1, 3, 32, 32), (64, 7, 7), 130, strides=(2, 2), padding=(3, 3, 3, 3)),
    case((2, 3, 19, 37), (24, 3, 3), strides=(2, 2), padding=(0, 0, 1, 1)),
    case((1, 4, 9, 9), (16, 3, 5)),
    case((1, 3, 8, 20), (32, 2, 16), dilation=(2, 1)),
]


@pytest.mark.slow
def test_sums_are_exact(shared_file: Shared) -> None:
    for each, outcome in exact_on_tiles(CASES, shared_file):
        assert tile_convolution.KIND in outcome.schedules, each
        assert outcome.products > 0, each


@pytest.mark.slow
def test_small_images_are_exact_in_one_row(shared_file: Shared) -> None:
    for each, outcome in exact_on_tiles(FLAT, shared_file):
        assert Flat.of(geometry(each)) is not None, each
        assert outcome.products > 0, each


@pytest.mark.slow
def test_rows_of_the_window_of_a_first_layer_are_exact(shared_file: Shared) -> None:
    for each, outcome in exact_on_tiles(FIRST, shared_file):
        assert tile_convolution.KIND in outcome.schedules, each
        assert outcome.products > 0, each


@pytest.mark.slow
def test_every_point_of_the_space_is_valid(shared_file: Shared) -> None:
    cases = [case((1, 64, 9, 24), (128, 3, 3), seed=seed, padding=(1, 1, 1, 1)) for seed in range(5)]
    cases += [case((1, 64, 14, 14), (64, 1, 1), seed=seed) for seed in range(4)]
    cases += [case((1, 3, 30, 30), (64, 3, 3), seed=seed) for seed in range(4)]
    for each, outcome in exact_on_tiles(cases, shared_file):
        assert outcome.products > 0, each
        assert set(outcome.decided) >= {"zt", "yt", "nt", "oh"}


@pytest.mark.slow
def test_every_point_of_the_space_of_an_image_in_one_row_is_valid(shared_file: Shared) -> None:
    cases = [case((1, 64, 3, 7), (128, 3, 3), seed=seed, padding=(1, 1, 1, 1)) for seed in range(4)]
    for each, outcome in exact_on_tiles(cases, shared_file):
        assert outcome.products > 0, each
        assert set(outcome.decided) == {"nt"}


@pytest.mark.parametrize(
    ("shape", "filters", "how", "tiles"),
    [
        # Seven rows of eight columns are four tiles of fourteen.
        ((1, 64, 7, 7), (64, 3, 3), {"padding": (1, 1, 1, 1)}, 4),
        ((1, 64, 14, 14), (64, 3, 3), {"strides": (2, 2), "padding": (1, 1, 1, 1)}, 4),
        ((1, 64, 6, 6), (64, 1, 1), {}, 3),
        ((1, 64, 4, 4), (64, 1, 1), {}, 1),
        # As many tiles as rows, and more than there are registers.
        ((1, 64, 4, 16), (64, 1, 1), {}, None),
        ((1, 64, 14, 14), (64, 1, 1), {}, None),
        ((1, 64, 8, 8), (64, 3, 3), {"padding": (1, 1, 1, 1)}, None),
    ],
)
def test_which_images_are_in_one_row(
    shape: tuple[int, int, int, int], filters: tuple[int, int, int], how: Any, tiles: int | None
) -> None:
    flat = Flat.of(geometry(case(shape, filters, **how)))
    assert (None if flat is None else flat.tiles) == tiles


@pytest.mark.parametrize(
    ("name", "shape", "in_block", "dtype", "expected"),
    [
        ("sapphirerapids", (14, 14), 64, "uint8", True),
        ("sapphirerapids", (2, 4), 64, "uint8", True),
        ("sapphirerapids", (1, 7), 64, "uint8", False),
        ("sapphirerapids", (14, 14), 16, "uint8", False),
        ("sapphirerapids", (14, 14), 64, "int8", False),
        ("sapphirerapids", (14, 14), 4, "uint8", False),
        ("cascadelake", (14, 14), 64, "uint8", False),
    ],
)
def test_what_takes_tiles(
    name: str, shape: tuple[int, int], in_block: int, dtype: str, expected: bool
) -> None:
    op = Conv2d(1, 64, *shape, 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    assert tile_convolution.fits(op, in_block, dtype, device(name)) is expected


@pytest.mark.parametrize(
    ("channels", "window", "dilation", "expected"),
    [
        (3, (3, 3), (1, 1), True),
        (4, (1, 16), (3, 1), True),
        (3, (3, 2), (1, 1), False),
        (3, (3, 17), (1, 1), False),
        (3, (3, 3), (1, 2), False),
        (5, (3, 3), (1, 1), False),
    ],
)
def test_which_first_layers_take_tiles(
    channels: int, window: tuple[int, int], dilation: tuple[int, int], expected: bool
) -> None:
    op = Conv2d(1, channels, 40, 40, 64, window, (1, 1), (0, 0, 0, 0), dilation, 1)
    assert tile_convolution.fits(op, 4, "uint8", device("sapphirerapids")) is expected


@pytest.mark.parametrize("width", [1, 4, 7, 8, 13, 14, 16, 17, 19, 28, 33, 56, 100, 112])
@pytest.mark.parametrize("height", [1, 2, 7, 56])
@pytest.mark.parametrize("out_block", [16, 64])
@pytest.mark.parametrize("by_pixels", [False, True])
def test_all_points_fit_the_registers(width: int, height: int, out_block: int, by_pixels: bool) -> None:
    target, rows = device("sapphirerapids"), Rows(height, 1000)
    space = tile_convolution.space(height, width, out_block, target, rows, by_pixels=by_pixels)
    shape, values = space.default, space.values
    assert 1 <= shape.m <= TILE.rows
    assert max(values["zt"]) * max(values["yt"]) * max(values["nt"]) <= 4
    assert width % shape.m == 0 or max(values["zt"]) == 1
    assert (shape.zt, shape.yt, shape.nt) == (max(values["zt"]), max(values["yt"]), max(values["nt"]))
    assert width % (shape.m * shape.zt) == 0 or shape.zt == 1
    assert all(-(-height // shape.yt) % oh == 0 for oh in (*values["oh"], shape.oh))
    assert shape.oh in values["oh"]
