"""A worker that has been taken over: it answers each request with what the request's number selects.

Some answers are frames with odd values, some are no frames at all, and sometimes it just ends.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import sys
from dataclasses import asdict, fields

from agent.worker.channel import Channel
from agent.worker.frames import MAGIC, PREFIX, Answer, Load, Ready, Request, Share, Stop, encode

_TEXTS = (
    "",
    "a\0b",
    "\ud800",
    "é" * 300,
    "x" * 22_000,
    "\x1b[2J",
    "image/png",
    "application/json",
    "a\nb",
    "+/#",
)
_NUMBERS = tuple(
    field.name for field in fields(Answer) if field.type in ("int", "int | None") and field.name != "seq"
)
_INTEGERS = (0, 1, -1, 99, 199, 200, 400, 408, 503, 999, 2**31, 2**53, 2**62, -(2**62))


def main() -> None:
    """Serve until the agent ends the connection."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel(connection)
    loaded = channel.receive_load()
    assert loaded is not None
    frame, descriptors = loaded
    for descriptor in descriptors:
        os.close(descriptor)
    assert isinstance(frame.header, Load)
    channel.send(Ready(0.0, 0.0, 0, 1, 6, True, "a hostile worker"))
    while (received := channel.receive()) is not None:
        header = received.header
        if isinstance(header, Stop):
            return
        if isinstance(header, Share):
            continue
        assert isinstance(header, Request)
        chance = random.Random(bytes(received.payload))
        connection.sendall(hostile_frame(chance, header.seq))
        if chance.randrange(40) == 0:
            os._exit(chance.randrange(256))


def hostile_frame(chance: random.Random, seq: int) -> bytes:
    """Return one answer, with anything in it."""
    # Of the protocol's own fields: a frame that lacks one is refused before anything in it is looked at.
    valid = Answer(seq, 200, content_type="application/octet-stream", tensors=("y;UINT8;1",))
    answer: dict[str, object] = {"kind": "answer", **asdict(valid)}
    for _ in range(chance.randrange(4)):
        match chance.randrange(8):
            case 0:
                answer["content_type"] = chance.choice(_TEXTS)
            case 1:
                answer["message"] = chance.choice(_TEXTS)
            case 2:
                answer["tensors"] = [
                    chance.choice(_TEXTS) for _ in range(chance.choice((0, 1, 3, 300, 5000)))
                ]
            case 3:
                answer["status"] = chance.choice(_INTEGERS)
            case 4:
                answer[chance.choice(_NUMBERS)] = chance.choice((*_INTEGERS, None))
            case 5 if chance.randrange(4) == 0:
                answer["seq"] = chance.choice((seq + 1, seq - 1, *_INTEGERS))
            case 6 if chance.randrange(6) == 0:
                answer.pop(chance.choice(sorted(answer)))
            case 7 if chance.randrange(6) == 0:
                answer["kind"] = chance.choice(("ready", "load", "request", "", "x" * 1000))
    header = json.dumps(answer).encode()
    payload = chance.randbytes(chance.choice((0, 1, 4, 5000, 100_000)))
    raw = PREFIX.pack(MAGIC, len(header), len(payload)) + header + payload
    if chance.randrange(12) == 0:
        raw = damage(chance, raw)
    return raw


def damage(chance: random.Random, raw: bytes) -> bytes:
    """Return a frame with a few other bytes, often in its lengths."""
    out = bytearray(raw)
    for _ in range(chance.choice((1, 2, 8))):
        match chance.randrange(5):
            case 0:
                out[chance.randrange(len(out))] = chance.randrange(256)
            case 1:
                del out[: chance.randrange(1, 20)]
                out = out or bytearray(b"\0")
            case 2:
                out[8:16] = struct.pack("<Q", chance.choice((2**63, 2**32, 2**26 + 1, 0, 7)))
            case 3:
                out[4:8] = struct.pack("<I", chance.choice((2**31, 2**16 + 1, 0, 3)))
            case _:
                out += chance.randbytes(50)
    return bytes(out)


def valid_frames() -> tuple[bytes, ...]:
    """Return one frame of some kinds, to be damaged."""
    kinds = (Ready(0.0, 0.0, 0, 1, 6, True, "x"), Stop(), Share((0, 1), 2), Request(1, "application/json"))
    return tuple(b"".join(map(bytes, encode(kind, b"payload"))) for kind in kinds)


if __name__ == "__main__":
    main()
