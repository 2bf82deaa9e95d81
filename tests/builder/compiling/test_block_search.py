"""Which of our tensors is taken for which of a model's, and which is a fault."""

from __future__ import annotations

import numpy as np
import pytest

from builder.compiling.block_search import Search, block_of

ONE, ZERO = np.ones(1), np.zeros(1)
RANDOM = np.random.default_rng(0)
BEFORE = RANDOM.integers(-3, 4, (1, 8, 5, 5)).astype("int8")
AFTER = np.maximum(BEFORE, 0)


def packed(array: np.ndarray, block: int = 4) -> np.ndarray:
    """Return `[N, C, H, W]` as `[N, C/b, H, W, b]`."""
    n, channels, *image = array.shape
    return array.reshape(n, channels // block, block, *image).transpose(0, 1, 3, 4, 2)


def find(search: Search, name: str, expected: np.ndarray) -> np.ndarray | None:
    return search.find(name, expected.astype("float32"), expected, ONE, ZERO)


def off(array: np.ndarray, count: int) -> np.ndarray:
    """Return a tensor of which `count` elements are one step off."""
    result = array.copy()
    result.reshape(-1)[:count] += 1
    return result


@pytest.mark.parametrize(
    "form", [packed(AFTER), AFTER, AFTER.astype("float32"), (AFTER.astype("int16") + 128).astype("uint8")]
)
def test_what_no_kernel_wrote_is_not_taken_for_its_activation(form: np.ndarray) -> None:
    search = Search([form])
    assert find(search, "before", BEFORE) is None
    np.testing.assert_array_equal(find(search, "after", AFTER), AFTER)
    found, hidden = search.result()
    assert [block.name for block in found] == ["after"]
    assert found[0].share == 0
    assert hidden == ["before"]


def test_what_is_close_is_a_fault_if_it_agrees_with_nothing() -> None:
    search = Search([off(AFTER, 3)])
    assert find(search, "before", BEFORE) is None
    assert find(search, "after", AFTER) is None
    found, hidden = search.result()
    assert hidden == ["before"]  # ours is closer to the other
    assert [(block.name, block.is_rounding) for block in found] == [("after", False)]
    assert found[0].unexplained == 3 / AFTER.size


def test_a_fault_is_found_beside_a_tensor_that_is_closer() -> None:
    """The closest is another's; the one that is wrong is not forgotten for it."""
    other = off(BEFORE, 3)
    search = Search([off(BEFORE, 90), other])
    assert find(search, "wrong", BEFORE) is None
    assert find(search, "other", other) is not None
    found, _ = search.result()
    assert [(block.name, block.is_rounding) for block in found] == [("wrong", False), ("other", True)]
    assert found[0].unexplained == 90 / BEFORE.size


def test_a_fault_is_found_beside_an_equal_tensor() -> None:
    search = Search([off(AFTER, 50), AFTER])
    assert find(search, "wrong", AFTER) is not None  # takes the other's, whose numbers are the same
    assert find(search, "other", AFTER) is None
    found, _ = search.result()
    assert [block.is_rounding for block in found] == [True, False]


def test_a_second_layout_of_a_tensor_is_no_fault_of_another() -> None:
    search = Search([packed(AFTER), AFTER])
    assert find(search, "after", AFTER) is not None
    assert find(search, "later", off(AFTER, 9)) is None
    assert search.result()[1] == ["later"]


def test_what_an_output_is_compared_with_is_no_fault_of_another() -> None:
    search = Search([AFTER])
    assert find(search, "before", BEFORE) is None
    search.exclude(AFTER.astype("float32"), AFTER, ONE, ZERO)
    assert search.result() == ([], ["before"])


def test_layers_that_are_all_zero_take_each_a_tensor() -> None:
    nothing = np.full((1, 8, 5, 5), -128, "int8")
    hardly = off(nothing, 4)
    search = Search([packed(nothing), packed(hardly), packed(nothing)])
    names = {"a": nothing, "b": hardly, "c": nothing, "d": nothing}
    assert [name for name, value in names.items() if find(search, name, value) is None] == ["d"]
    found, hidden = search.result()
    assert all(block.share == 0 for block in found)
    assert hidden == ["d"]


@pytest.mark.parametrize("elements", [1, 2])
def test_a_tensor_of_few_numbers_is_not_taken_for_one_that_is_steps_away(elements: int) -> None:
    """What follows is computed from it: with another's numbers, that would be a fault."""
    expected, other = np.full((elements, 1), 10, "uint8"), np.full((elements, 1), 13, "uint8")
    assert find(Search([other]), "hidden", expected) is None
    near = expected + np.uint8(1)
    np.testing.assert_array_equal(find(Search([near]), "rounded", expected), near)


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
        search = Search([form])
        assert find(search, "after", AFTER) is None
        found, hidden = search.result()
        assert [(block.name, block.is_rounding) for block in found] == [("after", False)]
        assert not hidden


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_steps_that_are_no_number_are_no_rounding(dtype: str) -> None:
    steps = np.zeros(1000)
    assert block_of("x", steps, halfway=False, dtype=dtype).is_rounding
    steps[7] = np.nan
    assert not block_of("x", steps, halfway=False, dtype=dtype).is_rounding
