"""Which security counters are ahead of time."""

from __future__ import annotations

import pytest

from agent.bundle.counter_time import LATEST_WITHOUT_CLOCK, MAX_AHEAD_S, day_of, highest_counter

NOW_S = 1_796_000_000
BIRTH_OF_THE_CLOCK_S = 12


@pytest.mark.parametrize(
    ("now_s", "synchronised", "expected"),
    [
        (NOW_S + 0.9, True, NOW_S + MAX_AHEAD_S),
        (NOW_S, False, LATEST_WITHOUT_CLOCK),
        # After a boot without a battery.
        (BIRTH_OF_THE_CLOCK_S, False, LATEST_WITHOUT_CLOCK),
        # A clock that runs ahead by itself keeps nothing out that its time allows.
        (LATEST_WITHOUT_CLOCK + 5, False, LATEST_WITHOUT_CLOCK + 5 + MAX_AHEAD_S),
    ],
)
def test_unknown_time_allows_every_honest_counter(now_s: float, synchronised: bool, expected: int) -> None:
    assert highest_counter(now_s, synchronised=synchronised) == expected


def test_milliseconds_are_ahead_of_every_clock() -> None:
    assert highest_counter(LATEST_WITHOUT_CLOCK, synchronised=False) < NOW_S * 1000


def test_bound_is_told_as_a_day() -> None:
    assert day_of(LATEST_WITHOUT_CLOCK) == "2100-01-01"
