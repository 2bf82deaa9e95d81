"""The kinds of frames between the agent and a worker, and their bytes.

`agent.worker.channel` describes when each of them is sent.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, get_args

from agent.errors import ChannelError

MAGIC: Final = b"EBC1"
PREFIX: Final = struct.Struct("<4sIQ")

# What a worker tells through its gate: the version of Landlock's ABI, and whether there is a filter.
SANDBOX_REPORT: Final = struct.Struct("=B?")
# What the template of workers answers: a process id, an errno below 0, or 0 once, when it is ready.
FORK_REPLY: Final = struct.Struct("=i")
# What a request for a worker brings: its channel, what becomes its standard error, its end of the gate.
FORK_DESCRIPTORS: Final = 3

# A header names tensors and has one message: a few hundred bytes. The limit keeps a faulty worker from making
# the agent parse megabytes of JSON.
MAX_HEADER_BYTES: Final = 64 * 1024

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Load:
    """The first frame: which bundle to serve, and within which limits.

    Attributes
    ----------
    files
        Names of the bundle's members (`mod.so`, `mod.json`, ...), in the order of the descriptors.
    threads
        Threads of a kernel; 0 for the kernel library's default.
    cpus
        Processors that the worker may run on; empty for those it inherits.
    memory_bytes
        Address space that loading and serving the model may add to the worker's; 0 for no limit.
    cpu_s
        Processor seconds over all threads until the agent allows more; 0 for no limit.
    max_pixels
        Pixels of the largest image that is decoded; 0 for the decoder's default.
    sessions, session_idle_s, session_bytes
        How many sessions of clients are kept, after how many seconds an unused one ends, and bytes of
        what all of them keep.
    compute_limit_s
        Seconds after which the agent ends a worker; a long recording is refused before that. 0 for no limit.
    require_sandbox
        Refuse to load unless the sandbox is complete.
    batch
        Compute waiting requests together, if the model declares a batch.
    batch_delay_s
        How long after its arrival a request waits for others.
    """

    files: tuple[str, ...]
    threads: int = 0
    cpus: tuple[int, ...] = ()
    memory_bytes: int = 0
    cpu_s: int = 0
    max_pixels: int = 0
    require_sandbox: bool = False
    sessions: int = 16
    session_idle_s: float = 600.0
    session_bytes: int = 64 << 20
    compute_limit_s: float = 0.0
    batch: bool = False
    batch_delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One inference request; its payload is the one that arrived over MQTT.

    Attributes
    ----------
    seq
        The agent's number for it, which the answer repeats.
    content_type
        As the requester gave it, with its parameters; an empty one means `application/json`.
    tensors
        The user properties `tensor` in their order, `name;FP32;1,3,4`, for raw tensors.
    accept
        Content type that the answer should have, or None.
    id
        The requester's name for it, which JSON answers repeat, or None; the body's own `id` has precedence.
    received_s
        When the agent received it (`time.monotonic`); the answer's `queue_us` runs from then until the worker
        takes it.
    deadline_s
        When its answer becomes useless (`time.monotonic`), or None.
    client_json
        The requester has no user properties (MQTT 3.1.1): the JSON answer has `status` and `message`.
    client
        Who sent it; its sessions are its own.
    session, step, session_end
        The session, the number of this request in it or None, and whether the session ends with it.
    by_itself
        Not to be computed with others: a worker died that had it.
    """

    seq: int
    content_type: str = ""
    tensors: tuple[str, ...] = ()
    accept: str | None = None
    id: str | None = None
    received_s: float = 0.0
    deadline_s: float | None = None
    client_json: bool = False
    client: str = ""
    session: str | None = None
    step: int | None = None
    session_end: bool = False
    by_itself: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """Processors and threads from the next request on.

    Attributes
    ----------
    cpus
        Processors that the worker may run on.
    threads
        Threads of a kernel, at least 1.
    """

    cpus: tuple[int, ...]
    threads: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Answer the requests that were sent before this, then end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and its recorded samples came out as recorded.

    Attributes
    ----------
    load_s
        Seconds from the load frame to this one.
    self_test_error
        Largest relative error of the samples' outputs.
    rss_bytes
        Resident memory of the worker.
    threads
        Threads of a kernel; 0 if the library does not say.
    landlock
        Version of Landlock's ABI that is in force; 0 if the kernel has none.
    seccomp
        Whether a system call filter is in force.
    sandbox
        One line about all parts, for the log.
    threads_bounded
        Whether the agent decides about each new thread.
    """

    load_s: float
    self_test_error: float
    rss_bytes: int
    threads: int
    landlock: int
    seccomp: bool
    sandbox: str
    threads_bounded: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The model could not be loaded.

    Attributes
    ----------
    code
        An error's code, `ERR_SELF_TEST` and the like.
    message
        One line.
    hint
        What to do about it, or None.
    """

    code: str
    message: str
    hint: str | None = None


