"""The window and the queue of QoS 1 messages, with a clock, timers and a publisher that a test controls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt import sending
from agent.mqtt.properties import EMPTY, Properties, decode, encode
from agent.mqtt.reason_codes import (
    CLOSED,
    EXPIRED,
    LOST,
    NOT_CONNECTED,
    POISON,
    QUEUE_FULL,
    RENEWED,
    TOO_LARGE,
    Reason,
    reason,
)
from agent.mqtt.sending import (
    MAX_IN_FLIGHT_BYTES,
    MAX_LOSSES,
    MAX_RESENDS,
    MAX_WAITING_BYTES,
    RESEND_DELAY_S,
    SUSPECT_LOSSES,
    Outgoing,
    Sending,
)

SUCCESS = reason(0x00)
QUOTA_EXCEEDED = reason(0x97)  # may pass
NOT_AUTHORIZED = reason(0x87)  # will not pass


class Rig:
    """A `Sending`, the publisher that it hands messages to, and its clock."""

    def __init__(self, *, limit: int = 1000) -> None:
        self.now_s = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.published: list[tuple[int, bytes]] = []
        self.expiries_s: list[int | None] = []
        self.dups: list[bool] = []
        self.up = True
        self.breaks = False
        self.at_once: Reason | None = None
        self.verdicts: dict[bytes, Reason] = {}
        self.sending = Sending(clock=lambda: self.now_s, call_later=self._later, wake=self.pump)
        self.sending.limit = limit

    def _later(self, delay_s: float, function: Callable[[], None]) -> None:
        self.timers.append((self.now_s + delay_s, function))

    def publish(
        self, topic: str, payload: bytes, *, packet_id: int | None, retain: bool, packed: bytes, dup: bool
    ) -> Reason | None:
        assert (topic, retain) == ("a", False)
        assert packet_id is not None
        if not self.up:
            return NOT_CONNECTED
        self.published.append((packet_id, payload))
        self.dups.append(dup)
        self.expiries_s.append(decode(memoryview(packed), 0)[0].expiry_s)
        if self.breaks:
            self.up = False
            self.sending.lost(LOST)
        return self.at_once

    def pump(self) -> None:
        self.sending.pump(self)

    def add(self, payload: bytes, expiry_s: int | None = None) -> None:
        def settle(verdict: Reason) -> None:
            assert payload not in self.verdicts, "settled twice"
            self.verdicts[payload] = verdict

        properties = EMPTY if expiry_s is None else Properties(expiry_s=expiry_s)
        deadline_s = None if expiry_s is None else self.now_s + expiry_s
        packed = encode(properties)
        self.sending.add(Outgoing("a", payload, False, properties, settle, deadline_s, packed))

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        due = [function for moment, function in self.timers if moment <= self.now_s]
        self.timers = [(moment, function) for moment, function in self.timers if moment > self.now_s]
        for function in due:
            function()

    def payloads(self) -> list[bytes]:
        return [payload for _, payload in self.published]


def test_no_more_is_in_flight_than_the_limit() -> None:
    rig = Rig(limit=3)
    for number in range(5):
        rig.add(b"%d" % number)
    rig.pump()
    assert rig.payloads() == [b"0", b"1", b"2"]
    rig.sending.acknowledged(2, SUCCESS)
    rig.pump()
    assert rig.payloads() == [b"0", b"1", b"2", b"3"]
    assert rig.verdicts == {b"1": SUCCESS}
    assert len(rig.sending) == 4


def test_message_that_cannot_be_sent_now_keeps_its_place() -> None:
    rig = Rig()
    rig.up = False
    rig.add(b"first")
    rig.add(b"second")
    rig.pump()
    assert not rig.published
    rig.up = True
    rig.pump()
    assert rig.payloads() == [b"first", b"second"]


def reconnect(rig: Rig, why: Reason = LOST, *, session_present: bool = True) -> None:
    rig.sending.lost(why)
    rig.sending.resume(session_present=session_present)
    rig.up = True
    rig.pump()


@pytest.mark.parametrize("session_present", [True, False])
def test_messages_in_flight_are_sent_again_in_order_with_their_identifiers_if_the_session_is_known(
    session_present: bool,
) -> None:
    rig = Rig(limit=2)
    for payload in (b"a", b"b", b"c"):
        rig.add(payload)
    rig.pump()
    rig.sending.limit = 10
    reconnect(rig, session_present=session_present)
    assert rig.payloads() == [b"a", b"b", b"a", b"b", b"c"]
    identifiers = [packet_id for packet_id, _ in rig.published]
    assert len(set(identifiers[2:])) == 3
    assert (identifiers[:2] == identifiers[2:4]) == session_present
    assert rig.dups == [False, False, session_present, session_present, False]


def test_resending_obeys_a_smaller_window() -> None:
    rig = Rig(limit=5)
    for number in range(5):
        rig.add(b"%d" % number)
    rig.pump()
    rig.sending.limit = 2
    reconnect(rig)
    assert rig.payloads()[5:] == [b"0", b"1"]
    rig.add(b"new")
    rig.sending.acknowledged(rig.published[5][0], SUCCESS)
    rig.pump()
    assert rig.payloads()[5:] == [b"0", b"1", b"2"]


def test_identifiers_in_use_are_not_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MAX_PACKET_ID", 5)
    rig = Rig(limit=2)
    for number in range(4):
        rig.add(b"%d" % number)
    rig.pump()
    rig.sending.lost(LOST)  # both wait to be sent again under their names
    assert [rig.sending.next_id() for _ in range(4)] == [3, 4, 5, 3]


def test_connection_that_breaks_while_sending_loses_no_message() -> None:
    rig = Rig()
    rig.add(b"x")
    rig.breaks = True
    rig.pump()
    assert not rig.verdicts
    rig.breaks = False
    rig.sending.resume(session_present=True)
    rig.up = True
    rig.pump()
    assert rig.published == [(1, b"x"), (1, b"x")]
    rig.sending.acknowledged(1, SUCCESS)
    assert rig.verdicts == {b"x": SUCCESS}


def test_message_that_needs_no_acknowledgement_or_cannot_be_sent_is_settled_at_once() -> None:
    rig = Rig(limit=1)
    for verdict in (SUCCESS, TOO_LARGE):
        rig.at_once = verdict
        for number in range(3):
            rig.add(b"%d %d" % (verdict.code, number))
        rig.pump()
    assert sorted(rig.verdicts.values(), key=lambda verdict: verdict.code) == [SUCCESS] * 3 + [TOO_LARGE] * 3
    assert len(rig.sending) == 0


def test_message_that_ends_each_connection_is_found_and_given_up() -> None:
    rig = Rig()
    for payload in (b"a", b"poison", b"b", b"c"):
        rig.add(payload)

    def serve() -> None:
        """Acknowledge what arrives, until the message that ends the connection."""
        for packet_id, payload in rig.published:
            if payload == b"poison":
                rig.up = False
                rig.published.clear()
                return
            rig.sending.acknowledged(packet_id, SUCCESS)
        rig.published.clear()

    connections = 0
    while len(rig.sending):
        connections += 1
        assert connections <= MAX_LOSSES + 1
        rig.sending.resume(session_present=True)
        rig.up = True
        rig.pump()
        while rig.up and len(rig.sending):
            serve()
            if rig.up:
                rig.pump()
        rig.sending.lost(LOST)
    assert rig.verdicts == {b"a": SUCCESS, b"b": SUCCESS, b"c": SUCCESS, b"poison": POISON}


def test_suspects_are_sent_one_at_a_time_and_others_after_them_as_before() -> None:
    rig = Rig()
    for payload in (b"a", b"b"):
        rig.add(payload)
    rig.pump()
    for _ in range(SUSPECT_LOSSES):
        rig.published.clear()
        reconnect(rig)
    rig.add(b"c")
    rig.add(b"d")
    rig.pump()
    assert rig.payloads() == [b"a"]
    rig.sending.acknowledged(1, SUCCESS)
    rig.pump()
    assert rig.payloads() == [b"a", b"b"]
    rig.sending.acknowledged(2, SUCCESS)
    rig.pump()
    assert rig.payloads() == [b"a", b"b", b"c", b"d"]


def test_renewing_the_connection_suspects_nobody() -> None:
    rig = Rig()
    rig.add(b"x")
    rig.pump()
    for _ in range(3 * MAX_LOSSES):
        reconnect(rig, RENEWED)
    assert not rig.verdicts


@pytest.mark.parametrize("code", [0x95, 0x82, 0x87])
def test_message_that_the_broker_blames_is_given_up_once_it_is_known(code: int) -> None:
    rig = Rig()
    for payload in (b"a", b"b"):
        rig.add(payload)
    rig.pump()
    rig.published.clear()
    reconnect(rig, reason(code))
    assert rig.payloads() == [b"a"]  # one of the two: each is tried with nothing beside it
    reconnect(rig, reason(code))
    assert rig.verdicts == {b"a": reason(code)}
    assert rig.payloads() == [b"a", b"b"]


def test_refusal_that_may_pass_is_sent_again_after_a_pause() -> None:
    rig = Rig()
    rig.add(b"x")
    rig.pump()
    rig.sending.acknowledged(1, QUOTA_EXCEEDED)
    rig.advance(RESEND_DELAY_S - 0.01)
    assert rig.payloads() == [b"x"]
    assert len(rig.sending) == 1
    rig.advance(0.01)
    assert rig.payloads() == [b"x", b"x"]
    rig.sending.acknowledged(2, SUCCESS)
    assert rig.verdicts == {b"x": SUCCESS}


def test_refusal_that_may_pass_is_final_after_many() -> None:
    rig = Rig()
    rig.add(b"x")
    rig.pump()
    for attempt in range(1, MAX_RESENDS + 2):
        assert not rig.verdicts
        rig.sending.acknowledged(attempt, QUOTA_EXCEEDED)
        rig.advance(RESEND_DELAY_S)
    assert rig.verdicts == {b"x": QUOTA_EXCEEDED}
    assert len(rig.published) == MAX_RESENDS + 1


def test_refusal_for_good_is_not_sent_again() -> None:
    rig = Rig()
    rig.add(b"x")
    rig.pump()
    rig.sending.acknowledged(1, NOT_AUTHORIZED)
    assert rig.verdicts == {b"x": NOT_AUTHORIZED}
    assert not rig.timers


def test_waiting_message_expires_and_is_never_sent() -> None:
    rig = Rig()
    rig.up = False
    rig.add(b"late", expiry_s=5)
    rig.add(b"fresh", expiry_s=60)
    rig.advance(5)
    rig.up = True
    rig.pump()
    assert rig.verdicts == {b"late": EXPIRED}
    assert rig.payloads() == [b"fresh"]


def test_expiry_counts_the_time_that_a_message_waited() -> None:
    rig = Rig()
    rig.up = False
    rig.add(b"x", expiry_s=10)
    rig.advance(7)
    rig.up = True
    rig.pump()
    assert rig.expiries_s == [3]


def test_expiry_never_rounds_down_to_expired() -> None:
    rig = Rig()
    rig.up = False
    rig.add(b"x", expiry_s=10)
    rig.advance(9.9)
    rig.up = True
    rig.pump()
    assert rig.expiries_s == [1]


def test_queue_is_bounded_by_bytes() -> None:
    rig = Rig()
    rig.up = False
    half = bytes(MAX_WAITING_BYTES // 2)
    rig.add(half)
    rig.add(half[:-1] + b"\1")
    rig.add(b"x")
    assert rig.verdicts == {b"x": QUEUE_FULL}


def test_properties_count_against_the_bounds() -> None:
    sending = Rig().sending
    outgoing = Outgoing("t", b"x", False, EMPTY, lambda _verdict: None, packed=bytes(1001))
    sending.add(outgoing)
    assert sending.nbytes == 1001


def test_messages_that_are_queued_again_count_against_the_bound() -> None:
    rig = Rig()
    half = bytes(MAX_WAITING_BYTES // 2)
    rig.add(half)
    rig.add(half[:-1] + b"\1")
    rig.pump()
    rig.sending.lost(LOST)
    rig.add(b"x")
    assert rig.verdicts == {b"x": QUEUE_FULL}


def test_window_is_bounded_in_bytes() -> None:
    rig = Rig()
    half, large = bytes(MAX_IN_FLIGHT_BYTES // 2), bytes(2 * MAX_IN_FLIGHT_BYTES)
    for payload in (half, half[1:], b"xy", large, b"last"):
        rig.add(payload)
    rig.pump()
    assert [number for number, _ in rig.published] == [1, 2]
    rig.sending.acknowledged(1, SUCCESS)
    rig.pump()
    assert rig.payloads()[2:] == [b"xy"]
    rig.sending.acknowledged(2, SUCCESS)
    rig.sending.acknowledged(3, SUCCESS)
    rig.pump()
    assert rig.payloads()[3:] == [large]  # by itself
    rig.sending.lost(LOST)
    rig.pump()
    assert rig.payloads()[4:] == [large]
    rig.sending.acknowledged(4, SUCCESS)
    rig.pump()
    assert rig.payloads()[5:] == [b"last"]


def test_queue_is_bounded_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MAX_WAITING_MESSAGES", 2)
    rig = Rig()
    for payload in (b"a", b"b", b"c"):
        rig.add(payload)
    assert rig.verdicts == {b"c": QUEUE_FULL}
    rig.pump()
    rig.add(b"d")
    assert b"d" not in rig.verdicts


def test_close_settles_waiting_and_pausing_messages_and_those_in_flight() -> None:
    rig = Rig(limit=2)
    for payload in (b"pausing", b"in flight", b"waiting"):
        rig.add(payload)
    rig.sending.limit = 2
    rig.pump()
    rig.sending.limit = 1
    rig.sending.acknowledged(1, QUOTA_EXCEEDED)
    rig.sending.close()
    rig.add(b"too late")
    assert rig.verdicts == dict.fromkeys((b"pausing", b"in flight", b"waiting", b"too late"), CLOSED)
    rig.advance(RESEND_DELAY_S)
    assert len(rig.sending) == 0


steps = st.lists(
    st.one_of(
        st.just("add"),
        st.tuples(st.just("lost"), st.sampled_from([0x95, LOST.code, RENEWED.code])),
        st.tuples(st.just("resume"), st.booleans()),
        st.tuples(st.just("at once"), st.sampled_from([None, 0, TOO_LARGE.code])),
        st.just("pass time"),
        st.tuples(st.just("acknowledge"), st.integers(1, 40), st.sampled_from([0x00, 0x87, 0x97])),
        st.tuples(st.just("limit"), st.integers(1, 5)),
        st.tuples(st.just("up"), st.booleans()),
    ),
    max_size=60,
)


@given(steps)
def test_whatever_happens_each_message_is_settled_exactly_once(steps: list[object]) -> None:
    rig = Rig(limit=2)
    added = 0
    for step in steps:
        match step:
            case "add":
                rig.add(b"%d" % added, expiry_s=(None, 2)[added % 2])
                added += 1
            case ("lost", int(code)):
                rig.sending.lost(reason(code))
            case ("resume", bool(session_present)):
                rig.sending.resume(session_present=session_present)
            case ("at once", None):
                rig.at_once = None
            case ("at once", int(code)):
                rig.at_once = reason(code)
            case "pass time":
                rig.advance(0.7)
            case ("acknowledge", int(packet_id), int(code)):
                rig.sending.acknowledged(packet_id, reason(code))
            case ("limit", int(limit)):
                rig.sending.limit = limit
            case ("up", bool(up)):
                rig.up = up
        rig.pump()
        assert len(rig.sending) + len(rig.verdicts) == added
    rig.sending.close()
    assert len(rig.verdicts) == added
    assert len(rig.sending) == 0
