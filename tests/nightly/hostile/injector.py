"""A proxy in front of a broker that floods one kind of connection as fast as its client reads.

What the broker sends is passed on, whole packets between blocks of the flood. The proxy sends more whenever
there is room: the client always has more to read than it can, whatever its speed. If it is `deaf`, it does
not read what the client sends meanwhile.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, MutableSequence
from multiprocessing.synchronize import Event
from queue import Empty, SimpleQueue
from typing import Final

# As a broker that queues little in the kernel: what is in there is in front of each honest message.
_SEND_BUFFER_BYTES: Final = 64 << 10
_BLOCK_BYTES: Final = 16 << 10


def inject(
    upstream: int, part: bytes, packet: bytes, shared: MutableSequence[int], on: Event, *, deaf: bool = False
) -> None:
    """Serve until the process is ended.

    Parameters
    ----------
    upstream
        The broker's port.
    part
        A connection that subscribes to a filter with this in it is flooded.
    packet
        The flood.
    shared
        Gets the proxy's port, and how many packets of the flood were sent.
    on
        Whether to flood now.
    deaf
        Whether to read nothing from the client meanwhile.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    shared[0] = listener.getsockname()[1]
    block = packet * max(1, _BLOCK_BYTES // len(packet))
    while True:
        sock, _ = listener.accept()
        with contextlib.suppress(OSError):
            up = socket.create_connection(("127.0.0.1", upstream))
            for each in (sock, up):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            _Line(sock, up, part, on, deaf=deaf).start(block, len(block) // len(packet), shared)


class _Line:
    """One connection, in both directions."""

    def __init__(self, sock: socket.socket, up: socket.socket, part: bytes, on: Event, *, deaf: bool) -> None:
        self._sock, self._up, self._part, self._on, self._deaf = sock, up, part, on, deaf
        self._packets: SimpleQueue[bytes] = SimpleQueue()
        self._flooded = False
        self._ended = False

    def start(self, block: bytes, count: int, shared: MutableSequence[int]) -> None:
        for target in (
            self._read_broker,
            self._read_client,
            lambda: self._write_client(block, count, shared),
        ):
            threading.Thread(target=self._run, args=(target,), daemon=True).start()

    def _run(self, target: Callable[[], None]) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            target()
        self._ended = True
        for each in (self._sock, self._up):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _read_broker(self) -> None:
        file = self._up.makefile("rb")
        while head := file.read(1):
            size = shift = 0
            while True:
                byte = file.read(1)
                head += byte
                size |= (byte[0] & 0x7F) << shift
                shift += 7
                if byte[0] < 0x80:
                    break
            self._packets.put(head + file.read(size))

    def _read_client(self) -> None:
        while data := self._sock.recv(65536):
            self._up.sendall(data)
            if self._part in data:
                self._flooded = True
            while self._deaf and self._flooded and self._on.is_set() and not self._ended:
                time.sleep(0.05)

    def _write_client(self, block: bytes, count: int, shared: MutableSequence[int]) -> None:
        while not self._ended:
            flooded = self._flooded and self._on.is_set()
            data = block if flooded else b""
            with contextlib.suppress(Empty):
                data += self._packets.get(timeout=0 if flooded else 0.1)
                while True:
                    data += self._packets.get_nowait()
            self._sock.sendall(data)
            if flooded:
                shared[1] += count
