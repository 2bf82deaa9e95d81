"""The agent's deployment side at a real broker, without workers, for `edgebundle deploy`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent.bundle.machine import Machine
from agent.deploy.circumstances import Circumstances
from agent.deploy.deployment import Deployment
from agent.deploy.fetch.allow_list import HttpsSettings
from agent.deploy.store.store import Store
from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.wire import topics
from agent.wire.info import Hardware, Info, Software
from agent.wire.presence import AgentState, Presence
from tests.agent.deploy.rig import DEVICE, MACHINE, FakeModels
from tests.bundles import KEYRING


def info_of(device: str, machine: Machine) -> Info:
    """Return what an agent on a machine publishes about it."""
    return Info(
        device,
        "0.1.0",
        Hardware(machine.arch, cpu=machine.cpu_model, features=tuple(sorted(machine.features))),
        tuple(sorted(machine.compatible)),
        Software(glibc=machine.glibc, abi=machine.abi),
    )


class Device:
    """The deployment side of an agent on a real connection.

    `machine` is what it runs on, `published` what it says of it; None publishes no info document.
    """

    def __init__(
        self,
        root: Path,
        broker_url: str,
        *,
        device: str = DEVICE,
        protocol: str = "auto",
        https: HttpsSettings | None = None,
        machine: Machine = MACHINE,
        published: Machine | None = None,
    ) -> None:
        host, port = broker_url.removeprefix("mqtt://").split(":")
        self.device = device
        self._published = published
        self.models = FakeModels()
        self.store = Store(root)
        self.connection = Connection(
            BrokerSettings(host, int(port), protocol=protocol),
            Owner(self._on_message, on_up=self._on_up),
            client_id=f"{device}-control",
        )
        self.deployment = Deployment(
            device=device,
            store=self.store,
            circumstances=Circumstances(lambda: KEYRING, machine),
            models=self.models,
            control=self.connection,
            https=https or HttpsSettings(),
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Device:
        await self.deployment.start()
        self.connection.start()
        self._task = asyncio.create_task(self.deployment.run())
        await self.connection.wait_connected()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        assert self._task is not None
        self._task.cancel()
        try:
            await self._task
        except asyncio.CancelledError:
            pass
        finally:
            await self.deployment.close()
            await self.connection.close(drain_s=1.0)

    def _on_up(self, _session_present: bool) -> None:
        state = Presence(AgentState.ONLINE, 1, "0.1.0").to_bytes()
        self.connection.publish(topics.format_topic(topics.State(self.device)), state, retain=True)
        if self._published is not None:
            info = topics.format_topic(topics.Info(self.device))
            self.connection.publish(info, info_of(self.device, self._published).to_bytes(), retain=True)
        self.deployment.on_connected()

    def _on_message(self, message: Message) -> None:
        topic = topics.parse_topic(message.topic)
        if topic is not None:
            self.deployment.on_message(topic, message.payload)
        self.connection.ack(message)
