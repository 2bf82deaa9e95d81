"""QoS 1 messages that the broker has not acknowledged: waiting for their turn, or in flight.

Promises: no more messages are in flight than the server's Receive Maximum, also after a reconnection, when
those in flight are sent again in their order and with their identifiers (MQTT 5.0, 4.4). Window and queue are
bounded, also in bytes; a message that does not fit is refused at once.

No message blocks the others: some brokers end a connection without a reason because one message is too large
or contains something that they refuse. A message that was in flight at several losses is sent with no other
message in flight; if the connection is lost then too, the message is given up.

A core without sockets, event loop or clock: `Publisher` sends, and the owner passes in clock and timer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from agent.mqtt.properties import Properties, encode
from agent.mqtt.reason_codes import (
    BLAMES_A_PACKET,
    CLOSED,
    EXPIRED,
    NOT_CONNECTED,
    POISON,
    QUEUE_FULL,
    RENEWED,
    Action,
    Reason,
)

# A server that states no Receive Maximum accepts 65535; a message costs less in our queue than in its queue.
MAX_IN_FLIGHT: Final = 1000
# Limits of the queue while the broker is away.
MAX_WAITING_MESSAGES: Final = 10_000
MAX_WAITING_BYTES: Final = 64 << 20
# A message in flight is kept twice: to be sent again, and as the packet that waits to be written. A larger
# one is in flight by itself.
MAX_IN_FLIGHT_BYTES: Final = 8 << 20
# After a temporary refusal (a quota, say): how long to pause, and how many times.
RESEND_DELAY_S: Final = 1.0
MAX_RESENDS: Final = 10
# A message that was in flight at this many losses of the connection is suspected of causing them.
SUSPECT_LOSSES: Final = 2
# A message is given up after this many, if nothing else was in flight. A broker that is restarted repeatedly
# hardly ever meets the same message so often.
MAX_LOSSES: Final = 5
MAX_PACKET_ID: Final = 65535


@dataclass(slots=True, eq=False)
class Outgoing:
    """One QoS 1 message on its way out.

    `settle` is called once with the verdict: the broker's, or one of our own such as `EXPIRED`. It expires at
    `deadline_s` by the clock given to `Sending`. `packed` has the properties as they are sent; `packet_id` is
    known once it was sent in the session that the broker keeps. `resends` counts temporary refusals, and
    `losses` the connections that ended while it was in flight.
    """

    topic: str
    payload: bytes
    retain: bool
    properties: Properties
    settle: Callable[[Reason], None]
    deadline_s: float | None = None
    packed: bytes = b"\0"
    resends: int = 0
    packet_id: int | None = None
    losses: int = 0

    @property
    def nbytes(self) -> int:
        """Its payload and properties, which may have 64 KiB, without the first byte of their length."""
        return len(self.payload) + len(self.packed) - 1


class Publisher(Protocol):
    """Sends messages: an engine, or a test's stand-in for one."""

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        packet_id: int | None,
        retain: bool,
        packed: bytes,
        dup: bool,
    ) -> Reason | None:
        """Send it; return None if it will be acknowledged, `NOT_CONNECTED`, or its verdict."""


