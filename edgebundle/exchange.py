"""One request on its way, sent again until its answer arrives or it is too late.

Promises: it is sent again with the same correlation data, so a broker or an agent that restarts in between
costs only time: the agent remembers its answers and does not run the model twice. Until the broker has
acknowledged a message, the connection repeats it, and no second one is made. It ends once: with the message
that answers it, or with an error.

Leaves to others: the connection (`async_client`), reading the answer (`answer`), and asking again with a new
identifier after a 503 (`async_model`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from agent.mqtt.reason_codes import CLOSED, EXPIRED, TOO_LARGE_CODES, Action, Reason
from agent.wire.content_types import RAW, UNPROCESSED
from agent.wire.envelope import Envelope
from agent.wire.request import InferMessage
from edgebundle.errors import BrokerError, ClientError
from edgebundle.request import Request
from edgebundle.target import Target

if TYPE_CHECKING:
    from agent.mqtt.message import Message
    from agent.mqtt.properties import Properties

# When to send a request again for the first time; the interval grows by half each time.
RESEND_S: Final = 2.0
LONGEST_RESEND_S: Final = 15.0
# Without an answer after this long, find out whether the agent exists. Retained messages arrive at once.
ABSENT_S: Final = 1.0
# MQTT 5.0, 3.4.2.1: the broker accepted the message, and there is no subscriber.
_NO_SUBSCRIBERS: Final = 0x10


class Wire(Protocol):
    """The part of the connection that an exchange needs."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""

    @property
    def version(self) -> int:
        """5, or 4 for MQTT 3.1.1."""

    def send(
        self, topic: str, payload: bytes, settle: Callable[[Reason], None], *, properties: Properties
    ) -> None:
        """Publish at QoS 1, and call `settle` with the broker's verdict."""


class Exchange:
    """One identifier's request.

    Parameters
    ----------
    wire
        The connection.
    target
        The agent or group that receives the request.
    make
        Returns the message, given the seconds that are left: what `message_maker` returns.
    identifier
        The Correlation Data, and the last level of the topic for the answer.
    end_s
        When an answer is of no use, by `time.monotonic`.
    on_silence
        Called with this object at `ABSENT_S` and before each repetition.
    too_late
        Returns the error for a deadline that has passed.

    Attributes
    ----------
    done
        The message that answers it.
    sent_s
        When it was sent first, by `time.monotonic`.
    arrived_s
        When the answer arrived.
    attempts
        How often it was sent.
    no_subscriber
        Whether the broker said, the last time, that no client takes such requests.
    """

    def __init__(
        self,
        wire: Wire,
        target: Target,
        make: Callable[[float], InferMessage],
        *,
        identifier: str,
        end_s: float,
        on_silence: Callable[[Exchange], None],
        too_late: Callable[[Exchange], ClientError],
    ) -> None:
        self.target = target
        self.identifier = identifier
        self.end_s = end_s
        self.sent_s = 0.0
        self.arrived_s = 0.0
        self.attempts = 0
        self.no_subscriber = False
        self._wire = wire
        self._make = make
        self._on_silence = on_silence
        self._too_late = too_late
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Message] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._interval_s = RESEND_S
        self._next_s = 0.0
        self._unsettled = False
        self._sent_bytes = 0

    def start(self) -> None:
        """Send it for the first time."""
        self.sent_s = time.monotonic()
        self._next_s = self.sent_s + self._interval_s
        self._interval_s *= 1.5
        self._send()
        if not self.done.done():
            self._wait(min(self._next_s, self.sent_s + ABSENT_S))

    def reconnected(self) -> None:
        """Send it again at once: what the broker had may be lost. The agent may be back only later."""
        if self.done.done() or self._timer is None:
            return
        self._repeat()
        self._interval_s = RESEND_S
        self._next_s = time.monotonic() + RESEND_S
        self._timer.cancel()
        self._wait(self._next_s)

    def arrived(self, message: Message) -> None:
        """Take the answer."""
        if not self.done.done():
            self.arrived_s = time.monotonic()
            self.done.set_result(message)
        self.close()

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        if not self.done.done():
            self.done.set_exception(error)
        self.close()

    def close(self) -> None:
        """Send it no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.done.cancel()

    def _wait(self, until_s: float) -> None:
        delay_s = min(until_s, self.end_s) - time.monotonic()
        self._timer = self._loop.call_later(max(0.0, delay_s), self._tick)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s >= self.end_s:
            self.fail(self._too_late(self))
            return
        self._on_silence(self)
        if now_s >= self._next_s:
            self._repeat()
            self._next_s = now_s + self._interval_s
            self._interval_s = min(1.5 * self._interval_s, LONGEST_RESEND_S)
        if not self.done.done():
            self._wait(self._next_s)

    def _repeat(self) -> None:
        if not self._unsettled:  # otherwise the connection itself repeats it
            self._send()

    def _send(self) -> None:
        left_s = self.end_s - time.monotonic()
        if left_s <= 0 or not self._wire.connected:
            return  # `reconnected` follows, and the timer ends it
        message = self._make(left_s)
        self._sent_bytes = len(message.body)
        self.attempts += 1
        self._unsettled = True
        self._wire.send(self.target.topic, message.body, self._settled, properties=message.properties())

    def _settled(self, verdict: Reason) -> None:
        self._unsettled = False
        self.no_subscriber = verdict.code == _NO_SUBSCRIBERS
        if not verdict.failed or self.done.done():
            return
        if verdict.sending is not Action.GIVE_UP or verdict in (EXPIRED, CLOSED):
            return  # sent again later; the deadline and the client's end have errors of their own
        if verdict.code in TOO_LARGE_CODES:
            error = BrokerError(
                f"the broker does not take a request of {self._sent_bytes} bytes: {verdict}",
                hint="send less in one request, or raise the broker's limit for packets",
            )
        else:
            error = BrokerError(
                f"the broker refused the request to {self.target.topic}: {verdict}",
                hint="let this user publish there in the broker's access list (docs/mosquitto/edge.acl)"
                if self.target.has_user
                else "name the user that the broker knows, as in mqtt://USER@HOST (1 to 128 letters, digits "
                "and ._~:=@-), or let clients without one publish there in its access list",
            )
        self.fail(error)


def message_maker(
    request: Request,
    identifier: str,
    reply_to: str,
    end_s: float,
    trace: tuple[tuple[str, str], ...],
    body: bytes | None,
) -> Callable[[float], InferMessage]:
    """Return what makes the message of a request, given the seconds that are left.

    `trace` are user properties that the answer carries on. `body` is the request's JSON for MQTT 3.1.1, in
    which the message is the same each time: the agent recognises it by its bytes. None with MQTT 5.
    """
    if body is not None:
        left_s = max(0.001, round(end_s - time.monotonic(), 3))
        message = InferMessage.with_envelope(Envelope(reply_to, identifier, left_s, request.session), body)
        return lambda _left_s: message
    return lambda left_s: InferMessage(
        reply_to=reply_to,
        body=request.body,
        content_type=request.content_type,
        tensors=request.tensors,
        accept=f"{RAW};{UNPROCESSED}" if request.is_raw else RAW,
        correlation=identifier.encode(),
        deadline_s=left_s,
        trace=trace,
        session=request.session,
    )
