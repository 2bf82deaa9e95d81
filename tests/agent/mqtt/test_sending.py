"""The window and the queue of QoS 1 messages, with a clock, timers and a publisher that a test controls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt import sending
from agent.mqtt.properties import EMPTY, Properties
from agent.mqtt.reason_codes import CLOSED, EXPIRED, QUEUE_FULL, Reason, reason
from agent.mqtt.sending import MAX_RESENDS, MAX_WAITING_BYTES, RESEND_DELAY_S, Outgoing, Sending

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
        self.up = True
        self.verdicts: dict[bytes, Reason] = {}
        self.sending = Sending(clock=lambda: self.now_s, call_later=self._later, wake=self.pump)
        self.sending.limit = limit

    def _later(self, delay_s: float, function: Callable[[], None]) -> None:
        self.timers.append((self.now_s + delay_s, function))

    def publish(
        self, topic: str, payload: bytes, *, qos: int, retain: bool, properties: Properties
    ) -> int | None:
        assert (topic, qos, retain) == ("a", 1, False)
        if not self.up:
            return None
        self.published.append((len(self.published) + 1, payload))
        self.expiries_s.append(properties.expiry_s)
        return len(self.published)

    def pump(self) -> None:
        self.sending.pump(self)

    def add(self, payload: bytes, expiry_s: int | None = None) -> None:
        def settle(verdict: Reason) -> None:
            assert payload not in self.verdicts, "settled twice"
            self.verdicts[payload] = verdict

        properties = EMPTY if expiry_s is None else Properties(expiry_s=expiry_s)
        deadline_s = None if expiry_s is None else self.now_s + expiry_s
        self.sending.add(Outgoing("a", payload, False, properties, settle, deadline_s))

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


def test_messages_in_flight_are_sent_again_in_order_when_the_session_is_new() -> None:
    rig = Rig(limit=2)
    for payload in (b"a", b"b", b"c"):
        rig.add(payload)
    rig.pump()
    rig.sending.start_over()
    rig.sending.limit = 10
    rig.pump()
    assert rig.payloads() == [b"a", b"b", b"a", b"b", b"c"]
    rig.sending.acknowledged(1, SUCCESS)  # an identifier of the session before
    assert not rig.verdicts


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


def test_messages_that_are_queued_again_count_against_the_bound() -> None:
    rig = Rig()
    half = bytes(MAX_WAITING_BYTES // 2)
    rig.add(half)
    rig.add(half[:-1] + b"\1")
    rig.pump()
    rig.sending.start_over()
    rig.add(b"x")
    assert rig.verdicts == {b"x": QUEUE_FULL}


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
        st.just("start over"),
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
            case "start over":
                rig.sending.start_over()
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
