"""Sessions: each step once and in order, bounded in number and age, fair between clients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import SessionGoneError, SessionStepError
from agent.runtime.sessions import MAX_GONE, Sessions


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(most: int = 2, idle_s: float = 10.0) -> tuple[Sessions[list[int]], Clock]:
    clock = Clock()
    return Sessions(most, idle_s, list, clock), clock


def step(sessions: Sessions[list[int]], client: str, name: str, number: int | None = None) -> list[int]:
    visit = sessions.enter(client, name, number)
    visit.kept.append(visit.step)
    sessions.leave(visit)
    return list(visit.kept)


def test_steps_are_counted_and_keep_what_the_session_has() -> None:
    sessions, _ = make()
    assert [step(sessions, "a", "s", n) for n in range(3)] == [[0], [0, 1], [0, 1, 2]]
    assert step(sessions, "a", "t") == [0]
    assert step(sessions, "a", "t") == [0, 1]


def test_two_clients_may_use_one_name() -> None:
    sessions, _ = make()
    step(sessions, "a", "s", 0)
    assert step(sessions, "b", "s") == [0]
    assert step(sessions, "a", "s", 1) == [0, 1]


@pytest.mark.parametrize("wrong", [1, 3, 2**53 - 1])
def test_a_repeated_or_skipped_step_is_refused_and_changes_nothing(wrong: int) -> None:
    sessions, _ = make()
    step(sessions, "a", "s", 0)
    step(sessions, "a", "s", 1)
    with pytest.raises(SessionStepError, match=f"expected step 2, got {wrong}"):
        sessions.enter("a", "s", wrong)
    assert step(sessions, "a", "s", 2) == [0, 1, 2]


def test_a_request_that_fails_does_not_count() -> None:
    sessions, _ = make()
    step(sessions, "a", "s", 0)
    sessions.enter("a", "s", 1)
    assert step(sessions, "a", "s", 1) == [0, 1]


def test_step_0_begins_anew() -> None:
    sessions, _ = make()
    step(sessions, "a", "s", 0)
    assert step(sessions, "a", "s", 0) == [0]
    assert len(sessions) == 1


def test_an_unknown_session_is_gone_unless_it_begins() -> None:
    sessions, _ = make()
    with pytest.raises(SessionGoneError, match="restarted or replaced"):
        sessions.enter("a", "s", 1)


def test_the_least_recently_used_one_goes_and_is_told_so() -> None:
    sessions, _ = make()
    for name in ("s", "t", "s", "u"):
        step(sessions, "a", name)
    assert sessions.evicted == 1
    with pytest.raises(SessionGoneError, match="made room"):
        sessions.enter("a", "t", 1)
    # A client that does not count is told once, and begins again with its next request.
    with pytest.raises(SessionGoneError, match="made room"):
        sessions.enter("a", "t", None)
    assert step(sessions, "a", "t") == [0]


def test_the_client_that_has_most_loses_one() -> None:
    sessions, _ = make(most=4)
    step(sessions, "quiet", "s", 0)
    for number in range(50):
        step(sessions, "greedy", f"s{number}", 0)
    assert step(sessions, "quiet", "s", 1) == [0, 1]
    step(sessions, "late", "s", 0)
    assert step(sessions, "quiet", "s", 2) == [0, 1, 2]
    assert len(sessions) == 4


def test_an_unused_session_ends() -> None:
    sessions, clock = make()
    step(sessions, "a", "s", 0)
    clock.now_s += 9
    assert step(sessions, "a", "s", 1) == [0, 1]
    clock.now_s += 10
    with pytest.raises(SessionGoneError, match="it was unused for 10 s"):
        sessions.enter("a", "s", 2)
    assert len(sessions) == 0


def test_an_ended_session_frees_its_place() -> None:
    sessions, _ = make(most=1)
    sessions.leave(sessions.enter("a", "s", 0), end=True)
    assert (len(sessions), sessions.evicted) == (0, 0)
    step(sessions, "a", "t", 0)
    sessions.end("a", "t", None)
    sessions.end("a", "never", None)
    sessions.end("a", "never", 3)
    assert len(sessions) == 0
    assert step(sessions, "a", "t") == [0]
    sessions.end("a", "t", 1)
    assert len(sessions) == 0


def test_a_late_end_does_not_end_what_began_again() -> None:
    sessions, _ = make()
    for number in (0, 1, 2, 0):
        step(sessions, "a", "s", number)
    with pytest.raises(SessionStepError, match="expected step 1, got 3"):
        sessions.end("a", "s", 3)
    assert step(sessions, "a", "s", 1) == [0, 1]


def test_what_is_remembered_of_ended_sessions_is_bounded() -> None:
    sessions, _ = make(most=1)
    for number in range(MAX_GONE + 10):
        step(sessions, "a", f"s{number}", 0)
    assert sessions._gone._count == MAX_GONE


def test_what_a_client_ends_does_not_make_that_of_another_be_forgotten() -> None:
    sessions, clock = make()
    step(sessions, "alice", "cam")
    clock.now_s += 11
    for number in range(MAX_GONE + 10):
        step(sessions, "mallory", f"s{number}")
    with pytest.raises(SessionGoneError, match="unused for 10 s"):
        sessions.enter("alice", "cam", None)
    # She was told: now it begins again.
    assert step(sessions, "alice", "cam") == [0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from("xyz"), st.none() | st.integers(0, 3), st.booleans()
        ),
        max_size=60,
    )
)
def test_a_session_never_has_a_step_twice_or_out_of_order(
    requests: list[tuple[str, str, int | None, bool]],
) -> None:
    sessions, clock = make(most=3)
    for client, name, number, fails in requests:
        clock.now_s += 0.1
        try:
            visit = sessions.enter(client, name, number)
        except (SessionGoneError, SessionStepError):
            continue
        assert number in (None, visit.step)
        if not fails:
            visit.kept.append(visit.step)
            sessions.leave(visit)
            assert visit.kept == list(range(visit.step + 1))
        assert len(sessions) <= 3
        assert sum(map(len, sessions._owned.values())) == len(sessions)


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9), st.booleans())))
def test_who_must_go_is_the_client_with_most_and_its_oldest(
    most: int, requests: list[tuple[str, int, bool]]
) -> None:
    sessions, _ = make(most)
    kept: list[tuple[str, str]] = []  # least recently used first
    for client, number, ends in requests:
        key = (client, str(number))
        if ends:
            sessions.end(*key, None)
            kept = [each for each in kept if each != key]
            continue
        step(sessions, *key, 0)
        if key not in kept and len(kept) == most:
            owners = [each[0] for each in kept] + [client]
            largest = max(map(owners.count, owners))
            kept.remove(next(each for each in kept if owners.count(each[0]) == largest))
        kept = [*(each for each in kept if each != key), key]
        assert list(sessions._sessions) == kept


def test_who_must_go_is_found_without_a_search() -> None:
    sessions, _ = make(most=500)
    for number in range(500):
        step(sessions, f"client{number % 250}", str(number), 0)
    ranks: list[str] = []
    rank = sessions._rank
    sessions._rank = lambda client: ranks.append(client) or rank(client)  # type: ignore[method-assign,func-returns-value]
    for number in range(500):
        step(sessions, "greedy", str(number), 0)
    # Five or so for each new session; a search would look at hundreds.
    assert len(ranks) < 500 * 20
    assert len(sessions) == 500