# A recording is computed window by window, and its length is the client's choice.
NOT_COMPARABLE: Final = (0,)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request; its payload goes to the requester unchanged.

    Attributes
    ----------
    seq
        The request's number.
    status
        200, 400, 408, 415 or 500.
    message
        Empty for 200, otherwise one line.
    content_type
        The payload's content type; empty if there is no payload.
    tensors
        The user properties `tensor` of raw tensors, in their order.
    queue_us, decode_us, compute_us, encode_us
        Microseconds from `received_s` until the worker began, for decoding and preprocessing, for the graph,
        and for postprocessing and encoding.
    step
        The number of this request in its session, or None.
    sessions, evicted
        How many sessions the model has, and how many ended early since it was loaded.
    bucket
        The sizes of the bucket that computed it; empty for a model of one size, `NOT_COMPARABLE` if
        `compute_us` says nothing about the model's speed.
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
    step: int | None = None
    sessions: int = 0
    evicted: int = 0
    bucket: tuple[int, ...] = ()


Header = Load | Request | Share | Stop | Ready | Failed | Answer
_KINDS: Final[Mapping[str, type[Header]]] = MappingProxyType(
    {kind.__name__.lower(): kind for kind in get_args(Header)}
)


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _is_str(value: object) -> bool:
    return type(value) is str


def _is_float(value: object) -> bool:
    return math.isfinite(value) if type(value) is float else _is_int(value)


# The check of a field, by its annotation as it is written above.
_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "bool": lambda value: type(value) is bool,
        "int": _is_int,
        "str": _is_str,
        "float": _is_float,
        "int | None": lambda value: value is None or _is_int(value),
        "str | None": lambda value: value is None or _is_str(value),
        "float | None": lambda value: value is None or _is_float(value),
        "tuple[str, ...]": lambda value: type(value) is list and all(map(_is_str, value)),
        "tuple[int, ...]": lambda value: type(value) is list and all(map(_is_int, value)),
    }
)


# Each kind's fields and their checks, prepared once instead of for each frame.
_NAMES: Final[Mapping[type[Header], tuple[str, tuple[str, ...]]]] = MappingProxyType(
    {cls: (kind, tuple(item.name for item in fields(cls))) for kind, cls in _KINDS.items()}
)
_FIELDS: Final[Mapping[str, tuple[tuple[str, Callable[[Any], bool], str], ...]]] = MappingProxyType(
    {
        kind: tuple((item.name, _CHECKS[str(item.type)], str(item.type)) for item in fields(cls))
        for kind, cls in _KINDS.items()
    }
)
# json.dumps would make an encoder for each call with options.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER: Final = json.JSONDecoder()


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
    # Not dataclasses.asdict, which makes deep copies and takes three times as long.
    kind, names = _NAMES[type(header)]
    content: dict[str, Any] = {"kind": kind}
    for name in names:
        content[name] = getattr(header, name)
    raw = _ENCODER.encode(content).encode()
    if len(raw) > MAX_HEADER_BYTES:
        raise ChannelError(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {len(raw)}")
    nbytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    return PREFIX.pack(MAGIC, len(raw), nbytes) + raw, payload


def decode_header(raw: Buffer) -> Header:
    """Parse a frame's header.

    Raises
    ------
    ChannelError
        If it is not one of the kinds, or has other fields.
    """
    try:
        content = _DECODER.decode(str(raw, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise ChannelError(f"expected a header in JSON: {error}") from error
    kind = content.pop("kind", None) if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ChannelError(f"expected a frame among {', '.join(_KINDS)}, got {kind!r:.80}")
    expected = _FIELDS[kind]
    values: list[Any] = []
    for name, check, described in expected:
        if name not in content:
            break
        value = content[name]
        if not check(value):
            raise ChannelError(f"expected {name} of the frame {kind} to be {described}, got {value!r:.80}")
        values.append(tuple(value) if type(value) is list else value)
    if not len(values) == len(expected) == len(content):
        names = ", ".join(name for name, _, _ in expected)
        raise ChannelError(f"expected the frame {kind} to have {names}, got {sorted(content)!r:.400}")
    return _KINDS[kind](*values)
