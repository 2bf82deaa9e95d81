"""paho on an asyncio event loop: one connection in one protocol version.

Nothing leaves here that the broker has said in CONNACK that it does not accept: a packet that is too large is
not sent, QoS is lowered, the retain flag is taken off. Messages in flight are kept in `sending`.

paho gets a connected socket, after any TLS handshake, is called when that socket is readable or writable, and
runs no thread. The methods that every message passes through are replaced in `paho_client`, the only other
file that imports paho.

No I/O happens here: the socket passed to `connect` reads, writes and watches itself. What arrives is read in
turns (`turns`); a broker that sends more than it may is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paho.mqtt.client import ConnectFlags, DisconnectFlags
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from agent.mqtt.limits import LARGEST_PACKET_BYTES, NO_LIMITS, BrokerLimits
from agent.mqtt.message import Message, Receipt, Will, decode_publish, encode_publish
from agent.mqtt.paho_client import PahoClient
from agent.mqtt.reason_codes import NOT_CONNECTED, TOO_LARGE, Reason, reason
from agent.mqtt.settings import BrokerSettings
from agent.mqtt.transport import BrokerSocket, Packet
from agent.mqtt.turns import Turns

MQTT_5: Final = 5
MQTT_3_1_1: Final = 4

# MQTT 3.1.1 knows no Receive Maximum; there are no more identifiers than these.
_ALL_IDENTIFIERS: Final = 65535
_RECEIVE_MAXIMUM_EXCEEDED: Final = 0x93
_QOS: Final = 0x06

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Connack:
    """The broker's answer to CONNECT.

    `reason` is None if it ended the connection without one.
    """

    reason: Reason | None
    session_present: bool = False
    limits: BrokerLimits = NO_LIMITS


class Listener:
    """What an engine tells, in the event loop; none of these may raise. This one ignores it."""

    def on_message(self, message: Message) -> None:
        """Take a message, which is acknowledged with `Engine.ack`."""

    def on_puback(self, packet_id: int, verdict: Reason) -> None:
        """Take the broker's verdict on a published message."""

    def on_suback(self, packet_id: int, verdicts: Sequence[Reason]) -> None:
        """Take the broker's verdict on each filter of a SUBSCRIBE; of an UNSUBSCRIBE, none."""

    def on_lost(self, why: Reason | None) -> None:
        """Learn once that an accepted connection is gone, with the broker's reason if it gave one.

        Not called after `Engine.disconnect` and `Engine.drop`.
        """

    def sheds(self, topic: str, flooded_for_s: float) -> bool:  # noqa: ARG002
        """Return whether to drop a message at QoS 0, as more has arrived for some time than can be read."""
        return False


