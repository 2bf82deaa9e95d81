"""A broker of MQTT 5 that floods one connection of its client as fast as that reads, and answers the others.

`python tests/flooding_broker.py PART FLOOD HONEST BLOCKS SECONDS`: the connection that subscribes to a filter
with PART in it gets blocks of 64 KiB, full of the packet FLOOD (hexadecimal), and behind each of them the
next packet of HONEST (hexadecimal, separated by commas), in turn, with an identifier of its own.

The first line on stdout is the port. Then there is a line for each message that the client publishes: how
many blocks were sent by then, and its topic. After BLOCKS blocks, and not before SECONDS are over, a line
with only their number says that all was sent.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue

CONNECT, PUBLISH, PUBACK, SUBSCRIBE, UNSUBSCRIBE, PINGREQ = 0x10, 0x30, 0x40, 0x80, 0xA0, 0xC0
BLOCK_BYTES = 64 << 10
MAX_IN_FLIGHT = 20


def length(size: int) -> bytes:
    """Encode the length of a packet."""
    out = bytearray()
    while True:
        size, low = divmod(size, 128)
        out.append(low | 0x80 if size else low)
        if not size:
            return bytes(out)


def publish(topic: str, payload: bytes, properties: bytes = b"", *, qos: int = 0) -> bytes:
    """Encode a PUBLISH; at QoS 1 its identifier is zero."""
    body = len(topic).to_bytes(2, "big") + topic.encode() + b"\0\0" * qos
    body += length(len(properties)) + properties + payload
    return bytes((PUBLISH | qos << 1,)) + length(len(body)) + body


def reply_to(topic: str, correlation: bytes) -> bytes:
    """Encode the properties Response Topic and Correlation Data."""
    return b"\x08%b%b\x09%b%b" % (
        len(topic).to_bytes(2, "big"),
        topic.encode(),
        len(correlation).to_bytes(2, "big"),
        correlation,
    )


_speaking = threading.Lock()


def say(line: str) -> None:
    """Write a line to stdout, whole, whichever thread speaks."""
    with _speaking:
        print(line, flush=True)


class Flood:
    """What is sent to the flooded connection."""

    def __init__(self, part: bytes, flood: bytes, honest: list[bytes], blocks: int, limit_s: float) -> None:
        self.part = part
        self.block = flood * (BLOCK_BYTES // len(flood))
        self.honest = honest
        self.blocks = blocks
        self.limit_s = limit_s
        self.sent = 0


class Connection:
    """One connection of the client."""

    def __init__(self, sock: socket.socket, flood: Flood) -> None:
        self._sock = sock
        self._flood = flood
        self._file = sock.makefile("rb")
        self._replies: SimpleQueue[bytes] = SimpleQueue()
        self._flooded = False
        self._sending = threading.Lock()
        self._in_flight = 0

    def run(self) -> None:
        """Answer until the client is gone."""
        try:
            while head := self._file.read(1):
                self._answer(head[0], self._body())
        except (OSError, ValueError):
            pass

    def _body(self) -> bytes:
        size = shift = 0
        while True:
            (byte,) = self._file.read(1)
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return self._file.read(size)

    def _answer(self, first: int, body: bytes) -> None:
        kind = first & 0xF0
        if kind == CONNECT:
            self._send(b"\x20\x03\x00\x00\x00")
        elif kind == SUBSCRIBE:
            self._send(b"\x90\x04" + body[:2] + b"\0\1")
            if self._flood.part in body and not self._flooded:
                self._flooded = True
                threading.Thread(target=self._pour, daemon=True).start()
        elif kind == UNSUBSCRIBE:
            self._send(b"\xb0\x04" + body[:2] + b"\0\0")
        elif kind == PINGREQ:
            self._send(b"\xd0\x00")
        elif kind == PUBACK:
            self._in_flight -= 1
        elif kind == PUBLISH:
            end = 2 + int.from_bytes(body[:2], "big")
            say(f"{self._flood.sent} {body[2:end].decode()}")
            if first & 6:
                self._send(b"\x40\x02" + body[end : end + 2])

    def _send(self, packet: bytes) -> None:
        with self._sending:
            if self._flooded:
                self._replies.put(packet)  # behind the block that is being sent
            else:
                self._sock.sendall(packet)

    def _pour(self) -> None:
        honest = itertools.cycle(self._flood.honest)
        identifiers = itertools.cycle(range(1, 65536))
        flood = self._flood
        end_s = time.monotonic() + flood.limit_s
        try:
            while flood.sent < flood.blocks or time.monotonic() < end_s:
                data = self._unsent() + flood.block
                if flood.honest and self._in_flight < MAX_IN_FLIGHT:
                    self._in_flight += 1
                    data += numbered(next(honest), next(identifiers))
                self._sock.sendall(data)
                flood.sent += 1
        except OSError:
            pass
        say(str(flood.sent))
        with self._sending, contextlib.suppress(OSError):
            self._flooded = False
            self._sock.sendall(self._unsent())

    def _unsent(self) -> bytes:
        return b"".join(self._replies.get() for _ in range(self._replies.qsize()))


def numbered(packet: bytes, identifier: int) -> bytes:
    """Return a PUBLISH at QoS 1 with an identifier."""
    at = 1
    while packet[at] & 0x80:
        at += 1
    at += 3 + int.from_bytes(packet[at + 1 : at + 3], "big")
    return packet[:at] + identifier.to_bytes(2, "big") + packet[at + 2 :]


def main() -> None:
    part, flood, honest, blocks, seconds = sys.argv[1:]
    packets = [bytes.fromhex(text) for text in honest.split(",") if text]
    shared = Flood(part.encode(), bytes.fromhex(flood), packets, int(blocks), float(seconds))
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=Connection(sock, shared).run, daemon=True).start()


SCRIPT = Path(__file__)

if __name__ == "__main__":
    main()
