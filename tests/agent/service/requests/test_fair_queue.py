"""Whose turn it is, who gives way, and that a client waits for at most one request of each other client."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.service.requests import fair_queue
from agent.service.requests.fair_queue import FairQueue


@dataclass(frozen=True)
class Asked:
    client: str
    number: int = 0
    nbytes: int = 1


def filled(*clients: str, max_items: int = 100, max_bytes: int = 1000) -> FairQueue[Asked]:
    queue: FairQueue[Asked] = FairQueue(max_items, max_bytes)
    for number, client in enumerate(clients):
        assert queue.offer(Asked(client, number)) == []
    return queue


def drain(queue: FairQueue[Asked]) -> str:
    return "".join(item.client for item in queue.clear())


def test_clients_take_turns_and_each_keeps_its_order() -> None:
    queue = filled(*"aaaabbc")
    order = queue.clear()
    assert "".join(item.client for item in order) == "abcabaa"
    assert [item.number for item in order if item.client == "a"] == [0, 1, 2, 3]
    assert (queue.count, queue.nbytes) == (0, 0)
    with pytest.raises(IndexError):
        queue.pop()


def test_client_that_is_set_back_has_its_turn_when_no_other_waits() -> None:
    queue = filled(*"aabbc")
    queue.set_back("a")
    assert queue.pop().client == "b"
    queue.put_back([Asked("a", 7), Asked("b", 8)])  # of a worker that died
    assert drain(queue) == "bcbaaa"
    queue = filled(*"aab")
    queue.set_back("a")
    queue.restore("a")
    assert drain(queue) == "aba"


def test_only_so_many_clients_are_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_LANES", 2)
    queue = filled()
    for client in "abc":
        queue.set_back(client)
    for client in "abc":
        queue.append(Asked(client))
    # The first was restored when the third was set back.
    assert queue.pop().client == "a"


def test_longest_lane_gives_way_with_its_newest_request() -> None:
    queue = filled(*"aaab", max_items=4)
    assert queue.offer(Asked("c", 9)) == [Asked("a", 2)]
    assert queue.offer(Asked("b", 9)) == [Asked("b", 9)]  # two each: a swap would not be fairer
    assert queue.offer(Asked("a", 9)) == [Asked("a", 9)]
    assert drain(queue) == "abca"


def test_heaviest_lane_gives_way_when_bytes_are_short() -> None:
    queue: FairQueue[Asked] = FairQueue(100, 100)
    for number in range(3):
        assert queue.offer(Asked("heavy", number, 30)) == []
    for number in range(10):
        assert queue.offer(Asked("light", number)) == []
    assert queue.offer(Asked("third", 0, 20)) == [Asked("heavy", 2, 30)]
    assert queue.offer(Asked("third", 1, 20)) == [Asked("heavy", 1, 30)]
    assert queue.nbytes == 30 + 10 + 40
    assert queue.offer(Asked("fourth", 0, 70)) == [Asked("fourth", 0, 70)]  # more than anybody has
    assert queue.nbytes == 30 + 10 + 40


def test_request_that_never_fits_changes_nothing() -> None:
    queue = filled(*"ab", max_bytes=10)
    assert queue.offer(Asked("c", 0, 11)) == [Asked("c", 0, 11)]
    assert drain(queue) == "ab"


def test_requests_that_come_back_go_first_and_do_not_give_way() -> None:
    queue = filled(*"aa", max_items=3)
    queue.put_back([Asked("x", 1), Asked("x", 2)])
    assert queue.offer(Asked("b")) == [Asked("b")]
    assert queue.pop() == Asked("x", 1)
    assert queue.offer(Asked("b")) == [Asked("a", 1)]
    assert queue.remove(Asked("x", 2))
    assert not queue.remove(Asked("x", 2))
    assert drain(queue) == "ab"


def test_more_clients_than_lanes_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_LANES", 2)
    queue = filled("a", "b", "c", "d", "a")
    assert queue.remove(Asked("d", 3))
    assert drain(queue) == "abca"


clients = st.sampled_from("abcde")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), clients, st.integers(0, 40)),
        st.tuples(st.just("pop"), clients, st.just(0)),
        st.tuples(st.just("remove"), clients, st.just(0)),
        st.tuples(st.just("return"), clients, st.integers(0, 5)),
    ),
    max_size=80,
)


@pytest.mark.slow
@given(steps)
def test_nothing_is_lost_or_doubled_and_the_limits_hold(
    steps: list[tuple[str, str, int]],
) -> None:
    queue: FairQueue[Asked] = FairQueue(6, 60)
    inside: set[Asked] = set()
    for number, (what, client, nbytes) in enumerate(steps):
        item = Asked(client, number, nbytes)
        if what == "offer":
            before = Counter(each.client for each in inside)
            refused = queue.offer(item)
            inside = (inside | {item}) - set(refused)
            if refused and item not in refused and nbytes == 0:
                assert all(before[each.client] > before[client] + 1 for each in refused)
            if item in inside:
                assert queue.count <= 6
                assert queue.nbytes <= 60
        elif what == "pop" and inside:
            popped = queue.pop()
            assert popped in inside
            inside.remove(popped)
        elif what == "remove":
            for each in sorted(inside, key=lambda each: each.number)[:1]:
                assert queue.remove(each)
                inside.remove(each)
        elif what == "return" and queue.count < 5:
            queue.put_back([item])
            inside.add(item)
        assert queue.count == len(inside)
        assert queue.nbytes == sum(each.nbytes for each in inside)
    assert set(queue.clear()) == inside


@pytest.mark.slow
@given(
    others=st.lists(st.lists(st.sampled_from("bcdef"), max_size=10), min_size=40, max_size=40),
    starts=st.integers(0, 20),
)
def test_honest_client_is_never_refused_and_waits_one_turn_of_each_other(
    others: list[list[str]], starts: int
) -> None:
    """One request at a time, among five clients that send what they like, in a queue of eight."""
    queue: FairQueue[Asked] = FairQueue(8, 1 << 20)
    sent_at: int | None = None
    for turn, flood in enumerate(others):
        if turn >= starts and sent_at is None:
            refused = queue.offer(Asked("honest", turn))
            assert Asked("honest", turn) not in refused
            sent_at = turn
        for number, client in enumerate(flood):
            assert all(each.client != "honest" for each in queue.offer(Asked(client, 100 * turn + number)))
        if queue.count and queue.pop().client == "honest":
            assert sent_at is not None
            assert turn - sent_at <= 5
            sent_at = None
    assert sent_at is None or len(others) - sent_at <= 5
