"""Delays double and are bounded, and two agents with one name do not evict each other at full speed."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.settings import RECONNECT_SPREAD_S
from agent.mqtt.backoff import (
    FIRST_S,
    LATER_S,
    LONGEST_S,
    LONGEST_UNSETTLED_S,
    SETTLED_S,
    Backoff,
)
from agent.mqtt.reason_codes import LOST, RENEWED, reason

NOT_AUTHORIZED = reason(0x87)
NOW_S = 1000.0


@given(st.integers(0, 10_000))
def test_delay_doubles_with_each_failure_up_to_the_longest(failures: int) -> None:
    backoff = Backoff()
    for _ in range(min(failures, 40)):
        backoff.failed()
    backoff.failures = failures
    full_s = min(LONGEST_S, FIRST_S * 2.0**failures) if failures < 100 else LONGEST_S
    assert full_s / 2 <= backoff.delay_s(LOST, NOW_S) <= full_s


def test_fleet_does_not_come_back_all_at_once() -> None:
    backoff = Backoff()
    for _ in range(10):
        backoff.failed()
    delays_s = sorted(backoff.delay_s(LOST, NOW_S) for _ in range(100))
    assert delays_s[-1] - delays_s[0] > LONGEST_S / 4


def test_connection_that_lasted_long_enough_starts_from_the_shortest_delay() -> None:
    backoff = Backoff()
    for _ in range(10):
        backoff.failed()
    backoff.ended(SETTLED_S)
    assert backoff.failures == 0
    assert backoff.delay_s(LOST, NOW_S) <= FIRST_S


def test_connection_that_ended_soon_counts_as_a_failure_and_is_retried_sooner_than_a_missing_broker() -> None:
    backoff = Backoff()
    for _ in range(20):
        backoff.ended(SETTLED_S - 0.01)
    assert backoff.failures == 20
    assert backoff.delay_s(LOST, NOW_S) <= LONGEST_UNSETTLED_S
    backoff.failed()
    assert backoff.delay_s(LOST, NOW_S) > LONGEST_UNSETTLED_S


def test_refusal_that_someone_must_fix_is_retried_late_however_few_failures_there_were() -> None:
    assert LATER_S <= Backoff().delay_s(NOT_AUTHORIZED, NOW_S) <= 1.5 * LATER_S


@given(st.lists(st.floats(0, 10), max_size=30))
def test_delay_is_never_negative_nor_longer_than_the_longest(lasted_s: list[float]) -> None:
    backoff = Backoff()
    for seconds in lasted_s:
        backoff.ended(seconds)
        assert 0 < backoff.delay_s(LOST, NOW_S) <= LONGEST_S


def test_two_clients_of_one_name_evict_each_other_ever_more_slowly() -> None:
    # The broker ends the older connection when the newer one arrives.
    backoffs = (Backoff(), Backoff())
    connected_s = [0.0, 0.0]
    returns_s = [0.0, float("inf")]
    connects: list[float] = []
    while len(connects) < 100:
        who = 0 if returns_s[0] <= returns_s[1] else 1
        now_s, other = returns_s[who], 1 - who
        connects.append(now_s)
        connected_s[who], returns_s[who] = now_s, float("inf")
        if len(connects) == 1:
            returns_s[other] = 0.0
            continue
        backoffs[other].ended(now_s - connected_s[other])
        returns_s[other] = now_s + backoffs[other].delay_s(LOST, NOW_S)
    assert sum(moment < 3.0 for moment in connects) < 14
    late = [later - earlier for earlier, later in itertools.pairwise(connects[50:])]
    assert min(late) >= LONGEST_UNSETTLED_S / 2


# The slots of a fleet.

AGENTS = 1000
CONNECTIONS = 3


def connects_s(away_s: float, rng: random.Random) -> list[float]:
    """Return when each connection of a fleet is back, in seconds after its broker is back.

    All connections end at the same moment. Attempts to connect fail at once until the broker is back.
    """
    returns_s = []
    for _ in range(AGENTS * CONNECTIONS):
        backoff = Backoff(RECONNECT_SPREAD_S, rng.random)
        backoff.ended(3600.0)
        now_s = backoff.delay_s(LOST, 0.0)
        while now_s < away_s:
            backoff.failed()
            now_s += backoff.delay_s(LOST, now_s)
        returns_s.append(now_s - away_s)
    return sorted(returns_s)


def busiest_second(moments_s: list[float]) -> int:
    """Return the largest number of moments within any second."""
    most = first = 0
    for last, moment_s in enumerate(moments_s):
        while moments_s[first] <= moment_s - 1.0:
            first += 1
        most = max(most, last + 1 - first)
    return most


@pytest.mark.parametrize("away_s", [0.0, 1.0, 10.0, 27.0, 300.0])
def test_thousand_agents_are_back_within_30_s_and_make_at_most_150_connects_in_any_second(
    away_s: float,
) -> None:
    back_s = connects_s(away_s, random.Random(7))
    assert back_s[-1] < 28.1
    assert busiest_second(back_s) <= 150


def test_slot_recurs_at_the_interval_and_is_used_once() -> None:
    backoff = Backoff(27.0, lambda: 0.5)
    backoff.ended(3600.0)
    now_s = backoff.delay_s(LOST, 0.0)
    assert now_s == pytest.approx(13.5)
    backoff.failed()
    # Also if the timer fires a moment early, and if the attempt takes its time.
    for late_s in (-0.001, 0.0, 0.5, 10.0):
        assert now_s + late_s + backoff.delay_s(LOST, now_s + late_s) == pytest.approx(40.5)


@given(st.floats(0.01, 3600), st.floats(0, 1), st.floats(0, 1e7), st.integers(0, 40))
def test_slot_is_never_now_and_never_later_than_its_interval(
    spread_s: float, offset: float, now_s: float, failures: int
) -> None:
    backoff = Backoff(spread_s, lambda: offset)
    backoff.failures = failures
    delay_s = backoff.delay_s(LOST, now_s)
    assert 0 < delay_s <= max(spread_s, LONGEST_S) * 1.001 + 0.1


def test_small_fleet_tries_less_often_while_its_broker_is_missing() -> None:
    backoff = Backoff(2.0)
    longest_s = []
    for _ in range(6):
        backoff.failed()
        longest_s.append(max(backoff.delay_s(LOST, 0.1 * tick) for tick in range(400)))
    assert longest_s == pytest.approx([4, 8, 16, 16, 16, 16], abs=0.2)


def test_renewed_certificates_need_no_slot() -> None:
    backoff = Backoff(RECONNECT_SPREAD_S)
    backoff.ended(3600.0)
    assert backoff.delay_s(RENEWED, NOW_S) <= FIRST_S
