"""The control connection, as deployment sees it.

`agent.mqtt.connection.Connection` is one; tests have others.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from agent.mqtt.reason_codes import Reason


class Control(Protocol):
    """What deployment needs of a connection to the broker."""

    @property
    def connected(self) -> bool:
        """Whether the broker is there."""

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False
    ) -> asyncio.Future[Reason]:
        """Send a message; at QoS 1 it is sent again until the broker has it."""

    def want(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe, now and after each reconnection."""

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""
