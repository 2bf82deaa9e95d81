"""One MQTT connection on the running event loop, kept up until it is closed.

Promises: a lost connection is re-established with back-off, and its subscriptions with it; a message
published at QoS 1 is sent again until the broker acknowledges it, it expires, or the broker refuses it for
good; what the broker says in CONNACK is obeyed; a received message is acknowledged when the owner calls
`ack`. MQTT 5 first, 3.1.1 if the broker refuses 5.

Leaves to others: what messages mean, the order of acknowledgement, and keeping anything across a restart.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from agent.errors import BrokerError, ConfigError, StoreError
from agent.mqtt.backoff import Backoff
from agent.mqtt.engine import MQTT_5, Callbacks, Connack, Engine
from agent.mqtt.limits import NO_LIMITS
from agent.mqtt.message import Message, Receipt, Will, check_topic, encode_publish
from agent.mqtt.negotiation import Negotiation, SocketOpener
from agent.mqtt.properties import EMPTY, Properties, encode
from agent.mqtt.reason_codes import (
    CLOSED,
    LOST,
    NOT_CONNECTED,
    POISON,
    QUEUE_FULL,
    RENEWED,
    TOO_LARGE_CODES,
    Action,
    Reason,
    reason,
)
from agent.mqtt.sending import MAX_IN_FLIGHT, Outgoing, Sending
from agent.mqtt.settings import BrokerSettings
from agent.mqtt.subscriptions import Subscriptions
from agent.mqtt.transport import open_socket as open_tcp_socket
from agent.mqtt.upgrade import Upgrade
from agent.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)

_KEEP_ALIVE_TICK_S: Final = 1.0
# A longer pause is logged, for a person who wonders why nothing happens.
_WORTH_SAYING_S: Final = 1.0
# What others may cause as often as they like is logged at most this often; the counters count all of it.
_LOG_INTERVAL_S: Final = 60.0
# More than everything before the payload in any packet of ours.
_LARGEST_HEAD_BYTES: Final = 256 << 10
# What may wait at QoS 0 for a broker that does not read; a larger message is sent if nothing else waits.
_MAX_UNSENT_BYTES: Final = 8 << 20
# Ours, and the broker's own in PUBACK or DISCONNECT.
_RETAIN_NOT_SUPPORTED: Final = 0x9A
_QOS_NOT_SUPPORTED: Final = 0x9B


class Connection:
    """One client of one broker.

    Parameters
    ----------
    settings
        The broker.
    client_id
        Unique at the broker: two clients with one identifier evict each other.
    on_message
        Called in the event loop with each message; each one with a receipt must be passed to `ack` once.
    will
        Sent to the broker with each CONNECT; may be changed until the first one.
    persistent
        Whether the broker keeps the session while we are away, and delivers unacknowledged messages again.
    on_up
        Called after each connect, while the subscriptions are in flight. The argument is whether the broker
        still had the session.
    on_down
        Called with the reason when an established connection is lost.
    on_subscribed
        Called whenever the broker has answered a SUBSCRIBE or UNSUBSCRIBE.
    open_socket
        Opens a socket to the broker; tests pass their own.
    name
        The name of this connection in the log, if the identifier is secret; by default the identifier.
    shed
        Called with the topic of a message at QoS 0 while more arrives than can be read, and for how many
        seconds that has been so; returns whether to drop the message. By default every message is read.

    Attributes
    ----------
    connects
        How often the broker accepted us.
    over_limit
        How many messages arrived that MQTT allows but that exceed one of our limits (`Message.refusal`).
    unsendable
        How many messages were given up because they are too large for the broker, or because it ended the
        connection each time they were sent.
    limits
        What the broker said that it accepts, the last time it accepted us.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        client_id: str,
        on_message: Callable[[Message], None],
        will: Will | None = None,
        persistent: bool = False,
        on_up: Callable[[bool], None] | None = None,
        on_down: Callable[[Reason], None] | None = None,
        on_subscribed: Callable[[], None] | None = None,
        open_socket: SocketOpener = open_tcp_socket,
        name: str = "",
        shed: Callable[[str, float], bool] | None = None,
    ) -> None:
        self.settings = settings
        self.client_id = client_id
        self.name = name or client_id
        self.connects = 0
        self.over_limit = 0
        self.unsendable = 0
        self._dropped = 0
        self.limits = NO_LIMITS
        self._said: set[str] = set()
        self._log = RateLimitedLog(_log, _LOG_INTERVAL_S)
        self._on_message = on_message
        self._shed = shed
        self.will = will
        self._persistent = persistent
        self._on_up = on_up
        self._on_down = on_down
        self._on_subscribed = on_subscribed
        self._negotiation = Negotiation(settings, self._engine_of, self._accepted, open_socket)
        self._upgrade = Upgrade(self._speaks_5, self._wants_5, self._upgraded)
        self._engine: Engine | None = None
        self._sending = Sending(clock=_now_s, call_later=_call_later, wake=self._pump)
        self._drained: asyncio.Future[None] | None = None
        self._up = asyncio.Event()
        self._up_s = 0.0
        self._down: asyncio.Future[Reason] | None = None
        self._subscriptions = Subscriptions(self.name, self._ask_for, self._leave)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted us and the connection is up."""
        return self._up.is_set()

    @property
    def settled(self) -> bool:
        """Whether the connection is up and the broker has answered its subscriptions."""
        return self.connected and self._subscriptions.settled

    @property
    def granted(self) -> bool:
        """Whether the connection is up and the broker has granted everything that it was asked for."""
        return self.settled and not self._subscriptions.refused

    @property
    def version(self) -> int:
        """The MQTT version in use, or last used: 5, or 4 for 3.1.1."""
        return self._negotiation.first_version if self._engine is None else self._engine.version

    @property
    def dropped(self) -> int:
        """How many messages at QoS 0 were dropped unread, because more arrived than could be read."""
        return self._dropped + (0 if self._engine is None else self._engine.dropped)

    @property
    def unacknowledged(self) -> int:
        """Number of published QoS 1 messages that the broker has not acknowledged yet."""
        return len(self._sending)

    def start(self) -> None:
        """Connect and stay connected, in the background, until `close`."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._stay_connected(), name=self.name)

    async def connect(self, timeout_s: float | None = None) -> None:
        """Connect, and stay connected from then on.

        Parameters
        ----------
        timeout_s
            Limit for the first connection in seconds; `connect_timeout_s` of the settings by default.

        Raises
        ------
        BrokerError
            If the broker cannot be reached within the limit, or refuses.
        ConfigError, StoreError
            If a file with a secret or certificate cannot be used, or not be read now.
        """
        limit_s = self.settings.connect_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                why = await self._negotiation.attempt(limit_s)
        except ssl.SSLError as error:
            from agent.mqtt.diagnosis import diagnose_error

            diagnosis = diagnose_error(error, self.settings)
            raise BrokerError(diagnosis.message, LOST.code, hint=diagnosis.hint) from error
        except OSError as error:  # TimeoutError is one
            from agent.mqtt.diagnosis import describe, other_port

            raise BrokerError(
                f"cannot reach the broker at {self.settings.url}: {describe(error, self.settings)}",
                LOST.code,
                hint="check the address, and whether the broker runs there"
                + (other_port(self.settings) if isinstance(error, ConnectionResetError) else ""),
            ) from error
        if not self.connected:
            from agent.mqtt.diagnosis import diagnose_refusal, other_port

            diagnosis = diagnose_refusal(why, self.settings)
            raise BrokerError(
                f"the broker at {self.settings.url} refused the connection: {why}",
                why.code,
                hint=diagnosis.hint + ("" if diagnosis.kind != "silence" else other_port(self.settings)),
            )
        self.start()

    async def wait_connected(self) -> None:
        """Return when the connection is up."""
        await self._up.wait()

    async def close(self, drain_s: float = 0.0) -> None:
        """Wait up to `drain_s` for acknowledgements, send DISCONNECT (so that no will is published), and end.

        Messages that are not acknowledged by then are settled with `CLOSED`.
        """
        if drain_s > 0 and self.connected and self._sending:
            self._drained = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._drained], timeout=drain_s)
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # which leaves a cancellation of this call what it is
            self._task = None
        self._up.clear()
        self._upgrade.close()
        if self._engine is not None and (sock := self._engine.disconnect()) is not None:
            await sock.wait_closed()
        self._sending.close()
        self._subscriptions.close(CLOSED)

    def renew(self) -> None:
        """Disconnect and connect again, with the certificates and the password as they are on disk now.

        Nothing is lost: messages in flight are sent again, and a broker that keeps the session delivers
        unacknowledged ones again.
        """
        if self.connected and self._engine is not None:
            engine = self._engine
            self._lost(RENEWED)
            engine.disconnect()

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        qos: int = 1,
        retain: bool = False,
        properties: Properties = EMPTY,
    ) -> asyncio.Future[Reason]:
        """Send a message.

        Returns
        -------
        asyncio.Future[Reason]
            At QoS 1 the broker's verdict, over as many connections as it takes; at QoS 0 whether there was a
            connection to send the message on. It never holds an exception: check `Reason.failed`.

        Raises
        ------
        ValueError
            If MQTT cannot represent the topic or the properties.
        """
        done: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()

        def settle(verdict: Reason) -> None:
            if not done.done():
                done.set_result(verdict)

        self.send(topic, payload, settle, qos=qos, retain=retain, properties=properties)
        return done

    def send(
        self,
        topic: str,
        payload: bytes,
        settle: Callable[[Reason], None],
        *,
        qos: int = 1,
        retain: bool = False,
        properties: Properties = EMPTY,
    ) -> None:
        """Send a message as `publish` does, and call `settle` once with the verdict, perhaps immediately.

        Raises
        ------
        ValueError
            If MQTT cannot represent the topic or the properties; `settle` is not called then.
        """
        check_topic(topic)
        packed = encode(properties)
        if qos == 0:
            verdict: Reason | None = NOT_CONNECTED
            if self.connected and self._engine is not None:
                unsent_bytes = self._engine.unsent_bytes
                if unsent_bytes and unsent_bytes + len(payload) > _MAX_UNSENT_BYTES:
                    verdict = QUEUE_FULL
                else:
                    verdict = self._engine.publish(
                        topic, payload, packet_id=None, retain=retain, packed=packed
                    )
            assert verdict is not None
            self._settled(topic, payload, verdict)
            settle(verdict)
        elif self._closed:
            settle(CLOSED)
        else:

            def settled(verdict: Reason) -> None:
                self._settled(topic, payload, verdict)
                settle(verdict)

            deadline_s = None if properties.expiry_s is None else _now_s() + properties.expiry_s
            self._sending.add(Outgoing(topic, payload, retain, properties, settled, deadline_s, packed))
            self._pump()

    @property
    def max_packet_bytes(self) -> int:
        """Bytes of the largest packet that can be sent and received, as far as it is known."""
        return min(self.limits.max_packet_bytes, self.settings.max_packet_bytes)

    def fits(self, topic: str, payload: bytes, *, qos: int, properties: Properties) -> bool:
        """Return whether the broker accepts a packet of this size, by what it said last."""
        room = self.limits.max_packet_bytes - len(payload)
        if room >= _LARGEST_HEAD_BYTES:
            return True
        head = encode_publish(
            topic,
            len(payload),
            packet_id=1 if qos and self.limits.max_qos else None,
            retain=False,
            packed=encode(properties) if self.version == MQTT_5 else None,
        )
        return len(head) <= room

    def _settled(self, topic: str, payload: bytes, verdict: Reason) -> None:
        if verdict.code not in TOO_LARGE_CODES and verdict is not POISON:
            return
        self.unsendable += 1
        if self._log.due("unsendable"):
            _log.error(
                "%s: a message on %.200s with %d bytes was given up: %s; the broker accepts at most %d bytes",
                self.name,
                ascii(topic[:200]),
                len(payload),
                verdict,
                self.limits.max_packet_bytes,
            )

    def ack(self, message: Message | Receipt) -> None:
        """Acknowledge a message, unless it came over an earlier connection: the broker delivers it again."""
        receipt = message.receipt if isinstance(message, Message) else message
        if receipt is None or self._engine is None or receipt.epoch != self._negotiation.epoch:
            return
        # Not `self.connected`: the first messages of a session may arrive together with CONNACK.
        if self._engine.connected:
            self._engine.ack(receipt.packet_id, receipt.qos)

    def want(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe now and after each reconnection, without waiting for the broker's verdict."""
        self._subscriptions.add(topic_filter, qos, connected=self.connected)

    async def subscribe(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe now and after each reconnection; return when the broker has granted the subscription.

        Raises
        ------
        BrokerError
            If the broker refuses the subscription.
        """
        granted = self._subscriptions.wait_for(topic_filter)
        self.want(topic_filter, qos)
        try:
            why = await granted
        finally:
            self._subscriptions.stop_waiting(topic_filter, granted)
        if why.failed:
            self._subscriptions.remove(topic_filter, connected=False)
            raise BrokerError(f"the broker refused the subscription to {topic_filter}: {why}", why.code)

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""
        self._subscriptions.remove(topic_filter, connected=self.connected)

    async def wait_subscribed(self) -> None:
        """Return when the broker has answered every SUBSCRIBE and UNSUBSCRIBE, or the connection is lost.

        All messages that it sent because of an earlier subscription have arrived by then.
        """
        await self._subscriptions.idle()

    async def _stay_connected(self) -> None:
        ticking = asyncio.get_running_loop().create_task(self._keep_alive())
        backoff = Backoff(self.settings.reconnect_spread_s)
        try:
            while True:
                why, detail = LOST, ""
                if not self.connected:
                    try:
                        async with asyncio.timeout(self.settings.connect_timeout_s):
                            why = await self._negotiation.attempt(self.settings.connect_timeout_s)
                    except (OSError, ConfigError, StoreError) as error:
                        # Imported late: a connected agent does without this memory.
                        from agent.mqtt.diagnosis import describe

                        detail = describe(error, self.settings)
                    except Exception:  # noqa: BLE001 - the outermost loop: nothing else connects again
                        _log.exception("%s: internal error while connecting", self.name)
                        if self._engine is not None:
                            self._engine.drop()
                        self._lost(LOST)
                if self.connected:
                    if backoff.failures:
                        _log.info("%s: connected to %s", self.name, self.settings.url)
                    why = await self._wait_for_loss()
                    backoff.ended(_now_s() - self._up_s)
                elif self._lower_will(why):
                    continue
                else:
                    if backoff.failures == 0 or why.connecting is Action.LATER:
                        _log.warning(
                            "%s: no connection to %s (%.400s), trying again",
                            self.name,
                            self.settings.url,
                            detail or why,
                        )
                    backoff.failed()
                delay_s = backoff.delay_s(why, _now_s())
                if delay_s >= _WORTH_SAYING_S and backoff.failures <= 1:
                    _log.info("%s: next attempt in %.0f s", self.name, delay_s)
                await asyncio.sleep(delay_s)
        finally:
            ticking.cancel()

    async def _wait_for_loss(self) -> Reason:
        """Return the reason for the end of the connection, once it has ended."""
        assert self._down is not None
        why = await self._down
        _log.warning("%s: connection to %s ended: %s", self.name, self.settings.url, why)
        return why

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_KEEP_ALIVE_TICK_S)
            if self.connected and self._engine is not None:
                try:
                    self._engine.keep_alive()
                    self._upgrade.tick()
                except Exception:  # noqa: BLE001 - the outermost loop: without pings, a silent loss stays unnoticed
                    _log.exception("%s: internal error while the connection is kept alive", self.name)

    async def _speaks_5(self) -> bool:
        return await self._negotiation.speaks_5(self.settings.connect_timeout_s)

    def _wants_5(self) -> bool:
        behind = self.version != MQTT_5 and self.settings.protocol == "auto"
        return self.connected and behind and not self._sending

    def _upgraded(self) -> None:
        _log.info("%s: the broker speaks MQTT 5 now, connecting again", self.name)
        self.renew()

    def _engine_of(self, version: int) -> Engine:
        if self._engine is not None:
            self._engine.drop()
            self._dropped += self._engine.dropped
        self._engine = engine = Engine(
            self.client_id,
            version,
            callbacks=Callbacks(self._received, self._acknowledged, self._granted, self._lost, self._shed),
            persistent=self._persistent,
            will=self.will,
            next_id=self._sending.next_id,
        )
        return engine

    def _lower_will(self, why: Reason) -> bool:
        """Return whether a broker that refused the will may accept it now (MQTT 5.0, 3.2.2.3.4 and 5)."""
        will = self.will
        if will is not None and why.code == _RETAIN_NOT_SUPPORTED and will.retain:
            self.will = replace(will, retain=False)
        elif will is not None and why.code == _QOS_NOT_SUPPORTED and will.qos:
            self.will = replace(will, qos=0)
        else:
            return False
        return True

    def _accepted(self, engine: Engine, connack: Connack) -> Reason:
        if not engine.connected:  # accepted, and dropped at once
            return LOST
        self.limits = limits = connack.limits
        missing = limits.missing()
        if engine.version != MQTT_5 and self.settings.protocol == "auto":
            missing = ("refuses MQTT 5, using 3.1.1: requests need reply_to in their JSON", *missing)
        for line in missing:
            if line not in self._said:
                self._said.add(line)
                _log.warning("%s: the broker %s", self.name, line)
        self._upgrade.connected(in_5=engine.version == MQTT_5)
        self._sending.limit = max(1, min(MAX_IN_FLIGHT, limits.receive_maximum))
        self._sending.resume(session_present=connack.session_present)
        self._down = asyncio.get_running_loop().create_future()
        self._up.set()
        self._up_s = _now_s()
        self.connects += 1
        # Answers to the waiting messages may arrive at once, and not every broker handles packets in order,
        # so nothing is sent before the subscriptions are granted.
        self._subscriptions.begin(limits)
        self._pump()
        if not self.connected:  # lost while the first packets were sent
            return LOST
        if self._on_up is not None:
            self._on_up(connack.session_present)
        return reason(0)

    def _received(self, message: Message) -> None:
        if message.refusal is not None:
            self.over_limit += 1
            if self._log.due("over limit"):
                _log.warning(
                    "%s: a message on %.200s is over a limit: %s",
                    self.name,
                    ascii(message.topic[:200]),
                    message.refusal,
                )
        self._on_message(message)

    def _lost(self, given: Reason | None) -> None:
        if not self._up.is_set():
            return
        why = LOST if given is None or not given.failed else given
        self._up.clear()
        # First, so that no error of an owner keeps this connection from being made again.
        if self._down is not None and not self._down.done():
            self._down.set_result(why)
        self._end_drain()
        self._subscriptions.lost()
        self._sending.lost(why)
        if self._on_down is not None:
            self._on_down(why)

    def _pump(self) -> None:
        if self.connected and self._engine is not None and self._subscriptions.settled:
            self._sending.pump(self._engine)
        if not self._sending:
            self._end_drain()

    def _end_drain(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _acknowledged(self, packet_id: int, verdict: Reason) -> None:
        self._sending.acknowledged(packet_id, verdict)
        self._pump()

    def _ask_for(self, filters: list[tuple[str, int]]) -> int | None:
        assert self._engine is not None
        return self._engine.subscribe(filters)

    def _leave(self, topic_filter: str) -> int | None:
        assert self._engine is not None
        return self._engine.unsubscribe(topic_filter)

    def _granted(self, packet_id: int, verdicts: Sequence[Reason]) -> None:
        self._subscriptions.granted(packet_id, verdicts)
        self._pump()
        if self._on_subscribed is not None:
            self._on_subscribed()


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _call_later(delay_s: float, function: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, function)
