"""The order of acknowledgement, with any order of finishing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt.message import Message, Receipt
from agent.service.requests.acknowledgement import AckOrder


def message(number: int, *, qos: int = 1, epoch: int = 1) -> Message:
    return Message("t", b"", qos=qos, receipt=Receipt(number, epoch) if qos else None)


@given(st.permutations(range(8)))
def test_acknowledged_in_the_order_of_arrival_however_they_finish(order: list[int]) -> None:
    acked: list[int] = []
    acks = AckOrder(lambda receipt: acked.append(receipt.packet_id))
    slots = [acks.arrived(message(number)) for number in range(8)]
    finished: set[int] = set()
    for number in order:
        slot = slots[number]
        assert slot is not None
        slot.finish()
        finished.add(number)
        # Exactly the longest run from the start that is finished, and nothing behind it.
        run = next((at for at in range(8) if at not in finished), 8)
        assert acked == list(range(run))
    assert len(acks) == 0


def test_finishing_twice_acknowledges_once() -> None:
    acked: list[int] = []
    acks = AckOrder(lambda receipt: acked.append(receipt.packet_id))
    slot = acks.arrived(message(1))
    assert slot is not None
    slot.finish()
    slot.finish()
    assert acked == [1]


def test_message_of_qos_0_has_no_place() -> None:
    assert AckOrder(lambda _message: None).arrived(message(0, qos=0)) is None


def test_messages_of_an_earlier_connection_do_not_hold_up_others() -> None:
    acked: list[int] = []
    acks = AckOrder(lambda receipt: acked.append(receipt.packet_id))
    stale = acks.arrived(message(1, epoch=1))
    fresh = acks.arrived(message(2, epoch=2))
    assert stale is not None
    assert fresh is not None
    fresh.finish()
    assert acked == [2]
    stale.finish()
    assert acked == [2]
