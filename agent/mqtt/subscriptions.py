"""The subscriptions of one connection: wanted filters, packets in flight, verdicts of the broker.

A core without a socket: `Subscriber` sends; the owner calls `begin` when the connection is up and `lost` when
it is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, Protocol

from agent.mqtt.limits import NO_LIMITS, BrokerLimits
from agent.mqtt.reason_codes import Reason, reason

_log = logging.getLogger(__name__)

# Some brokers accept no more in one SUBSCRIBE (AWS IoT Core: 8), and every broker accepts such a packet.
MAX_FILTERS: Final = 8
_NO_WILDCARDS: Final = reason(0xA2)
_NO_SHARING: Final = reason(0x9E)


class Subscriber(Protocol):
    """Sends packets, and returns their identifiers or None if it cannot: an engine, or a test's stand-in."""

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int | None:
        """Send a SUBSCRIBE for filters, each with its largest QoS."""

    def unsubscribe(self, topic_filter: str) -> int | None:
        """Send an UNSUBSCRIBE for a filter."""


class Subscriptions:
    """The filters of one connection, which has a name for the log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._subscriber: Subscriber | None = None
        self._refused: set[str] = set()
        self._idle: asyncio.Future[None] | None = None
        self._filters: dict[str, int] = {}
        self._in_flight: dict[int, tuple[str, ...]] = {}
        self._verdicts: dict[str, asyncio.Future[Reason]] = {}
        self._first: set[int] = set()
        self._limits = NO_LIMITS

    @property
    def settled(self) -> bool:
        """Whether the broker has answered what was sent when the connection came up."""
        return not self._first

    @property
    def refused(self) -> bool:
        """Whether the broker has refused one of the filters on this connection."""
        return bool(self._refused)

    async def idle(self) -> None:
        """Return when the broker has answered everything that was sent, or the connection is lost."""
        if self._in_flight:
            self._idle = self._idle or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def add(self, topic_filter: str, qos: int) -> None:
        """Keep a filter subscribed from now on."""
        self._filters[topic_filter] = qos
        self._send((topic_filter,))

    def remove(self, topic_filter: str) -> None:
        """End the subscription to a filter, now and at the next connections."""
        self._forget(topic_filter)
        if self._subscriber is not None:
            self._note(self._subscriber.unsubscribe(topic_filter), ())

    async def ask(self, topic_filter: str, qos: int) -> Reason:
        """Keep a filter subscribed from now on unless the broker refuses it; return its verdict."""
        verdict: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        self._verdicts[topic_filter] = verdict
        self.add(topic_filter, qos)
        try:
            why = await verdict
        finally:
            if self._verdicts.get(topic_filter) is verdict:
                del self._verdicts[topic_filter]
        if why.failed:
            self._forget(topic_filter)
        return why

    def begin(self, subscriber: Subscriber, limits: BrokerLimits = NO_LIMITS) -> None:
        """Subscribe to every filter that the broker allows: a connection is up."""
        self._subscriber = subscriber
        self._limits = limits
        filters = tuple(self._filters)
        for at in range(0, len(filters), MAX_FILTERS):
            packet_id = self._send(filters[at : at + MAX_FILTERS])
            if packet_id is not None:
                self._first.add(packet_id)

    def lost(self) -> None:
        """Forget the packets in flight and the verdicts: the connection is gone."""
        self._subscriber = None
        self._in_flight.clear()
        self._refused.clear()
        self._first.clear()
        self._end_wait()

    def close(self, why: Reason) -> None:
        """Send nothing more, and end every wait for a verdict with this one."""
        self._subscriber = None
        for verdict in self._verdicts.values():
            if not verdict.done():
                verdict.set_result(why)

    def granted(self, packet_id: int, verdicts: Sequence[Reason]) -> None:
        """Pass on the broker's verdicts on the filters of one SUBSCRIBE."""
        self._first.discard(packet_id)
        for topic_filter, verdict in zip(self._in_flight.pop(packet_id, ()), verdicts, strict=False):
            self._judge(topic_filter, verdict)
        if not self._in_flight:
            self._end_wait()

    def _judge(self, topic_filter: str, verdict: Reason) -> None:
        if topic_filter in self._filters and verdict.failed:
            self._refused.add(topic_filter)
        else:
            self._refused.discard(topic_filter)
        waiting = self._verdicts.get(topic_filter)
        if waiting is not None and not waiting.done():
            waiting.set_result(verdict)
        elif verdict.failed:
            _log.error("%s: the broker refuses the subscription to %s: %s", self._name, topic_filter, verdict)

    def _end_wait(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        self._idle = None

    def _forget(self, topic_filter: str) -> None:
        self._filters.pop(topic_filter, None)
        self._refused.discard(topic_filter)

    def _send(self, filters: tuple[str, ...]) -> int | None:
        if self._subscriber is None:
            return None
        allowed = tuple(text for text in filters if self._limits.allows(text))
        for text in filters:
            if text not in allowed:  # asking for it would end the connection (MQTT 5.0, 3.2.2.3.11 and 13)
                self._judge(text, _NO_SHARING if text.startswith("$share/") else _NO_WILDCARDS)
        if not allowed:
            return None
        return self._note(
            self._subscriber.subscribe([(text, self._filters[text]) for text in allowed]), allowed
        )

    def _note(self, packet_id: int | None, filters: tuple[str, ...]) -> int | None:
        """Wait for the answer to a packet, unless the connection broke while it was sent."""
        if packet_id is None or self._subscriber is None:
            return None
        self._in_flight[packet_id] = filters
        return packet_id
