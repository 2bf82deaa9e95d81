"""The MQTT library on an asyncio event loop: one session of one protocol version.

paho keeps the protocol's state (packet identifiers, what is unacknowledged, keep-alive) and sends what is
under way again with its original identifier after a reconnection. It gets its socket connected and shaken
hands, is called when that is readable or writable, and runs no thread. What every message goes through is
replaced in `paho_client`, the other file that imports it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paho.mqtt.client import ConnectFlags, DisconnectFlags
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from agent.mqtt.message import Message, Will, decode_publish
from agent.mqtt.paho_client import PackedProperties, PahoClient
from agent.mqtt.properties import Properties, encode
from agent.mqtt.reason_codes import Reason, reason
from agent.mqtt.settings import BrokerSettings
from agent.mqtt.transport import BrokerSocket

MQTT_5: Final = 5
MQTT_3_1_1: Final = 4
# A packet identifier may belong to a message that has waited for 65535 others; then the next one is taken.
_MAX_PACKET_IDS: Final = 65535


@dataclass(frozen=True, slots=True)
class Greeting:
    """The broker's CONNACK; without a reason it ended the connection and said nothing.

    Attributes
    ----------
    reason
        Its verdict.
    session_present
        It kept our session.
    receive_maximum
        Messages of QoS 1 it takes before it acknowledges one.
    """

    reason: Reason | None
    session_present: bool = False
    receive_maximum: int = 65535


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Where an engine reports; all are called in the event loop and must not raise.

    Attributes
    ----------
    message
        One came.
    acknowledged
        The broker's verdict on the message of this packet identifier.
    granted
        Its verdicts on the filters of this SUBSCRIBE.
    lost
        The connection is gone: its reason, or None when nothing was said.
    """

    message: Callable[[Message], None]
    acknowledged: Callable[[int, Reason], None]
    granted: Callable[[int, Sequence[Reason]], None]
    lost: Callable[[Reason | None], None]

    @staticmethod
    def ignore() -> Callbacks:
        """Return callbacks that do nothing."""
        return Callbacks(
            message=lambda _message: None,
            acknowledged=lambda _packet_id, _reason: None,
            granted=lambda _packet_id, _reasons: None,
            lost=lambda _reason: None,
        )


