"""Delays double and are bounded, and two agents with one name do not evict each other at full speed."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt.backoff import (
    FIRST_S,
    LATER_S,
    LONGEST_S,
    LONGEST_UNSETTLED_S,
    SETTLED_S,
    Backoff,
)
from agent.mqtt.reason_codes import LOST, reason

NOT_AUTHORIZED = reason(0x87)


@given(st.integers(0, 10_000))
def test_delay_doubles_with_each_failure_up_to_the_longest(failures: int) -> None:
    backoff = Backoff()
    for _ in range(min(failures, 40)):
        backoff.failed()
    backoff.failures = failures
    full_s = min(LONGEST_S, FIRST_S * 2.0**failures) if failures < 100 else LONGEST_S
    assert full_s / 2 <= backoff.delay_s(LOST) <= full_s


def test_fleet_does_not_come_back_all_at_once() -> None:
    backoff = Backoff()
    for _ in range(10):
        backoff.failed()
    delays_s = sorted(backoff.delay_s(LOST) for _ in range(100))
    assert delays_s[-1] - delays_s[0] > LONGEST_S / 4


def test_connection_that_lasted_long_enough_starts_from_the_shortest_delay() -> None:
    backoff = Backoff()
    for _ in range(10):
        backoff.failed()
    backoff.ended(SETTLED_S)
    assert backoff.failures == 0
    assert backoff.delay_s(LOST) <= FIRST_S


def test_connection_that_ended_soon_counts_as_a_failure_and_is_retried_sooner_than_a_missing_broker() -> None:
    backoff = Backoff()
    for _ in range(20):
        backoff.ended(SETTLED_S - 0.01)
    assert backoff.failures == 20
    assert backoff.delay_s(LOST) <= LONGEST_UNSETTLED_S
    backoff.failed()
    assert backoff.delay_s(LOST) > LONGEST_UNSETTLED_S


def test_refusal_that_someone_must_fix_is_retried_late_however_few_failures_there_were() -> None:
    assert LATER_S <= Backoff().delay_s(NOT_AUTHORIZED) <= 1.5 * LATER_S


@given(st.lists(st.floats(0, 10), max_size=30))
def test_delay_is_never_negative_nor_longer_than_the_longest(lasted_s: list[float]) -> None:
    backoff = Backoff()
    for seconds in lasted_s:
        backoff.ended(seconds)
        assert 0 < backoff.delay_s(LOST) <= LONGEST_S


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
        returns_s[other] = now_s + backoffs[other].delay_s(LOST)
    assert sum(moment < 3.0 for moment in connects) < 14
    late = [later - earlier for earlier, later in itertools.pairwise(connects[50:])]
    assert min(late) >= LONGEST_UNSETTLED_S / 2
