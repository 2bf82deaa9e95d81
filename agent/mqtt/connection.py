"""One MQTT connection on the running event loop, kept up until it is closed.

Promises: a lost connection is re-established with back-off, and its subscriptions with it; a message
published at QoS 1 is sent again until the broker acknowledges it, it expires, or the broker refuses it for
good; what the broker says in CONNACK is obeyed; a received message is acknowledged when the owner calls
`ack`. MQTT 5 first, 3.1.1 if the broker refuses 5.

Leaves to others: connecting again (`upkeep`), what outlives a loss (`session`), what messages mean, the order
of acknowledgement, and keeping anything across a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from agent.errors import BrokerError
from agent.mqtt.engine import MQTT_5
from agent.mqtt.limits import BrokerLimits
from agent.mqtt.message import Message, Receipt, Will, check_topic, encode_publish
from agent.mqtt.negotiation import SocketOpener
from agent.mqtt.properties import EMPTY, Properties, encode
from agent.mqtt.reason_codes import CLOSED, POISON, TOO_LARGE_CODES, Reason
from agent.mqtt.sending import Outgoing
from agent.mqtt.session import Owner, Session
from agent.mqtt.settings import BrokerSettings
from agent.mqtt.transport import open_socket as open_tcp_socket
from agent.mqtt.upkeep import Upkeep
from agent.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)

# What others may cause as often as they like is logged at most this often; the counters count all of it.
_LOG_INTERVAL_S: Final = 60.0
# More than everything before the payload in any packet of ours.
_LARGEST_HEAD_BYTES: Final = 256 << 10


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
        self.unsendable = 0
        self._session = Session(self.name, owner)
        self._upkeep = Upkeep(
            settings, self._session, client_id, will, persistent=persistent, open_socket=open_socket
        )
        self._log = RateLimitedLog(_log, _LOG_INTERVAL_S)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def will(self) -> Will | None:
        """The will, as it is sent with the next CONNECT."""
        return self._upkeep.will

    @will.setter
    def will(self, will: Will | None) -> None:
        self._upkeep.will = will

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
        return self._upkeep.version

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
            self._task = asyncio.get_running_loop().create_task(self._upkeep.run(), name=self.name)

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
                why = await self._upkeep.attempt(limit_s)
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
        self._session.renew()

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
            self._settled(topic, payload, settle, verdict)
        elif self._closed:
            settle(CLOSED)
        else:
            # Not a closure: thousands may wait, and each of its cells is an object of the garbage collector.
            settled = partial(self._settled, topic, payload, settle)
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

    def _settled(self, topic: str, payload: bytes, settle: Callable[[Reason], None], verdict: Reason) -> None:
        if verdict.code in TOO_LARGE_CODES or verdict is POISON:
            self._note_unsendable(topic, payload, verdict)
        settle(verdict)

    def _note_unsendable(self, topic: str, payload: bytes, verdict: Reason) -> None:
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


def _now_s() -> float:
    return asyncio.get_running_loop().time()
