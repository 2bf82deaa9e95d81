"""Sensitivity: which blocks to leave in float until a model is accurate enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from builder.quantising.units import Unit

# Of the blocks with the most noise, this many are also left out one at a time.
TRIED_ONE_BY_ONE: Final = 24


def rank(
    units: Sequence[Unit],
    isolated_db: Mapping[str, float],
    gain: Callable[[str], float],
    progress: Callable[[str], None],
) -> list[Unit]:
    """Units in the order in which leaving them in float is worth most.

    `gain`: returns what leaving a unit in float adds to the model's signal to noise, in dB.
    """
    worst = sorted(units, key=lambda unit: isolated_db[unit.name])
    tried = worst[:TRIED_ONE_BY_ONE]
    gains = {}
    for count, unit in enumerate(tried):
        progress(f"leaving one block in float: {unit.name} ({count + 1} of {len(tried)})")
        gains[unit.name] = gain(unit.name)
    return sorted(tried, key=lambda unit: -gains[unit.name]) + worst[TRIED_ONE_BY_ONE:]


def fewest(count: int, passes: Callable[[int], bool]) -> int | None:
    """The least number from 1 to `count` for which `passes` holds, by doubling and halving.

    `passes`: taken to hold for all larger numbers once it holds.
    """
    low, high = 0, 1
    while not passes(min(high, count)):
        if high >= count:
            return None
        low, high = high, 2 * high
    high = min(high, count)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high
