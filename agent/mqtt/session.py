"""One session at a broker (MQTT 5.0, 4.1), from the first connect to the last disconnect.

Promises: messages in flight and subscriptions outlive each network connection, and go on over the next one.
Nothing is published before the subscriptions are granted. An owner is told once of each loss.

Leaves to others: making network connections (`upkeep`), and their packets (`engine`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from agent.mqtt.engine import Connack, Engine, Listener
from agent.mqtt.limits import NO_LIMITS
from agent.mqtt.message import Message, Receipt
from agent.mqtt.reason_codes import CLOSED, LOST, NOT_CONNECTED, QUEUE_FULL, RENEWED, Reason, reason
from agent.mqtt.sending import MAX_IN_FLIGHT, Outgoing, Sending
from agent.mqtt.subscriptions import Subscriptions
from agent.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)

# What others may cause as often as they like is logged at most this often; the counters count all of it.
_LOG_INTERVAL_S: Final = 60.0
# What may wait at QoS 0 for a broker that does not read; a larger message is sent if nothing else waits.
_MAX_UNSENT_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Owner:
    """What a connection calls, in the event loop.

    Attributes
    ----------
    on_message
        Called with each message; each one with a receipt must be passed to `ack` once.
    on_up
        Called after each connect, while the subscriptions are in flight. The argument is whether the broker
        still had the session.
    on_down
        Called with the reason when an established connection is lost.
    on_subscribed
        Called whenever the broker has answered a SUBSCRIBE or UNSUBSCRIBE.
    shed
        Called with the topic of a message at QoS 0 while more arrives than can be read, and for how many
        seconds that has been so; returns whether to drop the message. By default every message is read.
    """

    on_message: Callable[[Message], None]
    on_up: Callable[[bool], None] | None = None
    on_down: Callable[[Reason], None] | None = None
    on_subscribed: Callable[[], None] | None = None
    shed: Callable[[str, float], bool] | None = None


class Session(Listener):
    """What we and the broker know of each other.

    `subscriptions` are the filters that are subscribed. `up` is set while a network connection is up; `up_s`
    is when the latest one came up, and `ended` the reason for its end. `version` is the MQTT version in use,
    or last used: 5, or 4 for 3.1.1; 0 before the first. `connects`, `over_limit` and `limits` are as in
    `connection.Connection`.
    """

    def __init__(self, name: str, owner: Owner) -> None:
        self.sending = Sending(clock=_now_s, call_later=_call_later, wake=self._pump)
        self.subscriptions = Subscriptions(name)
        self.up = asyncio.Event()
        self.up_s = 0.0
        self.connects = self.over_limit = self.version = 0
        self.limits = NO_LIMITS
        self.ended: asyncio.Future[Reason]
        self.name = name
        self._owner = owner
        self._log = RateLimitedLog(_log, _LOG_INTERVAL_S)
        self._engine: Engine | None = None
        self._dropped = 0
        self._drained: asyncio.Future[None] | None = None

    @property
    def engine(self) -> Engine | None:
        """The network connection that is up; None if none is."""
        return self._engine if self.up.is_set() else None

    @property
    def backlog_bytes(self) -> int:
        """What waits for the broker: messages not acknowledged, and packets that it has not read."""
        return self.sending.nbytes + (0 if self._engine is None else self._engine.unsent_bytes)

    @property
    def dropped(self) -> int:
        """How many messages at QoS 0 were dropped unread."""
        return self._dropped + (0 if self._engine is None else self._engine.dropped)

    def use(self, engine: Engine) -> None:
        """Take over a network connection that is being made."""
        if self._engine is not None:
            self._engine.drop()
            self._dropped += self._engine.dropped
        self._engine, self.version = engine, engine.version

    def begin(self, connack: Connack) -> Reason:
        """Go on over the network connection that the broker has accepted; return `LOST` if it is gone."""
        engine = self._engine
        if engine is None or not engine.connected:  # accepted, and dropped at once
            return LOST
        self.limits = limits = connack.limits
        self.sending.limit = max(1, min(MAX_IN_FLIGHT, limits.receive_maximum))
        self.sending.resume(session_present=connack.session_present)
        self.ended = asyncio.get_running_loop().create_future()
        self.up.set()
        self.up_s = _now_s()
        self.connects += 1
        # Answers to the waiting messages may arrive at once, and not every broker handles packets in order,
        # so nothing is sent before the subscriptions are granted.
        self.subscriptions.begin(engine, limits)
        self._pump()
        if not self.up.is_set():  # lost while the first packets were sent
            return LOST
        if self._owner.on_up is not None:
            self._owner.on_up(connack.session_present)
        return reason(0)

    def send(self, outgoing: Outgoing) -> None:
        """Send a message at QoS 1, as soon as the broker takes it."""
        self.sending.add(outgoing)
        self._pump()

    def publish_once(self, topic: str, payload: bytes, *, retain: bool, packed: bytes) -> Reason:
        """Send a message at QoS 0, and return what became of it."""
        if (engine := self.engine) is None:
            return NOT_CONNECTED
        if engine.unsent_bytes and engine.unsent_bytes + len(payload) > _MAX_UNSENT_BYTES:
            return QUEUE_FULL
        verdict = engine.publish(topic, payload, packet_id=None, retain=retain, packed=packed)
        return verdict or NOT_CONNECTED

    def ack(self, receipt: Receipt) -> None:
        """Acknowledge a message, unless it came over an earlier network connection."""
        # Not `self.engine`: the first messages of a session may arrive together with CONNACK.
        if self._engine is not None:
            self._engine.ack(receipt)

    async def drain(self, limit_s: float) -> None:
        """Return when everything is acknowledged, or the network connection lost, or the time over."""
        if self.up.is_set() and self.sending:
            self._drained = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._drained], timeout=limit_s)

    def drop(self) -> None:
        """End the network connection without DISCONNECT."""
        if self._engine is not None:
            self._engine.drop()
        self.on_lost(LOST)

    def renew(self) -> None:
        """End the network connection with DISCONNECT; another one follows."""
        if (engine := self.engine) is not None:
            self.on_lost(RENEWED)
            engine.disconnect()

    async def close(self) -> None:
        """Send DISCONNECT, and settle with `CLOSED` what is not acknowledged."""
        self.up.clear()
        self.subscriptions.close(CLOSED)
        if self._engine is not None and (sock := self._engine.disconnect()) is not None:
            await sock.wait_closed()
        self.sending.close()

    # Called by the engine.

    def on_message(self, message: Message) -> None:
        """Pass on a message."""
        if message.refusal is not None:
            self.over_limit += 1
            if self._log.due("over limit"):
                _log.warning(
                    "%s: a message on %.200s is over a limit: %s",
                    self.name,
                    ascii(message.topic[:200]),
                    message.refusal,
                )
        self._owner.on_message(message)

    def on_puback(self, packet_id: int, verdict: Reason) -> None:
        """Settle a message, and send the next ones."""
        self.sending.acknowledged(packet_id, verdict)
        self._pump()

    def on_suback(self, packet_id: int, verdicts: Sequence[Reason]) -> None:
        """Note what is granted, and send what waited for it."""
        self.subscriptions.granted(packet_id, verdicts)
        self._pump()
        if self._owner.on_subscribed is not None:
            self._owner.on_subscribed()

    def on_lost(self, why: Reason | None) -> None:
        """Note that the network connection is gone."""
        if not self.up.is_set():
            return
        why = LOST if why is None or not why.failed else why
        self.up.clear()
        # First, so that no error of an owner keeps the next connection from being made.
        if not self.ended.done():
            self.ended.set_result(why)
        self._end_drain()
        self.subscriptions.lost()
        self.sending.lost(why)
        if self._owner.on_down is not None:
            self._owner.on_down(why)

    def sheds(self, topic: str, flooded_for_s: float) -> bool:
        """Ask the owner."""
        return self._owner.shed is not None and self._owner.shed(topic, flooded_for_s)

    def _pump(self) -> None:
        if (engine := self.engine) is not None and self.subscriptions.settled:
            self.sending.pump(engine)
        if not self.sending:
            self._end_drain()

    def _end_drain(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _call_later(delay_s: float, function: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, function)
