"""Frames between the agent and one of its workers, over a stream socket pair.

This module has the protocol; only `send_load` and the worker's `Channel`, which block, move bytes. The agent
feeds a `Decoder` from its event loop and writes what `encode` returns. The agent's main process imports this
module, so it must not import numpy.

A frame on the wire::

    "EBC1" | header length, u32 | payload length, u64 | header, JSON in UTF-8 | payload

Numbers are little-endian. The JSON is an object with the key `kind` and exactly the fields of that kind's
class in `frames`, with tuples as arrays. Lengths are checked against their limits before anything is
allocated. Anything else is a `ChannelError`. The agent then ends the worker, because a model's native code
runs there.

========= ================ ============================================================================
kind      direction        payload, and when
========= ================ ============================================================================
load      agent to worker  the manifest's bytes. First frame, once; the members' descriptors travel with
                           its first byte as SCM_RIGHTS, in the order of `files`. See `send_load`.
ready     worker to agent  none. The model is loaded and its recorded samples came out as recorded.
failed    worker to agent  none. The model could not be loaded; the worker then ends by itself.
request   agent to worker  the request's payload as it arrived over MQTT. Several may be sent ahead: the
                           worker computes them one by one in order, and the socket is their queue.
answer    worker to agent  the answer's payload. Exactly one for each request, in their order.
share     agent to worker  none. Other models came or went: later requests run on these processors.
stop      agent to worker  none. The worker answers all earlier requests, and ends with status 0.
========= ================ ============================================================================

A worker also ends with status 0 if the agent closes the socket. If a worker dies, the agent gives its
requests to the next worker; a request that ends two workers is answered with 500.

Times of both sides are comparable: `received_s` and `deadline_s` are readings of `time.monotonic`, which
is one clock for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Final

from agent.errors import ChannelError
from agent.worker.frames import (
    MAGIC,
    MAX_HEADER_BYTES,
    PREFIX,
    Buffer,
    Frame,
    Header,
    Load,
    decode_header,
    encode,
)

# Default limit of one request's or answer's payload: a 4000x3000 RGB tensor of uint8 has 36 MB.
MAX_PAYLOAD_BYTES: Final = 64 * 1024 * 1024
# SCM_MAX_FD of Linux; a bundle has at most 64 members.
MAX_DESCRIPTORS: Final = 253
# Many small frames are read at once; this is the usual size of a socket's buffer.
_CHUNK_BYTES: Final = 64 * 1024


class Decoder:
    """Turns a stream of bytes into frames, without reading the stream itself.

    Either call `feed`, or write the next bytes to `get_buffer` and call `buffer_updated` with their number;
    the two have the names that `asyncio.BufferedProtocol` uses. A large payload is read into its final place.

    Parameters
    ----------
    max_payload_bytes
        Largest payload that is accepted.
    """

    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._pending = bytearray()
        self._header: Header | None = None
        # What the view is of: a frame takes it over, so that a large payload is not copied.
        self._body = bytearray()
        self._payload = memoryview(self._body)
        self._filled = 0

    @property
    def idle(self) -> bool:
        """Whether the stream is between two frames, the only place where it may end."""
        return self._header is None and not self._pending

    def get_buffer(self, sizehint: int = -1) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return memory for the next bytes of the stream, never empty."""
        if self._header is not None and self._filled < len(self._payload):
            return self._payload[self._filled :]
        return self._chunk

    def buffer_updated(self, nbytes: int) -> list[Frame]:
        """Take the `nbytes` that were written to the last `get_buffer`; return the frames that are complete.

        Raises
        ------
        ChannelError
            If they are not a frame. The stream cannot be used after that.
        """
        if self._header is not None and self._filled < len(self._payload):
            self._filled += nbytes
            if self._filled < len(self._payload):
                return []
            return [self._complete()]
        self._pending += self._chunk[:nbytes]
        return self._parse()

    def feed(self, data: Buffer) -> list[Frame]:
        """Take bytes of the stream; return the frames that are complete.

        Raises
        ------
        ChannelError
            If they are not a frame. The stream cannot be used after that.
        """
        frames = []
        rest = memoryview(data).cast("B")
        while rest:
            place = self.get_buffer()
            count = min(len(place), len(rest))
            place[:count] = rest[:count]
            frames += self.buffer_updated(count)
            rest = rest[count:]
        return frames

    def _parse(self) -> list[Frame]:
        frames = []
        start = 0
        pending = memoryview(self._pending)
        try:
            while len(pending) - start >= PREFIX.size:
                magic, header_bytes, payload_bytes = PREFIX.unpack_from(pending, start)
                self._check(magic, header_bytes, payload_bytes)
                body = start + PREFIX.size
                if len(pending) - body < header_bytes:
                    break
                self._header = decode_header(pending[body : body + header_bytes])
                body += header_bytes
                self._body = bytearray(payload_bytes)
                self._payload = memoryview(self._body)
                self._filled = min(payload_bytes, len(pending) - body)
                self._payload[: self._filled] = pending[body : body + self._filled]
                start = body + self._filled
                if self._filled < payload_bytes:
                    break
                frames.append(self._complete())
        finally:
            pending.release()
        del self._pending[:start]
        return frames

    def _check(self, magic: bytes, header_bytes: int, payload_bytes: int) -> None:
        if magic != MAGIC:
            raise ChannelError(f"expected a frame that begins with {MAGIC!r}, got {magic!r}")
        if header_bytes > MAX_HEADER_BYTES:
            raise ChannelError(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {header_bytes}")
        if payload_bytes > self._max_payload_bytes:
            raise ChannelError(
                f"expected a payload of at most {self._max_payload_bytes} bytes, got {payload_bytes}"
            )

    def _complete(self) -> Frame:
        assert self._header is not None
        frame = Frame(self._header, self._body)
        self._header, self._body, self._filled = None, bytearray(), 0
        self._payload = memoryview(self._body)
        return frame


def send_load(connection: socket.socket, load: Load, manifest: bytes, descriptors: Sequence[int]) -> None:
    """Send the first frame and the members' descriptors, over a blocking socket.

    For tests and benchmarks: the agent's `WorkerProcess` does the same without blocking. The caller closes
    the descriptors, so that the memory files are freed when the worker is done. Raises OSError if the worker
    is gone.
    """
    if len(load.files) != len(descriptors):
        raise ValueError(f"expected {len(load.files)} descriptors, one for each file, got {len(descriptors)}")
    head, payload = encode(load, manifest)
    data = head + payload
    sent = socket.send_fds(connection, [data], list(descriptors))
    if sent < len(data):  # a worker that has refused all of it may be gone
        connection.sendall(data[sent:])


def _check_load(header: Header, count: int) -> None:
    if not isinstance(header, Load):
        raise ChannelError(f"expected load as the first frame, got {type(header).__name__.lower()}")
    if len(header.files) != count:
        raise ChannelError(f"expected {len(header.files)} descriptors, one for each file, got {count}")


class Channel:
    """The worker's end: blocking, one frame at a time.

    The caller closes `connection`, a connected stream socket in blocking mode.
    """

    def __init__(self, connection: socket.socket, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._connection = connection
        self._decoder = Decoder(max_payload_bytes)
        self._ready: list[Frame] = []

    def send(self, header: Header, payload: Buffer = b"") -> None:
        """Send one frame, and wait until the socket has taken all of it.

        Raises OSError if the other side is gone.
        """
        head, body = encode(header, payload)
        rest = [memoryview(head), memoryview(body).cast("B")]
        while rest:
            sent = self._connection.sendmsg(rest)
            while rest and sent >= len(rest[0]):
                sent -= len(rest[0])
                del rest[0]
            if rest:
                rest[0] = rest[0][sent:]

    def receive(self) -> Frame | None:
        """Return the next frame, or None if the other side closed the socket between two frames.

        Bytes that are not a frame, or end within one, raise ChannelError.
        """
        while not self._ready:
            nbytes = self._connection.recv_into(self._decoder.get_buffer())
            if nbytes == 0:
                self._end()
                return None
            self._ready = self._decoder.buffer_updated(nbytes)
        return self._ready.pop(0)

    def has_frame(self, timeout_s: float) -> bool:
        """Return whether a frame, or at least its beginning, is there or comes within the time."""
        if self._ready:
            return True
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def put_back(self, frame: Frame) -> None:
        """Let the next `receive` return this frame again."""
        self._ready.insert(0, frame)

    def receive_load(self) -> tuple[Frame, list[int]] | None:
        """Return the first frame and its descriptors (close-on-exec), or None if the other side closed.

        Another frame, or one with more or fewer descriptors than files, raises ChannelError.
        """
        descriptors: list[int] = []
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * struct.calcsize("i"))
        try:
            while not self._ready:
                # Descriptors may come with any chunk of a stream, so every read has room for them.
                nbytes, ancillary, _, _ = self._connection.recvmsg_into(
                    [self._decoder.get_buffer()], space, socket.MSG_CMSG_CLOEXEC
                )
                for level, kind, data in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        count = len(data) // struct.calcsize("i")
                        descriptors += struct.unpack(f"={count}i", data[: count * struct.calcsize("i")])
                if nbytes == 0:
                    self._end()
                    return None
                self._ready = self._decoder.buffer_updated(nbytes)
            frame = self._ready.pop(0)
            _check_load(frame.header, len(descriptors))
        except ChannelError:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            raise
        return frame, descriptors

    def _end(self) -> None:
        if not self._decoder.idle:
            raise ChannelError("the stream ended within a frame")
