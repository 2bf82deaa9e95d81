"""What one connection is subscribed to: wanted filters, those under way to the broker, and its verdicts.

A core without a socket: `ask` sends a SUBSCRIBE, whoever owns the connection says when it stands or is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from agent.mqtt.reason_codes import Reason

_log = logging.getLogger(__name__)

_NOTHING: Final = ()


class Subscriptions:
    """The filters of one connection.

    Parameters
    ----------
    name
        The connection's, for the log.
    ask
        Sends a SUBSCRIBE for filters with their largest QoS; returns its packet identifier, or None when it
        cannot be sent now.
    """

    def __init__(self, name: str, ask: Callable[[list[tuple[str, int]]], int | None]) -> None:
        self._name = name
        self._ask = ask
        self._filters: dict[str, int] = {}
        self._under_way: dict[int, tuple[str, ...]] = {}
        self._waiting: dict[str, asyncio.Future[Reason]] = {}
        self._first: int | None = None

    @property
    def settled(self) -> bool:
        """Whether the broker has answered for all that was asked when the connection began."""
        return self._first is None

    def add(self, topic_filter: str, qos: int, *, connected: bool) -> None:
        """Want a filter from now on."""
        self._filters[topic_filter] = qos
        if connected:
            self._send((topic_filter,))

    def remove(self, topic_filter: str) -> None:
        """Want it no more."""
        self._filters.pop(topic_filter, None)

    def wait_for(self, topic_filter: str) -> asyncio.Future[Reason]:
        """Return what will have the broker's verdict on a filter."""
        verdict: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        self._waiting[topic_filter] = verdict
        return verdict

    def stop_waiting(self, topic_filter: str, verdict: asyncio.Future[Reason]) -> None:
        """Forget what `wait_for` returned."""
        if self._waiting.get(topic_filter) is verdict:
            del self._waiting[topic_filter]

    def begin(self) -> None:
        """Ask for everything: a connection stands."""
        if self._filters:
            self._first = self._send(tuple(self._filters))

    def lost(self) -> None:
        """Forget what was under way: the connection is gone."""
        self._under_way.clear()
        self._first = None

    def close(self, why: Reason) -> None:
        """Tell everybody who waits."""
        for verdict in self._waiting.values():
            if not verdict.done():
                verdict.set_result(why)

    def granted(self, packet_id: int, verdicts: Sequence[Reason]) -> None:
        """Take the broker's verdicts on the filters of one SUBSCRIBE."""
        if packet_id == self._first:
            self._first = None
        for topic_filter, verdict in zip(self._under_way.pop(packet_id, _NOTHING), verdicts, strict=False):
            waiting = self._waiting.get(topic_filter)
            if waiting is not None and not waiting.done():
                waiting.set_result(verdict)
            elif verdict.failed:
                _log.error(
                    "%s: the broker refuses the subscription to %s: %s", self._name, topic_filter, verdict
                )

    def _send(self, filters: tuple[str, ...]) -> int | None:
        packet_id = self._ask([(text, self._filters[text]) for text in filters])
        if packet_id is not None:
            self._under_way[packet_id] = filters
        return packet_id
