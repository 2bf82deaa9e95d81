from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.bundle.buckets import OutputAxis
from builder.compiling.size_rules import find_rule
from builder.errors import ShapeError

LIKE = OutputAxis("y", 1, "n")


@pytest.mark.parametrize(("low", "high"), [(640, 2000), (1000, 90_000)])
@pytest.mark.parametrize(
    "size",
    [
        lambda n: n,
        lambda n: 8 * n,
        lambda n: 2 * n - 4,
        lambda n: (n + 1) // 2,
        lambda n: (n - 5) // 4 + 1,
        lambda n: ((n - 7) // 3 - 1) // 2,
        lambda n: 2 * ((n + 3) // 8) + 1,
        lambda n: n // 64,
        lambda n: (n - 400) // 160 + 1,
    ],
)
def test_a_rule_gives_every_size_in_the_bounds(size: Callable[[int], int], low: int, high: int) -> None:
    asked: list[int] = []

    def at(n: int) -> int:
        asked.append(n)
        return size(n)

    rule = find_rule(LIKE, {n: size(n) for n in (low, high)}, (low, high), at)
    assert all(rule(n) == size(n) for n in range(low, high + 1, 1 if high < 3000 else 7))
    assert len(asked) < 16


def test_sizes_that_no_rule_gives() -> None:
    with pytest.raises(ShapeError, match="output 'y': axis 1 has sizes that no rule gives: 4 at n=2"):
        find_rule(LIKE, {2: 4, 5: 25, 9: 81}, (2, 9), lambda n: n * n)
