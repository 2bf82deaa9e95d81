"""The parts of the agent that deployment uses: a connection to the broker, and the models that run.

`Connection`, `Outbox` and `agent.service.models.models.Models` have these methods; tests use fakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from agent.bundle.verify import VerifiedBundle
from agent.mqtt.reason_codes import Reason


class Control(Protocol):
    """The control connection."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the broker."""

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False
    ) -> asyncio.Future[Reason]:
        """Send a message; at QoS 1 it is sent again until the broker has it."""

    def want(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe, now and after each reconnection."""

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""


class Models(Protocol):
    """Runs models."""

    def expect(self, names: Iterable[str]) -> None:
        """Take note of models that will be activated: until then, requests for them are answered 503."""

    async def activate(self, verified: VerifiedBundle) -> None:
        """Start a worker with the bundle, run its recorded samples, and then give it the model's requests.

        The previous worker answers them until then, and goes on if this raises. The callee owns the bundle
        and closes it.

        Raises
        ------
        EdgeError
            If the new worker did not start, or failed its samples.
        """

    async def deactivate(self, name: str) -> None:
        """Answer the accepted requests, and end the model's worker."""
