"""The order in which blocks are left in float, and how many."""

from __future__ import annotations

import pytest

from builder.quantising.sensitivity import TRIED_ONE_BY_ONE, fewest, rank
from builder.quantising.units import Unit


@pytest.mark.parametrize("least", [1, 2, 3, 7, 8, 20, 21])
def test_fewest_is_found_by_doubling_and_halving(least: int) -> None:
    asked: list[int] = []

    def passes(count: int) -> bool:
        asked.append(count)
        return count >= least

    assert fewest(20, passes) == (least if least <= 20 else None)
    assert len(asked) == len(set(asked)) <= 10


def test_noisiest_blocks_are_tried_and_ranked_by_what_they_gain() -> None:
    units = [Unit(f"u{i}", "Conv", (f"u{i}",), (), ()) for i in range(TRIED_ONE_BY_ONE + 2)]
    noise = {unit.name: float(i) for i, unit in enumerate(units)}
    tried: list[str] = []

    def gain(name: str) -> float:
        tried.append(name)
        return noise[name]

    order = rank(list(reversed(units)), noise, gain, lambda _: None)
    assert sorted(tried) == sorted(f"u{i}" for i in range(TRIED_ONE_BY_ONE))
    assert [unit.name for unit in order[:2]] == [f"u{TRIED_ONE_BY_ONE - 1}", f"u{TRIED_ONE_BY_ONE - 2}"]
    assert [unit.name for unit in order[-2:]] == [f"u{TRIED_ONE_BY_ONE}", f"u{TRIED_ONE_BY_ONE + 1}"]
