"""The envelope of a JSON request without MQTT 5: `reply_to`, `id`, `deadline_s` and the session.

Promises: `read_envelope` finds these keys at the top level of a JSON object, without recursion and
without building the rest of the object. It takes the same bounded time for a body of any length: it reads
from the start, and if it does not get to the end, from the end backwards. The keys may stand anywhere in a
short body, and before or behind the long arrays of a long one.
Leaves to others: everything else in the body, which the worker parses strictly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent.errors import InputError
from agent.wire import document
from agent.wire.session import SessionStep, make_step
from agent.wire.topics import MAX_TOPIC_CHARACTERS

# An id names a request; it is not a place for data.
MAX_ID_CHARACTERS: Final = 256
# Tensors have at most 16 dimensions, and nothing else in a request is nested deeply.
MAX_DEPTH: Final = 64
# Keys of the object; the Open Inference Protocol and the envelope have eight.
MAX_MEMBERS: Final = 32
# How much is read from either side: bytes, and strings and brackets. Both sides together take at most 1 ms
# on the machine that docs/mqtt.md names, which is 15 to 20 ms on a Raspberry Pi 3.
WINDOW_BYTES: Final = 32 * 1024
MAX_MARKS: Final = 600

_SPACE: Final = re.compile(rb"[ \t\r\n]*")
_SCALAR: Final = re.compile(rb"[^,:}\]\s\"\[{]+")
_STRUCTURE: Final = re.compile(rb'["\[\]{}]')
# A string without its closing quote.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# The same, read backwards: a quote belongs to the string if an odd number of backslashes precedes it. Nothing
# follows the group, so it never backtracks. It must not be possessive: Python before 3.11.5 gets possessive
# groups wrong in which something backtracks (https://github.com/python/cpython/issues/106052).
_BACKWARD_STRING: Final = re.compile(rb'"[^"]*+(?:"\\(?:\\\\)*+(?!\\)[^"]*+)*')
_KEYS: Final = {
    f'"{key}"'.encode(): key
    for key in ("reply_to", "id", "deadline_s", "session", "session_step", "session_end")
}


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
    session
        Which step of which session it is, or None.
    """

    reply_to: str | None = None
    id: str | None = None
    deadline_s: float | None = None
    session: SessionStep | None = None


def read_envelope(body: bytes) -> Envelope:
    """Find the envelope in a JSON body; a value that has the wrong type or is too long raises InputError.

    If a key is repeated, its last value counts: the request can then be answered, and the worker refuses it.
    """
    found: dict[str, bytes] = {}
    try:
        # Copied: a large body is a bytearray, whose parts have no hash. One byte more says that it goes on.
        _read_forward(_Window(bytes(body[: WINDOW_BYTES + 1]), _STRING, opening=b"[{"), found)
    except _EndOfWindowError:
        # Copied, so that both directions use the same functions.
        tail: dict[str, bytes] = {}
        _read_backward(_Window(bytes(body[: -WINDOW_BYTES - 1 : -1]), _BACKWARD_STRING, opening=b"]}"), tail)
        found |= tail
    return Envelope(
        reply_to=_text("reply_to", found.get("reply_to"), MAX_TOPIC_CHARACTERS),
        id=_text("id", found.get("id"), MAX_ID_CHARACTERS),
        deadline_s=_seconds(found.get("deadline_s")),
        session=_session(found),
    )


def write_envelope(envelope: Envelope, body: bytes) -> bytes:
    """Return a request's JSON body with the envelope's keys, which replace those of the same name.

    A body that is not a JSON object raises FormatError.
    """
    session = envelope.session
    keys = {
        "reply_to": envelope.reply_to,
        "id": envelope.id,
        "deadline_s": envelope.deadline_s,
        "session": None if session is None else session.name,
        "session_step": None if session is None else session.step,
        "session_end": True if session is not None and session.end else None,
    }
    given = {key: value for key, value in keys.items() if value is not None}
    return document.encode(
        {**given, **document.parse_object(body, "the request", len(body), len(body)), **given}
    )


class _EndOfWindowError(Exception):
    """The part of the body that may be read ends here."""


