"""paho's client, with the methods that every message passes through replaced.

paho reads a packet one byte at a time, represents properties and reason codes as objects that check
themselves, and writes each packet with its own system call: together, half of what a request costs the agent.
The replacements read whole packets from the bytes that have arrived, decode PUBLISH and PUBACK, and write all
waiting packets at once. Messages in flight and their identifiers are kept by `sending`, which knows what the
broker accepts. Connecting, subscribing and keep-alive remain paho's.

These methods and attributes are private to paho and may change with any release, so pyproject.toml pins
paho's minor version (docs/decisions/0003), and tests/agent/mqtt/test_paho_client.py lists them.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from typing import Any, Final, cast

from paho.mqtt import client as paho
from paho.mqtt.enums import MQTTErrorCode
from paho.mqtt.properties import MalformedPacket  # type: ignore[attr-defined]  # not in `__all__`

from agent.errors import MalformedPacketError
from agent.mqtt.transport import BrokerSocket, Packet

_log = logging.getLogger(__name__)

_PUBLISH: Final = 0x30
_PUBACK: Final = 0x40
_PUBREL: Final = 0x60
_DISCONNECT: Final = 0xE0
_KIND: Final = 0xF0
# Kind and QoS of a PUBLISH at QoS 1.
_KIND_AND_QOS: Final = 0xF6
_PUBLISH_AT_QOS_1: Final = 0x32
# What a waiting packet takes besides its bytes.
_PACKET_OVERHEAD_BYTES: Final = 512
# The longest packet that paho decodes: it copies the rest for each property, so that 256 KiB would
# take seconds. A broker sends a code for each filter, and a reason.
_MAX_CONTROL_BYTES: Final = 4096
# The most bytes that one call joins: small packets are written together, a large one by itself, uncopied.
_JOINED_BYTES: Final = 64 << 10


class PahoClient(paho.Client):
    """The client; the engine sets these attributes before it connects.

    `next_socket` is the one that `reconnect` uses: connected, after any TLS handshake. `packet_received` is
    called with each PUBLISH packet, `packet_acknowledged` with the packet identifier and reason code of a
    PUBACK. `next_id` returns an identifier that no packet in flight has; without it, paho counts.
    `unsent_bytes` is the memory of the packets that wait to be written, but for PUBLISH at QoS 1, which
    `sending` bounds. While the socket is not being read (`reading`), a packet that is written is a sign of
    life.
    """

    next_socket: BrokerSocket | None = None
    packet_received: Callable[[Packet], None]
    packet_acknowledged: Callable[[int, int], None]
    next_id: Callable[[], int] | None = None
    unsent_bytes: int = 0
    reading: bool = True

    def send_packet(self, packet: bytes) -> bool:
        """Send a PUBLISH; return False without a connection."""
        return self._packet_queue(_PUBLISH, packet, 0, 0) == MQTTErrorCode.MQTT_ERR_SUCCESS

    def received(self, packet_id: int) -> None:
        """Send a PUBREC: a message of QoS 2 needs nothing more from its owner."""
        self._send_pubrec(packet_id)

    def ping_after(self, seconds: int) -> None:
        """Send a ping after this long without a packet."""
        self._keepalive = seconds

    def _mid_generate(self) -> int:
        return super()._mid_generate() if self.next_id is None else self.next_id()

    def count_last(self) -> None:
        """Count the packet that was queued last in `unsent_bytes`; `_packet_write` counts them all."""
        self.unsent_bytes += _weight(cast(Any, self._out_packet)[-1]["packet"])

    def _packet_queue(
        self,
        command: int,
        packet: bytes | bytearray,
        mid: int,
        qos: int,
        info: paho.MQTTMessageInfo | None = None,
    ) -> MQTTErrorCode:
        # paho tells the owner only of the first packet that waits; the others must be counted, too.
        others_wait, sock = self._registered_write, self.next_socket
        code = super()._packet_queue(command, packet, mid, qos, info)
        if others_wait and sock is not None and sock.is_full:
            cast(Any, self.on_socket_register_write)(self, None, sock)
        return code

    def _create_socket(self) -> paho.SocketLike:
        # paho's own method connects with a blocking call, however long that takes.
        assert self.next_socket is not None
        self.unsent_bytes, self.reading = 0, True  # paho has dropped what was waiting
        return self.next_socket

    def _packet_read(self) -> MQTTErrorCode:
        sock = self.next_socket
        if sock is None or self._sock is None:
            return MQTTErrorCode.MQTT_ERR_NO_CONN
        try:
            packet = sock.take_packet()
        except (BlockingIOError, ssl.SSLWantReadError):
            if sock.collecting:  # a packet that is still arriving is a sign of life
                self._last_bytes_received = time.monotonic()
            return MQTTErrorCode.MQTT_ERR_AGAIN
        except OSError as error:
            _log.debug("receiving from the broker: %s", error)
            return MQTTErrorCode.MQTT_ERR_CONN_LOST
        except MalformedPacketError as error:
            _log.warning("the broker sent a broken packet, connection dropped: %.200s", error)
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        if packet is None:
            return MQTTErrorCode.MQTT_ERR_CONN_LOST
        kind = packet.first & _KIND
        self._last_bytes_received = time.monotonic()
        if kind == _PUBLISH:
            return self._publish_received(packet)
        body = packet.body
        if kind == _PUBACK:
            return self._puback_received(body)
        if kind == _PUBREL:
            return self._pubrel_received(body)
        if len(body) > _MAX_CONTROL_BYTES:
            _log.warning("the broker sent a control packet of %d bytes, connection dropped", len(body))
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        whole = cast(dict[str, Any], self._in_packet)
        whole |= {"command": packet.first, "remaining_length": len(body), "packet": bytearray(body), "pos": 0}
        try:
            return self._packet_handle()
        except MalformedPacket as error:
            _log.warning("the broker sent a broken packet, connection dropped: %.200s", error)
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        finally:
            whole |= {"command": 0, "remaining_length": 0, "packet": bytearray()}

    def _publish_received(self, packet: Packet) -> MQTTErrorCode:
        try:
            self.packet_received(packet)
        except MalformedPacketError as error:
            _log.warning("the broker sent a broken message, connection dropped: %.200s", error)
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _puback_received(self, body: bytes | bytearray) -> MQTTErrorCode:
        """Handle a PUBACK (MQTT 5.0, 3.4): an identifier, perhaps a code, perhaps properties."""
        if len(body) < 2:
            _log.warning("the broker sent an acknowledgement without an identifier, connection dropped")
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        self.packet_acknowledged(int.from_bytes(body[:2], "big"), body[2] if len(body) > 2 else 0)
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _pubrel_received(self, body: bytes | bytearray) -> MQTTErrorCode:
        """Answer a PUBREL, the second half of QoS 2, also of an identifier that an earlier process had."""
        if len(body) < 2:
            _log.warning("the broker sent a PUBREL without an identifier, connection dropped")
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        return self._send_pubcomp(int.from_bytes(body[:2], "big"))

    def _packet_write(self) -> MQTTErrorCode:
        waiting = cast(Any, self._out_packet)
        while waiting:
            first = waiting[0]
            if first["command"] & _KIND == _DISCONNECT:
                return super()._packet_write()
            data = first["packet"]
            if first["pos"]:
                data = memoryview(data)[first["pos"] :]
            elif len(waiting) > 1:
                data = self._join(waiting)
            try:
                sent = self._sock_send(data)
            except BlockingIOError:
                self.unsent_bytes = sum(_weight(packet["packet"]) for packet in waiting)
                return MQTTErrorCode.MQTT_ERR_AGAIN
            except OSError as error:
                _log.debug("sending to the broker: %s", error)
                return MQTTErrorCode.MQTT_ERR_CONN_LOST
            while sent:
                packet = waiting[0]
                if sent < packet["to_process"]:
                    packet["pos"] += sent
                    packet["to_process"] -= sent
                    break
                sent -= packet["to_process"]
                waiting.popleft()
            self._last_msg_out = time.monotonic()
            if not self.reading:
                self._last_bytes_received = self._last_msg_out
        self.unsent_bytes = 0
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    @staticmethod
    def _join(waiting: Any) -> bytes | bytearray:  # noqa: ANN401 - paho's dictionaries
        parts: list[bytes] = []
        size = 0
        for packet in waiting:
            size += len(packet["packet"])
            if parts and (size > _JOINED_BYTES or packet["command"] & _KIND == _DISCONNECT):
                break
            parts.append(packet["packet"])
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _weight(packet: bytes | bytearray) -> int:
    """Return what a waiting packet counts for in `unsent_bytes`."""
    if packet[0] & _KIND_AND_QOS == _PUBLISH_AT_QOS_1:
        return 0
    return len(packet) + _PACKET_OVERHEAD_BYTES
