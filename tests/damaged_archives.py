"""Files that should be `.npz` files of arrays, and are damaged, each in another way."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Final

import numpy as np

_HEADER: Final = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4, 8), }"


def _array(header: bytes = _HEADER) -> bytes:
    """An array's file, whose header may be wrong; its numbers do not compress."""
    padded = header.ljust(117) + b"\n"
    values = np.random.default_rng(0).bytes(4 * 8 * 4)
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + values


def _archive(content: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("x.npy", content)
    return file.getvalue()


def _with_wrong_bytes(raw: bytes, start: int, count: int) -> bytes:
    return raw[:start] + b"\xff" * count + raw[start + count :]


# Behind the names of the archive and its member, the compressed data begin at byte 35.
_DEFLATED: Final = _archive(_array(), zipfile.ZIP_DEFLATED)
_LZMA: Final = _archive(_array(), zipfile.ZIP_LZMA)
DAMAGED: Final = {
    "the compressed data": _with_wrong_bytes(_DEFLATED, 35, 40),
    "the data of lzma": _with_wrong_bytes(_LZMA, 44, 40),
    "the end": _DEFLATED[:-30],
    "a sum of the data": _with_wrong_bytes(_archive(_array()), 200, 4),
    "a bracket of the shape": _archive(_array(_HEADER.replace(b"(", b"\xe6"))),
    "the shape": _archive(_array(_HEADER.replace(b"4, 8", b"1 << 50, "))),
    "a shape that no memory has": _archive(_array(_HEADER.replace(b"4, 8", b"4, 99999999999999"))),
    "the type": _archive(_array(_HEADER.replace(b"<f4", b"<q9"))),
    "an array without an archive": _array(),
    "a member that is no array": _archive(b"text"),
}


def write(folder: Path, which: str) -> Path:
    """Write one of `DAMAGED`."""
    path = folder / "damaged.npz"
    path.write_bytes(DAMAGED[which])
    return path