class _Window:
    """The first bytes of a JSON body, or of its end backwards, read with a limited number of steps.

    `string` is the pattern of a string in it, without the closing quote, and `opening` the brackets that
    begin a value.
    """

    def __init__(self, text: bytes, string: re.Pattern[bytes], *, opening: bytes) -> None:
        self.text = text
        self._string = string
        self._opening = opening
        self._end = min(len(text), WINDOW_BYTES)
        self._marks = MAX_MARKS

    def space(self, at: int) -> int:
        """Return the offset behind white space."""
        match = _SPACE.match(self.text, at, self._end)
        assert match is not None
        return match.end()

    def character(self, at: int) -> bytes:
        """Return one byte; none at the end of the body."""
        if at >= self._end < len(self.text):
            raise _EndOfWindowError
        return self.text[at : at + 1]

    def string(self, at: int) -> int:
        """Return the offset behind the string that begins here."""
        self._marks -= 1
        match = self._string.match(self.text, at, self._end)
        quote = self._end if match is None else match.end()
        if quote >= self._end or self.text[quote : quote + 1] != b'"':
            raise self._missing(f"expected a string at byte {at}")
        self.character(quote + 1)  # backwards, what follows decides where it ends
        return quote + 1

    def value(self, at: int) -> int:
        """Return the offset behind the value that begins here."""
        first = self.character(at)
        if first == b'"':
            return self.string(at)
        if first and first in self._opening:
            return self._nested(at)
        match = _SCALAR.match(self.text, at, self._end)
        if match is None:
            raise self._missing(f"expected a JSON value at byte {at}")
        self.character(match.end())  # it may go on behind the window
        return match.end()

    def _nested(self, at: int) -> int:
        depth = 0
        while self._marks > 0:
            match = _STRUCTURE.search(self.text, at, self._end)
            if match is None:
                raise self._missing("the JSON body ends within an array or object")
            if match.group() == b'"':
                at = self.string(match.start())
                continue
            self._marks -= 1
            at = match.end()
            depth += 1 if match.group() in self._opening else -1
            if depth > MAX_DEPTH:
                raise InputError(f"expected JSON nested at most {MAX_DEPTH} deep, got more")
            if depth == 0:
                return at
        raise _EndOfWindowError

    def _missing(self, message: str) -> Exception:
        return InputError(message) if self._end == len(self.text) else _EndOfWindowError()


def _read_forward(window: _Window, found: dict[str, bytes]) -> None:
    """Add the envelope's values, up to the end of the object."""
    at = window.space(0)
    if window.character(at) != b"{":
        raise InputError("expected a JSON object with reply_to, got something else")
    at = window.space(at + 1)
    count = 0
    while window.character(at) != b"}":
        count += 1
        if count > MAX_MEMBERS:
            raise InputError(f"expected at most {MAX_MEMBERS} keys in the JSON object, got more")
        end = window.string(at)
        key = window.text[at:end]
        at = window.space(end)
        if window.character(at) != b":":
            raise InputError(f"expected ':' at byte {at} of the JSON object")
        start = window.space(at + 1)
        end = window.value(start)
        if key in _KEYS:
            found[_KEYS[key]] = window.text[start:end]
        at = window.space(end)
        if window.character(at) == b",":
            at = window.space(at + 1)
        elif window.character(at) != b"}":
            raise InputError(f"expected ',' or '}}' at byte {at} of the JSON object")


def _read_backward(window: _Window, found: dict[str, bytes]) -> None:
    """Add the envelope's values from the end of the body, as far as they can be read.

    The bytes before the window decide what is JSON, so nothing is an error here.
    """
    try:
        at = window.space(0)
        if window.character(at) != b"}":
            return
        for _ in range(MAX_MEMBERS):
            start = window.space(at + 1)
            end = window.value(start)
            value = window.text[start:end][::-1]
            at = window.space(end)
            if window.character(at) != b":":
                return
            start = window.space(at + 1)
            end = window.string(start)
            key = window.text[start:end][::-1]
            at = window.space(end)
            if window.character(at) not in (b",", b"{"):
                return
            if key in _KEYS:
                found.setdefault(_KEYS[key], value)
            if window.character(at) == b"{":
                return
    except (_EndOfWindowError, InputError):
        return


def _scalar(name: str, raw: bytes) -> object:
    limit = 6 * MAX_TOPIC_CHARACTERS + 2  # a character takes up to six bytes as \uXXXX
    if len(raw) > limit:
        raise InputError(f"{name}: expected at most {limit} bytes, got {len(raw)}")
    try:
        return json.loads(raw)
    except ValueError as error:
        raise InputError(f"{name}: {error}") from error


def _text(name: str, raw: bytes | None, limit: int) -> str | None:
    if raw is None:
        return None
    value = _scalar(name, raw)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > limit:
        raise InputError(
            f"{name}: expected a string of at most {limit} characters, got {document.shown(value)}"
        )
    return value


def _session(found: Mapping[str, bytes]) -> SessionStep | None:
    name = _text("session", found.get("session"), MAX_TOPIC_CHARACTERS)
    raw_step, raw_end = found.get("session_step"), found.get("session_end")
    step = None if raw_step is None else _scalar("session_step", raw_step)
    end = None if raw_end is None else _scalar("session_end", raw_end)
    if name is None:
        if step is not None or end is not None:
            raise InputError("session_step and session_end need a session, got none")
        return None
    if step is not None and type(step) is not int:
        raise InputError(f"session_step: expected a number from 0, got {document.shown(step)}")
    if end is not None and type(end) is not bool:
        raise InputError(f"session_end: expected true or false, got {document.shown(end)}")
    return make_step(name, step, end=bool(end))


def _seconds(raw: bytes | None) -> float | None:
    if raw is None:
        return None
    value = _scalar("deadline_s", raw)
    if value is None:
        return None
    number = document.number(value)
    if number is None or number <= 0:
        raise InputError(f"deadline_s: expected a positive number of seconds, got {document.shown(value)}")
    return float(number)
