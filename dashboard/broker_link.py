"""The dashboard's connection to the broker, which receives all documents of all agents.

Promises: it reconnects by itself, and says since when it has been disconnected. It subscribes to one kind of
document after the other, because a broker drops what it cannot queue: mosquitto queues at most 1000 messages
for each client.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from agent.errors import EdgeError
from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.reason_codes import Reason
from agent.mqtt.session import Owner
from agent.wire import topics
from agent.wire.document import MAX_AGENT_DOCUMENT_BYTES
from builder.errors import FleetError
from dashboard.fleet_state import FleetState
from edgebundle.broker import Broker
from edgebundle.errors import UsageError

# The broker keeps larger ones to itself; topic and properties take the rest.
_MAX_PACKET_BYTES: Final = MAX_AGENT_DOCUMENT_BYTES + (64 << 10)


class BrokerLink:
    """The connection.

    `on_change`: called when the connection is made or lost.
    """

    def __init__(self, broker: Broker, fleet: FleetState, on_change: Callable[[], None]) -> None:
        try:
            self._settings = replace(broker.settings(), max_packet_bytes=_MAX_PACKET_BYTES)
        except UsageError as error:
            raise FleetError(error.message, hint=error.hint) from error
        self._fleet = fleet
        self._on_change = on_change
        self._down_since_s: float | None = time.time()
        self._why = "not connected yet"
        self._refused: list[str] = []
        self._connection = Connection(
            self._settings,
            Owner(self._received, on_up=self._up, on_down=self._down),
            client_id=f"edgebundle-{secrets.token_hex(8)}",
            name="dashboard",
        )

    async def start(self) -> None:
        """Connect, and stay connected from then on.

        Raises `BrokerError` if the broker cannot be reached, or refuses the connection or what an agent list
            needs.
        """
        await self._connection.connect()
        await self._connection.subscribe(topics.states_filter(), 1)
        for topic_filter, what, qos in (
            (topics.infos_filter(), "what the devices are", 1),
            (topics.all_models_filter(), "models", 1),
            (topics.reports_filter(), "reports", 1),
            (topics.all_jobs_filter(), "deployments", 1),
            (topics.all_metrics_filter(), "metrics", 0),
        ):
            try:
                await self._connection.subscribe(topic_filter, qos)
            except EdgeError:  # not every user may read everything; the page says what is missing
                self._refused.append(what)

    async def close(self) -> None:
        """End the connection."""
        await self._connection.close()

    def state(self) -> dict[str, object]:
        """Return what a page shows: the address, since when it is down and why, what may not be read."""
        return {
            "url": self._settings.url,
            "up": self._down_since_s is None,
            "since": self._down_since_s,
            "why": "" if self._down_since_s is None else self._why,
            "refused": self._refused,
        }

    def _received(self, message: Message) -> None:
        topic = topics.parse_topic(message.topic)
        if topic is not None:
            self._fleet.on_message(topic, bytes(message.payload), is_retained=message.retain)
        self._connection.ack(message)

    def _up(self, _session_present: bool) -> None:
        self._down_since_s = None
        self._fleet.on_up()
        asyncio.get_running_loop().call_soon(self._on_change)

    def _down(self, why: Reason) -> None:
        self._down_since_s, self._why = time.time(), str(why)
        self._on_change()
