"""The order of weights whose groups are stored in halves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from builder.kernels.spaces.dot_loops import fits_words, in_pairs, words_group


def test_the_first_halves_of_four_lanes_are_followed_by_their_second_halves() -> None:
    weights = np.arange(2 * 8 * 4).reshape(2, 8, 4)
    packed = in_pairs(weights)
    assert packed.shape == (2, 2, 2, 4, 2)
    assert packed[1, 1, 0, 2].tolist() == weights[1, 4 + 2, :2].tolist()
    assert packed[1, 1, 1, 2].tolist() == weights[1, 4 + 2, 2:].tolist()


@given(arrays.arrays(np.int8, (8, 4), elements=st.sampled_from([-128, -127, 0, 127])))
def test_weights_fit_if_no_input_makes_a_sum_of_two_products_too_large(weights: np.ndarray) -> None:
    wide = weights.astype(np.int64)
    sums = -128 * (wide[:, :2] + wide[:, 2:])  # the largest magnitude of a datum is that of -128
    assert fits_words(weights) == bool((sums < 1 << 15).all())


@pytest.mark.parametrize(("weights", "fits"), [([-128, 0, -128, 0], False), ([-128, -128, -127, 127], True)])
def test_only_elements_that_are_added_in_16_bits_count(weights: list[int], *, fits: bool) -> None:
    assert fits_words(np.asarray([weights], np.int8)) is fits
