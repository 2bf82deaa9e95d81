"""The desired document, read strictly."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.bundle.archive import MAX_BUNDLE_BYTES
from agent.errors import EndlessDataError, FormatError
from agent.wire.desired import (
    FREE_VERSIONS,
    MAX_DESIRED_BYTES,
    MAX_MODELS,
    MAX_SOURCES,
    MAX_STEP,
    MAX_VERSION,
    Desired,
    newest_after,
)

ENTRY: dict[str, Any] = {
    "digest": "sha256:" + "a" * 64,
    "size": 1000,
    "version": "1.0.0",
    "job": "job-1",
    "sources": ["mqtt"],
}


def document(**changes: Any) -> bytes:
    return json.dumps({"version": 1, "models": {"digits": ENTRY | changes}}).encode()


def test_a_document_is_read_and_written_again() -> None:
    desired = Desired.from_bytes(document(sources=["https://files.example/a", "mqtt"]))
    (request,) = desired.models
    assert (request.model, request.digest, request.size) == ("digits", ENTRY["digest"], 1000)
    assert request.sources == ("https://files.example/a", "mqtt")
    assert Desired.from_document(desired.to_document()) == desired
    assert desired.get("digits") == request
    assert desired.get("faces") is None


def test_the_digest_of_a_document_does_not_depend_on_how_it_was_written() -> None:
    shuffled = json.dumps(json.loads(document()), indent=3, sort_keys=True).encode()
    assert Desired.from_bytes(shuffled).digest == Desired.from_bytes(document()).digest
    assert Desired.from_bytes(document(job="job-2")).digest != Desired.from_bytes(document()).digest
    based = json.loads(document()) | {"base": ENTRY["digest"]}
    assert Desired.from_bytes(json.dumps(based).encode()).digest == Desired.from_bytes(document()).digest


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "sha256:" + "A" * 64},
        {"digest": "a" * 64},
        {"digest": "sha256:../../../etc/passwd"},
        {"digest": None},
        {"size": 0},
        {"size": -1},
        {"size": 1.0},
        {"size": True},
        {"size": "1000"},
        {"version": ""},
        {"version": "1 0"},
        {"version": 1},
        {"job": "a/b"},
        {"job": ""},
        {"job": "+"},
        {"job": "x" * 65},
        {"sources": []},
        {"sources": "mqtt"},
        {"sources": [1]},
        {"sources": ["mqtt"] * (MAX_SOURCES + 1)},
        {"sources": ["https://a.example/" + "a" * 3000]},
        {"sources": ["https://a.example/\n"]},
        {"command": "rm -rf /"},
    ],
)
def test_an_entry_with_one_thing_wrong_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        Desired.from_bytes(document(**changes))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"version":1}',
        b'{"version":-1,"models":{}}',
        b'{"version":true,"models":{}}',
        b'{"version":1.0,"models":{}}',
        b'{"version":9007199254740992,"models":{}}',
        b'{"version":1,"models":[]}',
        b'{"version":1,"models":{},"more":1}',
        b'{"version":1,"models":{},"base":"x"}',
        b'{"version":1,"version":2,"models":{}}',
        b'{"version":NaN,"models":{}}',
        b'{"version":1,"models":{"../x":{}}}',
        b'{"version":1,"models":{"Digits":{}}}',
        b'{"version":1,"models":{"a":{}}}',
        b"\xff\xfe",
        b"[" * 4000,
        b"1" * 5000,
    ],
)
def test_other_documents_are_refused(raw: bytes) -> None:
    with pytest.raises(FormatError):
        Desired.from_bytes(raw)


def test_over_a_limit_is_endless_data() -> None:
    with pytest.raises(EndlessDataError, match="at most 2147483648 bytes"):
        Desired.from_bytes(document(size=MAX_BUNDLE_BYTES + 1))
    many = {f"m{index}": ENTRY | {"job": f"j{index}"} for index in range(MAX_MODELS + 1)}
    with pytest.raises(EndlessDataError, match="at most 64 desired models, got 65"):
        Desired.from_bytes(json.dumps({"version": 1, "models": many}).encode())
    with pytest.raises(EndlessDataError, match="at most"):
        Desired.from_bytes(b" " * (MAX_DESIRED_BYTES + 1))


@pytest.mark.parametrize(
    "raw",
    [b"[" + b"{}," * 80_000 + b"1]", b"[" * 200_000, b'["",' + b'"",' * 60_000 + b"1]", b'{"a":' * 30_000],
    ids=["objects", "arrays", "strings", "nested"],
)
def test_document_that_is_slow_to_read_is_refused_before_it_is_read(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", lambda *_arguments, **_options: pytest.fail("it was read"))
    assert len(raw) <= MAX_DESIRED_BYTES
    with pytest.raises(EndlessDataError, match="values in JSON"):
        Desired.from_bytes(raw)


def test_largest_document_has_no_more_values_than_are_read() -> None:
    sources = [f"https://files.example:8443/{number}?a=1,2" for number in range(MAX_SOURCES)]
    models = {f"m{n}": ENTRY | {"job": f"j{n}", "sources": sources} for n in range(MAX_MODELS)}
    raw = json.dumps({"version": 1, "models": models}).encode()
    assert len(Desired.from_bytes(raw).models) == MAX_MODELS


def test_integer_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(FormatError, match="an integer of at most 21 characters, got 4300"):
        Desired.from_bytes(b'{"version":' + b"9" * 4300 + b',"models":{}}')


def test_two_models_with_one_job_are_refused() -> None:
    with pytest.raises(FormatError, match="same job"):
        Desired.from_bytes(json.dumps({"version": 1, "models": {"a": ENTRY, "b": ENTRY}}).encode())


@given(st.binary(max_size=300))
def test_any_bytes_are_a_document_or_an_error(raw: bytes) -> None:
    with contextlib.suppress(FormatError, EndlessDataError):
        assert isinstance(Desired.from_bytes(raw), Desired)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.sampled_from(sorted(ENTRY)), JSON_VALUES)
def test_any_value_of_any_key_is_a_document_or_an_error(key: str, value: Any) -> None:
    with contextlib.suppress(FormatError, EndlessDataError):
        Desired.from_bytes(json.dumps({"version": 1, "models": {"digits": ENTRY | {key: value}}}).encode())


def test_versions_may_jump_up_to_the_time_in_milliseconds_and_then_in_steps() -> None:
    milliseconds_in_2035 = 2_051_222_400_000
    assert milliseconds_in_2035 < newest_after(None) == newest_after(7) == FREE_VERSIONS
    assert newest_after(FREE_VERSIONS) == FREE_VERSIONS + MAX_STEP
    assert newest_after(MAX_VERSION - 1) == MAX_VERSION
    assert (MAX_VERSION - FREE_VERSIONS) // MAX_STEP > 8 * 10**9, "more documents than are ever sent"
