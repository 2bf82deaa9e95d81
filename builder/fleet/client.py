"""One command's connection to a broker, and its part of the reply space.

Promises: every message is acknowledged after its handler has returned. The client identifier is random, so
two commands never take over each other's session at the broker. Nothing that is published contains it,
because anybody who knows a client's identifier can disconnect it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Final

from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.properties import EMPTY, Properties
from agent.mqtt.reason_codes import TOO_LARGE_CODES, Reason
from agent.mqtt.session import Owner
from agent.wire.topics import Topic, parse_topic
from builder.errors import FleetError
from edgebundle.broker import Broker
from edgebundle.errors import UsageError

# How long to wait for the last acknowledgement; a broker that is reachable needs a millisecond.
_DRAIN_S: Final = 2.0
# Where to raise the limit of a broker.
LARGER_PACKETS: Final = "raise the broker's limit for packets (mosquitto: max_packet_size)"


class Client:
    """One command's connection.

    `on_message`: called in the event loop with each message on one of our topics.
    `on_up`: called after each connect.
    """

    def __init__(
        self,
        broker: Broker,
        on_message: Callable[[Topic, Message], None],
        *,
        on_up: Callable[[], None] | None = None,
    ) -> None:
        name = f"edgebundle-{secrets.token_hex(8)}"
        self._on_message = on_message
        self._on_up = on_up
        try:
            settings = broker.settings()
        except UsageError as error:
            raise FleetError(error.message, hint=error.hint) from error
        self._connection = Connection(settings, Owner(self._received, on_up=self._up), client_id=name)

    async def __aenter__(self) -> Client:
        await self._connection.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connection.close(drain_s=_DRAIN_S if error is None else 0.0)

    @property
    def speaks_5(self) -> bool:
        """Whether the connection is MQTT 5, whose messages have properties."""
        return self._connection.version == 5

    @property
    def max_packet_bytes(self) -> int:
        """Bytes of the largest packet that the broker takes, as far as it says."""
        return self._connection.max_packet_bytes

    async def subscribe(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe, now and after each reconnection."""
        await self._connection.subscribe(topic_filter, qos)

    def want(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe without waiting for the broker's confirmation."""
        self._connection.want(topic_filter, qos)

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        qos: int = 1,
        retain: bool = False,
        properties: Properties = EMPTY,
    ) -> asyncio.Future[Reason]:
        """Send a message; the future gets the broker's reason code."""
        return self._connection.publish(topic, payload, qos=qos, retain=retain, properties=properties)

    async def publish_confirmed(self, topic: str, payload: bytes, *, retain: bool, limit_s: float) -> None:
        """Send a message, and wait until the broker has it.

        Raises `FleetError` if the broker refused it, or did not answer within `limit_s`.
        """
        try:
            async with asyncio.timeout(limit_s):
                verdict = await self.publish(topic, payload, retain=retain)
        except TimeoutError as error:
            raise FleetError(
                f"the broker did not acknowledge a message to {topic} within {limit_s:g} s",
                hint="see the broker's log, and whether its disk is full; then run it again",
            ) from error
        if verdict.code in TOO_LARGE_CODES:
            raise FleetError(
                f"expected a broker that takes a message of {len(payload)} bytes to {topic}, "
                f"got one that takes packets of at most {self.max_packet_bytes}",
                hint=LARGER_PACKETS,
            )
        if verdict.failed:
            raise FleetError(
                f"the broker refused a message to {topic}: {verdict}",
                hint="let this user publish there in the broker's access control list",
            )

    def _received(self, message: Message) -> None:
        topic = parse_topic(message.topic)
        if topic is not None:
            self._on_message(topic, message)
        self._connection.ack(message)

    def _up(self, _session_present: bool) -> None:
        if self._on_up is not None:
            self._on_up()
