"""A broker in memory: no sockets, no processes; a test sees every packet and answers it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from agent.mqtt.settings import BrokerSettings
from agent.mqtt.transport import BrokerSocket

CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK = 0x10, 0x20, 0x30, 0x40, 0x80, 0x90
PUBREC, PUBREL, PUBCOMP = 0x50, 0x60, 0x70
UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP, DISCONNECT = 0xA0, 0xB0, 0xC0, 0xD0, 0xE0

ACCEPTED = b"\x20\x03\x00\x00\x00"
ACCEPTED_3_1_1 = b"\x20\x02\x00\x00"


@dataclass(frozen=True)
class Packet:
    """One MQTT packet that the client sent."""

    flags: int
    body: bytes

    @property
    def kind(self) -> int:
        return self.flags & 0xF0

    @property
    def version(self) -> int:
        """Of a CONNECT."""
        assert self.kind == CONNECT
        return self.body[6]

    @property
    def packet_id(self) -> int:
        """Of a PUBLISH at QoS 1, a PUBACK, a SUBSCRIBE."""
        at = 2 + int.from_bytes(self.body[:2], "big") if self.kind == PUBLISH else 0
        return int.from_bytes(self.body[at : at + 2], "big")

    @property
    def filters(self) -> list[tuple[str, int]]:
        """Of a SUBSCRIBE of MQTT 5 without properties: each filter with its largest QoS."""
        assert self.kind == SUBSCRIBE
        assert self.body[2] == 0
        found, rest = [], self.body[3:]
        while rest:
            end = 2 + int.from_bytes(rest[:2], "big")
            found.append((rest[2:end].decode(), rest[end] & 3))
            rest = rest[end + 1 :]
        return found

    @property
    def topic(self) -> str:
        assert self.kind == PUBLISH
        return self.body[2 : 2 + int.from_bytes(self.body[:2], "big")].decode()


class _Pipe:
    """What `BrokerSocket` asks of a socket, in memory."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.incoming = b""
        self.ended = False
        self.closed = False

    def recv(self, size: int) -> bytes:
        if not self.incoming and not self.ended:
            raise BlockingIOError
        data, self.incoming = self.incoming[:size], self.incoming[size:]
        return data

    def send(self, data: bytes | bytearray | memoryview) -> int:
        if self.ended or self.closed:
            raise BrokenPipeError
        return self._client.take(bytes(data))

    def setsockopt(self, *_arguments: int) -> None: ...

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.closed = True


class _MemorySocket(BrokerSocket):
    """Its bytes come from a test, and so does its readiness."""

    def __init__(self, client: Client) -> None:
        self.pipe = _Pipe(client)
        super().__init__(cast(socket.socket, self.pipe))
        self._on_readable: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    def watch(self, on_readable: Callable[[], None]) -> None:
        self._on_readable = on_readable
        asyncio.get_running_loop().call_soon(self.readable)

    def unwatch(self) -> None:
        self._on_readable = None

    def watch_writing(self, on_writable: Callable[[], None]) -> None:
        self.on_writable = on_writable

    @property
    def is_full(self) -> bool:
        return self.on_writable is not None

    def unwatch_writing(self) -> None:
        self.on_writable = None

    def readable(self) -> None:
        if self._on_readable is not None and not self.pipe.closed:
            self._on_readable()
            if self.pipe.incoming:  # as a selector says again and again
                asyncio.get_running_loop().call_soon(self.readable)


class Client:
    """One connection, as the broker sees it: it answers with `send`, and ends it with `hang_up`."""

    def __init__(self, answer: Callable[[Client, Packet], None]) -> None:
        self._answer = answer
        self._partial = b""
        self.room: int | None = None
        self.writes: list[int] = []
        self.packets: list[Packet] = []
        self.socket = _MemorySocket(self)

    @property
    def closed(self) -> bool:
        return self.socket.pipe.closed

    def kinds(self) -> list[int]:
        return [packet.kind for packet in self.packets]

    def of_kind(self, kind: int) -> list[Packet]:
        return [packet for packet in self.packets if packet.kind == kind]

    def send(self, data: bytes) -> None:
        """Deliver bytes to the client in the loop's next turn."""
        self.socket.pipe.incoming += data
        asyncio.get_running_loop().call_soon(self.socket.readable)

    def hang_up(self) -> None:
        self.socket.pipe.ended = True
        asyncio.get_running_loop().call_soon(self.socket.readable)

    def take(self, data: bytes) -> int:
        """Take what the client sends, as far as there is room; return how many bytes that were."""
        if self.room is not None:
            data = data[: self.room]
            self.room -= len(data)
            if not data:
                raise BlockingIOError
        self.writes.append(len(data))
        self._partial += data
        while (packet := self._next()) is not None:
            self.packets.append(packet)
            self._answer(self, packet)
        return len(data)

    def _next(self) -> Packet | None:
        length = at = 0
        while True:
            at += 1
            if at >= len(self._partial):
                return None
            length |= (self._partial[at] & 0x7F) << 7 * (at - 1)
            if self._partial[at] < 0x80:
                break
        end = at + 1 + length
        if end > len(self._partial):
            return None
        packet = Packet(self._partial[0], self._partial[at + 1 : end])
        self._partial = self._partial[end:]
        return packet


class MemoryBroker:
    """Answers each packet as a function says; its `open_socket` takes the place of the transport's.

    Parameters
    ----------
    answer
        Called with each packet and the connection it came over; by default `polite`.
    """

    def __init__(self, answer: Callable[[Client, Packet], None] | None = None) -> None:
        self._answer = answer or polite
        self.clients: list[Client] = []
        self.opened_s: list[float] = []

    async def open_socket(self, _settings: BrokerSettings) -> BrokerSocket:
        self.clients.append(Client(self._answer))
        self.opened_s.append(asyncio.get_running_loop().time())
        return self.clients[-1].socket


def puback(packet_id: int, code: int = 0) -> bytes:
    return b"\x40\x03" + packet_id.to_bytes(2, "big") + bytes((code,))


def suback(packet_id: int, *codes: int) -> bytes:
    return bytes((SUBACK, 3 + len(codes))) + packet_id.to_bytes(2, "big") + b"\0" + bytes(codes)


def unsuback(packet_id: int) -> bytes:
    return bytes((UNSUBACK, 4)) + packet_id.to_bytes(2, "big") + b"\0\0"


def publish(topic: str, payload: bytes, packet_id: int | None = None) -> bytes:
    """Encode a PUBLISH of MQTT 5 without properties; at QoS 1 if it has an identifier."""
    body = len(topic).to_bytes(2, "big") + topic.encode()
    body += b"" if packet_id is None else packet_id.to_bytes(2, "big")
    body += b"\0" + payload
    assert len(body) < 128
    return bytes((PUBLISH | (0 if packet_id is None else 2), len(body))) + body


def polite(client: Client, packet: Packet) -> None:
    """Accept everything, as a broker that speaks MQTT 5 does."""
    match packet.kind:
        case 0x10:
            client.send(ACCEPTED)
        case 0x30 if packet.flags & 6:
            client.send(puback(packet.packet_id))
        case 0x80:
            client.send(suback(packet.packet_id, *(qos for _, qos in packet.filters)))
        case 0xC0:
            client.send(bytes((PINGRESP, 0)))
