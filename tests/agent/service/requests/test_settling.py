"""When an answer counts as delivered, and when the agent stops waiting for that; no broker, no workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config.settings import QueueLimits, WorkerSettings
from agent.mqtt.connection import Connection
from agent.mqtt.message import Message, Receipt
from agent.mqtt.properties import Properties
from agent.mqtt.reason_codes import CLOSED, LOST, Reason, reason
from agent.service.inference import Inference
from agent.service.metrics.metrics import Metrics
from agent.service.models.models import Models
from agent.service.requests import answers
from agent.service.requests.answers import AnswerStore
from agent.service.requests.pending import Deadlines
from tests.virtual_time import START_S, in_virtual_time

SUCCESS = reason(0)


@dataclass
class FakeConnection:
    """Keeps what is sent until the test settles it."""

    connected: bool = True
    backlog_bytes: int = 0
    acknowledged: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    settle: list[Callable[[Reason], None]] = field(default_factory=list)

    def send(self, topic: str, payload: bytes, settle: Callable[[Reason], None], **_options: Any) -> None:
        assert topic == "edge/v1/replies/me/a"
        self.payloads.append(payload)
        self.settle.append(settle)

    def ack(self, receipt: Receipt) -> None:
        self.acknowledged.append(receipt.packet_id)


# It cannot create its file, and remembers nothing.
FORGETFUL = AnswerStore(Path("/nonexistent"), clock=lambda: START_S)
text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
long_text = st.builds(lambda part, count: part * count, text, st.sampled_from([1, 3000]))
messages = st.builds(
    Message,
    topic=st.sampled_from(["edge/v1/kitchen/models/none/infer", "edge/v1/groups/g/models/none/infer"])
    | text.map(lambda name: f"edge/v1/kitchen/models/{name}/infer")
    | text,
    payload=st.sampled_from([b"", b"{}", b'{"reply_to":"edge/v1/replies/me/a"}', b'{"reply_to":7', b"\xff"]),
    retain=st.booleans(),
    properties=st.builds(
        Properties,
        content_type=st.none() | long_text,
        response_topic=st.just("edge/v1/replies/me/a") | st.none() | long_text,
        correlation_data=st.none() | st.sampled_from([b"", b"c", bytes(60_000)]),
        expiry_s=st.none() | st.sampled_from([0, 1, 2**32 - 1]),
        user=st.lists(
            st.tuples(st.sampled_from(["tensor", "accept", "traceparent", "x"]), long_text), max_size=4
        ).map(tuple),
    ),
    refusal=st.none() | st.just("expected less"),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(messages, min_size=1, max_size=6))
def test_every_message_is_acknowledged_and_answered_if_it_can_be(received: list[Message]) -> None:
    @in_virtual_time
    async def run() -> None:
        inference, connection = serving(FORGETFUL)
        for number, message in enumerate(received):
            inference.on_message(replace(message, receipt=Receipt(number + 1, 1)))
        for settle in connection.settle:
            settle(SUCCESS)
        assert connection.acknowledged == list(range(1, len(received) + 1))
        assert inference.in_flight == 0
        counted = {sample.metric for sample in inference._metrics.samples({})}
        assert "edge_faults_total" not in counted
        for payload in connection.payloads:
            assert len(payload) < 4096
            assert "error" in json.loads(payload)

    run()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AnswerStore]:
    made = AnswerStore(tmp_path, clock=lambda: START_S)
    yield made
    made.close()


def serving(store: AnswerStore) -> tuple[Inference, FakeConnection]:
    """Return an agent without models, which answers everything 404 at once."""
    models = Models(WorkerSettings(), QueueLimits(), lambda _name: None)
    inference = Inference("kitchen", models, store, Metrics(), Deadlines(60.0, 600.0))
    connection = FakeConnection()
    inference.use(cast(Connection, connection))
    return inference, connection


def request(number: int, correlation: bytes | None = None) -> Message:
    properties = Properties(
        response_topic="edge/v1/replies/me/a", correlation_data=correlation or b"%d" % number
    )
    return Message(
        "edge/v1/kitchen/models/none/infer", b"", 1, properties=properties, receipt=Receipt(number, 1)
    )


@in_virtual_time
async def test_request_is_acknowledged_when_the_broker_has_its_answer(store: AnswerStore) -> None:
    inference, connection = serving(store)
    for number in (1, 2):
        inference.on_message(request(number))
    assert connection.acknowledged == []
    connection.settle[1](SUCCESS)
    assert (connection.acknowledged, inference.in_flight) == ([], 1)
    connection.settle[0](SUCCESS)
    assert (connection.acknowledged, inference.in_flight) == ([1, 2], 0)
    assert store.waiting == 0


@in_virtual_time
async def test_request_whose_answer_was_not_sent_is_left_to_the_broker(store: AnswerStore) -> None:
    inference, connection = serving(store)
    inference.on_message(request(1))
    connection.settle[0](CLOSED)
    assert (connection.acknowledged, inference.in_flight) == ([], 0)
    assert store.waiting == 1


@in_virtual_time
async def test_repeated_request_gets_the_first_answer_and_is_acknowledged_too(store: AnswerStore) -> None:
    inference, connection = serving(store)
    for number in (1, 2):  # the second one while the answer to the first is on its way
        inference.on_message(request(number, b"same"))
    assert len(connection.payloads) == 1
    connection.settle[0](SUCCESS)
    assert connection.acknowledged == [1, 2]
    inference.on_message(request(3, b"same"))
    assert connection.payloads[0] == connection.payloads[1]
    connection.settle[1](SUCCESS)
    assert connection.acknowledged == [1, 2, 3]


@in_virtual_time
async def test_drain_ends_with_the_last_answer(store: AnswerStore) -> None:
    inference, connection = serving(store)
    await inference.drain(10.0)  # nothing to wait for
    for number in (1, 2):
        inference.on_message(request(number))
    draining = asyncio.ensure_future(inference.drain(10.0))
    for second, settle in enumerate(connection.settle, 1):
        assert not draining.done()
        await asyncio.sleep(1)
        settle(SUCCESS)
        assert asyncio.get_running_loop().time() == pytest.approx(START_S + second)
    await draining
    assert asyncio.get_running_loop().time() == pytest.approx(START_S + 2)


@in_virtual_time
async def test_drain_ends_at_its_limit_and_with_the_connection(store: AnswerStore) -> None:
    inference, connection = serving(store)
    inference.on_message(request(1))
    await inference.drain(10.0)
    assert asyncio.get_running_loop().time() == pytest.approx(START_S + 10)
    inference.on_down(LOST)  # a loss before does not count
    draining = asyncio.ensure_future(inference.drain(10.0))
    await asyncio.sleep(1)
    assert not draining.done()
    inference.on_down(LOST)
    await draining
    connection.connected = False
    await inference.drain(10.0)
    assert asyncio.get_running_loop().time() == pytest.approx(START_S + 11)


@in_virtual_time
async def test_stopping_agent_leaves_new_requests_to_the_broker(store: AnswerStore) -> None:
    inference, connection = serving(store)
    inference.refuse_new()
    inference.on_message(request(1))
    assert (connection.payloads, connection.acknowledged, inference.in_flight) == ([], [], 0)


@in_virtual_time
async def test_internal_error_is_answered_500_and_a_repeated_request_too(
    store: AnswerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    inference, connection = serving(store)
    monkeypatch.setattr(Models, "get", lambda *_: 1 // 0)
    inference.on_message(request(1, b"same"))
    monkeypatch.undo()
    assert b"internal error" in connection.payloads[0]
    inference.on_message(request(2, b"same"))  # while the answer is on its way
    assert len(connection.payloads) == 1
    connection.settle[0](SUCCESS)
    assert (connection.acknowledged, inference.in_flight) == ([1, 2], 0)
    inference.on_message(request(3, b"same"))
    assert connection.payloads[1] == connection.payloads[0]
    connection.settle[1](SUCCESS)
    assert (connection.acknowledged, inference.in_flight) == ([1, 2, 3], 0)


@in_virtual_time
async def test_answer_that_cannot_be_sent_holds_up_nothing(
    store: AnswerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    inference, connection = serving(store)
    for error in (
        ValueError("a string"),
        UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"),
        KeyError(),
    ):

        def refuse(*_args: object, error: Exception = error, **_options: object) -> None:
            raise error

        monkeypatch.setattr(connection, "send", refuse)
        number = 1 + len(connection.acknowledged)
        inference.on_message(request(number, b"same"))
        assert (len(connection.acknowledged), inference.in_flight) == (number, 0)
    monkeypatch.undo()
    inference.on_message(request(9, b"same"))
    connection.settle[0](SUCCESS)
    assert (connection.acknowledged, inference.in_flight) == ([1, 2, 3, 9], 0)


@in_virtual_time
async def test_remembered_answer_that_cannot_be_read_is_computed_again(
    store: AnswerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    inference, connection = serving(store)
    inference.on_message(request(1, b"same"))
    connection.settle[0](SUCCESS)
    monkeypatch.setattr(answers, "_record", lambda *_: json.loads("damaged"))
    inference.on_message(request(2, b"same"))
    assert connection.payloads[1] == connection.payloads[0]
    connection.settle[1](SUCCESS)
    assert (connection.acknowledged, inference.in_flight) == ([1, 2], 0)
    assert store.undelivered() == []


@pytest.mark.parametrize("method", ["put", "get"])
@in_virtual_time
async def test_store_that_fails_holds_up_nothing(
    store: AnswerStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    inference, connection = serving(store)
    monkeypatch.setattr(store, method, lambda *_args, **_options: 1 // 0)
    for number in (1, 2):
        inference.on_message(request(number, b"same"))
        assert json.loads(connection.payloads[-1])["error"]
        connection.settle[-1](SUCCESS)
    assert (connection.acknowledged, inference.in_flight) == ([1, 2], 0)
