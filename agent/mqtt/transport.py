"""A TCP or TLS connection to the broker that neither blocks the event loop nor waits for delayed ACKs.

Nagle's algorithm in the broker and delayed acknowledgement here would turn every QoS 1 round trip into 44 ms.
TCP_NODELAY cures only what we send; TCP_QUICKACK, which the kernel takes back whenever it likes, is therefore
armed again after each receive (tcp(7): "the flag is not permanent").
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final

from agent.mqtt.settings import BrokerSettings
from agent.mqtt.tls import tls_context

# The MQTT library reads headers a byte at a time; from this buffer that costs no system call.
_READ_AHEAD_BYTES: Final = 64 << 10
# recv() allocates what it is asked for before a byte has come: never trust a length in a header that far.
_MAX_RECEIVE_BYTES: Final = 1 << 20
# Holds a large tensor's answer, so that sending takes few turns of the loop.
_SEND_BUFFER_BYTES: Final = 1 << 20
# As getaddrinfo(3) returns them.
_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
_TCP_QUICKACK: Final = getattr(socket, "TCP_QUICKACK", None)


class BrokerSocket:
    """A connected, non-blocking socket with what the MQTT library asks of one."""

    def __init__(self, sock: socket.socket, *, quick_ack: bool = True) -> None:
        self._sock = sock
        self.tls_error: ssl.SSLError | None = None
        self._quick_ack = int(quick_ack)
        self._ahead = b""
        self._at = 0
        self._empty = False

    def wake(self) -> None:
        """Take note that the kernel says there is something to read."""
        self._empty = False

    def take_packet(self) -> tuple[int, bytes] | None:
        """Return an MQTT packet's first byte and what is behind its length, or None while some of it is away.

        Raises
        ------
        BlockingIOError, ssl.SSLWantReadError
            If nothing at all is there.
        OSError
            If the connection is broken.
        """
        if self._at >= len(self._ahead):
            if self._empty:
                raise BlockingIOError
            self._ahead = self._receive(_READ_AHEAD_BYTES)
            self._at = 0
            # Less came than was asked for: the kernel has no more now. (TLS hands out record by record.)
            self._empty = 0 < len(self._ahead) < _READ_AHEAD_BYTES and not isinstance(
                self._sock, ssl.SSLSocket
            )
        ahead, at = self._ahead, self._at
        end = len(ahead)
        length = 0
        for place in range(4):  # MQTT 5.0, 2.1.4: at most four bytes
            at += 1
            if at >= end:
                return None
            byte = ahead[at]
            length |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                at += 1
                if at + length > end:
                    return None
                first = ahead[self._at]
                self._at = at + length
                return first, ahead[at : self._at]
        return None

    def recv(self, size: int) -> bytes:
        """Return up to `size` bytes; raises BlockingIOError (or SSLWantReadError) when none are there."""
        held = len(self._ahead) - self._at
        if not held:
            if size >= _READ_AHEAD_BYTES:
                return self._receive(min(size, _MAX_RECEIVE_BYTES))
            self._ahead = self._receive(_READ_AHEAD_BYTES)
            self._at = 0
            held = len(self._ahead)
        size = min(size, held)
        data = self._ahead[self._at : self._at + size]
        self._at += size
        return data

    def _receive(self, size: int) -> bytes:
        try:
            data = self._sock.recv(size)
        except ssl.SSLError as error:
            # TLS 1.3: what a broker thinks of our certificate comes after the handshake.
            if "ALERT" in (error.reason or ""):
                self.tls_error = error
            raise
        if _TCP_QUICKACK is not None:
            self._sock.setsockopt(socket.IPPROTO_TCP, _TCP_QUICKACK, self._quick_ack)
        return data

    def pending(self) -> int:
        """Return how many bytes can be had without the kernel telling us of them."""
        held = len(self._ahead) - self._at
        if isinstance(self._sock, ssl.SSLSocket):
            held += self._sock.pending()
        return held

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send what fits."""
        try:
            return self._sock.send(data)
        except ssl.SSLEOFError:
            # The broker has closed; why stands in what it sent before.
            with contextlib.suppress(OSError):
                self._receive(1)
            raise

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        """Keep the socket as it is: it never blocks."""
        if flag:
            raise ValueError("this socket never blocks")

    def close(self) -> None:
        """Close it."""
        self._sock.close()


async def open_socket(settings: BrokerSettings) -> BrokerSocket:
    """Connect to the broker: look up, connect, TLS handshake, all without blocking the loop.

    Raises
    ------
    OSError
        If it cannot be reached (ssl.SSLError is one).
    ConfigError
        If a file with a certificate cannot be used.
    """
    # Made anew for each connection: a renewed certificate is in use after the next one.
    context = None if settings.tls is None else tls_context(settings.tls)
    loop = asyncio.get_running_loop()
    addresses = await _look_up(settings.host, settings.port)
    failure: OSError = OSError(f"no address for {settings.host}")
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            await loop.sock_connect(sock, address)
            if context is not None:
                sock = await _handshake(sock, context, settings.host)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return BrokerSocket(sock, quick_ack=settings.quick_ack)
    raise failure


async def _look_up(host: str, port: int) -> Sequence[_Address]:
    try:
        # An address needs nobody to ask: no thread is started for it.
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


async def _handshake(sock: socket.socket, context: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    wrapped = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    try:
        while True:
            try:
                wrapped.do_handshake()
            except ssl.SSLWantReadError:
                await _until_ready(wrapped.fileno(), writing=False)
            except ssl.SSLWantWriteError:
                await _until_ready(wrapped.fileno(), writing=True)
            else:
                return wrapped
    except BaseException:
        wrapped.close()
        raise


async def _until_ready(fd: int, *, writing: bool) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(fd, wake)
    try:
        await ready
    finally:
        remove(fd)
