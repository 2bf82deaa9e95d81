"""Groups whose products are added in 16 bits: which weights permit it, and in which order they are stored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from builder.kernels.spaces.dot_loops import fits_words, in_pairs, words_group
from tests.builder.kernels.integer_machines import device


@pytest.mark.parametrize("group", [4, 8])
def test_the_first_pairs_of_four_lanes_are_followed_by_their_next_pairs(group: int) -> None:
    weights = np.arange(2 * 8 * group).reshape(2, 8, group)
    packed = in_pairs(weights)
    assert packed.shape == (2, 2, group // 2, 4, 2)
    for pair in range(group // 2):
        assert packed[1, 1, pair, 2].tolist() == weights[1, 4 + 2, 2 * pair : 2 * pair + 2].tolist()


@given(
    arrays.arrays(np.int8, (8, 4), elements=st.sampled_from([-128, -127, 0, 127]))
    | arrays.arrays(np.int8, (3, 8), elements=st.sampled_from([-65, -64, -63, 0, 63, 64, 65, 127]))
)
def test_weights_fit_if_no_input_makes_a_sum_too_large(weights: np.ndarray) -> None:
    chains = weights.reshape(len(weights), -1, 2).astype(np.int64)
    largest = np.where(chains > 0, 127, -128)
    smallest = np.where(chains > 0, -128, 127)
    sums = [(chains * data).sum(axis=1) for data in (largest, smallest)]
    assert fits_words(weights) == all((each == each.astype(np.int16)).all() for each in sums)


@pytest.mark.parametrize(
    ("weights", "fits"),
    [
        ([-128, 0, -128, 0], False),
        ([-128, -128, -127, 127], True),
        # 129 * 127 + 128 * 128 is 2^15 - 1, and 129 * 128 + 128 * 127 is 2^15.
        ([127, 0, 2, 0, -127, 0, -1, 0], True),
        ([127, 0, 3, 0, -127, 0, -1, 0], False),
        ([127, 0, 2, 0, -127, 0, -2, 0], False),
        ([127, 127, 127, 127, 1, 1, 0, 0], True),
        ([127, 127, 127, 127, 1, 1, 3, 0], False),
    ],
)
def test_only_elements_that_are_added_in_16_bits_count(weights: list[int], *, fits: bool) -> None:
    assert fits_words(np.asarray([weights], np.int8)) is fits


@pytest.mark.parametrize(
    ("weight", "depth", "group"), [(64, 16, 8), (64, 12, 4), (65, 16, 4), (-127, 16, 4), (-128, 16, 1)]
)
def test_a_group_is_the_longest_that_one_weight_of_any_lane_permits(
    weight: int, depth: int, group: int
) -> None:
    weights = np.full((4, depth), 1, np.int8)
    weights[3] = weight
    assert words_group(lambda g: weights.reshape(-1, 4, g), device("rpi4").dot, depth) == group
    assert words_group(lambda g: weights.reshape(-1, 4, g), device("rpi5").dot, depth) == 4
