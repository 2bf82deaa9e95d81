"""What a payload that could not be read really is, for the error's message.

Authors of clients forget the content type, send base64 instead of bytes, or send nothing. Promises a guess
by the payload's beginning, or None. The guess decides nothing: it is only told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agent.wire.beginnings import content_type_of
from agent.wire.content_types import JPEG, PNG, WAV

_READ: Final = 32  # bytes; the longest beginning is shorter


@dataclass(frozen=True, slots=True)
class PayloadKind:
    """A guess at what the payload is, such as `a JPEG picture`, and what to do about it.

    `media_type` is the content type that it should have been sent with; empty if there is none.
    """

    text: str
    hint: str
    media_type: str = ""


_BASE64_HINT: Final = (
    "send the bytes of the file themselves; in JSON, as a BYTES tensor in base64 (docs/mqtt.md, Requests)"
)
_CONVERT: Final = "convert it to JPEG or PNG"
_READABLE: Final = {
    content_type: PayloadKind(text, f"set the Content Type to {content_type}", content_type)
    for content_type, text in ((JPEG, "a JPEG picture"), (PNG, "a PNG picture"), (WAV, "a WAV recording"))
}
_BEGINNINGS: Final = (
    (b"GIF8", PayloadKind("a GIF picture", _CONVERT)),
    (b"data:", PayloadKind("a data URL", _BASE64_HINT)),
    (b"/9j/", PayloadKind("a JPEG picture in base64", _BASE64_HINT)),
    (b"iVBORw0KGgo", PayloadKind("a PNG picture in base64", _BASE64_HINT)),
    (b"UklGR", PayloadKind("a RIFF file in base64", _BASE64_HINT)),
)
_WEBP: Final = PayloadKind("a WebP picture", _CONVERT)
_FTYP: Final = PayloadKind("a HEIF, AVIF or MP4 file", _CONVERT)
_EMPTY: Final = PayloadKind("empty", "send the request as the message's payload")


def kind_of(payload: bytes | memoryview) -> PayloadKind | None:
    """Return what a payload looks like, or None if it looks like nothing that is known."""
    start = bytes(payload[:_READ])
    if not start:
        return _EMPTY
    if (content_type := content_type_of(start)) is not None:
        return _READABLE[content_type]
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return _WEBP
    if start[4:8] == b"ftyp":
        return _FTYP
    return next((kind for begin, kind in _BEGINNINGS if start.startswith(begin)), None)
