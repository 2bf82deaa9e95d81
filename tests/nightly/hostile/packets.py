"""MQTT 5 packets as bytes, legal or not, and a client that sends them.

A client library refuses to send what is wrong; this one sends what it is given. All lengths are right, so
that one strange packet does not hide the next, but every value in between may be anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from dataclasses import dataclass, field
from typing import Final

# Property identifiers of PUBLISH (MQTT 5.0, 3.3.2.3).
PAYLOAD_FORMAT, EXPIRY, CONTENT_TYPE, RESPONSE_TOPIC, CORRELATION = 0x01, 0x02, 0x03, 0x08, 0x09
SUBSCRIPTION_ID, TOPIC_ALIAS, USER_PROPERTY = 0x0B, 0x23, 0x26
_ALLOWED: Final = {PAYLOAD_FORMAT, EXPIRY, CONTENT_TYPE, RESPONSE_TOPIC, CORRELATION, TOPIC_ALIAS}
_CONNACK, _PUBLISH, _PUBACK, _PUBREC, _PUBCOMP, _DISCONNECT = 0x20, 0x30, 0x40, 0x50, 0x70, 0xE0
# mosquitto announces a Receive Maximum of 20.
_MAX_IN_FLIGHT: Final = 10
_ANSWER_LIMIT_S: Final = 10.0
_FLUSH_EVERY: Final = 5


@dataclass(frozen=True, slots=True)
class Packet:
    """One PUBLISH.

    Attributes
    ----------
    user
        Who sends it.
    topic, payload
        As bytes, which need not be text.
    qos, retain, dup
        The bits of the first byte.
    properties
        Identifier and encoded value, in order.
    """

    user: str
    topic: bytes
    payload: bytes = field(repr=False)
    qos: int = 0
    retain: bool = False
    dup: bool = False
    properties: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)

    @property
    def forbidden(self) -> bool:
        """Whether a broker should refuse it and end the connection."""
        numbers = [number for number, _ in self.properties if number != USER_PROPERTY]
        return len(set(numbers)) < len(numbers) or not set(numbers) <= _ALLOWED or b"\0" in self.topic

    def encode(self, packet_id: int) -> bytes:
        """Return the packet's bytes."""
        body = string(self.topic)
        if self.qos:
            body += struct.pack(">H", packet_id)
        properties = b"".join(bytes([identifier]) + value for identifier, value in self.properties)
        body += length(len(properties)) + properties + self.payload
        first = _PUBLISH | self.dup << 3 | self.qos << 1 | self.retain
        return bytes([first]) + length(len(body)) + body


def string(raw: bytes) -> bytes:
    """Return a string or binary data with its length; what does not fit is cut off."""
    return struct.pack(">H", len(raw[:65535])) + raw[:65535]


def pair(name: bytes, value: bytes) -> bytes:
    """Return a string pair."""
    return string(name) + string(value)


def length(value: int) -> bytes:
    """Return a variable byte integer."""
    out = bytearray()
    while True:
        value, low = divmod(value, 128)
        out.append(low | 0x80 if value else low)
        if not value:
            return bytes(out)


class RawClient:
    """A connection of one user that sends any packet.

    Attributes
    ----------
    sent, refused
        Packets that were written, and how often the broker ended the connection because of one.
    """

    def __init__(self, port: int, user: str) -> None:
        self.sent = 0
        self.refused = 0
        self._port = port
        self._user = user
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._next_id = 0
        self._in_flight: set[int] = set()

    async def publish(self, packet: Packet) -> None:
        """Send a packet; wait while too many are unacknowledged."""
        try:
            await self._connect()
            assert self._writer is not None
            packet_id = self._take_id()
            if packet.qos in (1, 2):
                self._in_flight.add(packet_id)
            self._writer.write(packet.encode(packet_id))
            self.sent += 1
            if packet.forbidden or self.sent % _FLUSH_EVERY == 0:
                # What is written after a packet that the broker refuses is lost.
                await self.flush()
            while len(self._in_flight) >= _MAX_IN_FLIGHT:
                await self._read()
        except (OSError, EOFError, TimeoutError):
            self._lost()

    async def flush(self) -> None:
        """Return when the broker has taken everything that was sent."""
        try:
            if self._writer is not None:
                self._writer.write(b"\xc0\x00")  # PINGREQ
                while await self._read() != 0xD0:
                    pass
                while self._in_flight:
                    await self._read()
        except (OSError, EOFError, TimeoutError):
            self._lost()

    async def close(self) -> None:
        """End the connection."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
            self._writer = None

    def _lost(self) -> None:
        self.refused += 1
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _take_id(self) -> int:
        while True:
            self._next_id = self._next_id % 65535 + 1
            if self._next_id not in self._in_flight:
                return self._next_id

    async def _connect(self) -> None:
        if self._writer is not None:
            return
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._in_flight.clear()
        # Clean start, with a user name; no keep-alive; an empty identifier, for which the broker makes one.
        body = (
            string(b"MQTT") + b"\x05\x82" + b"\x00\x00" + b"\x00" + string(b"") + string(self._user.encode())
        )
        self._writer.write(b"\x10" + length(len(body)) + body)
        if await self._read() != _CONNACK:
            raise EOFError("expected CONNACK")

    async def _read(self) -> int:
        """Read one packet and take note of what it acknowledges; return its kind."""
        assert self._reader is not None
        assert self._writer is not None
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            [kind] = await self._reader.readexactly(1)
            size = shift = 0
            while True:
                [byte] = await self._reader.readexactly(1)
                size |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            body = await self._reader.readexactly(size)
        kind &= 0xF0
        if kind in (_PUBACK, _PUBCOMP):
            self._in_flight.discard(int.from_bytes(body[:2], "big"))
        elif kind == _PUBREC:
            if len(body) > 2 and body[2] >= 0x80:
                self._in_flight.discard(int.from_bytes(body[:2], "big"))
            else:
                self._writer.write(b"\x62\x02" + body[:2])  # PUBREL
        elif kind == _DISCONNECT:
            raise EOFError("the broker refused a packet")
        return kind
