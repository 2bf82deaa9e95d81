"""Remembered answers are found again, bounded, forgotten in time, and survive a kill of the process."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import StoreError
from agent.service.requests import answers
from agent.service.requests.answers import FILE, AnswerRecord, AnswerStore, ReplyTo, RequestKey
from agent.wire.answer import FinalAnswer

TEXT = FinalAnswer(200, "", "text/plain", b"payload", "1.0.0", ("a;FP32;2", "b;BYTES;1"))


def key(number: int) -> RequestKey:
    return RequestKey.of("topic", "reply", str(number).encode(), b"")


def put(
    store: AnswerStore,
    number: int,
    answer: FinalAnswer = TEXT,
    *,
    left_s: float = 10.0,
    cheap: bool = False,
    client: str = "",
) -> AnswerRecord:
    reply = ReplyTo("reply", b"\0\xff", 1, store._clock() + left_s, (("traceparent", "00-ab"),))
    record = AnswerRecord(key(number), reply, answer, client)
    store.put(record, cheap=cheap)
    return record


class Clock:
    """The store's clock, which a test moves."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[AnswerStore]:
    made = AnswerStore(tmp_path, clock=clock)
    yield made
    made.close()


parts = st.tuples(st.text(max_size=5), st.text(max_size=5), st.binary(max_size=5), st.binary(max_size=5))


@given(parts, parts)
def test_requests_are_the_same_exactly_when_all_parts_are(
    one: tuple[str, str, bytes, bytes], two: tuple[str, str, bytes, bytes]
) -> None:
    assert (RequestKey.of(*one) == RequestKey.of(*two)) == (one == two)


def test_answer_is_found_until_well_after_its_deadline(store: AnswerStore, clock: Clock) -> None:
    put(store, 1)
    assert store.get(key(1)) == TEXT
    assert store.get(key(2)) is None
    clock.now_s += 11
    assert store.get(key(1)) == TEXT  # a second delivery that was late
    clock.now_s += answers.GRACE_S
    assert store.get(key(1)) is None


