from __future__ import annotations

import itertools

import pytest

from agent.bundle.buckets import MAX_BUCKETS
from builder.compiling.ladder import MAX_SIZES, chosen_sizes, ladder, parse_buckets
from builder.errors import ShapeError


def test_powers_of_two_and_those_between() -> None:
    assert ladder(1, 512) == (16, 32, 64, 128, 192, 256, 384, 512)
    assert ladder(1, 8) == (1, 2, 3, 4, 6, 8)
    assert ladder(1, 40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert ladder(300, 320) == (320,)
    assert ladder(7, 7) == (7,)


def test_no_request_is_computed_at_more_than_twice_its_size() -> None:
    for low, high in itertools.product((1, 2, 5, 16, 100), (16, 100, 384, 1000, 4096)):
        for dimensions in (1, 2, 3, 4):
            sizes = ladder(low, max(low, high), dimensions)
            assert sizes[-1] == max(low, high)
            assert len(sizes) <= MAX_SIZES
            assert len(sizes) ** dimensions <= MAX_BUCKETS
            assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))


def test_sizes_that_the_user_wants() -> None:
    assert parse_buckets("64,16,16") == {"": (16, 64)}
    assert parse_buckets("batch=1,4 s=16") == {"batch": (1, 4), "s": (16,)}
    assert chosen_sizes((16, 64), 1, 128, "s", 1) == (16, 64, 128)
    with pytest.raises(ShapeError, match="sizes of s from 8 to 128, got 4"):
        chosen_sizes((4,), 8, 128, "s", 1)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "a", "s=", "1,,2", "1.5", "s=1 s=2", "99999999999", "²", "9" * 5000]
)
def test_sizes_without_sense(text: str) -> None:
    with pytest.raises(ShapeError, match="sizes of buckets"):
        parse_buckets(text)
