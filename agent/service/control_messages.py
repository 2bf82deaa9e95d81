"""The messages on the control connection: each is handed to the part that it is for, and acknowledged.

Promises: they are acknowledged in the order in which they arrived, each after its part has taken it. A bug
while one is taken is logged and counted; that message is acknowledged too, or the broker would deliver it
again and again. A flood costs no memory: while `MAX_WAITING` messages are being taken, those at QoS 0 are
dropped and counted, but not blocks, which nothing waits for; of those at QoS 1 the broker sends no more than
the Receive Maximum.
Leaves to others: what they mean (`presence`, `agent.deploy`), and requests (`inference`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from agent.deploy.deployment import Deployment
from agent.errors import EndlessDataError
from agent.mqtt.message import Message, Receipt
from agent.service.metrics.metrics import Metrics
from agent.service.presence import Presence
from agent.service.requests.acknowledgement import AckOrder
from agent.wire.topics import Block, Desired, Job, State, parse_topic

# Each may have half a MiB.
MAX_WAITING: Final = 16

_log = logging.getLogger(__name__)


class ControlMessages:
    """Takes the messages of one control connection; `ack` acknowledges one of them."""

    def __init__(
        self, ack: Callable[[Receipt], None], presence: Presence, deployment: Deployment, metrics: Metrics
    ) -> None:
        self._acks = AckOrder(ack)
        self._presence = presence
        self._deployment = deployment
        self._metrics = metrics
        self._waiting = 0

    def take(self, message: Message) -> None:
        """Hand a message on, and acknowledge it when its part has taken it."""
        slot = self._acks.arrived(message)
        is_full = self._waiting >= MAX_WAITING
        if slot is None and is_full and not isinstance(parse_topic(message.topic), Block):
            self._metrics.count("edge_control_messages_dropped_total")
            return

        def finish(taking: asyncio.Task[None] | None = None) -> None:
            if taking is not None:
                self._waiting -= 1
                if not taking.cancelled() and taking.exception() is not None:
                    _log.error("internal error while taking a message", exc_info=taking.exception())
                    self._metrics.count("edge_faults_total")
            if slot is not None:
                slot.finish()

        taking = None
        try:
            taking = self._hand_on(message)
        except Exception:  # noqa: BLE001 - the outermost loop of a message
            _log.exception("internal error while handling a message on %.200s", ascii(message.topic))
            self._metrics.count("edge_faults_total")
        if taking is None:
            finish()
        else:
            self._waiting += 1
            taking.add_done_callback(finish)

    def on_down(self) -> None:
        """Drop what is not acknowledged: the broker will deliver it again."""
        self._acks.forget()

    def _hand_on(self, message: Message) -> asyncio.Task[None] | None:
        """Give a message to its part; return a task that ends when the part has taken it, None if it has."""
        topic = parse_topic(message.topic)
        if isinstance(topic, State):
            self._presence.on_state(message.payload, retained=message.retain)
        elif isinstance(topic, Job):
            if message.retain:
                self._deployment.on_retained_job(topic, message.payload)
        elif isinstance(topic, Desired) and message.refusal is not None and not message.payload:
            self._deployment.refuse_desired(EndlessDataError(f"the desired document: {message.refusal}"))
        elif topic is not None:
            return self._deployment.on_message(topic, message.payload)
        return None
