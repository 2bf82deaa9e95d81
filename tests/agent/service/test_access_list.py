"""The access list in docs/mosquitto, on a real mosquitto: it allows what is needed, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.settings import BrokerSettings
from tests.agent.service.conftest import Client, StartService, status_of, until
from tests.conftest import BrokerProcess

ACCESS_LIST = Path(__file__).parents[3] / "docs" / "mosquitto" / "edge.acl"


@pytest.fixture
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Return a mosquitto with the access list, which trusts the given user name."""
    folder = tmp_path_factory.mktemp("guarded")
    acl = folder / "edge.acl"
    acl.write_text(ACCESS_LIST.read_text() + "user test\ntopic readwrite #\n")
    acl.chmod(0o644)
    process = BrokerProcess("mosquitto", folder, extra=f"acl_file {acl}\n")
    process.start()
    yield process
    process.stop()


async def person(port: int, user: str, client_id: str) -> Client:
    client = Client(BrokerSettings("127.0.0.1", port, username=user), client_id, "kitchen")
    await client.connection.connect()
    return client


async def test_person_who_may_ask_is_answered(guarded: BrokerProcess, start_service: StartService) -> None:
    async with start_service(guarded.port, broker_username="kitchen", groups=["door"]) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        alice = await person(guarded.port, "alice", "alice-laptop")
        await alice.start()
        assert status_of(await alice.ask(b"hello")) == 200
        await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 0)
        await alice.connection.close()
    assert not any("undelivered" in name for name in rig.service.samples())


@pytest.mark.parametrize(
    ("user", "topic"),
    [
        ("kitchen", "edge/v1/garage/desired"),
        ("kitchen", "edge/v1/garage/models/echo/infer"),
        ("kitchen", "edge/v1/garage/state"),
        ("kitchen", "homeassistant/device/edge_garage/config"),
        ("alice", "homeassistant/device/edge_kitchen/config"),
        ("homeassistant", "edge/v1/kitchen/models/echo/infer"),
        ("alice", "edge/v1/kitchen/desired"),
        ("alice", "edge/v1/kitchen/state"),
        ("alice", "edge/v1/replies/alice-laptop/forged"),
        ("fleet", "edge/v1/replies/alice-laptop/forged"),
        ("fleet", "edge/v1/kitchen/state"),
        ("mallory", "edge/v1/kitchen/models/echo/infer"),
    ],
)
async def test_publishing_without_the_right_is_refused(guarded: BrokerProcess, user: str, topic: str) -> None:
    somebody = await person(guarded.port, user, f"{user}-1")
    verdict = await somebody.connection.publish(topic, b"x")
    assert verdict.name == "Not authorized"
    await somebody.connection.close()


@pytest.mark.parametrize(
    ("user", "topic_filter", "topic"),
    [
        ("kitchen", "edge/v1/garage/models/+/infer", "edge/v1/garage/models/echo/infer"),
        ("kitchen", "edge/v1/replies/alice-laptop/#", "edge/v1/replies/alice-laptop/x"),
        ("alice", "edge/v1/replies/bob-laptop/#", "edge/v1/replies/bob-laptop/x"),
        ("alice", "edge/v1/kitchen/models/+/infer", "edge/v1/kitchen/models/echo/infer"),
        ("alice", "edge/v1/kitchen/jobs/+", "edge/v1/kitchen/jobs/7"),
        ("alice", "#", "edge/v1/kitchen/desired"),
        ("homeassistant", "edge/v1/replies/alice-laptop/#", "edge/v1/replies/alice-laptop/x"),
    ],
)
async def test_subscriber_without_the_right_receives_nothing(
    guarded: BrokerProcess, user: str, topic_filter: str, topic: str
) -> None:
    heard: list[Message] = []
    settings = BrokerSettings("127.0.0.1", guarded.port, username=user)
    somebody = Connection(settings, client_id=f"{user}-1", on_message=heard.append)
    await somebody.connect()
    await somebody.subscribe(topic_filter)  # mosquitto checks rights at delivery
    test = await person(guarded.port, "test", "test")
    await test.connection.subscribe(topic_filter)
    assert not (await test.connection.publish(topic, b"secret")).failed
    await until(lambda: [message.payload for message in test.received] == [b"secret"])
    await somebody.publish(f"edge/v1/{user}/note", b"", qos=1)  # everything before it has arrived now
    assert b"secret" not in [message.payload for message in heard]
    await somebody.close()
    await test.connection.close()
