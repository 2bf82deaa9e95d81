"""How our tensors are read as those of a model, and what is taken for rounding."""

from __future__ import annotations

import numpy as np
import pytest

from builder.compiling.block_agreement import Grid, block_of, has_order_of, read_as

GRID = Grid(np.ones(1), np.zeros(1), "int8")
RANDOM = np.random.default_rng(0)
BEFORE = RANDOM.integers(-3, 4, (1, 8, 5, 5)).astype("int8")
AFTER = np.maximum(BEFORE, 0)


def packed(array: np.ndarray, block: int = 4) -> np.ndarray:
    """Return `[N, C, H, W]` as `[N, C/b, H, W, b]`."""
    n, channels, *image = array.shape
    return array.reshape(n, channels // block, block, *image).transpose(0, 1, 3, 4, 2)


@pytest.mark.parametrize(
    "form", [packed(AFTER), AFTER, AFTER.astype("float32"), (AFTER.astype("int16") + 128).astype("uint8")]
)
def test_any_form_of_a_tensor_is_read_as_it(form: np.ndarray) -> None:
    match = read_as(form, "after", AFTER, False, GRID)
    assert match is not None
    assert match.block.share == 0
    np.testing.assert_array_equal(match.own, AFTER)
    other = read_as(form, "before", BEFORE, False, GRID)
    assert other is not None
    assert not other.block.is_rounding


def test_a_tensor_with_real_numbers_is_read_from_bytes() -> None:
    grid = Grid(np.array([0.5]), np.array([3.0]), "int8", is_real=True)
    expected = ((AFTER - 3.0) * 0.5).astype("float32")
    match = read_as(packed(AFTER), "after", expected, False, grid)
    assert match is not None
    np.testing.assert_array_equal(match.own, expected)


@pytest.mark.parametrize(
    ("have", "shape", "same"),
    [
        ((1, 48, 48, 17), (2304, 17), True),
        ((2, 12, 64), (24, 64), True),
        ((1, 3, 192, 192), (1, 192, 192, 3), False),
        ((7, 2, 5), (7, 5, 2), False),
        ((1, 4, 6, 6, 8), (1, 30, 6, 6), True),
    ],
)
def test_the_order_of_elements_is_known_from_the_axes(
    have: tuple[int, ...], shape: tuple[int, ...], *, same: bool
) -> None:
    assert has_order_of(have, shape) is same


@pytest.mark.parametrize(
    ("elements", "steps", "dtype", "rounded"),
    [
        (1, 1.0, "uint8", True),
        (2, 1.0, "int8", True),
        (1, 3.0, "uint8", False),
        (2, 3.0, "int8", False),
        (4, 60.0, "uint8", False),
        (1, 7.0, "uint16", True),
        (1, 60.0, "int16", False),
    ],
)
def test_an_output_of_few_numbers_that_is_steps_away_is_no_rounding(
    elements: int, steps: float, dtype: str, rounded: bool
) -> None:
    """`FEWEST` forgives two numbers of a tensor: not all that it has, however wrong they are."""
    distances = np.zeros(elements)
    distances[:2] = steps
    assert block_of("few", distances, False, dtype).is_rounding is rounded


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_nan_in_a_tensor_of_ours_is_a_fault(count: int) -> None:
    """Two elements may be rounded otherwise, but a NaN is no rounding."""
    own = AFTER.astype("float32")
    own.reshape(-1)[:count] = np.nan
    for form in (own, packed(own)):
        match = read_as(form, "after", AFTER, False, GRID)
        assert match is not None
        assert not match.block.is_rounding


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_steps_that_are_no_number_are_no_rounding(dtype: str) -> None:
    steps = np.zeros(1000)
    assert block_of("x", steps, halfway=False, dtype=dtype).is_rounding
    steps[7] = np.nan
    assert not block_of("x", steps, halfway=False, dtype=dtype).is_rounding