class Engine:
    """One MQTT session, over as many connections as it takes.

    Parameters
    ----------
    client_id
        Its name at the broker.
    version
        5, or 4 for 3.1.1.
    callbacks
        Where to report.
    persistent
        Whether the broker keeps the session while nobody is connected.
    will
        Left with the broker at each connect.
    bare
        Introduce ourselves with nothing but the version: neither properties nor credentials.
    """

    def __init__(
        self,
        client_id: str,
        version: int,
        *,
        callbacks: Callbacks,
        persistent: bool = False,
        will: Will | None = None,
        bare: bool = False,
    ) -> None:
        self.version = version
        self._epoch = 0
        self._persistent = persistent
        self._bare = bare
        self._callbacks = callbacks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: BrokerSocket | None = None
        self._writer_added = False
        self._reading = False
        self._greeting: asyncio.Future[Greeting] | None = None
        client = PahoClient(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            clean_session=None if version == MQTT_5 else not persistent,
            protocol=MQTTProtocolVersion(version),
            reconnect_on_failure=False,
            manual_ack=True,
        )
        client.max_inflight_messages = 0  # no limit and no search: the owner counts what is under way
        client.packet_received = self._received
        client.on_connect = self._greeted
        client.on_disconnect = self._disconnected
        client.packet_acknowledged = self._published
        client.on_subscribe = self._subscribed
        client.on_socket_close = self._closing
        client.on_socket_register_write = self._want_write
        client.on_socket_unregister_write = self._unwant_write
        if will is not None:
            client.will_set(will.topic, will.payload, will.qos, will.retain)
        self._client = client

    async def greet(
        self, sock: BrokerSocket, epoch: int, settings: BrokerSettings, password: str | None = None
    ) -> Greeting:
        """Take over a connected socket, introduce ourselves, and return the broker's answer.

        Messages that come over it bear the number `epoch`. After a refusal, and when cancelled, the socket is
        closed.
        """
        self._loop = loop = asyncio.get_running_loop()
        self.drop()
        self._epoch = epoch
        self._socket = sock
        self._greeting = loop.create_future()
        client = self._client
        client.next_socket = sock
        options: dict[str, Any] = {}
        if self._bare:
            options = {"clean_start": True}
        else:
            client.username_pw_set(settings.username, password)
        if self.version == MQTT_5 and not self._bare:
            properties = PahoProperties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.ReceiveMaximum = settings.receive_maximum
            properties.MaximumPacketSize = settings.max_packet_bytes
            if self._persistent:
                properties.SessionExpiryInterval = settings.session_expiry_s
            options = {"clean_start": not self._persistent, "properties": properties}
        client.connect_async(settings.host, settings.port, keepalive=settings.keepalive_s, **options)
        loop.add_reader(sock.fileno(), self._readable)
        try:
            client.reconnect()
            greeting = await self._greeting
        except BaseException:
            self.drop()
            raise
        if greeting.reason is None or greeting.reason.failed:
            self.drop()
        return greeting

    @property
    def connected(self) -> bool:
        """Whether there is a socket."""
        return self._socket is not None

    def publish(
        self, topic: str, payload: bytes, *, qos: int, retain: bool, properties: Properties
    ) -> int | None:
        """Hand one message over; return its packet identifier, or None without a connection."""
        packed = PackedProperties(encode(properties)) if self.version == MQTT_5 else None
        for _ in range(_MAX_PACKET_IDS):
            info = self._client.publish(topic, payload, qos, retain, packed)
            if info.rc == MQTTErrorCode.MQTT_ERR_SUCCESS:
                return info.mid
            if info.rc != MQTTErrorCode.MQTT_ERR_QUEUE_SIZE:
                break
        return None

    def ack(self, packet_id: int) -> None:
        """Acknowledge a received message of QoS 1."""
        self._client.ack(packet_id, 1)

    def subscribe(self, filters: Sequence[tuple[str, int]]) -> int | None:
        """Ask for filters, each with its largest QoS; return the packet's identifier."""
        wanted: list[tuple[str, Any]] = list(filters)
        if self.version == MQTT_5:
            wanted = [(text, SubscribeOptions(qos=qos)) for text, qos in filters]
        return self._client.subscribe(wanted)[1]

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""
        self._client.unsubscribe(topic_filter)

    def disconnect(self) -> None:
        """Say goodbye, so that the will is forgotten, and close."""
        if self._socket is not None:
            self._client.disconnect()
            self._flush()
        self.drop()

    def keep_alive(self) -> None:
        """Send a ping when one is due, and notice a broker that does not answer; to be called each second."""
        self._client.loop_misc()

    def drop(self) -> None:
        """Close the socket without a word to the broker."""
        sock, self._socket = self._socket, None
        if sock is None:
            return
        self._unwatch(sock)
        sock.close()

    def _unwatch(self, sock: BrokerSocket) -> None:
        # Before it is closed: the next socket may get its number, and the selector would take it for this
        # one.
        fd = sock.fileno()
        loop = self._loop
        if fd >= 0 and loop is not None and not loop.is_closed():
            loop.remove_reader(fd)
            loop.remove_writer(fd)
        self._writer_added = False

    # Called by the event loop.

    def _readable(self) -> None:
        sock = self._socket
        if sock is None:
            return
        sock.wake()
        self._reading = True
        try:
            # What the buffers of socket and TLS hold the kernel will not wake us for.
            while self._socket is not None:
                self._client.loop_read()
                if self._socket is None or not self._socket.pending():
                    break
        finally:
            self._reading = False
        if self._socket is sock and self._client.want_write():
            self._flush()

    def _flush(self) -> None:
        if self._socket is not None:
            self._client.loop_write()
        if self._socket is not None and self._client.want_write() and not self._writer_added:
            asyncio.get_running_loop().add_writer(self._socket.fileno(), self._flush)
            self._writer_added = True

    # Called by paho.

    def _want_write(self, _client: object, _data: object, _sock: object) -> None:
        # What answers packets that came goes out together when all of them are taken, anything else at once;
        # the selector is only asked when the socket's buffer is full.
        if not self._reading:
            self._flush()

    def _unwant_write(self, _client: object, _data: object, _sock: object) -> None:
        if self._writer_added and self._socket is not None:
            asyncio.get_running_loop().remove_writer(self._socket.fileno())
            self._writer_added = False

    def _closing(self, _client: object, _data: object, sock: object) -> None:
        if sock is self._socket and self._socket is not None:
            self._unwatch(self._socket)

    def _received(self, flags: int, packet: bytes) -> None:
        self._callbacks.message(decode_publish(flags, packet, version=self.version, epoch=self._epoch))

    def _greeted(
        self,
        _client: object,
        _data: object,
        flags: ConnectFlags,
        code: ReasonCode,
        properties: PahoProperties | None,
    ) -> None:
        if self._greeting is not None and not self._greeting.done():
            limit = getattr(properties, "ReceiveMaximum", 65535)
            self._greeting.set_result(Greeting(reason(code.value), flags.session_present, limit))

    def _disconnected(
        self,
        _client: object,
        _data: object,
        flags: DisconnectFlags,
        code: ReasonCode,
        _properties: object,
    ) -> None:
        self.drop()
        said = reason(code.value) if flags.is_disconnect_packet_from_server else None
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_result(Greeting(said))
        else:
            self._callbacks.lost(said)

    def _published(self, packet_id: int, code: int) -> None:
        self._callbacks.acknowledged(packet_id, reason(code))

    def _subscribed(
        self, _client: object, _data: object, packet_id: int, codes: list[ReasonCode], _properties: object
    ) -> None:
        self._callbacks.granted(packet_id, [reason(code.value) for code in codes])
