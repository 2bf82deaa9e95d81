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
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from agent.errors import BrokerError, ConfigError, StoreError
from agent.mqtt.backoff import Backoff
from agent.mqtt.engine import MQTT_5, Engine
from agent.mqtt.limits import BrokerLimits
from agent.mqtt.message import Message, Receipt, Will, check_topic, encode_publish
from agent.mqtt.negotiation import Negotiation, SocketOpener
from agent.mqtt.properties import EMPTY, Properties, encode
from agent.mqtt.reason_codes import CLOSED, LOST, POISON, RENEWED, TOO_LARGE_CODES, Action, Reason
from agent.mqtt.sending import Outgoing
from agent.mqtt.session import Owner, Session
from agent.mqtt.settings import BrokerSettings
from agent.mqtt.transport import open_socket as open_tcp_socket
from agent.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)

_KEEP_ALIVE_TICK_S: Final = 1.0
# A longer pause is logged, for a person who wonders why nothing happens.
_WORTH_SAYING_S: Final = 1.0
# What others may cause as often as they like is logged at most this often; the counters count all of it.
_LOG_INTERVAL_S: Final = 60.0
# On MQTT 3.1.1, how often to ask whether the broker speaks MQTT 5 by now: it may only have been starting, or
# was replaced since. If it says that it speaks 5 and then does not, it is asked half as often.
LOOK_FOR_5_S: Final = 300.0
_LOOK_FOR_5_AT_MOST_S: Final = 6 * 3600.0
# More than everything before the payload in any packet of ours.
_LARGEST_HEAD_BYTES: Final = 256 << 10
# Ours, and the broker's own in PUBACK or DISCONNECT.
_RETAIN_NOT_SUPPORTED: Final = 0x9A
_QOS_NOT_SUPPORTED: Final = 0x9B


