"""How files of the content types begin: pictures and recordings are known by their first bytes.

Promises to look at the beginning only. Leaves to others: whether the rest is such a file.
"""

from __future__ import annotations

from typing import Final

from agent.wire.content_types import JPEG, PNG, WAV

# RFC 2083, 3.1.
PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
# ISO 10918-1, B.1.1.3.
_JPEG: Final = b"\xff\xd8\xff"
# EBU Tech 3306: RF64 is a RIFF of more than 4 GiB.
_RIFF: Final = (b"RIFF", b"RF64")
# So many bytes of a file are enough.
HEAD_BYTES: Final = 12


def content_type_of(head: bytes) -> str | None:
    """Return the content type of a picture or a recording that begins like this; None if it is neither."""
    if head.startswith(PNG_SIGNATURE):
        return PNG
    if head.startswith(_JPEG):
        return JPEG
    return WAV if head.startswith(_RIFF) and head[8:12] == b"WAVE" else None
