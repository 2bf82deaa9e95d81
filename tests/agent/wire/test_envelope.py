"""The envelope of a JSON request, found without parsing the rest."""

from __future__ import annotations

import json
import time
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import InputError
from agent.wire.envelope import MAX_DEPTH, MAX_MARKS, Envelope, read_envelope

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
other_keys = st.text(max_size=10).filter(lambda text: text not in ("reply_to", "id", "deadline_s"))
identifiers = st.none() | st.text(max_size=50)


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
        envelope = read_envelope(raw)
    except InputError:
        return
    assert isinstance(envelope, Envelope)


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


def test_large_body_takes_milliseconds_and_a_hostile_one_not_much_longer() -> None:
    pixels = {"inputs": [{"data": [0.123456] * 150_528}], "id": "a", "reply_to": "r"}
    body = json.dumps(pixels).encode()
    started = time.thread_time()
    assert read_envelope(body).id == "a"
    assert time.thread_time() - started < 0.5
    started = time.thread_time()
    with pytest.raises(InputError, match=str(MAX_MARKS)):
        read_envelope(b'{"a":[' + b'"",' * 5_000_000 + b"]}")
    assert time.thread_time() - started < 2
