"""The envelope of a JSON request without MQTT 5: `reply_to`, `id` and `deadline_s` beside the model's inputs.

Promises: `read_envelope` finds these three keys at the top level of a JSON object in one pass, without
recursion and without building the rest of the object. A body of several megabytes costs the event loop
milliseconds and no memory.
Leaves to others: everything else in the body, which the worker parses strictly.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from agent.errors import InputError
from agent.wire import document
from agent.wire.topics import MAX_TOPIC_CHARACTERS

# An id names a request; it is not a place for data.
MAX_ID_CHARACTERS: Final = 256
# Tensors have at most 16 dimensions, and nothing else in a request is nested deeply.
MAX_DEPTH: Final = 64
# Strings and brackets in one value; each costs 0.3 us here. A 224 x 224 picture as nested arrays has 1400.
MAX_MARKS: Final = 100_000
# Keys of the object; the Open Inference Protocol and the envelope have eight.
MAX_MEMBERS: Final = 32

_SPACE: Final = re.compile(rb"[ \t\r\n]*")
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR: Final = re.compile(rb"[^,}\]\s\"\[{]+")
_STRUCTURE: Final = re.compile(rb'["\[\]{}]')
_KEYS: Final = {b'"reply_to"': "reply_to", b'"id"': "id", b'"deadline_s"': "deadline_s"}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a request without MQTT 5 properties says about itself.

    Attributes
    ----------
    reply_to
        The topic for the answer.
    id
        The requester's name for the request.
    deadline_s
        Seconds from its arrival until the answer is of no use.
    """

    reply_to: str | None = None
    id: str | None = None
    deadline_s: float | None = None


def read_envelope(body: bytes) -> Envelope:
    """Find the envelope in a JSON body.

    If a key is repeated, its last value counts: the request can then be answered, and the worker refuses it.

    Raises
    ------
    InputError
        If the body is not a JSON object, or a value of the envelope has the wrong type or is too long.
    """
    at = _space(body, 0)
    if body[at : at + 1] != b"{":
        raise InputError("expected a JSON object with reply_to, got something else")
    found: dict[str, object] = {}
    count = 0
    at = _space(body, at + 1)
    while body[at : at + 1] != b"}":
        key = _STRING.match(body, at)
        count += 1
        if count > MAX_MEMBERS:
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
        reply_to=_text("reply_to", found.get("reply_to"), MAX_TOPIC_CHARACTERS),
        id=_text("id", found.get("id"), MAX_ID_CHARACTERS),
        deadline_s=_seconds(found.get("deadline_s")),
    )


def write_envelope(envelope: Envelope, body: bytes) -> bytes:
    """Return a request's JSON body with the envelope's keys, which replace those of the same name.

    Raises
    ------
    FormatError
        If the body is not a JSON object.
    """
    keys = {"reply_to": envelope.reply_to, "id": envelope.id, "deadline_s": envelope.deadline_s}
    given = {key: value for key, value in keys.items() if value is not None}
    return document.encode({**given, **document.parse_object(body, "the request", len(body)), **given})


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
    limit = 6 * MAX_TOPIC_CHARACTERS + 2  # a character takes up to six bytes as \uXXXX
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
        raise InputError(
            f"{name}: expected a string of at most {limit} characters, got {document.shown(value)}"
        )
    return value


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    number = document.number(value)
    if number is None or number <= 0:
        raise InputError(f"deadline_s: expected a positive number of seconds, got {document.shown(value)}")
    return float(number)
