"""Frames between the agent and one of its workers, over a stream socket pair.

The protocol, and nothing that moves bytes but the worker's own blocking `Channel`: the agent feeds a
`Decoder` from its event loop and writes what `encode` returns. No numpy here: the agent's main process
imports this module.

A frame on the wire::

    "EBC1" | header length, u32 | payload length, u64 | header, JSON in UTF-8 | payload

numbers are little-endian, the JSON is an object with the key `kind` and exactly the fields of that kind's
class in `frames`, tuples as arrays. Lengths are checked against their limits before anything is allocated.
Anything else is a `ChannelError`: the agent then ends the worker, for what runs there is native code of a
model.

========= ================ ============================================================================
kind      direction        payload, and when
========= ================ ============================================================================
load      agent to worker  the manifest's bytes. First frame, once; the members' descriptors travel with
                           its first byte as SCM_RIGHTS, in the order of `files`. `send_load` does it.
ready     worker to agent  none. The model is loaded and answered its recorded samples.
failed    worker to agent  none. It could not be loaded; the worker ends by itself after it.
request   agent to worker  the request's payload as it came over MQTT. Several may be sent ahead: the worker
                           runs them one by one in order, and the socket is their queue.
answer    worker to agent  the answer's payload. Exactly one for each request, in order of the requests.
share     agent to worker  none. Other models came or went: the requests behind it run on these processors.
stop      agent to worker  none. The worker answers what it was sent before it, and ends with status 0.
========= ================ ============================================================================

A worker whose agent closes the socket ends with status 0 as well. One that dies leaves the requests without
an answer to the agent, which owes each of them a 500.

Times of both sides are comparable: `received_s` and `deadline_s` are readings of `time.monotonic`, which
is one clock for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import Final

from agent.errors import ChannelError
from agent.worker.frames import (
    MAGIC,
    MAX_HEADER_BYTES,
    PREFIX,
    Answer,
    Buffer,
    Failed,
    Frame,
    Header,
    Load,
    Ready,
    Request,
    Share,
    Stop,
    decode_header,
    encode,
)

__all__ = [
    "MAX_DESCRIPTORS",
    "MAX_HEADER_BYTES",
    "MAX_PAYLOAD_BYTES",
    "Answer",
    "Buffer",
    "Channel",
    "Decoder",
    "Failed",
    "Frame",
    "Header",
    "Load",
    "Ready",
    "Request",
    "Share",
    "Stop",
    "decode_header",
    "encode",
    "send_load",
]

# What one request or answer may carry, unless a side is told otherwise: a 4000x3000 RGB tensor of uint8 is 36
# MB.
MAX_PAYLOAD_BYTES: Final = 64 * 1024 * 1024
# SCM_MAX_FD of Linux; a bundle has fewer than ten members.
MAX_DESCRIPTORS: Final = 253
# Small frames are read many at a time, of the size of a socket's usual buffer.
_CHUNK_BYTES: Final = 64 * 1024


class Decoder:
    """Makes frames of a stream of bytes, without moving any itself.

    Either `feed` it, or let it say where the next bytes go (`get_buffer`) and how many came
    (`buffer_updated`): these two are named as `asyncio.BufferedProtocol` calls them. A large payload is read
    into its final place.

    Parameters
    ----------
    max_payload_bytes
        Largest payload that is taken.
    """

    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._pending = bytearray()
        self._header: Header | None = None
        self._payload = memoryview(b"")
        self._filled = 0

    @property
    def idle(self) -> bool:
        """Whether the stream stands between two frames, where alone it may end."""
        return self._header is None and not self._pending

    def get_buffer(self, sizehint: int = -1) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return memory for the next bytes of the stream, never empty."""
        if self._header is not None and self._filled < len(self._payload):
            return self._payload[self._filled :]
        return self._chunk

    def buffer_updated(self, nbytes: int) -> list[Frame]:
        """Take the `nbytes` that were written to the last `get_buffer`, and return the frames they complete.

        Raises
        ------
        ChannelError
            If they are no frame. The stream cannot be used after that.
        """
        if self._header is not None and self._filled < len(self._payload):
            self._filled += nbytes
            if self._filled < len(self._payload):
                return []
            return [self._complete()]
        self._pending += self._chunk[:nbytes]
        return self._parse()

    def feed(self, data: Buffer) -> list[Frame]:
        """Take bytes of the stream, and return the frames they complete.

        Raises
        ------
        ChannelError
            If they are no frame. The stream cannot be used after that.
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
                self._payload = memoryview(bytearray(payload_bytes))
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
            raise ChannelError(f"a frame begins with {MAGIC!r}, not with {magic!r}")
        if header_bytes > MAX_HEADER_BYTES:
            raise ChannelError(f"a frame's header has at most {MAX_HEADER_BYTES} bytes, not {header_bytes}")
        if payload_bytes > self._max_payload_bytes:
            raise ChannelError(f"a payload has at most {self._max_payload_bytes} bytes, not {payload_bytes}")

    def _complete(self) -> Frame:
        assert self._header is not None
        frame = Frame(self._header, self._payload)
        self._header, self._payload, self._filled = None, memoryview(b""), 0
        return frame


def send_load(connection: socket.socket, load: Load, manifest: bytes, descriptors: Sequence[int]) -> None:
    """Send the first frame and the members' descriptors, over a blocking socket.

    The descriptors stay open here; the caller closes them, so that the memory files go when the worker is
    done.

    Raises
    ------
    OSError
        If the worker is gone.
    """
    if len(load.files) != len(descriptors):
        raise ValueError(f"{len(load.files)} files need as many descriptors, not {len(descriptors)}")
    head, payload = encode(load, manifest)
    data = head + payload
    sent = socket.send_fds(connection, [data], list(descriptors))
    connection.sendall(data[sent:])


def _check_load(header: Header, count: int) -> None:
    if not isinstance(header, Load):
        raise ChannelError(f"the first frame is load, not {type(header).__name__.lower()}")
    if len(header.files) != count:
        raise ChannelError(f"{len(header.files)} files came with {count} descriptors, not with as many")


class Channel:
    """The worker's end: blocking, one frame at a time.

    Parameters
    ----------
    connection
        A connected stream socket in blocking mode; closing it is left to the caller.
    max_payload_bytes
        Largest payload that is taken.
    """

    def __init__(self, connection: socket.socket, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._connection = connection
        self._decoder = Decoder(max_payload_bytes)
        self._ready: list[Frame] = []

    def send(self, header: Header, payload: Buffer = b"") -> None:
        """Send one frame, waiting until the socket has taken all of it.

        Raises
        ------
        OSError
            If the other side is gone.
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
        """Return the next frame, or None when the other side has closed the socket between two frames.

        Raises
        ------
        ChannelError
            If the bytes are no frame, or end within one.
        """
        while not self._ready:
            nbytes = self._connection.recv_into(self._decoder.get_buffer())
            if nbytes == 0:
                self._end()
                return None
            self._ready = self._decoder.buffer_updated(nbytes)
        return self._ready.pop(0)

    def receive_load(self) -> tuple[Frame, list[int]] | None:
        """Return the first frame and its descriptors, close-on-exec; None if the other side has closed.

        Raises
        ------
        ChannelError
            If the bytes are no load frame, or its descriptors are not as many as its files.
        """
        descriptors: list[int] = []
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * struct.calcsize("i"))
        try:
            while not self._ready:
                # Descriptors may come with any chunk of a stream, so every read up to the frame's end has
                # room.
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