class Sending:
    """The queue of waiting messages and the window of messages in flight.

    `clock` never goes backwards. `wake` is called when a message is queued again after its pause; the owner
    then calls `pump`.
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
        self._in_flight_bytes = 0
        self._pausing: set[Outgoing] = set()
        self._suspects: set[Outgoing] = set()
        # Identifiers of messages that wait to be sent again.
        self._reserved: set[int] = set()
        self._last_id = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._in_flight) + len(self._pausing)

    @property
    def nbytes(self) -> int:
        """The payloads and properties that wait or are in flight."""
        return self._waiting_bytes + self._in_flight_bytes

    def add(self, outgoing: Outgoing) -> None:
        """Queue a message; if there is no room, settle it at once."""
        if self._closed:
            outgoing.settle(CLOSED)
        elif (
            len(self._waiting) >= MAX_WAITING_MESSAGES
            or self._waiting_bytes + outgoing.nbytes > MAX_WAITING_BYTES
        ):
            outgoing.settle(QUEUE_FULL)
        else:
            self._waiting.append(outgoing)
            self._waiting_bytes += outgoing.nbytes

    def next_id(self) -> int:
        """Return an identifier that no message in flight has."""
        while True:
            self._last_id = self._last_id % MAX_PACKET_ID + 1
            if self._last_id not in self._in_flight and self._last_id not in self._reserved:
                return self._last_id

    def pump(self, publisher: Publisher) -> None:
        """Send waiting messages while the window has room."""
        while (outgoing := self._next()) is not None:
            dup = outgoing.packet_id is not None
            packet_id = outgoing.packet_id = outgoing.packet_id or self.next_id()
            self._reserved.discard(packet_id)
            # Before it is sent: if the connection breaks meanwhile, `lost` finds it.
            self._in_flight[packet_id] = outgoing
            self._in_flight_bytes += outgoing.nbytes
            verdict = publisher.publish(
                outgoing.topic,
                outgoing.payload,
                packet_id=packet_id,
                retain=outgoing.retain,
                packed=outgoing.packed,
                dup=dup,
            )
            if verdict is None:
                continue
            if self._landed(packet_id) is None:
                return  # the connection broke
            if verdict is NOT_CONNECTED:
                outgoing.packet_id = packet_id if dup else None
                self._put_back(outgoing)
                return
            self._settle(outgoing, verdict)

    def acknowledged(self, packet_id: int, verdict: Reason) -> None:
        """Settle the message with this identifier, or send it again later if the refusal is temporary."""
        outgoing = self._landed(packet_id)
        if outgoing is None:
            return
        outgoing.packet_id = None
        if verdict.failed and verdict.sending is Action.RETRY and outgoing.resends < MAX_RESENDS:
            outgoing.resends += 1
            self._suspects.discard(outgoing)
            self._pausing.add(outgoing)
            self._call_later(RESEND_DELAY_S, lambda: self._resend(outgoing))
        else:
            self._settle(outgoing, verdict)

    def lost(self, why: Reason) -> None:
        """Queue the messages in flight again, in order: the connection is gone."""
        lost = tuple(self._in_flight.values())
        self._in_flight.clear()
        self._in_flight_bytes = 0
        blamed = why.code in BLAMES_A_PACKET
        guilty: list[Outgoing] = []
        for outgoing in reversed(lost):
            if why is not RENEWED:
                outgoing.losses = max(outgoing.losses + 1, SUSPECT_LOSSES if blamed else 0)
            if len(lost) == 1 and (blamed or outgoing.losses >= MAX_LOSSES):
                guilty.append(outgoing)
                continue
            if outgoing.losses >= SUSPECT_LOSSES:
                self._suspects.add(outgoing)
            self._put_back(outgoing)
        for outgoing in guilty:
            self._settle(outgoing, why if blamed else POISON)

    def resume(self, *, session_present: bool) -> None:
        """Begin a connection: in a new session, the messages that were in flight get new identifiers."""
        if not session_present:
            for outgoing in self._waiting:
                outgoing.packet_id = None
            self._reserved.clear()

    def close(self) -> None:
        """Settle every message with `CLOSED`."""
        self._closed = True
        left = (*self._in_flight.values(), *self._waiting, *self._pausing)
        self._in_flight.clear()
        self._waiting.clear()
        self._pausing.clear()
        self._reserved.clear()
        self._in_flight_bytes = self._waiting_bytes = 0
        for outgoing in left:
            self._settle(outgoing, CLOSED)

    def _next(self) -> Outgoing | None:
        while self._waiting and len(self._in_flight) < (1 if self._suspects else self.limit):
            nbytes = self._in_flight_bytes + self._waiting[0].nbytes
            if self._in_flight and nbytes > MAX_IN_FLIGHT_BYTES:
                return None
            outgoing = self._waiting.popleft()
            self._waiting_bytes -= outgoing.nbytes
            if outgoing.deadline_s is None:
                return outgoing
            left_s = outgoing.deadline_s - self._clock()
            if left_s > 0:
                # The broker counts down from here (MQTT 5.0, 3.3.2.3.3); zero would expire on arrival.
                expiry_s = max(1, round(left_s))
                if expiry_s != outgoing.properties.expiry_s:
                    outgoing.properties = replace(outgoing.properties, expiry_s=expiry_s)
                    outgoing.packed = encode(outgoing.properties)
                return outgoing
            self._settle(outgoing, EXPIRED)
        return None

    def _landed(self, packet_id: int) -> Outgoing | None:
        """Take a message out of the window; None if it is not there."""
        outgoing = self._in_flight.pop(packet_id, None)
        if outgoing is not None:
            self._in_flight_bytes -= outgoing.nbytes
        return outgoing

    def _put_back(self, outgoing: Outgoing) -> None:
        self._waiting.appendleft(outgoing)
        self._waiting_bytes += outgoing.nbytes
        if outgoing.packet_id is not None:
            self._reserved.add(outgoing.packet_id)

    def _settle(self, outgoing: Outgoing, verdict: Reason) -> None:
        self._suspects.discard(outgoing)
        if outgoing.packet_id is not None:
            self._reserved.discard(outgoing.packet_id)
        outgoing.settle(verdict)

    def _resend(self, outgoing: Outgoing) -> None:
        if outgoing in self._pausing:  # not closed meanwhile
            self._pausing.remove(outgoing)
            self.add(outgoing)
            self._wake()
