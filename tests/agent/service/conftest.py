"""A service with a broker, signed bundles without kernels, and clients that find their answers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.config.file import parse_config
from agent.config.settings import Config
from agent.deploy.store.active import ActiveModel
from agent.deploy.store.store import Store
from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.service.models.worker_process import WorkerProcess
from agent.service.notify import Notifier
from agent.service.service import Service
from agent.wire.reported import Origin
from agent.wire.topics import Infer, Reply, format_topic, reply_filter
from tests.agent.disk_guard import disk_guard
from tests.agent.launching import executed
from tests.agent.mqtt.peer import socket_of
from tests.bundles import Signer, sha256
from tests.patience import PATIENCE_S, until

__all__ = ["disk_guard", "signer", "start_service"]

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path / "trust")


class Client:
    """A requester with a name, reply topics, and all messages that arrived there."""

    def __init__(self, settings: BrokerSettings, name: str, device: str) -> None:
        self.name = name
        self.device = device
        self.received: list[Message] = []
        self._arrived = asyncio.Event()
        self._numbers = itertools.count()
        self.connection = Connection(settings, Owner(self._take), client_id=name)

    def _take(self, message: Message) -> None:
        # amqtt sends a new client retained messages of other clients' subscriptions, with QoS 0.
        if not message.retain:
            self.received.append(message)
        self._arrived.set()
        self.connection.ack(message)

    async def start(self) -> None:
        await self.connection.connect()
        await self.connection.subscribe(reply_filter(self.name))

    def send(
        self,
        payload: bytes,
        *,
        model: str = "echo",
        correlation: bytes | None = None,
        expiry_s: int | None = int(PATIENCE_S),
        qos: int = 1,
        reply_to: str | None = None,
        topic: str | None = None,
    ) -> bytes:
        correlation = str(next(self._numbers)).encode() if correlation is None else correlation
        self.connection.publish(
            format_topic(Infer(self.device, model, self.name)) if topic is None else topic,
            payload,
            qos=qos,
            properties=Properties(
                content_type="application/octet-stream",
                response_topic=format_topic(Reply(self.name, "answers")) if reply_to is None else reply_to,
                correlation_data=correlation,
                expiry_s=expiry_s,
            ),
        )
        return correlation

    async def answer(self, correlation: bytes, limit_s: float = PATIENCE_S) -> Message:
        return (await self.answers(correlation, 1, limit_s))[0]

    async def answers(self, correlation: bytes, count: int, limit_s: float = PATIENCE_S) -> list[Message]:
        async with asyncio.timeout(limit_s):
            while True:
                self._arrived.clear()
                found = [m for m in self.received if m.properties.correlation_data == correlation]
                if len(found) >= count:
                    return found
                await self._arrived.wait()

    async def ask(self, payload: bytes, **options: Any) -> Message:
        return await self.answer(self.send(payload, **options))

    async def settle(self) -> None:
        """Return when everything that the broker already had for this client has arrived.

        A message to itself is the last of them, because a broker keeps the order of messages.
        """
        marker = f"marker {next(self._numbers)}".encode()
        properties = Properties(correlation_data=marker)
        self.connection.publish(
            format_topic(Reply(self.name, "answers")), marker, qos=1, properties=properties
        )
        while marker not in [message.payload for message in self.received]:
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), PATIENCE_S)


def status_of(message: Message) -> int:
    return int(message.properties.first("__stat") or "0")


@dataclass
class Rig:
    """A running service and what belongs to it."""

    service: Service
    settings: BrokerSettings
    device: str
    signer: Signer
    stop: asyncio.Event
    clients: list[Client] = field(default_factory=list)

    async def client(self, name: str = "client") -> Client:
        client = Client(self.settings, name, self.device)
        await client.start()
        self.clients.append(client)
        return client

    async def settle(self) -> None:
        """Return when every accepted request is answered and all answers have arrived."""
        await until(lambda: self.service.online and not self.service.samples()["edge_inference_in_flight"])
        for client in self.clients:
            await client.settle()

    async def begin_to_stop(self) -> None:
        """Ask the service to stop, and return when it accepts no more requests."""
        self.stop.set()
        await until(lambda: self.service._inference._closed)

    def lose_power(self) -> list[socket.socket]:
        """End the agent's part of its connections without a word; the broker sees it when these close."""
        left = []
        for connection in self.service.connections:
            left.append(socket_of(connection).dup())
            assert connection._session.engine is not None
            connection._session.engine.drop()
            connection._session.up.clear()
            assert connection._task is not None
            connection._task.cancel()
        return left

    def cut(self) -> None:
        """Cut all of the agent's connections, without a word to either side."""
        for connection in self.service.connections:
            socket_of(connection).shutdown(socket.SHUT_RDWR)


StartService = Callable[..., contextlib.AbstractAsyncContextManager[Rig]]


@pytest.fixture
def start_service(tmp_path: Path, signer: Signer) -> StartService:
    """Return a context manager that runs a service against a broker."""

    @contextlib.asynccontextmanager
    async def start(
        port: int, *, wait: bool = True, models: Sequence[str] = (), **keys: object
    ) -> AsyncIterator[Rig]:
        config = configure(tmp_path, signer.trust, port, **keys)
        service = Service(
            config, Notifier({}), spawn=functools.partial(WorkerProcess, launch=executed(FAKE_WORKER))
        )
        for name in models:
            await service.models.activate(signer.bundle(name))
        stop = asyncio.Event()
        running = asyncio.create_task(service.run(stop))
        rig = Rig(service, BrokerSettings("127.0.0.1", port), config.device, signer, stop)
        try:
            await until(lambda: not wait or service.online or running.done())
            yield rig
        finally:
            stop.set()
            await asyncio.wait_for(running, PATIENCE_S)
            for client in rig.clients:
                await client.connection.close()

    return start


def keep_active(state_dir: Path, bundle: bytes, name: str = "echo", version: str = "1.0.0") -> None:
    """Leave a bundle in a state directory as an agent does that served it."""
    store = Store(state_dir)
    digest = f"sha256:{sha256(bundle)}"
    store.bundle_path(digest).write_bytes(bundle)
    store.switch(ActiveModel(name, digest, version, Origin.LOCAL, "job-1", None))


def configure(folder: Path, trust: Path, port: int, **keys: object) -> Config:
    device = keys.pop("device", "kitchen")
    document: dict[str, Any] = {"device": device, "state_dir": str(folder / f"state-{device}")}
    for name, value in {
        "broker_url": f"mqtt://127.0.0.1:{port}",
        "broker_reconnect_spread_s": 0,  # tests have few agents, and no time
        "trust_dir": str(trust),
        "shutdown_limit_s": 2.0,
        **keys,
    }.items():
        section, _, key = name.partition("_")
        if isinstance(value, dict):
            document[name] = value
        elif key:
            document.setdefault(section, {})[key] = value
        else:
            document[name] = value
    return parse_config(document, {}, {}, folder=folder)


@contextlib.asynccontextmanager
async def connected_client(port: int, name: str = "client", device: str = "kitchen") -> AsyncIterator[Client]:
    """A client for tests in which agents come and go."""
    client = Client(BrokerSettings("127.0.0.1", port), name, device)
    await client.start()
    try:
        yield client
    finally:
        await client.connection.close()
