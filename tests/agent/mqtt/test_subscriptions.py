"""Which filters are asked for when, and where the broker's verdicts go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt.reason_codes import CLOSED, Reason, reason
from agent.mqtt.subscriptions import MAX_FILTERS, Subscriptions
from tests.patience import PATIENCE_S

GRANTED = reason(0x01)
REFUSED = reason(0x87)


class Asked:
    """Records SUBSCRIBE packets, and gives them identifiers."""

    def __init__(self) -> None:
        self.packets: list[list[tuple[str, int]]] = []
        self.up = True

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int | None:
        if not self.up:
            return None
        self.packets.append([*filters])
        return len(self.packets)

    def unsubscribe(self, topic_filter: str) -> int | None:
        return self.subscribe([(topic_filter, -1)])


def test_each_connection_begins_with_every_filter() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me")
    subscriptions.add("a/#", 1)
    subscriptions.add("b", 0)
    assert not asked.packets
    subscriptions.begin(asked)
    subscriptions.lost()
    subscriptions.begin(asked)
    assert asked.packets == [[("a/#", 1), ("b", 0)]] * 2


def test_filter_added_while_connected_is_asked_for_at_once() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me")
    subscriptions.begin(asked)
    subscriptions.add("a", 1)
    assert asked.packets == [[("a", 1)]]
    assert subscriptions.settled


def test_removed_filter_is_not_asked_for_again() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me")
    subscriptions.add("a", 1)
    subscriptions.add("b", 1)
    subscriptions.remove("a")
    subscriptions.begin(asked)
    assert asked.packets == [[("b", 1)]]


def test_connection_is_settled_when_the_broker_has_answered_the_first_packet() -> None:
    subscriptions = Subscriptions("me")
    subscriptions.add("a", 1)
    subscriptions.begin(Asked())
    assert not subscriptions.settled
    subscriptions.add("b", 1)
    subscriptions.granted(2, [GRANTED])
    assert not subscriptions.settled
    subscriptions.granted(1, [GRANTED])
    assert subscriptions.settled


def test_connection_without_filters_is_settled_at_once() -> None:
    subscriptions = Subscriptions("me")
    subscriptions.begin(Asked())
    assert subscriptions.settled


def test_lost_connection_is_not_waited_for() -> None:
    subscriptions = Subscriptions("me")
    subscriptions.add("a", 1)
    subscriptions.begin(Asked())
    subscriptions.lost()
    assert subscriptions.settled


async def waiting_for(subscriptions: Subscriptions, *filters: str) -> list[asyncio.Task[Reason]]:
    """Return futures for the broker's verdicts on filters, once they are asked for."""
    waiting = [asyncio.create_task(subscriptions.ask(name, 1)) for name in filters]
    await asyncio.sleep(0)
    return waiting


async def test_each_filters_verdict_settles_the_future_for_it() -> None:
    subscriptions = Subscriptions("me")
    waiting = await waiting_for(subscriptions, "a", "b")
    subscriptions.begin(Asked())
    subscriptions.granted(1, [REFUSED, GRANTED])
    assert await asyncio.gather(*waiting) == [REFUSED, GRANTED]


async def test_verdict_of_a_lost_connection_is_ignored() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me")
    subscriptions.begin(asked)
    [waiting] = await waiting_for(subscriptions, "a")
    subscriptions.lost()
    subscriptions.granted(1, [REFUSED])
    await asyncio.sleep(0)
    assert not waiting.done()
    subscriptions.begin(asked)
    subscriptions.granted(2, [GRANTED])
    assert await waiting is GRANTED


async def test_close_settles_every_waiting_future() -> None:
    subscriptions = Subscriptions("me")
    waiting = await waiting_for(subscriptions, "a", "b")
    waiting[0].cancel()
    subscriptions.close(CLOSED)
    assert await waiting[1] is CLOSED


async def test_closed_connection_is_asked_for_nothing() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me")
    subscriptions.begin(asked)
    subscriptions.close(CLOSED)
    subscriptions.add("a", 1)
    subscriptions.remove("a")
    assert not asked.packets


