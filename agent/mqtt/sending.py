"""QoS 1 messages that the broker has not acknowledged: waiting for their turn, or in flight.

paho does not know MQTT 5's Receive Maximum, so the window is kept here: paho never gets more messages than
the server accepts. The queue is bounded; a message that does not fit is refused at once.

A core without sockets, event loop or clock: `Publisher` sends, and the owner passes in clock and timer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from agent.mqtt.properties import Properties
from agent.mqtt.reason_codes import CLOSED, EXPIRED, QUEUE_FULL, Action, Reason

# A server that states no Receive Maximum accepts 65535; a message costs less in our queue than in its queue.
MAX_IN_FLIGHT: Final = 1000
# Limits of the queue while the broker is away.
MAX_WAITING_MESSAGES: Final = 10_000
MAX_WAITING_BYTES: Final = 64 << 20
# After a temporary refusal (a quota, say): how long to pause, and how many times.
RESEND_DELAY_S: Final = 1.0
MAX_RESENDS: Final = 10


@dataclass(slots=True, eq=False)
class Outgoing:
    """One QoS 1 message on its way out.

    Attributes
    ----------
    topic, payload, retain, properties
        What is sent.
    settle
        Called once with the verdict: the broker's, or one of our own such as `EXPIRED`.
    deadline_s
        When the message expires, by the clock given to `Sending`; None for never.
    resends
        How many times it was sent again after a temporary refusal.
    """

    topic: str
    payload: bytes
    retain: bool
    properties: Properties
    settle: Callable[[Reason], None]
    deadline_s: float | None = None
    resends: int = 0


class Publisher(Protocol):
    """Sends messages: an engine, or a test's stand-in for one."""

    def publish(
        self, topic: str, payload: bytes, *, qos: int, retain: bool, properties: Properties
    ) -> int | None:
        """Send it; return its packet identifier, or None if that is not possible now."""


class Sending:
    """The queue of waiting messages and the window of messages in flight.

    Parameters
    ----------
    clock
        Returns the current time in seconds; never goes backwards.
    call_later
        Calls a function after that many seconds.
    wake
        Called when a message is queued again after its pause; the owner then calls `pump`.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], object],
        wake: Callable[[], None],
    ) -> None:
        self.limit = MAX_IN_FLIGHT
        self._clock = clock
        self._call_later = call_later
        self._wake = wake
        self._waiting: deque[Outgoing] = deque()
        self._waiting_bytes = 0
        self._in_flight: dict[int, Outgoing] = {}
        self._pausing: set[Outgoing] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._in_flight) + len(self._pausing)

    def add(self, outgoing: Outgoing) -> None:
        """Queue a message; if there is no room, settle it at once."""
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
        """Send waiting messages while the window has room."""
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
            self._in_flight[packet_id] = outgoing

    def acknowledged(self, packet_id: int, verdict: Reason) -> None:
        """Settle the message with this identifier, or send it again later if the refusal is temporary."""
        outgoing = self._in_flight.pop(packet_id, None)
        if outgoing is None:
            return
        if verdict.failed and verdict.sending is Action.RETRY and outgoing.resends < MAX_RESENDS:
            outgoing.resends += 1
            self._pausing.add(outgoing)
            self._call_later(RESEND_DELAY_S, lambda: self._resend(outgoing))
        else:
            outgoing.settle(verdict)

    def start_over(self) -> None:
        """Queue the messages in flight again, in order: a new session knows nothing of them."""
        for outgoing in reversed(self._in_flight.values()):
            self._put_back(outgoing)
        self._in_flight.clear()

    def close(self) -> None:
        """Settle every message with `CLOSED`."""
        self._closed = True
        for outgoing in (*self._in_flight.values(), *self._waiting, *self._pausing):
            outgoing.settle(CLOSED)
        self._in_flight.clear()
        self._waiting.clear()
        self._pausing.clear()
        self._waiting_bytes = 0

    def _next(self) -> Outgoing | None:
        while self._waiting and len(self._in_flight) < self.limit:
            outgoing = self._waiting.popleft()
            self._waiting_bytes -= len(outgoing.payload)
            if outgoing.deadline_s is None:
                return outgoing
            left_s = outgoing.deadline_s - self._clock()
            if left_s > 0:
                # The broker counts down from here (MQTT 5.0, 3.3.2.3.3); zero would expire on arrival.
                expiry_s = max(1, round(left_s))
                if expiry_s != outgoing.properties.expiry_s:
                    outgoing.properties = replace(outgoing.properties, expiry_s=expiry_s)
                return outgoing
            outgoing.settle(EXPIRED)
        return None

    def _put_back(self, outgoing: Outgoing) -> None:
        self._waiting.appendleft(outgoing)
        self._waiting_bytes += len(outgoing.payload)

    def _resend(self, outgoing: Outgoing) -> None:
        if outgoing in self._pausing:  # not closed meanwhile
            self._pausing.remove(outgoing)
            self.add(outgoing)
            self._wake()
