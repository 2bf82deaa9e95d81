"""An agent whose answers a test chooses, on a real connection to a real broker."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.wire import topics
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
    "inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 1, 2, 3]}],
}

# A status with JSON, or raw tensors: descriptions and bytes. None is no answer.
Reply = tuple[int, dict[str, Any]] | tuple[Sequence[str], bytes] | None


class Responder:
    """An agent `kitchen` with a model `digits`: `reply(count, message)` chooses its answers."""

    def __init__(
        self,
        broker: BrokerProcess,
        reply: Callable[[int, Message], Reply],
        *,
        device: str = "kitchen",
        state: dict[str, Any] | None = None,
        presence: bytes = b'{"state":"online"}',
        group: str = "",
        settings: BrokerSettings | None = None,
    ) -> None:
        self.requests: list[Message] = []
        self._reply = reply
        self._device, self._state, self._presence, self._group = device, state or STATE, presence, group
        self.connection = Connection(
            settings or BrokerSettings(broker.host, broker.port),
            Owner(self._on_message),
            client_id=f"{device}-{secrets.token_hex(4)}",
        )

    async def __aenter__(self) -> Responder:
        await self.connection.connect()
        documents: list[tuple[topics.Topic, bytes]] = [
            (topics.State(self._device), self._presence),
            (topics.ModelState(self._device, str(self._state["name"])), json.dumps(self._state).encode()),
            (
                topics.Info(self._device),
                json.dumps({"capabilities": {"groups": [self._group] if self._group else []}}).encode(),
            ),
        ]
        for topic, document in documents:
            verdict = await self.connection.publish(topics.format_topic(topic), document, retain=True)
            assert not verdict.failed
        of_group = self._group and topics.group_filters(self._group, "digits")
        for topic_filter in of_group or topics.infer_filters(self._device):
            await self.connection.subscribe(topic_filter)
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.connection.close(drain_s=1.0)

    def _on_message(self, message: Message) -> None:
        self.requests.append(message)
        reply = self._reply(len(self.requests), message)
        if reply is not None:
            self.answer(message, reply)
        self.connection.ack(message)

    def answer(self, request: Message, reply: Reply, **changes: Any) -> None:
        """Publish an answer to a request."""
        assert reply is not None
        head, body = reply
        if self.connection.version != 5:
            assert isinstance(body, dict)
            asked = json.loads(request.payload)
            document = {"id": asked["id"], "status": head, "message": "", **body}
            self.connection.publish(asked["reply_to"], json.dumps(document).encode(), **changes)
            return
        user: tuple[tuple[str, str], ...] = (("__stat", str(head) if isinstance(body, dict) else "200"),)
        if isinstance(body, bytes):
            assert not isinstance(head, int)
            user += (*(("tensor", tensor) for tensor in head), ("model_version", "1.0.0"))
            user += (("server-timing", "queue;dur=0.1, decode;dur=0.2, compute;dur=0.3, encode;dur=0.4"),)
        trace = tuple(pair for pair in request.properties.user if pair[0].startswith("trace"))
        assert request.properties.response_topic is not None
        self.connection.publish(
            request.properties.response_topic,
            body if isinstance(body, bytes) else json.dumps(body).encode(),
            properties=Properties(
                content_type="application/octet-stream" if isinstance(body, bytes) else "application/json",
                correlation_data=request.properties.correlation_data,
                user=user + trace,
            ),
            **changes,
        )
