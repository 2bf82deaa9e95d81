"""A connection for tests: to a real broker, or to one in memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.reason_codes import Reason
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from tests.agent.mqtt.memory_broker import MemoryBroker
from tests.patience import PATIENCE_S

TOPIC = "edge/v1/replies/me/x"
FILTER = "edge/v1/replies/me/#"
SETTINGS = BrokerSettings("broker")


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Peer(Connection):
    """A connection that keeps received messages and acknowledges none by itself."""

    def __init__(self, settings: BrokerSettings, client_id: str = "me", **options: object) -> None:
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.losses: asyncio.Queue[Reason] = asyncio.Queue()
        names = [field.name for field in fields(Owner)]
        called = {name: options.pop(name) for name in names if name in options}
        owner = Owner(**{"on_message": self._keep, "on_down": self.losses.put_nowait} | called)  # type: ignore[arg-type]
        super().__init__(settings, owner, client_id=client_id, **options)  # type: ignore[arg-type]

    def _keep(self, message: Message) -> None:
        if not message.retain:  # amqtt sends all retained messages
            self.inbox.put_nowait(message)

    async def next(self, limit_s: float = PATIENCE_S) -> Message:
        return await asyncio.wait_for(self.inbox.get(), limit_s)

    async def loss(self, limit_s: float = PATIENCE_S) -> Reason:
        """Return when a connection was lost."""
        return await asyncio.wait_for(self.losses.get(), limit_s)


def socket_of(connection: Connection) -> socket.socket:
    """The kernel's socket under a connection that is up: to break it without a word."""
    engine = connection._session.engine
    assert engine is not None
    assert engine._socket is not None
    return engine._socket._sock


@contextlib.asynccontextmanager
async def connected(
    port: int, client_id: str = "me", *, protocol: str = "auto", **options: object
) -> AsyncIterator[Peer]:
    peer = Peer(BrokerSettings("127.0.0.1", port, protocol=protocol), client_id, **options)
    await peer.connect()
    try:
        yield peer
    finally:
        await peer.close()


@contextlib.asynccontextmanager
async def in_memory(broker: MemoryBroker, **options: Any) -> AsyncIterator[Peer]:
    """A connection to a broker in memory, for `virtual_time.run`."""
    peer = Peer(SETTINGS, open_socket=broker.open_socket, **options)
    await peer.connect()
    try:
        yield peer
    finally:
        await peer.close()
