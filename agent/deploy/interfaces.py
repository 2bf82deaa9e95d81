"""The parts of the agent that deployment uses: a connection to the broker, and the models that run.

`Connection`, `Outbox` and `agent.service.models.models.Models` have these methods; tests use fakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from agent.bundle.verify import VerifiedBundle
from agent.deploy.trial import Score
from agent.mqtt.reason_codes import Reason


class Control(Protocol):
    """The control connection."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the broker."""

    @property
    def version(self) -> int:
        """The MQTT version: 5, or 4 for 3.1.1, in which a broker does not state its limits."""

    @property
    def max_packet_bytes(self) -> int:
        """Bytes of the largest packet that can be sent and received, as far as it is known."""

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False
    ) -> asyncio.Future[Reason]:
        """Send a message; at QoS 1 it is sent again until the broker has it."""

    def want(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe, now and after each reconnection."""

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What a model's worker is doing.

    Attributes
    ----------
    failed
        Whether it is out of service; it is tried again by itself.
    message
        Why it is not ready, or empty.
    next_try_s
        When a failed one is tried again, in seconds since the epoch; None otherwise.
    revoked
        Whether the key that signed its bundle was revoked since.
    """

    failed: bool = False
    message: str = ""
    next_try_s: float | None = None
    revoked: bool = False


class Models(Protocol):
    """Runs models."""

    def condition(self, name: str) -> Condition | None:
        """Return what a model's worker is doing; None if the model does not run here."""

    def score(self, name: str) -> Score:
        """Return how a model's bundle has done since it was put into service."""

    def expect(self, names: Iterable[str]) -> None:
        """Announce models that will be activated: until then, requests for them wait."""

    def give_up(self, name: str, why: str) -> None:
        """Refuse the requests that wait for a model which cannot be activated now, until it is."""

    async def activate(self, verified: VerifiedBundle) -> None:
        """Start a worker with the bundle, run its recorded samples, and then give it the model's requests.

        The previous worker answers them until then, and goes on if this raises. The callee owns the bundle
        and closes it.
        """

    async def deactivate(self, name: str) -> None:
        """Answer the accepted requests, and end the model's worker."""

    async def suspend(self, name: str, why: str) -> None:
        """End the model's worker at once, and refuse its requests with the reason until it is activated."""
