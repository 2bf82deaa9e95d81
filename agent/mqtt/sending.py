"""What was published at QoS 1 and is not acknowledged: waiting its turn, or under way.

The library knows no Receive Maximum, so the window is kept here: no more is handed to it than the server
takes. Both places are bounded; what does not fit is refused at once and never silently.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from agent.mqtt.properties import Properties
from agent.mqtt.reason_codes import CLOSED, EXPIRED, QUEUE_FULL, Action, Reason

# Servers that state no Receive Maximum take 65535; waiting in our own queue costs less than in theirs.
MAX_UNDER_WAY: Final = 1000
# What may wait while a broker is away.
MAX_WAITING_MESSAGES: Final = 10_000
MAX_WAITING_BYTES: Final = 64 << 20
# The broker refused a message for a passing reason (a quota, say): pause, and how often.
_RESEND_DELAY_S: Final = 1.0
_MAX_RESENDS: Final = 10


@dataclass(slots=True, eq=False)
class Outgoing:
    """One message of QoS 1 on its way out.

    Attributes
    ----------
    topic, payload, retain, properties
        What is sent.
    settle
        Called once with the broker's verdict.
    deadline_s
        When it is not worth sending any more (`time.monotonic`).
    resends
        How often it was sent again because the broker refused it for a passing reason.
    """

    topic: str
    payload: bytes
    retain: bool
    properties: Properties
    settle: Callable[[Reason], None]
    deadline_s: float | None = None
    resends: int = 0


class Publisher(Protocol):
    """What sends one message: an engine, or a test."""

    def publish(
        self, topic: str, payload: bytes, *, qos: int, retain: bool, properties: Properties
    ) -> int | None:
        """Send it; return its packet identifier, or None when that cannot be done now."""


class Sending:
    """The queue of waiting messages and the window of those under way.

    Parameters
    ----------
    wake
        Called when a message waits again after a pause, so that `pump` should be.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.limit = MAX_UNDER_WAY
        self._wake = wake
        self._waiting: deque[Outgoing] = deque()
        self._waiting_bytes = 0
        self._under_way: dict[int, Outgoing] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way)

    def add(self, outgoing: Outgoing) -> None:
        """Queue a message; one that finds no room is settled at once."""
        if self._closed:
            outgoing.settle(CLOSED)
        elif (
            len(self._waiting) >= MAX_WAITING_MESSAGES
            or self._waiting_bytes + len(outgoing.payload) > MAX_WAITING_BYTES
        ):
            outgoing.settle(QUEUE_FULL)
        else:
            self._waiting.append(outgoing)
            self._waiting_bytes += len(outgoing.payload)

    def pump(self, publisher: Publisher) -> None:
        """Send what waits, as far as the window has room."""
        while (outgoing := self._next()) is not None:
            packet_id = publisher.publish(
                outgoing.topic,
                outgoing.payload,
                qos=1,
                retain=outgoing.retain,
                properties=outgoing.properties,
            )
            if packet_id is None:
                self._put_back(outgoing)
                return
            self._under_way[packet_id] = outgoing

    def acknowledged(self, packet_id: int, verdict: Reason) -> None:
        """Settle the message that had this identifier, or send it again when it was refused in passing."""
        outgoing = self._under_way.pop(packet_id, None)
        if outgoing is None:
            return
        if verdict.failed and verdict.sending is Action.RETRY and outgoing.resends < _MAX_RESENDS:
            outgoing.resends += 1
            asyncio.get_running_loop().call_later(_RESEND_DELAY_S, self._again, outgoing)
        else:
            outgoing.settle(verdict)

    def start_over(self) -> None:
        """Queue what was under way again, in its order: a new session knows nothing of it."""
        for outgoing in reversed(self._under_way.values()):
            self._put_back(outgoing)
        self._under_way.clear()

    def close(self) -> None:
        """Settle everything."""
        self._closed = True
        for outgoing in (*self._under_way.values(), *self._waiting):
            outgoing.settle(CLOSED)
        self._under_way.clear()
        self._waiting.clear()
        self._waiting_bytes = 0

    def _next(self) -> Outgoing | None:
        while self._waiting and len(self._under_way) < self.limit:
            outgoing = self._waiting.popleft()
            self._waiting_bytes -= len(outgoing.payload)
            if outgoing.deadline_s is None:
                return outgoing
            left_s = outgoing.deadline_s - time.monotonic()
            if left_s > 0:
                # The broker counts on from here (MQTT 5.0, 3.3.2.3.3); zero would mean dead on arrival.
                expiry_s = max(1, round(left_s))
                if expiry_s != outgoing.properties.expiry_s:
                    outgoing.properties = replace(outgoing.properties, expiry_s=expiry_s)
                return outgoing
            outgoing.settle(EXPIRED)
        return None

    def _put_back(self, outgoing: Outgoing) -> None:
        self._waiting.appendleft(outgoing)
        self._waiting_bytes += len(outgoing.payload)

    def _again(self, outgoing: Outgoing) -> None:
        self.add(outgoing)
        self._wake()