class Engine:
    """One connection to a broker.

    Parameters
    ----------
    client_id
        The session's name at the broker.
    version
        5, or 4 for 3.1.1.
    listener
        Takes what arrives; by default, nothing does.
    persistent
        Whether the broker keeps the session while the client is away.
    will
        Sent to the broker with each CONNECT.
    bare
        Whether CONNECT carries only the version: neither properties nor credentials.
    next_id
        Returns an identifier that no packet in flight has; None for a connection that publishes nothing.

    Attributes
    ----------
    limits
        What the broker accepts, once it has accepted the connection.
    """

    def __init__(
        self,
        client_id: str,
        version: int,
        *,
        listener: Listener | None = None,
        persistent: bool = False,
        will: Will | None = None,
        bare: bool = False,
        next_id: Callable[[], int] | None = None,
    ) -> None:
        self.version = version
        self.limits = NO_LIMITS
        self._keepalive_s = 0
        self._epoch = 0
        self._persistent = persistent
        self._bare = bare
        self._listener = listener = listener or Listener()
        self._socket: BrokerSocket | None = None
        # Messages of QoS 1 and 2 that are not acknowledged, how many there may be, and what came beyond.
        self._unacknowledged = 0
        self._receive_maximum = _ALL_IDENTIFIERS
        self._excess_bytes = 0
        self._most_excess = (0, 0)
        self._accepted = False
        self._connack: asyncio.Future[Connack] | None = None
        client = PahoClient(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            clean_session=None if version == MQTT_5 else not persistent,
            protocol=MQTTProtocolVersion(version),
            reconnect_on_failure=False,
            manual_ack=True,
        )
        client.next_id = next_id
        client.packet_received = self._received
        client.on_connect = self._connected
        client.on_disconnect = self._disconnected
        client.packet_acknowledged = self._acknowledged
        client.on_subscribe = self._subscribed
        client.on_unsubscribe = self._unsubscribed
        client.on_socket_register_write = self._write_requested
        client.on_socket_unregister_write = self._write_done
        if will is not None:
            client.will_set(will.topic, will.payload, will.qos, will.retain)
        self._client = client
        self._turns = Turns(client, is_over=self._is_over, ended=self._turn_ended, shed=listener.sheds)

    async def connect(
        self, sock: BrokerSocket, epoch: int, settings: BrokerSettings, password: str | None = None
    ) -> Connack:
        """Take over a connected socket, send CONNECT, and return the broker's answer.

        Messages received over this socket carry the number `epoch`. The socket is closed if the broker
        refuses us or the caller cancels.
        """
        self.drop()
        self._epoch = epoch
        self._keepalive_s = settings.keepalive_s
        self._unacknowledged = self._excess_bytes = 0
        self._most_excess = (settings.excess_messages, settings.excess_bytes)
        sock.max_packet_bytes = settings.max_packet_bytes
        self._socket = sock
        self._connack = asyncio.get_running_loop().create_future()
        client = self._client
        client.next_socket = sock
        options: dict[str, Any] = {}
        if self._bare:
            options = {"clean_start": True}
        else:
            client.username_pw_set(settings.username, password)
            if self.version == MQTT_5:
                self._receive_maximum = settings.receive_maximum
                options = _session_options(settings, persistent=self._persistent)
        client.connect_async(settings.host, settings.port, keepalive=settings.keepalive_s, **options)
        self._turns.begin(sock)
        try:
            client.reconnect()
            answer = await self._connack
        except BaseException:
            self.drop()
            raise
        if answer.reason is None or answer.reason.failed:
            self.drop()
        return answer

    @property
    def connected(self) -> bool:
        """Whether the engine has a socket."""
        return self._socket is not None

    @property
    def dropped(self) -> int:
        """How many messages at QoS 0 were dropped because more arrived than could be read."""
        return self._turns.dropped

    @property
    def unsent_bytes(self) -> int:
        """The memory of the packets that wait to be written, without messages at QoS 1."""
        return self._client.unsent_bytes

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        packet_id: int | None,
        retain: bool,
        packed: bytes,
        dup: bool = False,
    ) -> Reason | None:
        """Send one message, at QoS 1 if it has an identifier.

        Parameters
        ----------
        topic, payload, retain
            The message.
        packet_id
            Its identifier at QoS 1.
        packed
            Its encoded properties, which MQTT 3.1.1 does without.
        dup
            Whether it was sent before, over an earlier connection.

        Returns
        -------
        Reason | None
            None if the broker will acknowledge the message; otherwise what became of it, `NOT_CONNECTED` and
            `TOO_LARGE` among others.
        """
        if self._socket is None:
            return NOT_CONNECTED
        limits = self.limits
        if limits.max_qos == 0:
            packet_id, dup = None, False
        head = encode_publish(
            topic,
            len(payload),
            packet_id=packet_id,
            retain=retain and limits.retain,
            packed=packed if self.version == MQTT_5 else None,
            dup=dup,
        )
        if len(head) + len(payload) > limits.max_packet_bytes:
            return TOO_LARGE
        if not self._client.send_packet(head + payload):
            return NOT_CONNECTED
        return reason(0) if packet_id is None else None

    def ack(self, receipt: Receipt) -> None:
        """Acknowledge a message of this connection: with PUBACK at QoS 1, with PUBREC at QoS 2."""
        if self._socket is None or receipt.epoch != self._epoch:
            return
        self._unacknowledged -= 1
        if receipt.qos == 1:
            self._client.ack(receipt.packet_id, 1)
        else:
            self._client.received(receipt.packet_id)

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int | None:
        """Send a SUBSCRIBE for filters, each with its largest QoS; return its packet identifier."""
        wanted: list[tuple[str, Any]] = list(filters)
        if self.version == MQTT_5:
            wanted = [(text, SubscribeOptions(qos=qos)) for text, qos in filters]
        return self._client.subscribe(wanted)[1]

    def unsubscribe(self, topic_filter: str) -> int | None:
        """Send an UNSUBSCRIBE; return its packet identifier."""
        return self._client.unsubscribe(topic_filter)[1]

    def disconnect(self) -> BrokerSocket | None:
        """Send DISCONNECT, so that the broker discards the will, and close the socket.

        Returns
        -------
        BrokerSocket | None
            The socket, which may still wait for the broker to close; None if there was none.
        """
        self._accepted = False  # so that this is not reported as a loss
        sock = self._socket
        if sock is not None:
            sock.lingers = True
            self._client.disconnect()
            self._flush()
        self.drop()
        return sock

    def keep_alive(self) -> None:
        """Send a ping if one is due, and drop a broker that does not answer; call this every second."""
        self._client.loop_misc()

    def drop(self) -> None:
        """Close the socket without sending DISCONNECT."""
        self._accepted = False
        self._turns.end()
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    # Called by the turns and the socket.

    def _is_over(self) -> bool:
        excess = self._unacknowledged - self._receive_maximum
        return excess > 0 and (excess > self._most_excess[0] or self._excess_bytes > self._most_excess[1])

    def _turn_ended(self, is_used_up: bool) -> None:
        if self._is_over():
            self._leave_broker()
        elif not self._client.want_write():
            pass
        elif self._persistent or is_used_up:
            # At once: what is lost before it is acknowledged would be delivered again.
            self._flush()
        else:
            # The task that waits for what was read goes on first: the system call takes longer than the rest.
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._socket is not None:
            self._client.loop_write()
        if self._socket is None:
            return
        if self._client.want_write():
            self._socket.watch_writing(self._flush)
            self._turns.match_writing()
        elif not self._client.reading:
            self._turns.match_writing()

    def _leave_broker(self) -> None:
        """End the connection to a broker that sends more than we have said that we accept (MQTT 5.0, 4.9)."""
        _log.error(
            "the broker sent %d messages before one was acknowledged (at most %d), connection dropped",
            self._unacknowledged,
            self._receive_maximum,
        )
        accepted, self._accepted = self._accepted, False
        code = None
        if self.version == MQTT_5:
            code = ReasonCode(PacketTypes.DISCONNECT, identifier=_RECEIVE_MAXIMUM_EXCEEDED)
        self._client.disconnect(code)
        self._flush()
        self.drop()
        if self._connack is not None and not self._connack.done():
            self._connack.set_result(Connack(None))
        elif accepted:
            self._listener.on_lost(reason(_RECEIVE_MAXIMUM_EXCEEDED))

    # Called by paho.

    def _write_requested(self, _client: object, _data: object, _sock: object) -> None:
        # Answers to received packets go out together once all are read; anything else goes out at once. The
        # selector is asked only when the socket's buffer is full.
        if self._turns.running or self._socket is None:
            return
        if self._socket.is_full:
            self._client.count_last()
            self._turns.match_writing()
        else:
            self._flush()

    def _write_done(self, _client: object, _data: object, _sock: object) -> None:
        if self._socket is not None:
            self._socket.unwatch_writing()

    def _received(self, packet: Packet) -> None:
        if packet.first & _QOS:
            self._unacknowledged += 1
            is_excess = self._unacknowledged > self._receive_maximum
            self._excess_bytes = self._excess_bytes + len(packet.body) if is_excess else 0
        message = decode_publish(
            packet.first,
            packet.body,
            version=self.version,
            epoch=self._epoch,
            cut_bytes=packet.cut_bytes,
        )
        self._listener.on_message(message)

    def _connected(
        self,
        _client: object,
        _data: object,
        flags: ConnectFlags,
        code: ReasonCode,
        properties: PahoProperties | None,
    ) -> None:
        if self._connack is not None and not self._connack.done():
            self._accepted = not reason(code.value).failed
            self.limits = limits = _limits(properties)
            if limits.keep_alive_s:
                # More often is allowed (MQTT 5.0, 3.1.2.10), and notices a lost connection sooner.
                self._client.ping_after(min(limits.keep_alive_s, self._keepalive_s or limits.keep_alive_s))
            elif limits.keep_alive_s == 0:
                self._client.ping_after(self._keepalive_s)
            self._connack.set_result(Connack(reason(code.value), flags.session_present, limits))

    def _disconnected(
        self,
        _client: object,
        _data: object,
        flags: DisconnectFlags,
        code: ReasonCode,
        _properties: object,
    ) -> None:
        was_accepted = self._accepted
        self.drop()
        why = reason(code.value) if flags.is_disconnect_packet_from_server else None
        if self._connack is not None and not self._connack.done():
            self._connack.set_result(Connack(why))
        elif was_accepted:
            self._listener.on_lost(why)

    def _acknowledged(self, packet_id: int, code: int) -> None:
        self._listener.on_puback(packet_id, reason(code))

    def _subscribed(
        self, _client: object, _data: object, packet_id: int, codes: list[ReasonCode], _properties: object
    ) -> None:
        self._listener.on_suback(packet_id, [reason(code.value) for code in codes])

    def _unsubscribed(
        self, _client: object, _data: object, packet_id: int, _codes: list[ReasonCode], _properties: object
    ) -> None:
        self._listener.on_suback(packet_id, ())


