"""paho's client, with the methods that every message goes through replaced.

paho reads a packet a byte at a time, makes properties and reason codes as objects that check themselves, and
writes each packet with a system call of its own: half of what a request costs the agent. What is replaced
here reads whole packets from what has arrived, decodes PUBLISH and PUBACK, and writes all that waits at
once. Connecting, subscribing, packet identifiers, keep-alive and sending again after a reconnection stay
paho's.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from typing import Any, Final, cast

from paho.mqtt import client as paho
from paho.mqtt.enums import MQTTErrorCode
from paho.mqtt.properties import MalformedPacket  # type: ignore[attr-defined]
from paho.mqtt.properties import Properties as PahoProperties

from agent.errors import MalformedPacketError
from agent.mqtt.transport import BrokerSocket

_log = logging.getLogger(__name__)

_PUBLISH: Final = 0x30
_PUBACK: Final = 0x40
_DISCONNECT: Final = 0xE0
_KIND: Final = 0xF0
# What goes out with one call: small packets are joined, a large one goes alone and is not copied.
_JOINED_BYTES: Final = 64 << 10


class PackedProperties(PahoProperties):
    """Properties that are encoded already: paho's own encoder takes 50 us for five of them."""

    def __init__(self, packed: bytes) -> None:  # the base's attributes are what makes it slow
        object.__setattr__(self, "packed", packed)

    def pack(self) -> bytes:
        """Return them."""
        return cast(bytes, object.__getattribute__(self, "packed"))


class PahoClient(paho.Client):
    """The client; the engine sets these three before it connects.

    Attributes
    ----------
    next_socket
        What `reconnect` takes: connected, and shaken hands.
    packet_received
        Called with a PUBLISH packet's first byte and all behind its fixed header.
    packet_acknowledged
        Called with the packet identifier and reason code of a PUBACK for what is under way.
    """

    next_socket: BrokerSocket | None = None
    packet_received: Callable[[int, bytes], None]
    packet_acknowledged: Callable[[int, int], None]

    def _create_socket(self) -> paho.SocketLike:
        # paho's own way blocks the loop for as long as the network likes.
        assert self.next_socket is not None
        return self.next_socket

    def _packet_read(self) -> MQTTErrorCode:
        sock = self.next_socket
        if self._in_packet["command"] or sock is None or self._sock is None:
            return super()._packet_read()
        try:
            packet = sock.take_packet()
        except (BlockingIOError, ssl.SSLWantReadError):
            return MQTTErrorCode.MQTT_ERR_AGAIN
        except OSError as error:
            _log.debug("receiving from the broker: %s", error)
            return MQTTErrorCode.MQTT_ERR_CONN_LOST
        if packet is None:
            # Not all of it is there: paho collects it.
            return super()._packet_read()
        flags, body = packet
        kind = flags & _KIND
        self._last_bytes_received = time.monotonic()
        if kind == _PUBLISH:
            return self._publish_came(flags, body)
        if kind == _PUBACK:
            return self._puback_came(body)
        whole = cast(dict[str, Any], self._in_packet)
        whole |= {"command": flags, "remaining_length": len(body), "packet": bytearray(body), "pos": 0}
        try:
            return self._packet_handle()
        except MalformedPacket as error:
            _log.warning("the broker sent a broken packet, connection dropped: %.200s", error)
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        finally:
            whole |= {"command": 0, "remaining_length": 0, "packet": bytearray()}

    def _handle_publish(self) -> MQTTErrorCode:
        # One that came in pieces. paho's own decoder copies the payload four times.
        packet = cast(dict[str, Any], self._in_packet)
        return self._publish_came(packet["command"], packet["packet"])

    def _handle_pubackcomp(self, cmd: Any) -> MQTTErrorCode:  # noqa: ANN401 - paho's own type is a Literal
        if cmd != "PUBACK":
            return super()._handle_pubackcomp(cmd)
        return self._puback_came(cast(dict[str, Any], self._in_packet)["packet"])

    def _publish_came(self, flags: int, body: bytes) -> MQTTErrorCode:
        try:
            self.packet_received(flags, body)
        except MalformedPacketError as error:
            _log.warning("the broker sent a broken message, connection dropped: %.200s", error)
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _puback_came(self, body: bytes) -> MQTTErrorCode:
        """Take an acknowledgement (MQTT 5.0, 3.4): identifier, perhaps a code, perhaps properties."""
        if len(body) < 2:
            _log.warning("the broker sent an acknowledgement of nothing, connection dropped")
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        packet_id = int.from_bytes(body[:2], "big")
        if self._out_messages.pop(packet_id, None) is not None:
            self._inflight_messages -= 1
            self.packet_acknowledged(packet_id, body[2] if len(body) > 2 else 0)
        return MQTTErrorCode.MQTT_ERR_SUCCESS

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
