"""`edgebundle infer`: one answer despite restarts, or an error with the reason."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.wire import topics
from builder.errors import FleetError, PackageError
from builder.fleet.broker import Broker
from builder.fleet.client import Client
from builder.fleet.infer import infer_async
from builder.fleet.request import Request
from tests.conftest import BrokerProcess

PNG = b"\x89PNG\r\n\x1a\n" + bytes(50)
JPEG = b"\xff\xd8\xff\xe0" + bytes(50)
TOP = {
    "model_name": "digits",
    "model_version": "1.0.0",
    "outputs": [
        {"name": "labels", "datatype": "BYTES", "shape": [2], "data": ["seven", "one"]},
        {"name": "scores", "datatype": "FP32", "shape": [2], "data": [0.9, 0.1]},
        {"name": "indices", "datatype": "INT64", "shape": [2], "data": [7, 1]},
    ],
}
STATE = {
    "name": "digits",
    "ready": True,
    "inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8]}],
}


class Responder:
    """An agent whose answers a test chooses: `reply(count)` returns a status and a body, or None."""

    def __init__(self, broker: BrokerProcess, reply: Callable[[int], tuple[int, Any] | None]) -> None:
        self.requests: list[Message] = []
        self._reply = reply
        self._client = Client(Broker(broker.url), self._on_message)

    async def __aenter__(self) -> Responder:
        await self._client.__aenter__()
        state = topics.format_topic(topics.ModelState("kitchen", "digits"))
        await self._client.publish_confirmed(state, json.dumps(STATE).encode(), retain=True, limit_s=5)
        await self._client.subscribe(topics.infer_filter("kitchen"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    def _on_message(self, topic: topics.Topic, message: Message) -> None:
        if not isinstance(topic, topics.Infer):
            return
        self.requests.append(message)
        answer = self._reply(len(self.requests))
        if answer is None:
            return
        status, body = answer
        if self._client.speaks_5:
            assert message.properties.response_topic is not None
            user: tuple[tuple[str, str], ...] = (("__stat", str(status)),)
            if isinstance(body, bytes):
                content_type, payload = "application/octet-stream", body
                user += (("tensor", "y;FP32;2"), ("tensor", "words;BYTES;1"))
            else:
                content_type, payload = "application/json", json.dumps(body).encode()
            self._client.publish(
                message.properties.response_topic,
                payload,
                properties=Properties(
                    content_type=content_type,
                    correlation_data=message.properties.correlation_data,
                    user=user,
                ),
            )
        else:
            request = json.loads(message.payload)
            document = {"id": request["id"], "status": status, "message": "", **body}
            self._client.publish(request["reply_to"], json.dumps(document).encode())


async def test_an_image_is_answered_with_labels_over_either_broker(broker: BrokerProcess) -> None:
    async with Responder(broker, lambda _count: (200, TOP)) as responder:
        result = await infer_async("kitchen", "digits", Request.image(PNG), Broker(broker.url), deadline_s=5)
    assert (result.ok, result.version, result.attempts) == (True, "1.0.0", 1)
    assert [(row.label, row.index) for row in result.top] == [("seven", 7), ("one", 1)]
    assert result.top[0].score == pytest.approx(0.9)
    (request,) = responder.requests
    if broker.kind == "mosquitto":
        assert (request.payload, request.properties.content_type) == (PNG, "image/png")
        assert request.properties.expiry_s == 5
    else:
        document = json.loads(request.payload)
        assert document["deadline_s"] == pytest.approx(5, abs=0.5)
        assert document["inputs"] == [
            {
                "name": "image",
                "datatype": "BYTES",
                "shape": [1],
                "data": [base64.b64encode(PNG).decode()],
                "parameters": {"content_type": "image/png"},
            }
        ]


async def test_raw_tensors_are_answered_with_raw_tensors(mosquitto: BrokerProcess) -> None:
    inputs = {"ids": np.array([[1, 2, 3]], np.int64), "mask": np.ones((1, 3), np.int64)}
    body = np.array([1.5, -2.0], "<f4").tobytes() + b"\x05\x00\x00\x00hello"
    async with Responder(mosquitto, lambda _count: (200, body)) as responder:
        result = await infer_async("kitchen", "digits", Request.arrays(inputs), Broker(mosquitto.url))
    (request,) = responder.requests
    assert request.properties.all("tensor") == ("ids;INT64;1,3", "mask;INT64;1,3")
    assert request.payload == inputs["ids"].tobytes() + inputs["mask"].tobytes()
    first, second = result.outputs
    np.testing.assert_array_equal(first.values, np.array([1.5, -2.0], np.float32))
    assert (second.name, second.values.tolist()) == ("words", ["hello"])


async def test_tensors_are_json_without_mqtt_5(amqtt_broker: BrokerProcess) -> None:
    inputs = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
    async with Responder(amqtt_broker, lambda _count: (200, TOP)) as responder:
        await infer_async("kitchen", "digits", Request.arrays(inputs), Broker(amqtt_broker.url))
    (tensor,) = json.loads(responder.requests[0].payload)["inputs"]
    assert tensor == {"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [0, 1, 2, 3, 4, 5]}


async def test_unanswered_request_is_sent_again_with_its_identifier(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.fleet.infer.RESEND_S", 0.2)
    async with Responder(broker, lambda count: (200, TOP) if count == 3 else None) as responder:
        result = await infer_async("kitchen", "digits", Request.image(JPEG), Broker(broker.url))
    assert (result.ok, result.attempts) == (True, 3)
    names = {
        message.properties.correlation_data or json.loads(message.payload)["id"]
        for message in responder.requests
    }
    assert len(names) == 1
    assert len({message.payload for message in responder.requests}) == 1


async def test_overloaded_model_gets_a_new_request(mosquitto: BrokerProcess) -> None:
    async with Responder(
        mosquitto, lambda count: (503, {"error": "full"}) if count < 3 else (200, TOP)
    ) as responder:
        result = await infer_async("kitchen", "digits", Request.image(JPEG), Broker(mosquitto.url))
    assert (result.ok, result.attempts) == (True, 3)
    assert len({message.properties.correlation_data for message in responder.requests}) == 3


@pytest.mark.parametrize("status", [400, 404, 408, 415, 500])
async def test_refusal_is_an_answer_and_not_retried(mosquitto: BrokerProcess, status: int) -> None:
    async with Responder(mosquitto, lambda _count: (status, {"error": "expected x, got y"})) as responder:
        result = await infer_async("kitchen", "digits", Request.image(JPEG), Broker(mosquitto.url))
    assert (result.ok, result.status, result.message) == (False, status, "expected x, got y")
    assert len(responder.requests) == 1


async def test_model_that_stays_overloaded_is_a_refusal_at_the_deadline(mosquitto: BrokerProcess) -> None:
    async with Responder(mosquitto, lambda _count: (503, {"error": "full"})):
        result = await infer_async(
            "kitchen", "digits", Request.image(JPEG), Broker(mosquitto.url), deadline_s=1.0
        )
    assert result.status == 503


@pytest.mark.slow
async def test_broker_that_restarts_costs_only_time(
    mosquitto: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.fleet.infer.RESEND_S", 60.0)  # only the reconnect makes it send again
    async with Responder(mosquitto, lambda count: (200, TOP) if count >= 2 else None) as responder:
        task = asyncio.create_task(
            infer_async("kitchen", "digits", Request.image(JPEG), Broker(mosquitto.url), deadline_s=20)
        )
        while not responder.requests:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(mosquitto.restart)
        result = await asyncio.wait_for(task, 20)
    assert result.ok
    assert result.attempts >= 2


@pytest.mark.slow
async def test_error_at_the_deadline_has_the_state_of_the_agent(mosquitto: BrokerProcess) -> None:
    with pytest.raises(FleetError, match=r"no answer from nobody within 1\.\d s: no agent of that name"):
        await infer_async("nobody", "digits", Request.image(JPEG), Broker(mosquitto.url), deadline_s=1)
    async with Client(Broker(mosquitto.url), lambda _topic, _message: None) as client:
        topic = topics.format_topic(topics.State("kitchen"))
        await client.publish_confirmed(topic, b'{"state":"offline"}', retain=True, limit_s=5)
    with pytest.raises(FleetError, match="it is offline"):
        await infer_async("kitchen", "digits", Request.image(JPEG), Broker(mosquitto.url), deadline_s=1)


@pytest.mark.slow
async def test_misspelt_name_is_an_error_with_the_known_names(
    mosquitto: BrokerProcess,
) -> None:
    async with Client(Broker(mosquitto.url), lambda _topic, _message: None) as client:
        topic = topics.format_topic(topics.State("kitchen"))
        await client.publish_confirmed(topic, b'{"state":"online"}', retain=True, limit_s=5)
    began = time.monotonic()
    with pytest.raises(FleetError, match="no agent called kitchne is known") as caught:
        await infer_async("kitchne", "digits", Request.image(JPEG), Broker(mosquitto.url), deadline_s=30)
    assert caught.value.hint == "use one of the agents at this broker: kitchen"
    assert time.monotonic() - began < 10


async def test_progress_names_the_agent_that_is_away(
    mosquitto: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.fleet.infer.RESEND_S", 0.2)
    lines: list[str] = []
    async with Client(Broker(mosquitto.url), lambda _topic, _message: None) as client:
        topic = topics.format_topic(topics.State("kitchen"))
        await client.publish_confirmed(topic, b'{"state":"stopped"}', retain=True, limit_s=5)
    with pytest.raises(FleetError, match="it is stopped"):
        await infer_async(
            "kitchen",
            "digits",
            Request.image(JPEG),
            Broker(mosquitto.url),
            deadline_s=1,
            progress=lines.append,
        )
    (line,) = lines
    assert line.startswith("kitchen is stopped; waiting for")


async def test_malformed_answer_is_an_error(mosquitto: BrokerProcess) -> None:
    async with Responder(mosquitto, lambda _count: (200, {"outputs": [{"name": 1}]})):
        with pytest.raises(FleetError, match="answer cannot be read"):
            await infer_async("kitchen", "digits", Request.image(JPEG), Broker(mosquitto.url))


@pytest.mark.parametrize(("agent", "model"), [("a/b", "m"), ("kitchen", "#"), ("groups", "m"), ("", "m")])
async def test_name_that_no_agent_or_model_can_have_is_refused(agent: str, model: str) -> None:
    with pytest.raises(FleetError, match="expected the names"):
        await infer_async(agent, model, Request.image(JPEG), Broker("mqtt://127.0.0.1:1"))


def test_file_becomes_a_request_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(PNG)
    assert Request.from_file(tmp_path / "a.bin").content_type == "image/png"
    (tmp_path / "a.json").write_bytes(b'{"inputs":[]}')
    assert Request.from_file(tmp_path / "a.json").content_type == "application/json"
    np.savez(tmp_path / "a.npz", x=np.zeros((1, 2), np.float32))
    assert Request.from_file(tmp_path / "a.npz").tensors == ("x;FP32;1,2",)
    (tmp_path / "b.bin").write_bytes(b"hello")
    with pytest.raises(PackageError, match="expected a JPEG or PNG"):
        Request.from_file(tmp_path / "b.bin")
    (tmp_path / "b.npz").write_bytes(b"hello")
    with pytest.raises(PackageError, match="cannot be read as"):
        Request.from_file(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", x=np.array([{}], dtype=object))
    with pytest.raises(PackageError):
        Request.from_file(tmp_path / "c.npz")
