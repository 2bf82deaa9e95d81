"""The life cycle of a worker: every way through the table, and the rules for a restart."""

from __future__ import annotations

import itertools

import pytest

from agent.service.models.life_cycle import (
    COMPUTING,
    OUT_OF_SERVICE,
    PHASES,
    TRANSITIONS,
    Cause,
    CrashWindow,
    Event,
    State,
    next_state,
    restart_delay_s,
    retry_delay_s,
)
from agent.wire.model_state import ModelPhase


def test_every_state_is_reached_from_the_start() -> None:
    reached, new = {State.STARTING}, [State.STARTING]
    while new:
        for following in TRANSITIONS[new.pop()].values():
            if following not in reached:
                reached.add(following)
                new.append(following)
    assert reached == set(State) == TRANSITIONS.keys()


@pytest.mark.parametrize("state", State)
def test_only_listed_events_happen(state: State) -> None:
    for event in Event:
        if event in TRANSITIONS[state]:
            assert next_state(state, event) is TRANSITIONS[state][event]
        else:
            with pytest.raises(ValueError, match=f"in the state {state.name}, got {event.name}"):
                next_state(state, event)


@pytest.mark.parametrize("state", State)
def test_every_state_can_be_stopped_and_a_stopped_worker_stays_stopped(state: State) -> None:
    if state is State.STOPPED:
        assert TRANSITIONS[state] == {}
    elif state is State.STOPPING:
        assert set(TRANSITIONS[state].values()) == {State.STOPPED}
    else:
        assert next_state(state, Event.STOP) is (State.STOPPING if state is State.READY else State.STOPPED)


def test_only_a_loaded_bundle_makes_a_worker_ready() -> None:
    events = {
        event
        for following in TRANSITIONS.values()
        for event, state in following.items()
        if state is State.READY
    }
    assert events == {Event.LOADED}


def test_a_worker_dies_only_while_it_computes() -> None:
    mortal = {state for state, following in TRANSITIONS.items() if Event.DIED in following}
    assert mortal == COMPUTING
    assert all(Event.DIED_TOO_OFTEN in TRANSITIONS[state] for state in mortal)


def test_a_failed_worker_is_tried_again_until_it_is_stopped() -> None:
    assert next_state(State.FAILED, Event.RETRY) is State.RETRYING
    assert next_state(State.RETRYING, Event.NOT_LOADED) is State.FAILED
    assert next_state(State.RETRYING, Event.LOADED) is State.READY
    assert {State.FAILED, State.RETRYING, State.STOPPED} == OUT_OF_SERVICE


def test_only_a_stopped_worker_stays_as_it_is() -> None:
    assert {state for state, following in TRANSITIONS.items() if not following} == {State.STOPPED}


def test_every_state_is_published_as_a_phase() -> None:
    assert PHASES.keys() == set(State)
    assert set(PHASES.values()) == set(ModelPhase)


def test_deaths_are_too_many_only_within_the_window() -> None:
    window = CrashWindow(3, 60.0)
    assert [window.died(second, Cause.ITSELF) for second in (0.0, 30.0, 60.0)] == [
        Event.DIED,
        Event.DIED,
        Event.DIED_TOO_OFTEN,
    ]
    window = CrashWindow(3, 60.0)
    assert {window.died(30.1 * number, Cause.ITSELF) for number in range(100)} == {Event.DIED}
    assert window.total == 100


def test_one_death_is_too_many_if_that_is_the_limit() -> None:
    assert CrashWindow(1, 0.1).died(5.0, Cause.ITSELF) is Event.DIED_TOO_OFTEN


def test_deaths_by_requests_are_never_too_many() -> None:
    window = CrashWindow(1, 60.0)
    assert {window.died(0.1 * number, Cause.REQUEST) for number in range(1000)} == {Event.DIED}
    assert (window.by_requests, window.by_itself, window.total) == (1000, 0, 1000)
    assert window.died(100.0, Cause.ITSELF) is Event.DIED_TOO_OFTEN


def test_deaths_by_requests_slow_restarts_down_for_the_length_of_the_window() -> None:
    window = CrashWindow(3, 60.0)
    delays_s = []
    for second in range(10):
        window.died(second, Cause.REQUEST)
        delays_s.append(window.restart_delay_s(0, second))
    assert delays_s[:3] == [0.05, 0.25, 1.0]
    assert set(delays_s[3:]) == {1.0}
    assert window.restart_delay_s(0, 9 + 60.1) == 0.05


def test_restarts_slow_down() -> None:
    delays_s = [restart_delay_s(attempt) for attempt in range(10)]
    assert all(earlier <= later for earlier, later in itertools.pairwise(delays_s))
    assert (delays_s[0], delays_s[-1]) == (0.05, 1.0)


def test_retries_slow_down_to_one_in_ten_minutes_and_do_not_fall_together() -> None:
    assert [retry_delay_s(attempt, 0.0) for attempt in range(9)] == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    assert retry_delay_s(10**6, 0.0) == 600
    assert retry_delay_s(0, 1.0) == pytest.approx(4)
