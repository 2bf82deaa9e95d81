"""JSON documents: one encoder, a strict parser, and typed access for tolerant readers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from agent.bundle.strict_json import refuse_constant, short_integer, unique_object
from agent.errors import EndlessDataError, FormatError

# The largest document that an agent sends: metrics of 64 models, about 400 histogram buckets each, are 2 MiB.
MAX_AGENT_DOCUMENT_BYTES: Final = 4 << 20
# JSON values in a document from outside: reading one takes at most 0.15 us on the machine that docs/mqtt.md
# names. A desired document of 64 models with 8 sources each has 1500.
MAX_VALUES: Final = 5000
# In a document of an agent. Metrics of 64 models, about 400 histogram buckets each, have 100,000.
MAX_AGENT_DOCUMENT_VALUES: Final = 1 << 18
# Each of these bytes stands before at most one value; those within strings count too.
_VALUE_MARKS: Final = b",:[{"
# The longest text that a tolerant reader returns; names, versions and messages are shorter.
MAX_TEXT_CHARACTERS: Final = 1024
# JavaScript represents integers exactly up to this one, so every tool can.
MAX_SAFE_INTEGER: Final = 2**53 - 1
# An integer of 1024 bits and more cannot become a float.
_MAX_INTEGER_BITS: Final = 1023
# Longer values are cut in error messages.
_SHOWN_CHARACTERS: Final = 60

Members = Mapping[str, object]
"""A JSON object."""

_Value = TypeVar("_Value")


def encode(document: Members) -> bytes:
    """Write a document as JSON without spaces."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def parse_strictly(raw: bytes, what: str, max_bytes: int) -> object:
    """Parse JSON (RFC 8259) without duplicate keys, NaN or infinity; anything else raises FormatError.

    `what` is its name in error messages, as in "the desired document". One of more than `max_bytes`, or of
    more than `MAX_VALUES` values, raises EndlessDataError; it is not parsed.
    """
    _check_size(raw, what, max_bytes, MAX_VALUES)
    try:
        document: object = json.loads(
            raw, object_pairs_hook=unique_object, parse_constant=refuse_constant, parse_int=short_integer
        )
    except RecursionError as error:
        raise FormatError(f"{what} is nested too deeply") from error
    except ValueError as error:
        raise FormatError(f"{what} is not JSON: {error}") from error
    return document


def parse_object(
    raw: bytes,
    what: str,
    max_bytes: int = MAX_AGENT_DOCUMENT_BYTES,
    max_values: int = MAX_AGENT_DOCUMENT_VALUES,
) -> Members:
    """Parse a JSON object tolerantly: a repeated key has its last value.

    Anything else raises FormatError, and one of more bytes or values EndlessDataError.
    """
    _check_size(raw, what, max_bytes, max_values)
    try:
        document = json.loads(raw)
    except RecursionError as error:
        raise FormatError(f"{what} is nested too deeply") from error
    except ValueError as error:
        raise FormatError(f"{what} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise FormatError(f"{what}: expected a JSON object, got {shown(document)}")
    return document


def _check_size(raw: bytes, what: str, max_bytes: int, max_values: int) -> None:
    if len(raw) > max_bytes:
        raise EndlessDataError(f"{what}: expected at most {max_bytes} bytes, got {len(raw)}")
    values = sum(map(raw.count, _VALUE_MARKS))
    if values > max_values:
        raise EndlessDataError(f"{what}: expected at most {max_values} values in JSON, got about {values}")


def members(value: object) -> Members:
    """Return an object's members; none if it is not an object."""
    return value if isinstance(value, dict) else {}


def items(value: object) -> tuple[object, ...]:
    """Return an array's items; none if it is not an array."""
    return tuple(value) if isinstance(value, list) else ()


def text(value: object) -> str:
    """Return a string of at most `MAX_TEXT_CHARACTERS`; an empty one if it is not a string."""
    return value[:MAX_TEXT_CHARACTERS] if isinstance(value, str) else ""


def texts(value: object) -> tuple[str, ...]:
    """Return the strings of an array; other items are left out."""
    return tuple(text(item) for item in items(value) if isinstance(item, str))


def optional_text(value: object) -> str | None:
    """Return a string of at most `MAX_TEXT_CHARACTERS`; None if it is not a string."""
    return text(value) if isinstance(value, str) else None


def integer(value: object) -> int | None:
    """Return an integer; None if it is not one (a boolean is not)."""
    return value if type(value) is int else None


def number(value: object) -> float | None:
    """Return a finite number as it is, an integer or a float; None if it is not one (a boolean is not)."""
    if type(value) is int and abs(value) < 1 << _MAX_INTEGER_BITS:
        return value
    return value if type(value) is float and math.isfinite(value) else None


def format_time(time_s: float | None) -> str | None:
    """Write seconds since the epoch as ISO 8601 in UTC, to milliseconds; None for no time."""
    return None if time_s is None else datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")


def parse_time(value: object) -> float | None:
    """Read what `format_time` wrote; None if it is something else."""
    try:
        return datetime.fromisoformat(text(value)).timestamp()
    except (ValueError, OverflowError):
        return None


# How a member is read, by the declared type of its field.
_READERS: Final[Mapping[object, Callable[[object], object]]] = {
    "str": text,
    "str | None": optional_text,
    "int": lambda value: integer(value) or 0,
    "int | None": integer,
    "bool": lambda value: value is True,
    "tuple[str, ...]": texts,
}


# Metadata of a field that is not a member by itself: who reads the document gives its value.
APART: Final[Mapping[str, object]] = {"apart": True}


def form(
    read: Callable[[object], object], write: Callable[[Any], object] | None = None, key: str | None = None
) -> Mapping[str, object]:
    """Return the metadata of a field whose declaration does not say how it is read, written or called."""
    return {"read": read, "write": write, "key": key}


def choice(make: Callable[[str], object], what: str, *, optional: bool = False) -> Mapping[str, object]:
    """Return the metadata of a field with an enumeration; to read another text is a `FormatError`."""

    def read(value: object) -> object:
        try:
            return None if optional and value is None else make(value if isinstance(value, str) else "")
        except ValueError as error:
            raise FormatError(f"expected a {what}, got {shown(value)}") from error

    return form(read)


def _members(kind: object) -> dict[str, Field[object]]:
    listed = (each for each in fields(kind) if "apart" not in each.metadata)  # type: ignore[arg-type]  # a dataclass
    return {each.metadata.get("key") or each.name: each for each in listed}


def read(kind: type[_Value], value: object, **given: object) -> _Value:
    """Return a dataclass whose fields are an object's members, but for those that are `given`.

    A member of another type counts as absent.
    """
    found = members(value)
    for key, each in _members(kind).items():
        reader = each.metadata.get("read") or _READERS[each.type]
        given.setdefault(each.name, reader(found.get(key)))
    return kind(**given)


def nested(kind: type) -> Mapping[str, object]:
    """Return the metadata of a field with another dataclass."""
    return form(lambda value: read(kind, value), write)


def write(record: object) -> dict[str, object]:
    """Return a dataclass as the members that `read` reads, in the order of its fields."""
    found = {}
    for key, each in _members(record).items():
        value, how = getattr(record, each.name), each.metadata.get("write")
        found[key] = value if how is None else how(value)
    return found


def shown(value: object) -> str:
    """Return a value for an error message: ASCII, at most 60 characters."""
    printed = ascii(value)
    return printed if len(printed) <= _SHOWN_CHARACTERS else printed[: _SHOWN_CHARACTERS - 3] + "..."
