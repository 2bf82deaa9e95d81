"""Remembered answers: found again, bounded, and forgotten in time."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.service import answers
from agent.service.answers import FinalAnswer, MemoryAnswers, RequestKey

TEXT = FinalAnswer(200, "", "text/plain", b"payload", (("a", "b"),))


def key(number: int) -> RequestKey:
    return RequestKey.of("topic", "reply", str(number).encode(), b"")


parts = st.tuples(st.text(max_size=5), st.text(max_size=5), st.binary(max_size=5), st.binary(max_size=5))


@given(parts, parts)
def test_requests_are_the_same_exactly_when_all_parts_are(one: tuple, two: tuple) -> None:
    assert (RequestKey.of(*one) == RequestKey.of(*two)) == (one == two)


def test_answer_is_found_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryAnswers()
    now_s = time.monotonic()
    store.put(key(1), TEXT, now_s + 10, cheap=False)
    assert store.get(key(1)) == TEXT
    assert store.get(key(2)) is None
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 11)
    assert store.get(key(1)) is None


def test_oldest_is_dropped_when_there_are_too_many_and_that_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWERS", 3)
    store = MemoryAnswers()
    for number in range(5):
        store.put(key(number), TEXT, time.monotonic() + 10, cheap=False)
    assert [store.get(key(number)) is not None for number in range(5)] == [False, False, True, True, True]
    assert store.dropped == 2


def test_bytes_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 100)
    store = MemoryAnswers()
    large = FinalAnswer(200, "", "", bytes(60))
    store.put(key(1), large, time.monotonic() + 10, cheap=False)
    store.put(key(2), large, time.monotonic() + 10, cheap=False)
    assert store.get(key(1)) is None
    assert store.get(key(2)) == large
    store.put(key(3), FinalAnswer(200, "", "", bytes(101)), time.monotonic() + 10, cheap=False)
    assert store.get(key(3)) is None
    assert store.get(key(2)) == large


def test_storm_of_refusals_pushes_out_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_REFUSALS", 3)
    store = MemoryAnswers()
    store.put(key(0), TEXT, time.monotonic() + 10, cheap=False)
    for number in range(1, 10):
        store.put(key(number), FinalAnswer(503, "full", "", b""), time.monotonic() + 10, cheap=True)
    assert store.get(key(0)) == TEXT
    assert store.get(key(9)) is not None


def test_expired_entries_make_room_without_being_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWERS", 1)
    store = MemoryAnswers()
    store.put(key(1), TEXT, time.monotonic() - 1, cheap=False)
    store.put(key(2), TEXT, time.monotonic() + 10, cheap=False)
    assert store.dropped == 0
    assert store.get(key(2)) == TEXT