def _session_options(settings: BrokerSettings, *, persistent: bool) -> dict[str, Any]:
    """Return what CONNECT says of the session and of what we accept (MQTT 5.0, 3.1.2.11)."""
    properties = PahoProperties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]  # paho has no types here
    properties.ReceiveMaximum = settings.receive_maximum
    properties.MaximumPacketSize = settings.max_packet_bytes
    if persistent:
        properties.SessionExpiryInterval = settings.session_expiry_s
    return {"clean_start": not persistent, "properties": properties}


def _limits(properties: PahoProperties | None) -> BrokerLimits:
    """Read the limits of a CONNACK (MQTT 5.0, 3.2.2.3); a limit of zero, which MQTT forbids, is none."""

    def said(name: str, default: int) -> int:
        value: int = getattr(properties, name, default)
        return value

    return BrokerLimits(
        receive_maximum=said("ReceiveMaximum", 0) or 65535,
        max_packet_bytes=said("MaximumPacketSize", 0) or LARGEST_PACKET_BYTES,
        max_qos=min(1, said("MaximumQoS", 1)),
        retain=bool(said("RetainAvailable", 1)),
        wildcards=bool(said("WildcardSubscriptionAvailable", 1)),
        shared=bool(said("SharedSubscriptionAvailable", 1)),
        keep_alive_s=getattr(properties, "ServerKeepAlive", None),
    )
