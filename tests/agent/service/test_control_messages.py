"""Messages on the control connection reach their part, and are acknowledged in order whatever happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent.errors import EdgeError
from agent.mqtt.message import Message, Receipt
from agent.service.control_messages import MAX_WAITING, ControlMessages
from agent.service.metrics.metrics import Metrics, to_document
from agent.wire.topics import Block, Desired, Job, State, Topic, format_topic

DESIRED, JOB, STATE = Desired("kitchen"), Job("kitchen", "deploy-1"), State("kitchen")


class Parts:
    """Presence and deployment: they write down what they are given, and take it as a test says."""

    def __init__(self) -> None:
        self.given: list[tuple[object, ...]] = []
        self.taking: asyncio.Task[None] | None = None
        self.error: Exception | None = None

    def on_state(self, payload: bytes, *, retained: bool) -> None:
        self.given.append((payload, retained))

    def on_retained_job(self, topic: Job, payload: bytes) -> None:
        self.given.append((topic, payload))

    def on_message(self, topic: Topic, payload: bytes) -> asyncio.Task[None] | None:
        self.given.append((topic, payload))
        if self.error is not None:
            raise self.error
        return self.taking

    def refuse_desired(self, error: EdgeError) -> None:
        self.given.append((str(error),))


class Rig:
    """The messages of one connection."""

    def __init__(self) -> None:
        self.parts = Parts()
        self.acked: list[int] = []
        self.metrics = Metrics()
        parts: Any = self.parts
        self.messages = ControlMessages(
            lambda receipt: self.acked.append(receipt.packet_id), parts, parts, self.metrics
        )

    def take(self, packet_id: int, topic: Topic | str, *, retain: bool = False) -> None:
        text = topic if isinstance(topic, str) else format_topic(topic)
        payload = b"%d" % packet_id
        self.messages.take(Message(text, payload, qos=1, retain=retain, receipt=Receipt(packet_id, 1)))

    @property
    def faults(self) -> float:
        return to_document(self.metrics.samples({})).get("edge_faults_total", 0)


def test_each_message_reaches_its_part() -> None:
    rig = Rig()
    rig.take(1, STATE, retain=True)
    rig.take(2, STATE)
    rig.take(3, JOB, retain=True)
    rig.take(4, JOB)  # our own, when it is published
    rig.take(5, DESIRED)
    rig.take(6, "of/another/program")
    assert rig.parts.given == [(b"1", True), (b"2", False), (JOB, b"3"), (DESIRED, b"5")]
    assert rig.acked == [1, 2, 3, 4, 5, 6]


async def test_message_that_is_taken_slowly_holds_up_the_acknowledgement_of_later_ones() -> None:
    rig = Rig()
    go_on = asyncio.Event()

    async def slowly() -> None:
        await go_on.wait()

    taking = rig.parts.taking = asyncio.create_task(slowly())
    rig.take(1, DESIRED)
    rig.take(2, STATE)
    assert rig.acked == []
    go_on.set()
    await taking
    await asyncio.sleep(0)
    assert rig.acked == [1, 2]


async def test_message_whose_taking_fails_is_logged_counted_and_acknowledged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()

    async def fail() -> None:
        raise ZeroDivisionError

    rig.parts.taking = asyncio.create_task(fail())
    rig.take(1, DESIRED)
    await asyncio.wait({rig.parts.taking})
    await asyncio.sleep(0)
    rig.parts.error = ZeroDivisionError()
    rig.take(2, DESIRED)
    assert rig.acked == [1, 2]
    assert rig.faults == 2
    assert [text.partition(" on ")[0] for text in caplog.messages] == [
        "internal error while taking a message",
        "internal error while handling a message",
    ]


async def test_message_of_a_lost_connection_is_left_to_the_next_one() -> None:
    rig = Rig()
    taking = rig.parts.taking = asyncio.create_task(asyncio.sleep(0))
    rig.take(1, DESIRED)
    rig.messages.on_down()
    await taking
    await asyncio.sleep(0)
    assert rig.acked == []


def test_desired_document_that_is_too_long_for_a_packet_is_refused_not_taken_as_cleared() -> None:
    rig = Rig()
    rig.messages.take(Message(format_topic(DESIRED), b"", qos=1, receipt=Receipt(1, 1), refusal="too long"))
    assert rig.parts.given == [("the desired document: too long",)]
    assert rig.acked == [1]


async def test_blocks_pass_while_a_flood_of_documents_is_taken() -> None:
    rig = Rig()
    go_on = asyncio.Event()

    async def slowly() -> None:
        await go_on.wait()

    taking = rig.parts.taking = asyncio.create_task(slowly())
    block = Block("kitchen", "0" * 64, 0)
    for number in range(MAX_WAITING + 5):
        rig.messages.take(Message(format_topic(DESIRED), b"%d" % number))
    rig.messages.take(Message(format_topic(block), b"data"))
    assert rig.parts.given[MAX_WAITING:] == [(block, b"data")]
    dropped = to_document(rig.metrics.samples({}))["edge_control_messages_dropped_total"]
    assert dropped == 5
    go_on.set()
    await taking
