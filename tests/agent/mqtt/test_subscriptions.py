"""Which filters are asked for when, and where the broker's verdicts go."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt.reason_codes import CLOSED, reason
from agent.mqtt.subscriptions import MAX_FILTERS, Subscriptions
from tests.patience import PATIENCE_S

GRANTED = reason(0x01)
REFUSED = reason(0x87)


class Asked:
    """Records SUBSCRIBE packets, and gives them identifiers."""

    def __init__(self) -> None:
        self.packets: list[list[tuple[str, int]]] = []
        self.up = True

    def __call__(self, filters: list[tuple[str, int]]) -> int | None:
        if not self.up:
            return None
        self.packets.append(filters)
        return len(self.packets)

    def leave(self, topic_filter: str) -> int | None:
        return self([(topic_filter, -1)])


def no_packet(_topic_filter: str) -> int | None:
    return None


def test_each_connection_begins_with_every_filter() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me", asked, asked.leave)
    subscriptions.add("a/#", 1, connected=False)
    subscriptions.add("b", 0, connected=False)
    assert not asked.packets
    subscriptions.begin()
    subscriptions.lost()
    subscriptions.begin()
    assert asked.packets == [[("a/#", 1), ("b", 0)]] * 2


def test_filter_added_while_connected_is_asked_for_at_once() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me", asked, asked.leave)
    subscriptions.begin()
    subscriptions.add("a", 1, connected=True)
    assert asked.packets == [[("a", 1)]]
    assert subscriptions.settled


def test_removed_filter_is_not_asked_for_again() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me", asked, asked.leave)
    subscriptions.add("a", 1, connected=False)
    subscriptions.add("b", 1, connected=False)
    subscriptions.remove("a", connected=False)
    subscriptions.begin()
    assert asked.packets == [[("b", 1)]]


def test_connection_is_settled_when_the_broker_has_answered_the_first_packet() -> None:
    subscriptions = Subscriptions("me", Asked(), no_packet)
    subscriptions.add("a", 1, connected=False)
    subscriptions.begin()
    assert not subscriptions.settled
    subscriptions.add("b", 1, connected=True)
    subscriptions.granted(2, [GRANTED])
    assert not subscriptions.settled
    subscriptions.granted(1, [GRANTED])
    assert subscriptions.settled


def test_connection_without_filters_is_settled_at_once() -> None:
    subscriptions = Subscriptions("me", Asked(), no_packet)
    subscriptions.begin()
    assert subscriptions.settled


def test_lost_connection_is_not_waited_for() -> None:
    subscriptions = Subscriptions("me", Asked(), no_packet)
    subscriptions.add("a", 1, connected=False)
    subscriptions.begin()
    subscriptions.lost()
    assert subscriptions.settled


async def test_each_filters_verdict_settles_the_future_for_it() -> None:
    subscriptions = Subscriptions("me", Asked(), no_packet)
    waiting = [subscriptions.wait_for(name) for name in ("a", "b")]
    subscriptions.add("a", 1, connected=False)
    subscriptions.add("b", 1, connected=False)
    subscriptions.begin()
    subscriptions.granted(1, [REFUSED, GRANTED])
    assert await asyncio.gather(*waiting) == [REFUSED, GRANTED]


async def test_verdict_of_a_lost_connection_is_ignored() -> None:
    subscriptions = Subscriptions("me", Asked(), no_packet)
    waiting = subscriptions.wait_for("a")
    subscriptions.add("a", 1, connected=True)
    subscriptions.lost()
    subscriptions.granted(1, [REFUSED])
    assert not waiting.done()
    subscriptions.begin()
    subscriptions.granted(2, [GRANTED])
    assert await waiting is GRANTED


async def test_close_settles_every_waiting_future() -> None:
    subscriptions = Subscriptions("me", Asked(), no_packet)
    waiting = [subscriptions.wait_for(name) for name in ("a", "b")]
    waiting[0].cancel()
    subscriptions.close(CLOSED)
    assert await waiting[1] is CLOSED


async def test_refusal_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    subscriptions = Subscriptions("me", Asked(), no_packet)
    verdict = subscriptions.wait_for("b")
    subscriptions.stop_waiting("b", verdict)
    for name in ("a", "b"):
        subscriptions.add(name, 1, connected=False)
    subscriptions.begin()
    subscriptions.granted(1, [GRANTED, REFUSED])
    assert [record.getMessage() for record in caplog.records] == [
        "me: the broker refuses the subscription to b: Not authorized (0x87)"
    ]


async def test_only_the_latest_of_two_who_wait_for_one_filter_can_be_forgotten() -> None:
    subscriptions = Subscriptions("me", Asked(), no_packet)
    first, second = subscriptions.wait_for("a"), subscriptions.wait_for("a")
    subscriptions.stop_waiting("a", first)
    subscriptions.add("a", 1, connected=True)
    subscriptions.granted(1, [GRANTED])
    assert await second is GRANTED


def test_packet_that_cannot_be_sent_does_not_block_the_connection() -> None:
    asked = Asked()
    asked.up = False
    subscriptions = Subscriptions("me", asked, asked.leave)
    subscriptions.add("a", 1, connected=False)
    subscriptions.begin()
    assert subscriptions.settled


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.integers(0, 1)), max_size=30))
def test_filters_of_a_connection_are_those_added_and_not_removed(
    changes: list[tuple[bool, str, int]],
) -> None:
    asked = Asked()
    subscriptions = Subscriptions("me", asked, asked.leave)
    wanted: dict[str, int] = {}
    for added, name, qos in changes:
        if added:
            subscriptions.add(name, qos, connected=False)
            wanted[name] = qos
        else:
            subscriptions.remove(name, connected=False)
            wanted.pop(name, None)
    subscriptions.begin()
    assert dict(asked.packets[0] if asked.packets else []) == wanted


async def test_wait_for_the_broker_ends_when_nothing_is_in_flight_or_the_connection_is_lost() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me", asked, asked.leave)
    await subscriptions.idle()
    subscriptions.add("a", 1, connected=True)
    subscriptions.remove("a", connected=True)
    assert asked.packets == [[("a", 1)], [("a", -1)]]
    waiting = asyncio.ensure_future(subscriptions.idle())
    await asyncio.sleep(0)
    subscriptions.granted(1, (GRANTED,))
    await asyncio.sleep(0)
    assert not waiting.done()
    subscriptions.granted(2, ())
    await asyncio.wait_for(waiting, PATIENCE_S)
    subscriptions.remove("b", connected=True)
    waiting = asyncio.ensure_future(subscriptions.idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    subscriptions.lost()
    await asyncio.wait_for(waiting, PATIENCE_S)


@pytest.mark.parametrize("forget", ["remove", "lost"])
def test_refused_filter_is_known_until_it_is_removed_or_the_connection_is_lost(forget: str) -> None:
    asked = Asked()
    subscriptions = Subscriptions("me", asked, asked.leave)
    subscriptions.add("a", 1, connected=False)
    subscriptions.add("b", 1, connected=False)
    subscriptions.begin()
    subscriptions.granted(1, (REFUSED, GRANTED))
    assert subscriptions.refused
    if forget == "remove":
        subscriptions.remove("a", connected=True)
    else:
        subscriptions.lost()
    assert not subscriptions.refused


def test_many_filters_are_asked_for_in_packets_that_every_broker_accepts() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me", asked, asked.leave)
    for number in range(2 * MAX_FILTERS + 1):
        subscriptions.add(f"a/{number}", 1, connected=False)
    subscriptions.begin()
    assert [len(filters) for filters in asked.packets] == [MAX_FILTERS, MAX_FILTERS, 1]
    subscriptions.granted(1, [GRANTED] * MAX_FILTERS)
    subscriptions.granted(3, [GRANTED])
    assert not subscriptions.settled
    subscriptions.granted(2, [GRANTED] * MAX_FILTERS)
    assert subscriptions.settled
