"""Frames between the agent and one of its workers, over a stream socket pair.

The protocol, and nothing that moves bytes but the worker's own blocking `Channel`: the agent feeds a
`Decoder` from its event loop and writes what `encode` returns. No numpy here: the agent's main process
imports this module.

A frame on the wire::

    "EBC1" | header length, u32 | payload length, u64 | header, JSON in UTF-8 | payload

numbers are little-endian, the JSON is an object with the key ``kind`` and exactly the fields of that kind's
class below, tuples as arrays. Lengths are checked against their limits before anything is allocated. Anything
else is a `ChannelError`: the agent then ends the worker, for what runs there is native code of a model.

========= ================ ============================================================================
kind      direction        payload, and when
========= ================ ============================================================================
load      agent to worker  the manifest's bytes. First frame, once; the members' descriptors travel with
                           its first byte as SCM_RIGHTS, in the order of ``files``. `send_load` does it.
ready     worker to agent  none. The model is loaded and answered its recorded samples.
failed    worker to agent  none. It could not be loaded; the worker ends by itself after it.
request   agent to worker  the request's payload as it came over MQTT. Several may be sent ahead: the worker
                           runs them one by one in order, and the socket is their queue.
answer    worker to agent  the answer's payload. Exactly one for each request, in order of the requests.
stop      agent to worker  none. The worker answers what it was sent before it, and ends with status 0.
========= ================ ============================================================================

A worker whose agent closes the socket ends with status 0 as well. One that dies leaves the requests without
an answer to the agent, which owes each of them a 500.

Times of both sides are comparable: ``received_s`` and ``deadline_s`` are readings of `time.monotonic`, which
is one clock for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, get_args

from agent.errors import EdgeError

_MAGIC: Final = b"EBC1"
_PREFIX: Final = struct.Struct("<4sIQ")

# A header names tensors and carries one message: a few hundred bytes. The limit keeps a worker that runs wild
# from making the agent parse megabytes of JSON.
MAX_HEADER_BYTES: Final = 64 * 1024
# What one request or answer may carry, unless a side is told otherwise: a 4000x3000 RGB tensor of uint8 is 36
# MB.
MAX_PAYLOAD_BYTES: Final = 64 * 1024 * 1024
# SCM_MAX_FD of Linux; a bundle has fewer than ten members.
MAX_DESCRIPTORS: Final = 253
# Small frames are read many at a time, of the size of a socket's usual buffer.
_CHUNK_BYTES: Final = 64 * 1024

Buffer = bytes | bytearray | memoryview


class ChannelError(EdgeError):
    """The other side sent what no frame is made of."""

    code = "ERR_CHANNEL"


@dataclass(frozen=True, slots=True)
class Load:
    """The first frame: what to serve, and within which limits.

    Parameters
    ----------
    files
        Names of the bundle's members (``mod.so``, ``mod.json``, ...), in the order of the descriptors sent
        along.
    threads
        Threads of a kernel; 0 leaves it to the kernel library.
    cpus
        Processors the worker may run on; empty for those it inherits.
    memory_bytes
        Address space the worker may take beyond what it has when the model is about to be loaded; 0 for no
        limit.
    cpu_s
        Processor seconds one request may burn, over all threads, before the kernel ends the worker; 0 for no
        limit.
    max_pixels
        Pixels of the largest image that is decoded; 0 for the decoder's own limit.
    require_sandbox
        Refuse to load where the kernel offers neither Landlock nor seccomp.
    """

    files: tuple[str, ...]
    threads: int = 0
    cpus: tuple[int, ...] = ()
    memory_bytes: int = 0
    cpu_s: int = 0
    max_pixels: int = 0
    require_sandbox: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One inference request; its payload is what came over MQTT.

    Parameters
    ----------
    seq
        The agent's number for it, echoed in the answer.
    content_type
        As the requester gave it, parameters and all; an empty one means ``application/json``.
    tensors
        The user properties ``tensor`` in their order, ``name;FP32;1,3,4``, for raw tensors.
    accept
        Content type wished for the answer, or None.
    id
        The requester's name for it, echoed in JSON answers (the body's own ``id`` otherwise), or None.
    received_s
        When the agent took it, `time.monotonic`; what passes until the worker takes it is the answer's
        ``queue_us``.
    deadline_s
        When its answer is of no use any more, `time.monotonic`, or None.
    client_json
        The requester has no user properties (MQTT 3.1.1): the JSON answer carries ``status`` and ``message``.
    """

    seq: int
    content_type: str = ""
    tensors: tuple[str, ...] = ()
    accept: str | None = None
    id: str | None = None
    received_s: float = 0.0
    deadline_s: float | None = None
    client_json: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Answer what was sent before this, then end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and its recorded samples came out as recorded.

    Parameters
    ----------
    load_s
        Seconds from the load frame to this one.
    self_test_error
        Largest relative error of the samples' outputs.
    rss_bytes
        Resident memory of the worker.
    threads
        Threads of a kernel, 0 if the library does not say.
    landlock
        Version of Landlock's ABI that is in force, 0 if the kernel has none.
    seccomp
        Whether a system call filter is in force.
    sandbox
        One line about both, for the log.
    """

    load_s: float
    self_test_error: float
    rss_bytes: int
    threads: int
    landlock: int
    seccomp: bool
    sandbox: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The model could not be loaded.

    Parameters
    ----------
    code
        An error's code, ``ERR_SELF_TEST`` and the like.
    message
        One line.
    hint
        What to do about it, or None.
    """

    code: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request; its payload goes to the requester as it is.

    Parameters
    ----------
    seq
        The request's.
    status
        200, 400, 408, 415 or 500.
    message
        Empty for 200, otherwise one line.
    content_type
        Of the payload; empty where there is no payload.
    tensors
        The user properties ``tensor`` of raw tensors, in their order.
    queue_us, decode_us, compute_us, encode_us
        Microseconds from ``received_s`` to the worker's start on it, decoding and preprocessing, the graph,
        and postprocessing and encoding.
    """

    seq: int
    status: int
    message: str = ""
    content_type: str = ""
    tensors: tuple[str, ...] = ()
    queue_us: int = 0
    decode_us: int = 0
    compute_us: int = 0
    encode_us: int = 0


Header = Load | Request | Stop | Ready | Failed | Answer
_KINDS: Final[Mapping[str, type[Header]]] = MappingProxyType(
    {kind.__name__.lower(): kind for kind in get_args(Header)}
)


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _is_str(value: object) -> bool:
    return type(value) is str


def _is_float(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# Keyed by a field's annotation as it is written above.
_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "bool": lambda value: type(value) is bool,
        "int": _is_int,
        "str": _is_str,
        "float": _is_float,
        "str | None": lambda value: value is None or _is_str(value),
        "float | None": lambda value: value is None or _is_float(value),
        "tuple[str, ...]": lambda value: type(value) is list and all(map(_is_str, value)),
        "tuple[int, ...]": lambda value: type(value) is list and all(map(_is_int, value)),
    }
)


@dataclass(frozen=True, slots=True)
class Frame:
    """A header and its payload."""

    header: Header
    payload: Buffer = field(default=b"")


def encode(header: Header, payload: Buffer = b"") -> tuple[bytes, Buffer]:
    """Return the frame's bytes before its payload, and the payload itself, which is not copied.

    Raises
    ------
    ChannelError
        If the header is over its limit.
    """
    # Not dataclasses.asdict, which copies deeply and takes three times as long.
    content: dict[str, Any] = {"kind": type(header).__name__.lower()}
    for item in fields(header):
        content[item.name] = getattr(header, item.name)
    raw = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > MAX_HEADER_BYTES:
        raise ChannelError(f"a frame's header has at most {MAX_HEADER_BYTES} bytes, this one has {len(raw)}")
    nbytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    return _PREFIX.pack(_MAGIC, len(raw), nbytes) + raw, payload


def decode_header(raw: Buffer) -> Header:
    """Parse a frame's header.

    Raises
    ------
    ChannelError
        If it is not exactly one of the kinds.
    """
    try:
        content = json.loads(bytes(raw))
    except (ValueError, RecursionError) as e:
        raise ChannelError(f"a frame's header is JSON, this one is not: {e}") from e
    kind = content.pop("kind", None) if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ChannelError(f"a frame is one of {', '.join(_KINDS)}, not {kind!r:.80}")
    cls = _KINDS[kind]
    expected = fields(cls)
    if content.keys() != {item.name for item in expected}:
        raise ChannelError(
            f"a {kind} frame has exactly {[item.name for item in expected]}, not {sorted(content)!r:.400}"
        )
    for item in expected:
        value = content[item.name]
        if not _CHECKS[str(item.type)](value):
            raise ChannelError(f"{item.name} of a {kind} frame is {item.type}, not {value!r:.80}")
        if type(value) is list:
            content[item.name] = tuple(value)
    return cls(**content)


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
            while len(pending) - start >= _PREFIX.size:
                magic, header_bytes, payload_bytes = _PREFIX.unpack_from(pending, start)
                self._check(magic, header_bytes, payload_bytes)
                body = start + _PREFIX.size
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
        if magic != _MAGIC:
            raise ChannelError(f"a frame begins with {_MAGIC!r}, not with {magic!r}")
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
