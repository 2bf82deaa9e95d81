"""What a payload that could not be read really is, for the error's message.

Authors of clients forget the content type, send base64 instead of bytes, or send nothing. Promises a guess
by the payload's beginning, or None. The guess decides nothing: it is only told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agent.wire.content_types import JPEG, PNG, WAV

_READ: Final = 32  # bytes; the longest beginning is shorter


@dataclass(frozen=True, slots=True)
class PayloadKind:
    """A guess.

    Attributes
    ----------
    text
        What the payload is, such as `a JPEG picture`.
    hint
        What to do about it.
    media_type
        The content type that it should have been sent with, or empty if there is none.
    """

    text: str
    hint: str
    media_type: str = ""


_BASE64_HINT: Final = (
    "send the bytes of the file themselves; in JSON, as a BYTES tensor in base64 (docs/mqtt.md, Requests)"
)
_CONVERT: Final = "convert it to JPEG or PNG"
_BEGINNINGS: Final = (
    (b"\xff\xd8\xff", PayloadKind("a JPEG picture", f"set the Content Type to {JPEG}", JPEG)),
    (b"\x89PNG\r\n", PayloadKind("a PNG picture", f"set the Content Type to {PNG}", PNG)),
    (b"GIF8", PayloadKind("a GIF picture", _CONVERT)),
    (b"data:", PayloadKind("a data URL", _BASE64_HINT)),
    (b"/9j/", PayloadKind("a JPEG picture in base64", _BASE64_HINT)),
    (b"iVBORw0KGgo", PayloadKind("a PNG picture in base64", _BASE64_HINT)),
    (b"UklGR", PayloadKind("a RIFF file in base64", _BASE64_HINT)),
)
_RIFF: Final = {
    b"WAVE": PayloadKind("a WAV recording", f"set the Content Type to {WAV}", WAV),
    b"WEBP": PayloadKind("a WebP picture", _CONVERT),
}
_FTYP: Final = PayloadKind("a HEIF, AVIF or MP4 file", _CONVERT)
_EMPTY: Final = PayloadKind("empty", "send the request as the message's payload")


def kind_of(payload: bytes | memoryview) -> PayloadKind | None:
    """Return what a payload looks like, or None if it looks like nothing that is known."""
    start = bytes(payload[:_READ])
    if not start:
        return _EMPTY
    if start[:4] == b"RIFF":
        return _RIFF.get(start[8:12])
    if start[4:8] == b"ftyp":
        return _FTYP
    return next((kind for begin, kind in _BEGINNINGS if start.startswith(begin)), None)
