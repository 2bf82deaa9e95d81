"""How evenly threads share a parallel loop."""

from __future__ import annotations

import pytest

from builder.kernels.spaces import shares


def test_the_thread_with_the_most_rounds_decides() -> None:
    assert [shares.most_rounds(rounds, 4) for rounds in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert shares.unevenness(16) == 1.0
    assert shares.unevenness(2) == pytest.approx((2 + 4 + 8) / 3)  # of 4, 8 and 16 threads two work
    assert shares.is_even(48)
    assert not shares.is_even(9)


def test_blocks_of_a_round_are_the_most_that_are_shared_evenly() -> None:
    assert shares.blocks_of_a_round(64, (1, 2, 4, 8), 8) == 4
    assert shares.blocks_of_a_round(64, (1, 2, 4, 8), 2) == 2
    assert shares.blocks_of_a_round(4, (1, 2, 4), 4) == 1  # the best of those that are all uneven
    assert shares.blocks_of_a_round(1024, (1, 2, 4, 8), 8) == 8


def test_rows_of_a_round_leave_enough_rounds() -> None:
    assert shares.rows_of_a_round(112, 2, 112, again=2) == 14
    assert shares.rows_of_a_round(112, 64, 112, again=2) == 112
    assert shares.rows_of_a_round(112, 64, 20, again=2) <= 20


@pytest.mark.parametrize("height", [1, 2, 7, 12, 13, 60])
@pytest.mark.parametrize("others", [1, 2, 3, 24])
@pytest.mark.parametrize("most", [1, 5, 100])
def test_rows_of_a_round_copy_few_rows_twice(height: int, others: int, most: int) -> None:
    rows = shares.rows_of_a_round(height, others, most, again=4)
    largest = shares.rows_of_a_round(height, 10**6, most, again=4)
    assert 1 <= rows <= min(height, most)
    assert rows == largest or (rows >= 8 and height % rows == 0)


def test_rows_again_are_those_under_the_rest_of_the_window() -> None:
    assert shares.rows_again(56, 58) == 2  # 3x3
    assert shares.rows_again(28, 57) == 0.5  # 3x3 with stride 2
    assert shares.rows_again(56, 56) == 0
