# ruff: noqa: ANN401 - parsed JSON has no better type
"""Canonical JSON, and frozen dataclasses written in it.

Promises that a value has exactly one encoding (sorted keys, no spaces, ASCII only, numbers as Python prints
them) and that a record read back has exactly its declared fields and types. Leaves the meaning of the values
to each record's own `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from agent.bundle.strict_json import refuse_constant, unique_object
from agent.errors import FormatError

Record = TypeVar("Record")

# Our records are at most 6 deep. Printing takes more stack: Python can parse JSON that it cannot print.
_MAX_DEPTH: Final = 16

# Metadata of a field that was added after the first bundles were made: its key is left out if it is None.
LATER: Final[Mapping[str, bool]] = types.MappingProxyType({"later": True})

# 64-bit signed integers: readers in other languages have nothing larger.
_INT_RANGE: Final = range(-(1 << 63), 1 << 63)


def encode(value: object) -> bytes:
    """Return the canonical encoding of a JSON value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def parse(raw: bytes, what: str) -> Any:
    """Parse ASCII JSON in any layout, without duplicate keys, NaN or infinities.

    Parameters
    ----------
    raw
        The document, untrusted.
    what
        Its name in error messages, such as `manifest.json`.

    Raises
    ------
    FormatError
        If it is anything else, or is nested more than 16 deep.
    """
    try:
        # Decode first: json.loads would accept UTF-16 and UTF-32 as well.
        value = json.loads(
            raw.decode("ascii"), object_pairs_hook=unique_object, parse_constant=refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: expected JSON in ASCII: {_one_line(error)}") from error
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    if level:
        raise FormatError(f"{what}: nested more than {_MAX_DEPTH} deep")
    return value


def to_json(record: object) -> dict[str, Any]:
    """Return a frozen dataclass as a JSON object, each number in the type that its field declares."""
    hints = _hints(type(record))  # type: ignore[arg-type]  # a dataclass
    out = {
        field.name: _plain(value, hints[field.name])
        for field in dataclasses.fields(record)  # type: ignore[arg-type]  # a dataclass
        if (value := getattr(record, field.name)) is not None or "later" not in field.metadata
    }
    kind = getattr(record, "kind", None)
    return out if kind is None else {"kind": kind, **out}


def from_json(cls: type[Record], value: object, where: str) -> Record:
    """Make a record from a JSON object that has exactly its fields, each with its declared type.

    A field with the metadata `LATER` may be missing, and is then None; null is refused.

    Parameters
    ----------
    cls
        A frozen dataclass whose fields are str, int, float, bool, another such class, tuples or string-keyed
        mappings of those, or one of those or None. The `kind` of a class identifies it in a union.
    value
        The parsed JSON.
    where
        Its name in error messages, such as `manifest.target`.

    Raises
    ------
    FormatError
        If a key is missing or unknown, or a value has the wrong type or is refused by `cls`. The message
        names the place, what was expected there and what was found.
    """
    if not isinstance(value, dict):
        raise _mismatch(where, "an object", value)
    hints = _hints(cls)  # type: ignore[arg-type]  # a dataclass
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # a dataclass
    expected = {*names, "kind"} if hasattr(cls, "kind") else set(names)
    if unknown := sorted(value.keys() - expected):
        raise FormatError(f"{where} has an unknown key {unknown[0]!r:.80}")
    later = {field.name for field in dataclasses.fields(cls) if "later" in field.metadata}  # type: ignore[arg-type]
    if missing := sorted(expected - later - value.keys()):
        raise FormatError(f"{where} has no key {missing[0]!r}")
    if null := sorted(name for name in later & value.keys() if value[name] is None):
        raise FormatError(f"{where}.{null[0]}: expected a value or no such key, got null")
    fields = {name: _typed(hints[name], value[name], f"{where}.{name}") for name in names if name in value}
    try:
        return cls(**fields)
    except ValueError as error:
        raise FormatError(f"{where}: {_one_line(error)}") from error


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    # Annotations are text; evaluating those of a manifest takes longer than the rest of reading it.
    return types.MappingProxyType(get_type_hints(cls))


def _typed(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _typed_union(arguments, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _mismatch(where, "an array", value)
        if arguments[-1] is Ellipsis:
            arguments = arguments[:1] * len(value)
        elif len(arguments) != len(value):
            raise FormatError(f"{where}: expected {len(arguments)} elements, got {len(value)}")
        return tuple(
            _typed(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(arguments, value, strict=True))
        )
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _mismatch(where, "an object", value)
        return {key: _typed(arguments[1], v, f"{where}[{key!r:.80}]") for key, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_json(hint, value, where)  # type: ignore[arg-type]  # hint is a class
    # type() instead of isinstance(), because True is an int in Python, but not in JSON.
    if type(value) is not hint:
        raise _mismatch(
            where,
            {str: "a string", int: "an integer", float: "a number with a fraction", bool: "a boolean"}[hint],
            value,
        )
    if hint is int and value not in _INT_RANGE:
        raise FormatError(f"{where}: expected an integer of at most 64 bits")
    if hint is float and not math.isfinite(value):
        raise FormatError(f"{where}: expected a number that fits a double")
    return value


def _typed_union(members: tuple[Any, ...], value: Any, where: str) -> Any:
    if type(None) in members and value is None:
        return None
    members = tuple(m for m in members if m is not type(None))
    if len(members) == 1:
        return _typed(members[0], value, where)
    if not isinstance(value, dict):
        raise _mismatch(where, "an object", value)
    for member in members:
        if member.kind == value.get("kind"):
            return from_json(member, value, where)
    kinds = ", ".join(member.kind for member in members)
    raise FormatError(f"{where}.kind: expected one of {kinds}, got {value.get('kind')!r:.80}")


def _plain(value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if value is None:
        return None
    if origin in (Union, types.UnionType):
        members = [m for m in arguments if m is not type(None)]
        return _plain(value, members[0] if len(members) == 1 else type(value))
    if origin is tuple:
        return [
            _plain(v, arguments[0] if arguments[-1] is Ellipsis else arguments[i])
            for i, v in enumerate(value)
        ]
    if origin is not None and issubclass(origin, Mapping):
        return {key: _plain(v, arguments[1]) for key, v in value.items()}
    if dataclasses.is_dataclass(value):
        return to_json(value)
    return float(value) if hint is float else value


def _mismatch(where: str, expected: str, value: object) -> FormatError:
    return FormatError(f"{where}: expected {expected}, got {_describe(value)}")


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    return "an array" if isinstance(value, list) else f"{json.dumps(value):.80}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