async def test_refusal_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    subscriptions = Subscriptions("me")
    [waiting] = await waiting_for(subscriptions, "b")
    waiting.cancel()
    await asyncio.wait([waiting])
    for name in ("b", "a"):
        subscriptions.add(name, 1)
    subscriptions.begin(Asked())
    subscriptions.granted(1, [REFUSED, GRANTED])
    assert [record.getMessage() for record in caplog.records] == [
        "me: the broker refuses the subscription to b: Not authorized (0x87)"
    ]


async def test_only_the_latest_of_two_who_wait_for_one_filter_can_be_forgotten() -> None:
    subscriptions = Subscriptions("me")
    subscriptions.begin(Asked())
    first, second = await waiting_for(subscriptions, "a", "a")
    first.cancel()
    await asyncio.wait([first])
    subscriptions.granted(2, [GRANTED])
    assert await second is GRANTED


async def test_refused_filter_is_neither_asked_for_again_nor_unsubscribed() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me")
    subscriptions.begin(asked)
    [waiting] = await waiting_for(subscriptions, "a")
    subscriptions.granted(1, [REFUSED])
    assert await waiting is REFUSED
    subscriptions.lost()
    subscriptions.begin(asked)
    assert asked.packets == [[("a", 1)]]
    assert not subscriptions.refused


def test_packet_that_cannot_be_sent_does_not_block_the_connection() -> None:
    asked = Asked()
    asked.up = False
    subscriptions = Subscriptions("me")
    subscriptions.add("a", 1)
    subscriptions.begin(asked)
    assert subscriptions.settled


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.integers(0, 1)), max_size=30))
def test_filters_of_a_connection_are_those_added_and_not_removed(
    changes: list[tuple[bool, str, int]],
) -> None:
    asked = Asked()
    subscriptions = Subscriptions("me")
    wanted: dict[str, int] = {}
    for added, name, qos in changes:
        if added:
            subscriptions.add(name, qos)
            wanted[name] = qos
        else:
            subscriptions.remove(name)
            wanted.pop(name, None)
    subscriptions.begin(asked)
    assert dict(asked.packets[0] if asked.packets else []) == wanted


async def test_wait_for_the_broker_ends_when_nothing_is_in_flight_or_the_connection_is_lost() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me")
    subscriptions.begin(asked)
    await subscriptions.idle()
    subscriptions.add("a", 1)
    subscriptions.remove("a")
    assert asked.packets == [[("a", 1)], [("a", -1)]]
    waiting = asyncio.ensure_future(subscriptions.idle())
    await asyncio.sleep(0)
    subscriptions.granted(1, (GRANTED,))
    await asyncio.sleep(0)
    assert not waiting.done()
    subscriptions.granted(2, ())
    await asyncio.wait_for(waiting, PATIENCE_S)
    subscriptions.remove("b")
    waiting = asyncio.ensure_future(subscriptions.idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    subscriptions.lost()
    await asyncio.wait_for(waiting, PATIENCE_S)


@pytest.mark.parametrize("forget", ["remove", "lost"])
def test_refused_filter_is_known_until_it_is_removed_or_the_connection_is_lost(forget: str) -> None:
    asked = Asked()
    subscriptions = Subscriptions("me")
    subscriptions.add("a", 1)
    subscriptions.add("b", 1)
    subscriptions.begin(asked)
    subscriptions.granted(1, (REFUSED, GRANTED))
    assert subscriptions.refused
    if forget == "remove":
        subscriptions.remove("a")
    else:
        subscriptions.lost()
    assert not subscriptions.refused


def test_many_filters_are_asked_for_in_packets_that_every_broker_accepts() -> None:
    asked = Asked()
    subscriptions = Subscriptions("me")
    for number in range(2 * MAX_FILTERS + 1):
        subscriptions.add(f"a/{number}", 1)
    subscriptions.begin(asked)
    assert [len(filters) for filters in asked.packets] == [MAX_FILTERS, MAX_FILTERS, 1]
    subscriptions.granted(1, [GRANTED] * MAX_FILTERS)
    subscriptions.granted(3, [GRANTED])
    assert not subscriptions.settled
    subscriptions.granted(2, [GRANTED] * MAX_FILTERS)
    assert subscriptions.settled
