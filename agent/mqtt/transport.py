"""A TCP or TLS connection to the broker that neither blocks the event loop nor waits for delayed ACKs.

With Nagle's algorithm in the broker and delayed acknowledgement here, every QoS 1 round trip would take
44 ms. TCP_NODELAY helps only with what we send. TCP_QUICKACK helps with what we receive, but the kernel may
clear it at any time (tcp(7): "the flag is not permanent"), so it is set again after each receive.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent.disk_thread import in_disk_thread
from agent.errors import MalformedPacketError
from agent.mqtt.limits import LARGEST_PACKET_BYTES
from agent.mqtt.settings import BrokerSettings
from agent.mqtt.tls import tls_context

# Many small packets are read with one system call.
_READ_AHEAD_BYTES: Final = 64 << 10
# recv() allocates its full size before a byte arrives, so a length in a header is trusted only this far.
_MAX_RECEIVE_BYTES: Final = 1 << 20
# After this many reads other connections get their turn.
_RECEIVES_IN_A_TURN: Final = 4
# What is kept of a packet that is too long: topic and properties of any request that could be answered.
_KEPT_BYTES: Final = 128 << 10
# Large enough for an answer with a large tensor, so that sending it takes few turns of the loop.
_SEND_BUFFER_BYTES: Final = 1 << 20
# A broker closes the connection as soon as it has read DISCONNECT.
LINGER_S: Final = 0.5

_KIND_AND_QOS: Final = 0xF6
_PUBLISH_AT_QOS_0: Final = 0x30

# As getaddrinfo(3) returns them.
_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]
_TCP_QUICKACK: Final = getattr(socket, "TCP_QUICKACK", None)


@dataclass(frozen=True, slots=True)
class Packet:
    """One MQTT packet: its first byte, and everything after its length.

    `cut_bytes` is how long the body was, if it was too long and only its beginning is kept.
    """

    first: int
    body: bytes | bytearray
    cut_bytes: int | None = None


class _Part:
    """A packet that has arrived in part."""

    def __init__(self, first: int, length: int) -> None:
        self.first = first
        self.length = length
        self.left = length
        self.kept = bytearray()

    def add(self, data: bytes, max_bytes: int) -> None:
        self.left -= len(data)
        most = self.length if self.length <= max_bytes else _KEPT_BYTES
        self.kept += data[: max(0, most - len(self.kept))]


class BrokerSocket:
    """A connected, non-blocking socket with the methods that paho needs, watched by the running event loop.

    `sock` has made its TLS handshake, if it has one. `quick_ack` acknowledges received segments at once.
    `tls_error` is the alert that the broker sent after the handshake, if any. Of a packet with a body longer
    than `max_packet_bytes` only the beginning is kept. If it `lingers`, `close` lets the broker close first.
    """

    def __init__(self, sock: socket.socket, *, quick_ack: bool = True) -> None:
        self._sock = sock
        self.tls_error: ssl.SSLError | None = None
        self.max_packet_bytes = LARGEST_PACKET_BYTES
        self._part: _Part | None = None
        self._waiting = False
        self._quick_ack = int(quick_ack)
        self._ahead = b""
        self._at = 0
        self._empty = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching_writes = False
        self.lingers = False
        self._closed: asyncio.Future[None] | None = None

    def watch(self, on_readable: Callable[[], None]) -> None:
        """Call a function whenever there is something to read, until the socket is closed."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fileno(), on_readable)

    def unwatch(self) -> None:
        """Stop what `watch` started."""
        if self._loop is not None:
            self._loop.remove_reader(self.fileno())

    def watch_writing(self, on_writable: Callable[[], None]) -> None:
        """Call a function whenever there is room to write, until `unwatch_writing`."""
        if self._loop is not None and not self._watching_writes:
            self._loop.add_writer(self.fileno(), on_writable)
            self._watching_writes = True

    @property
    def is_full(self) -> bool:
        """Whether it waits for room to write."""
        return self._watching_writes

    def unwatch_writing(self) -> None:
        """Stop what `watch_writing` started."""
        if self._loop is not None and self._watching_writes:
            self._loop.remove_writer(self.fileno())
            self._watching_writes = False

    def wake(self) -> None:
        """Allow reading from the kernel again, which reports something to read."""
        self._empty = False

    @property
    def collecting(self) -> bool:
        """Whether a packet has arrived in part."""
        return self._part is not None

    def take_packet(self) -> Packet | None:
        """Return the next MQTT packet; None if the broker has closed the connection.

        Raises BlockingIOError or ssl.SSLWantReadError if no packet is complete yet, or if many bytes were
        read and others get their turn; what was read is kept. Bytes that are not a packet raise
        MalformedPacketError, and a broken connection OSError.
        """
        if self._part is not None:
            return self._collect(self._part)
        if self._at >= len(self._ahead):
            if self._empty:
                raise BlockingIOError
            self._fill(b"")
        while (header := self._header()) is None:
            held = len(self._ahead) - self._at
            self._fill(self._ahead[self._at :])
            if len(self._ahead) == held:
                return None
        at, length = header
        first = self._ahead[self._at]
        end = at + length
        if end <= len(self._ahead):
            self._at = end
            return Packet(first, self._ahead[at:end])
        self._part = part = _Part(first, length)
        part.add(self._ahead[at:], self.max_packet_bytes)
        self._ahead, self._at = b"", 0
        return self._collect(part)

    def skip(self, is_unwanted: Callable[[bytes], bool]) -> int:
        """Drop the messages at QoS 0 that are next, as far as they were read and are unwanted.

        Return how many were dropped.
        """
        if self._part is not None:
            return 0
        ahead, count = self._ahead, 0
        while self._at < len(ahead) and ahead[self._at] & _KIND_AND_QOS == _PUBLISH_AT_QOS_0:
            header = self._header()
            if header is None:
                break
            at, length = header
            name = ahead[at + 2 : at + 2 + (ahead[at] << 8 | ahead[at + 1])] if at + 1 < len(ahead) else b""
            if at + length > len(ahead) or not is_unwanted(name):
                break
            self._at = at + length
            count += 1
        return count

    def _fill(self, held: bytes) -> None:
        """Read what has arrived, behind the bytes that are held."""
        self._waiting = bool(held)
        received = self.recv(_READ_AHEAD_BYTES)
        self._waiting = False
        self._ahead = held + received
        self._at = 0
        # Fewer bytes than asked for: the kernel has no more now. (TLS returns one record at a time.)
        self._empty = 0 < len(received) < _READ_AHEAD_BYTES and not isinstance(self._sock, ssl.SSLSocket)

    def _header(self) -> tuple[int, int] | None:
        """Return where the body of the next packet begins, and its length; None if that has not arrived."""
        ahead, at = self._ahead, self._at
        length = 0
        for place in range(4):  # MQTT 5.0, 2.1.4: at most four bytes
            at += 1
            if at >= len(ahead):
                return None
            byte = ahead[at]
            length |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return at + 1, length
        raise MalformedPacketError("expected the length of a packet in at most four bytes, got more")

    def _collect(self, part: _Part) -> Packet | None:
        for _ in range(_RECEIVES_IN_A_TURN):
            if not part.left or self._empty:
                break
            data = self.recv(min(max(part.left, _READ_AHEAD_BYTES), _MAX_RECEIVE_BYTES))
            if not data:
                return None
            self._ahead = data[part.left :]
            part.add(data[: part.left], self.max_packet_bytes)
        if part.left:
            raise BlockingIOError
        self._part = None
        return Packet(part.first, part.kept, part.length if part.length > self.max_packet_bytes else None)

    def recv(self, size: int) -> bytes:
        """Return up to `size` bytes that have arrived.

        Raises BlockingIOError or ssl.SSLWantReadError if there are none; any other OSError is a broken
        connection.
        """
        try:
            data = self._sock.recv(size)
        except ssl.SSLError as error:
            # In TLS 1.3 a broker refuses our certificate only after the handshake.
            if "ALERT" in (error.reason or ""):
                self.tls_error = error
            raise
        if _TCP_QUICKACK is not None:
            self._sock.setsockopt(socket.IPPROTO_TCP, _TCP_QUICKACK, self._quick_ack)
        return data

    def pending(self) -> int:
        """Return the number of bytes that are buffered here: the kernel does not report these as readable."""
        held = 0 if self._waiting else len(self._ahead) - self._at
        if isinstance(self._sock, ssl.SSLSocket):
            held += self._sock.pending()
        return held

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send as many bytes as fit; return their number."""
        try:
            return self._sock.send(data)
        except (ssl.SSLEOFError, ConnectionError):  # of Python 3.11, and of 3.13 (CPython's gh-115627)
            # The broker has closed the connection; the bytes it sent before may say why.
            with contextlib.suppress(OSError):
                self.recv(1)
            raise

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        """Accept only False; paho calls this for every socket, and this one never blocks."""
        if flag:
            raise ValueError("this socket never blocks")

    def close(self) -> None:
        """Stop watching the socket and close it.

        A socket that is closed with unread bytes resets its connection. A broker that is just writing to it
        may then not read our DISCONNECT, and publish the will. So a socket that `lingers` drops what still
        arrives until the broker closes, for `LINGER_S` at most.
        """
        if self._closed is not None:
            return
        self._watching_writes = False
        # In this order: the next socket may get the same descriptor, and the selector would confuse the two.
        fd, loop = self.fileno(), self._loop
        if fd >= 0 and loop is not None and not loop.is_closed():
            loop.remove_reader(fd)
            loop.remove_writer(fd)
            if self.lingers and self._finish_sending():
                self._closed = loop.create_future()
                loop.add_reader(fd, self._drop, loop.call_later(LINGER_S, self._end))
                return
        self._sock.close()

    def _finish_sending(self) -> bool:
        """Tell the broker that nothing follows; return whether the connection still exists."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    async def wait_closed(self) -> None:
        """Return when a socket that lingers is closed."""
        if self._closed is not None:
            await asyncio.wait([self._closed])

    def _drop(self, timer: asyncio.TimerHandle) -> None:
        try:
            data = self._sock.recv(_MAX_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            timer.cancel()
            self._end()

    def _end(self) -> None:
        assert self._loop is not None
        assert self._closed is not None
        self._loop.remove_reader(self.fileno())
        self._sock.close()
        if not self._closed.done():
            self._closed.set_result(None)


async def open_socket(settings: BrokerSettings) -> BrokerSocket:
    """Look up the broker's name, connect, and do the TLS handshake, without blocking the loop.

    Raises
    ------
    OSError
        If the broker cannot be reached (ssl.SSLError is an OSError).
    ConfigError, StoreError
        If a file with a certificate cannot be used, or not be read now.
    """
    # A new context for each connection, so that a renewed certificate is used from the next one on.
    context = None if settings.tls is None else await in_disk_thread(tls_context, settings.tls)
    loop = asyncio.get_running_loop()
    addresses = await _look_up(settings.host, settings.port)
    # An address that does not answer, such as one of IPv6 on a network that drops it, leaves time for the
    # others, for the handshake, and for CONNACK. The caller limits the last one.
    limit_s = settings.connect_timeout_s / (len(addresses) + 1)
    failure: OSError = OSError(f"no address for {settings.host}")
    for number, (family, kind, protocol, _, address) in enumerate(addresses, 1):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            if settings.receive_buffer_bytes is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, settings.receive_buffer_bytes)
            async with asyncio.timeout(limit_s if number < len(addresses) else None):
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
        # A numeric address needs no look-up, and so no thread.
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except UnicodeError as error:  # an empty label, or one of more than 63 bytes
        raise OSError(errno.EINVAL, f"expected the name of a host, got {host!a:.80}: {error}") from error
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        try:
            return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except RuntimeError as error:
            # No thread can be started: this attempt fails, and the connection tries again.
            raise OSError(errno.EAGAIN, f"cannot look up {host}: {error}") from error


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