class Connection:
    """One client of one broker.

    Parameters
    ----------
    settings
        The broker.
    owner
        What to call.
    client_id
        Unique at the broker: two clients with one identifier evict each other.
    name
        The name of this connection in the log, if the identifier is secret; by default the identifier.
    will
        Sent to the broker with each CONNECT; may be changed until the first one.
    persistent
        Whether the broker keeps the session while we are away, and delivers unacknowledged messages again.
    open_socket
        Opens a socket to the broker; tests pass their own.

    Attributes
    ----------
    unsendable
        How many messages were given up because they are too large for the broker, or because it ended the
        connection each time they were sent.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        owner: Owner,
        *,
        client_id: str,
        name: str = "",
        will: Will | None = None,
        persistent: bool = False,
        open_socket: SocketOpener = open_tcp_socket,
    ) -> None:
        self.settings = settings
        self.client_id = client_id
        self.name = name or client_id
        self.will = will
        self.unsendable = 0
        self._persistent = persistent
        self._session = Session(self.name, owner)
        self._negotiation = Negotiation(settings, self._engine_of, open_socket)
        self._look_for_5_s = LOOK_FOR_5_S
        self._log = RateLimitedLog(_log, _LOG_INTERVAL_S)
        self._said: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether the broker has accepted us and the connection is up."""
        return self._session.up.is_set()

    @property
    def settled(self) -> bool:
        """Whether the connection is up and the broker has answered its subscriptions."""
        return self.connected and self._session.subscriptions.settled

    @property
    def granted(self) -> bool:
        """Whether the connection is up and the broker has granted everything that it was asked for."""
        return self.settled and not self._session.subscriptions.refused

    @property
    def version(self) -> int:
        """The MQTT version in use, or last used: 5, or 4 for 3.1.1."""
        return self._session.version or self._negotiation.first_version

    @property
    def limits(self) -> BrokerLimits:
        """What the broker said that it accepts, the last time it accepted us."""
        return self._session.limits

    @property
    def connects(self) -> int:
        """How often the broker accepted us."""
        return self._session.connects

    @property
    def over_limit(self) -> int:
        """How many messages arrived that MQTT allows but that exceed our limits (`Message.refusal`)."""
        return self._session.over_limit

    @property
    def dropped(self) -> int:
        """How many messages at QoS 0 were dropped unread, because more arrived than could be read."""
        return self._session.dropped

    @property
    def backlog_bytes(self) -> int:
        """What waits for the broker: messages not acknowledged, and packets that it has not read."""
        return self._session.backlog_bytes

    @property
    def unacknowledged(self) -> int:
        """Number of published QoS 1 messages that the broker has not acknowledged yet."""
        return len(self._session.sending)

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
                why = await self._attempt(limit_s)
        except OSError as error:  # TimeoutError and ssl.SSLError are two
            from agent.mqtt.diagnosis import unreachable

            raise unreachable(error, self.settings) from error
        if not self.connected:
            from agent.mqtt.diagnosis import refused

            raise refused(why, self.settings)
        self.start()

    async def wait_connected(self) -> None:
        """Return when the connection is up."""
        await self._session.up.wait()

    async def close(self, drain_s: float = 0.0) -> None:
        """Wait up to `drain_s` for acknowledgements, send DISCONNECT (so that no will is published), and end.

        Messages that are not acknowledged by then are settled with `CLOSED`.
        """
        if drain_s > 0:
            await self._session.drain(drain_s)
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # which leaves a cancellation of this call what it is
            self._task = None
        await self._session.close()

    def renew(self) -> None:
        """Disconnect and connect again, with the certificates and the password as they are on disk now.

        Nothing is lost: messages in flight are sent again, and a broker that keeps the session delivers
        unacknowledged ones again.
        """
        if (engine := self._session.engine) is not None:
            self._session.on_lost(RENEWED)
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
            verdict = self._session.publish_once(topic, payload, retain=retain, packed=packed)
            self._settled(topic, payload, verdict)
            settle(verdict)
        elif self._closed:
            settle(CLOSED)
        else:

            def settled(verdict: Reason) -> None:
                self._settled(topic, payload, verdict)
                settle(verdict)

            deadline_s = None if properties.expiry_s is None else _now_s() + properties.expiry_s
            self._session.send(Outgoing(topic, payload, retain, properties, settled, deadline_s, packed))

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
        if receipt is not None:
            self._session.ack(receipt)

    def want(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe now and after each reconnection, without waiting for the broker's verdict."""
        self._session.subscriptions.add(topic_filter, qos)

    async def subscribe(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe now and after each reconnection; return when the broker has granted the subscription.

        Raises
        ------
        BrokerError
            If the broker refuses the subscription.
        """
        why = await self._session.subscriptions.ask(topic_filter, qos)
        if why.failed:
            raise BrokerError(f"the broker refused the subscription to {topic_filter}: {why}", why.code)

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""
        self._session.subscriptions.remove(topic_filter)

    async def wait_subscribed(self) -> None:
        """Return when the broker has answered every SUBSCRIBE and UNSUBSCRIBE, or the connection is lost.

        All messages that it sent because of an earlier subscription have arrived by then.
        """
        await self._session.subscriptions.idle()

    async def _stay_connected(self) -> None:
        ticking = asyncio.get_running_loop().create_task(self._keep_alive())
        backoff = Backoff(self.settings.reconnect_spread_s)
        try:
            while True:
                why, detail = LOST, ""
                if not self.connected:
                    try:
                        async with asyncio.timeout(self.settings.connect_timeout_s):
                            why = await self._attempt(self.settings.connect_timeout_s)
                    except (OSError, ConfigError, StoreError) as error:
                        # Imported late: a connected agent does without this memory.
                        from agent.mqtt.diagnosis import describe

                        detail = describe(error, self.settings)
                    except Exception:  # noqa: BLE001 - the outermost loop: nothing else connects again
                        _log.exception("%s: internal error while connecting", self.name)
                        self._session.drop()
                if self.connected:
                    if backoff.failures:
                        _log.info("%s: connected to %s", self.name, self.settings.url)
                    why = await self._wait_for_loss()
                    backoff.ended(_now_s() - self._session.up_s)
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

    async def _attempt(self, limit_s: float) -> Reason:
        """Try to connect; return the reason if that failed."""
        answer = await self._negotiation.attempt(limit_s)
        if isinstance(answer, Reason):
            return answer
        missing = answer.limits.missing()
        if self._is_behind:
            missing = ("refuses MQTT 5, using 3.1.1: requests need reply_to in their JSON", *missing)
        else:
            self._look_for_5_s = LOOK_FOR_5_S
        for line in missing:
            if line not in self._said:
                self._said.add(line)
                _log.warning("%s: the broker %s", self.name, line)
        return self._session.begin(answer)

    async def _wait_for_loss(self) -> Reason:
        """Return the reason for the end of the connection, once it has ended."""
        looking = asyncio.ensure_future(self._look_for_5()) if self._is_behind else None
        try:
            why = await self._session.ended
        finally:
            if looking is not None:
                looking.cancel()
        _log.warning("%s: connection to %s ended: %s", self.name, self.settings.url, why)
        return why

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_KEEP_ALIVE_TICK_S)
            if (engine := self._session.engine) is not None:
                try:
                    engine.keep_alive()
                except Exception:  # noqa: BLE001 - the outermost loop: without pings, a silent loss stays unnoticed
                    _log.exception("%s: internal error while the connection is kept alive", self.name)

    @property
    def _is_behind(self) -> bool:
        """Whether the broker, asked in MQTT 5, accepted only 3.1.1."""
        return self.version != MQTT_5 and self.settings.protocol == "auto"

    async def _look_for_5(self) -> None:
        """Ask now and then, on another connection, whether the broker speaks MQTT 5; then connect again."""
        while True:
            await asyncio.sleep(self._look_for_5_s)
            while self.unacknowledged:
                await asyncio.sleep(_KEEP_ALIVE_TICK_S)
            if await self._negotiation.speaks_5(self.settings.connect_timeout_s) and not self.unacknowledged:
                self._look_for_5_s = min(2 * self._look_for_5_s, _LOOK_FOR_5_AT_MOST_S)
                _log.info("%s: the broker speaks MQTT 5 now, connecting again", self.name)
                self.renew()

    def _engine_of(self, version: int) -> Engine:
        engine = Engine(
            self.client_id,
            version,
            listener=self._session,
            persistent=self._persistent,
            will=self.will,
            next_id=self._session.sending.next_id,
        )
        self._session.use(engine)
        return engine

    def _lower_will(self, why: Reason) -> bool:
        """Return whether a broker that refused the will may accept it now (MQTT 5.0, 3.2.2.3.4 and 5)."""
        if (will := self.will) is None:
            return False
        retain = will.retain and why.code != _RETAIN_NOT_SUPPORTED
        qos = 0 if why.code == _QOS_NOT_SUPPORTED else will.qos
        self.will = replace(will, retain=retain, qos=qos)
        return self.will != will


def _now_s() -> float:
    return asyncio.get_running_loop().time()
