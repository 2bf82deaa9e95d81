"""The envelope of a JSON request without MQTT 5: `reply_to`, `id` and `deadline_s` beside the model's inputs.

Promises: finds three keys at the top level of a JSON object without building the rest of it, in one pass,
with no recursion, so that a body of megabytes costs the event loop milliseconds and no memory. It checks
no more of the body than it needs: the worker parses all of it, strictly.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Final

from agent.errors import InputError

# An identifier, not a document.
MAX_ID_CHARACTERS: Final = 256
MAX_REPLY_CHARACTERS: Final = 1024
# A larger nesting is no tensor.
MAX_DEPTH: Final = 64
# Strings, brackets and keys; each costs 0.3 us here. A 224 x 224 picture as nested arrays has 1400.
MAX_MARKS: Final = 100_000

# The protocol knows five.
MAX_MEMBERS: Final = 32

_SPACE: Final = re.compile(rb"[ \t\r\n]*")
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR: Final = re.compile(rb"[^,}\]\s\"\[{]+")
_STRUCTURE: Final = re.compile(rb'["\[\]{}]')
_KEYS: Final = {b'"reply_to"': "reply_to", b'"id"': "id", b'"deadline_s"': "deadline_s"}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a request without properties says about itself.

    Attributes
    ----------
    reply_to
        Where the answer should go.
    id
        The requester's name for it.
    deadline_s
        Seconds from its arrival until the answer is of no use.
    """

    reply_to: str | None = None
    id: str | None = None
    deadline_s: float | None = None


def read_envelope(body: bytes) -> Envelope:
    """Find the envelope in a JSON body.

    Raises
    ------
    InputError
        If the body is no JSON object, or a key of the envelope has a value of another type or length.
    """
    at = _space(body, 0)
    if body[at : at + 1] != b"{":
        raise InputError("expected a JSON object with reply_to, got something else")
    found: dict[str, object] = {}
    members = 0
    at = _space(body, at + 1)
    while body[at : at + 1] != b"}":
        key = _STRING.match(body, at)
        members += 1
        if members > MAX_MEMBERS:
            raise InputError(f"expected at most {MAX_MEMBERS} keys in the JSON object, got more")
        if key is None:
            raise InputError(f"expected a key at byte {at} of the JSON object")
        at = _space(body, key.end())
        if body[at : at + 1] != b":":
            raise InputError(f"expected ':' at byte {at} of the JSON object")
        start = _space(body, at + 1)
        at = _skip_value(body, start)
        name = _KEYS.get(key.group())
        if name is not None:
            found[name] = _scalar(name, body[start:at])
        at = _space(body, at)
        if body[at : at + 1] == b",":
            at = _space(body, at + 1)
        elif body[at : at + 1] != b"}":
            raise InputError(f"expected ',' or '}}' at byte {at} of the JSON object")
    return Envelope(
        reply_to=_text("reply_to", found.get("reply_to"), MAX_REPLY_CHARACTERS),
        id=_text("id", found.get("id"), MAX_ID_CHARACTERS),
        deadline_s=_seconds(found.get("deadline_s")),
    )


def _space(body: bytes, at: int) -> int:
    match = _SPACE.match(body, at)
    assert match is not None
    return match.end()


def _skip_value(body: bytes, at: int) -> int:
    first = body[at : at + 1]
    if first == b'"':
        match = _STRING.match(body, at)
    elif first in (b"{", b"["):
        return _skip_nested(body, at)
    else:
        match = _SCALAR.match(body, at)
    if match is None:
        raise InputError(f"expected a JSON value at byte {at}")
    return match.end()


def _skip_nested(body: bytes, at: int) -> int:
    depth = 0
    for _ in range(MAX_MARKS):
        match = _STRUCTURE.search(body, at)
        if match is None:
            raise InputError("the JSON body ends within an array or object")
        mark = match.group()
        if mark == b'"':
            string = _STRING.match(body, match.start())
            if string is None:
                raise InputError("the JSON body ends within a string")
            at = string.end()
            continue
        at = match.end()
        depth += 1 if mark in b"[{" else -1
        if depth > MAX_DEPTH:
            raise InputError(f"expected JSON nested at most {MAX_DEPTH} deep, got more")
        if depth == 0:
            return at
    raise InputError(f"expected at most {MAX_MARKS} strings and brackets in one value, got more")


def _scalar(name: str, raw: bytes) -> object:
    limit = 6 * max(MAX_ID_CHARACTERS, MAX_REPLY_CHARACTERS)  # a character takes up to six bytes as \uXXXX
    if len(raw) > limit:
        raise InputError(f"{name}: expected at most {limit} bytes, got {len(raw)}")
    try:
        return json.loads(raw)
    except ValueError as error:
        raise InputError(f"{name}: {error}") from error


def _text(name: str, value: object, limit: int) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > limit:
        raise InputError(f"{name}: expected a string of at most {limit} characters")
    return value


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise InputError("deadline_s: expected a positive number of seconds")
    return float(value)
