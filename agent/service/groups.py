"""The device's membership of its groups: whose requests it asks the broker for, and when.

Promises: the broker deals a group's requests to this device only while it can answer them, that is while the
model is ready and the connection for answers is up. A device that vanishes gets none as soon as the
broker has noticed, because the connection has no session and a short keep-alive.
Leaves to others: reading requests and answering them (`inference`), the connection itself (`agent.mqtt`).
docs/decisions/0018 has the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from agent.mqtt.settings import BrokerSettings
from agent.wire.topics import group_filters

# The broker gives up a silent member after 1.5 times this, and until then deals it its share of the requests.
# A shorter one would cost more pings, and lose members whose radio pauses for a few seconds.
KEEPALIVE_S: Final = 5


class Subscriber(Protocol):
    """A connection that subscribes."""

    def want(self, topic_filter: str) -> None:
        """Subscribe, now and after each reconnection."""

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""


def settings_of(broker: BrokerSettings) -> BrokerSettings:
    """Return the settings for the connection of the groups."""
    return replace(broker, keepalive_s=min(KEEPALIVE_S, broker.keepalive_s))


class Groups:
    """The groups of one device, and the connection for their requests."""

    def __init__(self, names: Sequence[str], connection: Subscriber) -> None:
        self._names = tuple(names)
        self._connection = connection
        self._ready: set[str] = set()
        self._can_answer = False
        self._subscribed: set[str] = set()

    def model_changed(self, model: str, *, ready: bool) -> None:
        """Subscribe to a model's requests while it is ready, and not otherwise."""
        if ready:
            self._ready.add(model)
        else:
            self._ready.discard(model)
        self._follow()

    def answers_changed(self, *, possible: bool) -> None:
        """Subscribe only while answers can be sent."""
        self._can_answer = possible
        self._follow()

    def _follow(self) -> None:
        wanted = {
            topic_filter
            for group in self._names
            for model in self._ready
            for topic_filter in group_filters(group, model)
        }
        if not self._can_answer:
            wanted.clear()
        for topic_filter in sorted(self._subscribed - wanted):
            self._connection.unsubscribe(topic_filter)
        for topic_filter in sorted(wanted - self._subscribed):
            self._connection.want(topic_filter)
        self._subscribed = wanted
