"""Send a recording while it arrives, such as a microphone's: a WAV in a pipe, as the steps of a session.

Promises that the last part is also sent when the pipe ends. Leaves printing to the caller.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

from agent.errors import InputError
from agent.runtime.wav import read_recording
from builder.errors import FleetError
from edgebundle.request import Request

if TYPE_CHECKING:
    from edgebundle.answer import Answer
    from edgebundle.async_model import AsyncModel

# A part: a person does not notice it, and a message costs a device a few milliseconds.
PART_S: Final = 0.25
# A head of a WAV without its samples; recorders write 44 bytes, and programs some chunks more.
MAX_HEAD_BYTES: Final = 1 << 16
_HINT: Final = "arecord -q -t wav -f S16_LE -r 16000 writes one"
_CHUNK: Final = struct.Struct("<4sI")


@dataclass(frozen=True, slots=True)
class Piped:
    """A WAV that is still arriving, with the first bytes already read."""

    head: bytes


async def listen(
    model: AsyncModel, piped: Piped, source: BinaryIO, deadline_s: float, heard: Callable[[Answer], None]
) -> Answer:
    """Send a recording in parts until it ends; return the last answer.

    Parameters
    ----------
    model
        A model that declares audio.
    piped
        The first bytes.
    source
        The rest, read in a thread of its own.
    deadline_s
        Of each part.
    heard
        Called with each answer except the last.

    Raises
    ------
    FleetError
        If it is not a WAV that a device takes.
    ClientError
        If a part gets no answer.
    """
    head = await asyncio.to_thread(_head, piped.head, source)
    try:
        form = read_recording(head, "audio/wav")
    except InputError as error:
        raise FleetError(f"standard input: {error}", hint=_HINT) from error
    width = form.channels * form.bits // 8
    size = max(1, round(form.rate * PART_S)) * width
    async with model.session() as session:
        while part := await asyncio.to_thread(_read, source, size):
            whole = part[: len(part) - len(part) % width]
            heard(await session(audio=Request.sound(head + whole).body, deadline_s=deadline_s))
        return await session.finish(deadline_s=deadline_s)


def _read(source: BinaryIO, size: int) -> bytes:
    parts = []
    while size and (part := source.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _head(head: bytes, source: BinaryIO) -> bytes:
    """Read up to the samples; return it with a length that means: up to the end."""
    while len(head) < MAX_HEAD_BYTES:
        chunk = _read(source, _CHUNK.size)
        if len(chunk) < _CHUNK.size:
            break
        name, size = _CHUNK.unpack(chunk)
        if name == b"data":
            return head + _CHUNK.pack(name, 0)
        head += chunk + _read(source, min(size + size % 2, MAX_HEAD_BYTES))
    raise FleetError(
        "standard input: expected a WAV with samples, got something else",
        hint=_HINT,
    )
