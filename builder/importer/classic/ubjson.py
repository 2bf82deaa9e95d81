"""Read Universal Binary JSON, the format in which XGBoost saves a model unless told otherwise.

Promises Python values as `json.loads` returns them, but arrays of numbers of one type as NumPy arrays.
Sizes are checked against the file before anything is allocated.

Source: the UBJSON specification, draft 12 (ubjson.org).
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np

# Nothing in a model is deeper than eight levels.
MAX_DEPTH: Final = 32
# Lists and objects take far more memory than the two bytes that they may have in the file.
MAX_CONTAINERS: Final = 1 << 22
# Numbers outside arrays of one type, and strings.
MAX_VALUES: Final = 1 << 24

_NUMBERS: Final = {"i": ">b", "U": ">B", "I": ">h", "l": ">i", "L": ">q", "d": ">f", "D": ">d"}
_INTEGERS: Final = frozenset("iUIlL")
_LITERALS: Final = {"T": True, "F": False, "Z": None}


def loads(raw: bytes) -> Any:  # noqa: ANN401 - as json.loads
    """Read a value.

    Raises `ValueError` if the bytes are not UBJSON, or exceed a limit.
    """
    reader = _Reader(raw)
    value = reader.value(reader.marker(), 0)
    if reader.place != len(raw):
        raise ValueError(f"expected the end at byte {reader.place} of {len(raw)}")
    return value


class _Reader:
    """A place in the bytes."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.place = 0
        self._containers = 0
        self._values = 0

    def marker(self) -> str:
        """Return the next byte that is no padding, and go on."""
        while True:
            if self.place >= len(self._raw):
                raise ValueError("expected more bytes, got the end of the file")
            found = chr(self._raw[self.place])
            self.place += 1
            if found != "N":
                return found

    def value(self, marker: str, depth: int) -> Any:  # noqa: ANN401
        """Read the value after its marker."""
        self._values += 1
        if self._values > MAX_VALUES:
            raise ValueError(f"expected at most {MAX_VALUES} values")
        if marker in _NUMBERS:
            return self._number(marker)
        if marker in _LITERALS:
            return _LITERALS[marker]
        if marker == "S":
            return self._text()
        if marker == "C":
            return self._bytes(1).decode("latin-1")
        if marker in "[{":
            self._containers += 1
            if depth >= MAX_DEPTH or self._containers > MAX_CONTAINERS:
                raise ValueError(f"expected at most {MAX_DEPTH} levels and {MAX_CONTAINERS} lists")
            return self._array(depth) if marker == "[" else self._object(depth)
        raise ValueError(f"expected a type at byte {self.place - 1}, got {marker!r}")

    def _array(self, depth: int) -> Any:  # noqa: ANN401
        marker = self.marker()
        if marker == "$":
            kind = self.marker()
            if kind not in _NUMBERS or self.marker() != "#":
                raise ValueError(f"expected an array of numbers and its length at byte {self.place}")
            dtype = np.dtype(_NUMBERS[kind].replace("b", "i1").replace("B", "u1"))
            count = self._length()
            raw = self._bytes(count * dtype.itemsize)
            return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))
        if marker == "#":
            count = self._length()
            if count > len(self._raw) - self.place:
                raise ValueError(f"expected {count} values, got the end of the file")
            return [self.value(self.marker(), depth + 1) for _ in range(count)]
        items = []
        while marker != "]":
            items.append(self.value(marker, depth + 1))
            marker = self.marker()
        return items

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        marker = self.marker()
        while marker != "}":
            self.place -= 1
            key = self._text()
            if key in found:
                raise ValueError(f"duplicate key {key:.40}")
            found[key] = self.value(self.marker(), depth + 1)
            marker = self.marker()
        return found

    def _text(self) -> str:
        return self._bytes(self._length()).decode("utf-8")

    def _length(self) -> int:
        marker = self.marker()
        if marker not in _INTEGERS:
            raise ValueError(f"expected a length at byte {self.place - 1}, got {marker!r}")
        length = int(self._number(marker))
        if length < 0:
            raise ValueError(f"expected a length, got {length}")
        return length

    def _number(self, marker: str) -> int | float:
        form = _NUMBERS[marker]
        (number,) = struct.unpack(form, self._bytes(struct.calcsize(form)))
        return number  # type: ignore[no-any-return]  # as `form` says

    def _bytes(self, count: int) -> bytes:
        if count > len(self._raw) - self.place:
            raise ValueError(
                f"expected {count} bytes at byte {self.place}, got {len(self._raw) - self.place}"
            )
        found = self._raw[self.place : self.place + count]
        self.place += count
        return found
