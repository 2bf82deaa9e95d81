"""The envelope of a JSON request, found without parsing the rest."""

from __future__ import annotations

import contextlib
import json
import re
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import InputError
from agent.wire import envelope
from agent.wire.envelope import MAX_DEPTH, WINDOW_BYTES, Envelope, read_envelope

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
other_keys = st.text(max_size=10).filter(lambda text: text not in ("reply_to", "id", "deadline_s"))
identifiers = st.none() | st.text(max_size=50)


@pytest.mark.slow
@given(st.dictionaries(other_keys, values, max_size=6), identifiers, identifiers, st.booleans(), st.randoms())
def test_envelope_is_what_a_parser_finds(
    rest: dict[str, Any], reply_to: str | None, identifier: str | None, ascii_only: bool, random: Random
) -> None:
    members = [*rest.items(), ("reply_to", reply_to), ("id", identifier), ("deadline_s", 1.5)]
    random.shuffle(members)
    body = json.dumps(dict(members), ensure_ascii=ascii_only, indent=1 if ascii_only else None).encode()
    assert read_envelope(body) == Envelope(reply_to, identifier, 1.5)


@given(st.binary(max_size=60) | st.text('{}[]":,\\ ab1', max_size=40).map(str.encode))
def test_hostile_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        found = read_envelope(raw)
    except InputError:
        return
    assert isinstance(found, Envelope)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"id"',
        b'{"id":',
        b'{"id":1}',
        b'{"id":"a"',
        b'{"id":"a" "b"}',
        b'{"reply_to":["a"]}',
        b'{"reply_to":"' + b"x" * 2000 + b'"}',
        b'{"deadline_s":-1}',
        b'{"deadline_s":true}',
        b'{"deadline_s":NaN}',
        b'{"deadline_s":1e999}',
        b'{"a":' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}",
        b'{"a":["unfinished]}',
        b"\xff\xd8\xff",
    ],
)
def test_other_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(InputError):
        read_envelope(body)


def long(data: bytes) -> bytes:
    """Return an inputs member that is longer than what is read."""
    return b'"inputs":[{"data":[' + data * (3 * WINDOW_BYTES // len(data)) + b"0]}]"


@pytest.mark.parametrize("data", [b"0.123456,", b"[1],", b'"a",', b'"\\\\\\"",', b'"{]",'])
@pytest.mark.parametrize("space", [b"", b" \n "])
def test_keys_are_found_before_and_behind_a_long_array(data: bytes, space: bytes) -> None:
    before, behind = b'"reply_to":"r"', b'"id":"a\\"\\\\","parameters":{"x":[1,"}"]},"deadline_s":2.5'
    for members in ((before, long(data), behind), (long(data), before, behind), (before, behind, long(data))):
        body = b"{" + (b"," + space).join(members) + b"}" + space
        assert read_envelope(body) == Envelope("r", 'a"\\', 2.5)


def test_last_value_of_a_repeated_key_counts_in_a_long_body_too() -> None:
    body = b'{"id":"1","reply_to":"r",' + long(b"1,") + b',"id":"2","id":"3"}'
    assert read_envelope(body) == Envelope("r", "3")


def test_key_between_two_long_arrays_is_not_found() -> None:
    body = b"{" + long(b"1,") + b',"reply_to":"r",' + long(b"1,") + b',"id":"a"}'
    assert read_envelope(body) == Envelope(None, "a")


def test_what_looks_like_a_key_in_a_long_string_is_none() -> None:
    text = json.dumps('","reply_to":"evil","x":"' * 4000)
    assert read_envelope(b'{"reply_to":"r","a":' + text.encode() + b"}") == Envelope("r")
    nested = b'{"reply_to":"r","a":{"b":' + long(b"1,")[9:] + b',"reply_to":"evil"}}'
    assert read_envelope(nested) == Envelope("r")


@pytest.mark.slow
@given(
    st.dictionaries(other_keys, values, max_size=6),
    identifiers,
    identifiers,
    st.booleans(),
    st.randoms(),
    st.integers(1, 80),
    st.integers(1, 20),
)
def test_short_window_finds_the_same_or_nothing(
    rest: dict[str, Any],
    reply_to: str | None,
    identifier: str | None,
    ascii_only: bool,
    random: Random,
    window_bytes: int,
    marks: int,
) -> None:
    members = [*rest.items(), ("reply_to", reply_to), ("id", identifier), ("deadline_s", 1.5)]
    random.shuffle(members)
    body = json.dumps(dict(members), ensure_ascii=ascii_only, indent=1 if ascii_only else None).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envelope, "WINDOW_BYTES", window_bytes)
        patch.setattr(envelope, "MAX_MARKS", marks)
        found = read_envelope(body)
    assert found.reply_to in (None, reply_to)
    assert found.id in (None, identifier)
    assert found.deadline_s in (None, 1.5)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b'"",' * 5_000_000 + b"]}",
        b'{"a":[' + b"1," * 5_000_000 + b"]}",
        b'{"a":[' + b"[]," * 3_000_000 + b"]}",
        b"{" + b'"a":[' + b'"",' * 90_000 + b'""],' * 32 + b'"reply_to":"r"}',
        b"{" + b'"a":"",' * 3_000_000 + b"}",
        b'{"a":"' + b'\\"' * 5_000_000 + b'"}',
        b'{"a":"' + b"\\\\" * 5_000_000 + b'"}',
        b" " * 10_000_000 + b"{}",
        b'{"a":1' + b" " * 10_000_000 + b"}",
    ],
    ids=[
        "strings",
        "numbers",
        "arrays",
        "values",
        "members",
        "quotes",
        "backslashes",
        "space",
        "space behind",
    ],
)
def test_body_of_any_length_costs_a_bounded_number_of_steps(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    matched = 0

    class Counted:
        """A pattern that counts the bytes that it looks at."""

        def __init__(self, pattern: re.Pattern[bytes]) -> None:
            self._pattern = pattern

        def __getattr__(self, name: str) -> Any:
            def call(text: bytes, at: int, end: int) -> re.Match[bytes] | None:
                nonlocal matched
                match = getattr(self._pattern, name)(text, at, end)
                matched += (end if match is None else match.end()) - at + 1
                return match

            return call

    for name in ("_SPACE", "_SCALAR", "_STRUCTURE", "_STRING", "_BACKWARD_STRING"):
        monkeypatch.setattr(envelope, name, Counted(getattr(envelope, name)))
    with contextlib.suppress(InputError):
        read_envelope(body)
    assert matched < 5 * WINDOW_BYTES