def test_oldest_is_dropped_when_there_are_too_many_and_that_is_counted(
    store: AnswerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWERS", 3)
    for number in range(5):
        put(store, number)
    assert [store.get(key(number)) is not None for number in range(5)] == [False, False, True, True, True]
    assert store.dropped == 2


def test_bytes_are_bounded_too(store: AnswerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 1000)
    large = FinalAnswer(200, "", "", bytes(600))
    put(store, 1, large)
    put(store, 2, large)
    assert store.get(key(1)) is None
    assert store.get(key(2)) == large
    put(store, 3, FinalAnswer(200, "", "", bytes(1001)))
    assert store.get(key(3)) is None
    assert store.get(key(2)) == large
    assert store.dropped == 2


def test_storm_of_refusals_pushes_out_no_answer(store: AnswerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_REFUSALS", 3)
    put(store, 0)
    for number in range(1, 10):
        put(store, number, FinalAnswer(503, "full", "", b""), cheap=True)
    assert store.get(key(0)) == TEXT
    assert store.get(key(9)) is not None
    assert store.get(key(1)) is None


@pytest.mark.parametrize("limit", ["MAX_ANSWERS", "MAX_ANSWER_BYTES"])
def test_client_that_asks_much_does_not_make_the_answers_of_others_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(answers, limit, 10 if limit == "MAX_ANSWERS" else 3000)
    with contextlib.closing(AnswerStore(tmp_path)) as store:
        put(store, 0, client="alice")
        for number in range(1, 30):
            put(store, number, client="mallory")
    with contextlib.closing(AnswerStore(tmp_path)) as store:  # the next process
        for number in range(30, 60):
            put(store, number, client="mallory")
        assert store.get(key(0)) == TEXT
        assert store.get(key(59)) == TEXT
        assert store.get(key(1)) is None


def test_a_large_answer_is_remembered_although_its_client_then_has_the_most(
    store: AnswerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 3000)
    large = FinalAnswer(200, "", "text/plain", b"x" * 2500, "1.0.0", ())
    for number in range(5):
        put(store, number, client="mallory")
    put(store, 9, large, client="alice")
    assert store.get(key(9)) == large


def test_expired_entries_make_room_without_being_counted(
    store: AnswerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWERS", 1)
    put(store, 1, left_s=-1)
    put(store, 2)
    assert store.dropped == 0
    assert store.get(key(2)) == TEXT


def test_answers_outlive_the_process_and_those_that_were_not_delivered_are_named(tmp_path: Path) -> None:
    before = AnswerStore(tmp_path, "boot 1")
    records = [put(before, number) for number in range(3)]
    before.delivered(key(1))
    put(before, 3, left_s=-1)
    # Not closed: the process is killed.
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tmp_path.glob(FILE + "*"):
        (copy / path.name).write_bytes(path.read_bytes())
    after = AnswerStore(copy, "boot 1")
    assert [after.get(key(number)) for number in range(3)] == [TEXT] * 3
    assert after.undelivered() == [records[0], records[2]]
    after.delivered(key(0))
    after.close()
    assert AnswerStore(copy, "boot 1").undelivered() == [records[2]]


def test_answers_of_another_boot_are_not_used(tmp_path: Path) -> None:
    before = AnswerStore(tmp_path, "boot 1")
    put(before, 1)
    before.close()
    after = AnswerStore(tmp_path, "boot 2")
    assert after.get(key(1)) is None
    assert after.undelivered() == []
    put(after, 2)
    assert after.get(key(2)) == TEXT


@pytest.mark.parametrize("damage", [b"", b"garbage" * 1000, None])
def test_damaged_file_costs_what_it_remembers_and_nothing_else(tmp_path: Path, damage: bytes | None) -> None:
    before = AnswerStore(tmp_path, "boot")
    for number in range(200):
        put(before, number)
    before.close()
    path = tmp_path / FILE
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2] if damage is None else damage)
    after = AnswerStore(tmp_path, "boot")
    put(after, 1000)
    after.get(key(1))  # must not raise
    after.undelivered()
    after.close()


def test_folder_that_cannot_be_written_costs_only_the_next_process_its_memory(tmp_path: Path) -> None:
    now_s = [100.0]
    store = AnswerStore(tmp_path / "none", "boot", lambda: now_s[0])
    put(store, 1)
    assert (store.get(key(1)), store.waiting, store.dropped) == (TEXT, 1, 0)
    store.delivered(key(1))
    (tmp_path / "none").mkdir()
    put(store, 2)
    assert not (tmp_path / "none" / FILE).exists(), "it is tried once a minute"
    now_s[0] += 61
    put(store, 3)
    store.close()
    again = AnswerStore(tmp_path / "none", "boot", lambda: now_s[0])
    assert [again.get(key(number)) for number in (1, 2, 3)] == [TEXT, TEXT, TEXT]
    again.close()


def test_file_that_can_no_longer_be_written_is_replaced_by_memory(tmp_path: Path) -> None:
    now_s = [100.0]
    store = AnswerStore(tmp_path, "boot", lambda: now_s[0])
    put(store, 1)
    assert store._database is not None
    store._database.execute("PRAGMA max_page_count = 1")
    for number in range(2, 50):
        put(store, number, FinalAnswer(200, "", "", bytes(5000)))
    assert store.dropped == 0
    assert store.get(key(1)) == TEXT
    assert store.get(key(2)) == store.get(key(49)) == FinalAnswer(200, "", "", bytes(5000))
    now_s[0] += 61
    put(store, 50)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        sqlite3.connect(tmp_path / FILE, timeout=0).execute("SELECT * FROM answers")
    store.close()
    again = AnswerStore(tmp_path, "boot", lambda: now_s[0])
    assert again.get(key(49)) == FinalAnswer(200, "", "", bytes(5000))
    again.close()


def test_folder_in_the_place_of_the_file_is_moved_away(tmp_path: Path) -> None:
    (tmp_path / FILE / "sub").mkdir(parents=True)
    store = AnswerStore(tmp_path)
    put(store, 1)
    assert store.get(key(1)) == TEXT
    assert (tmp_path / FILE).is_file()
    store.close()


@pytest.mark.slow
def test_a_second_agent_does_not_take_the_answers_of_the_first(tmp_path: Path) -> None:
    first = AnswerStore(tmp_path)
    before = (tmp_path / "answers.db").stat().st_ino
    with pytest.raises(StoreError, match="in use by another agent"):
        AnswerStore(tmp_path)
    assert (tmp_path / "answers.db").stat().st_ino == before
    first.close()
    AnswerStore(tmp_path).close()


@pytest.mark.parametrize("damage", [b"\0", b"\xff", b"\x0d\x05"], ids=["zeros", "ones", "others"])
def test_damage_anywhere_in_the_file_costs_only_answers(tmp_path: Path, damage: bytes) -> None:
    first = AnswerStore(tmp_path)
    for number in range(20):
        put(first, number, FinalAnswer(200, "", "text/plain", bytes(1000)))
    first.close()
    path = tmp_path / FILE
    whole = path.read_bytes()
    assert len(whole) > 20_000
    for at in range(100, len(whole), 512):  # behind the file's header
        path.write_bytes(whole[:at] + (damage * 512)[:512] + whole[at + 512 :])
        store = AnswerStore(tmp_path)
        for number in range(20):
            store.get(key(number))  # must not raise
        store.undelivered()
        put(store, 99)
        assert store.get(key(99)) == TEXT
        store.close()


def test_answer_that_is_missing_in_the_file_stops_nothing(
    store: AnswerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1)
    assert store._database is not None
    store._database.execute("DELETE FROM answers")
    monkeypatch.setattr(answers, "MAX_ANSWERS", 1)
    put(store, 2)
    put(store, 3)
    assert store.get(key(3)) == TEXT


def test_bytes_of_everything_that_is_stored_are_bounded(
    store: AnswerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 10_000)
    many = tuple(f"{number:0240d};FP32;1" for number in range(20))  # 5 KB of descriptions
    for number in range(4):
        put(store, number, FinalAnswer(200, "", "application/octet-stream", b"", "1.0.0", many))
    assert [store.get(key(number)) is not None for number in range(4)] == [False, False, False, True]
