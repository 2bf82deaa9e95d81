"""The access list in docs/mosquitto, on the mosquitto of Debian 12 and 13: it allows what is needed, no more.

Two clients (alice, bob), two devices (kitchen, garage), and each of them as an attacker of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from agent.mqtt.connection import Connection
from agent.mqtt.message import Message, Will
from agent.mqtt.properties import Properties
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from edgebundle import AsyncClient, Broker, BrokerError, NoAnswerError, Request
from tests.agent.mqtt.peer import socket_of
from tests.agent.service.conftest import StartService, status_of
from tests.conftest import BrokerProcess, debian_mosquitto
from tests.needs import needed
from tests.patience import PATIENCE_S, until

ROOT = Path(__file__).parents[3]
ACCESS_LIST = ROOT / "docs" / "mosquitto" / "edge.acl"
RECIPES = ROOT / "examples" / "clients"
# Each client has its own block; the sample has alice's.
BOB = """
user bob
topic write edge/v1/+/models/+/infer/bob
topic read edge/v1/replies/bob/#
topic read edge/v1/+/state
"""
TEST = """
user test
topic readwrite #
"""
RAW = Request("application/octet-stream", b"hello", ("x;FP32;1,4",))


async def ask(agent: str, broker: Broker) -> int:
    """Return the status of an answer to `RAW`."""
    async with AsyncClient(broker) as client:
        target = client.model(agent, "echo")._target
        message, _ = await client.ask(target, RAW, end_s=time.monotonic() + PATIENCE_S)
        return status_of(message)


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    """Return a release's mosquitto with the access list, which trusts the given user name."""
    folder = tmp_path_factory.mktemp("guarded")
    acl = folder / "edge.acl"
    acl.write_text(ACCESS_LIST.read_text() + BOB + TEST)
    acl.chmod(0o644)
    program = debian_mosquitto(request.param)
    process = BrokerProcess("mosquitto", folder, extra=f"acl_file {acl}\n", program=program)
    process.start()
    yield process
    process.stop()


class User:
    """One connection of a user, and everything that it received."""

    _numbers = itertools.count()

    def __init__(self, port: int, name: str, client_id: str | None = None, **options: object) -> None:
        self.name = name
        self.heard: list[Message] = []
        settings = BrokerSettings("127.0.0.1", port, username=name)
        self.connection = Connection(
            settings,
            Owner(self._take),
            client_id=client_id or f"{name}-{next(self._numbers)}".replace("+", "x").replace("#", "x"),
            **options,  # type: ignore[arg-type]
        )

    def _take(self, message: Message) -> None:
        self.heard.append(message)
        self.connection.ack(message)

    async def publish(self, topic: str, payload: bytes = b"x", **options: object) -> bool:
        """Publish, and return whether the broker allowed it."""
        verdict = await self.connection.publish(topic, payload, **options)  # type: ignore[arg-type]
        assert not verdict.failed or verdict.name == "Not authorized"
        return not verdict.failed

    async def settle(self) -> None:
        """Return when everything that the broker sent before this has arrived."""
        await self.connection.publish("edge/v1/settle", b"")

    async def ask(self, device: str, reply_to: str) -> None:
        properties = Properties(
            content_type="application/octet-stream",
            response_topic=reply_to,
            correlation_data=b"1",
            expiry_s=9,
        )
        topic = f"edge/v1/{device}/models/echo/infer/{self.name}"
        assert await self.publish(topic, b"private", properties=properties)


@contextlib.asynccontextmanager
async def connected(port: int, *names: str) -> AsyncIterator[list[User]]:
    users = [User(port, name) for name in names]
    await asyncio.gather(*(user.connection.connect() for user in users))
    try:
        yield users
    finally:
        await asyncio.gather(*(user.connection.close() for user in users))


async def test_client_is_answered_by_each_device_under_its_user_name(
    guarded: BrokerProcess, start_service: StartService
) -> None:
    async with (
        start_service(guarded.port, broker_username="kitchen", groups=["door"]) as kitchen,
        start_service(guarded.port, broker_username="garage", device="garage") as garage,
    ):
        for rig in (kitchen, garage):
            await rig.service.models.activate(rig.signer.bundle())
        for user, device in itertools.product(("alice", "bob"), ("kitchen", "garage")):
            broker = Broker(f"mqtt://{user}@127.0.0.1:{guarded.port}")
            assert await ask(device, broker) == 200
        for rig in (kitchen, garage):
            await rig.settle()
            assert not any("undelivered" in name for name in rig.service.samples())


async def test_request_to_a_group_is_answered_below_the_name_of_the_group(
    guarded: BrokerProcess, start_service: StartService
) -> None:
    async with (
        start_service(guarded.port, broker_username="kitchen", groups=["door"]) as rig,
        connected(guarded.port, "alice") as [alice],
    ):
        await rig.service.models.activate(rig.signer.bundle())
        await until(lambda: rig.service.online)
        await alice.connection.subscribe("edge/v1/replies/alice/#")
        properties = Properties(
            content_type="application/octet-stream", response_topic="edge/v1/replies/alice/door/1", expiry_s=9
        )
        assert await alice.publish(
            "edge/v1/groups/door/models/echo/infer/alice", b"hi", properties=properties
        )
        await until(lambda: [status_of(message) for message in alice.heard] == [200])


async def test_nobody_else_sees_a_request_or_its_answer(
    guarded: BrokerProcess, start_service: StartService
) -> None:
    async with (
        start_service(guarded.port, broker_username="kitchen") as rig,
        connected(guarded.port, "alice", "bob", "garage", "fleet", "homeassistant", "+", "#") as users,
    ):
        alice, *others = users
        await rig.service.models.activate(rig.signer.bundle())
        for user in users:
            for topic_filter in ("#", "edge/v1/replies/#", "edge/v1/replies/alice/#", "edge/v1/kitchen/#"):
                await user.connection.subscribe(topic_filter)
        await alice.ask("kitchen", "edge/v1/replies/alice/kitchen/1")
        await until(lambda: any("/replies/" in message.topic for message in alice.heard))
        for user in others:
            await user.settle()
            topics = {message.topic for message in user.heard}
            assert not any("replies" in topic or "infer" in topic for topic in topics), (user.name, topics)


async def test_nobody_asks_in_the_name_of_another_nor_has_an_answer_sent_to_them(
    guarded: BrokerProcess, start_service: StartService
) -> None:
    async with (
        start_service(guarded.port, broker_username="kitchen") as rig,
        connected(guarded.port, "alice", "bob") as [alice, bob],
    ):
        await rig.service.models.activate(rig.signer.bundle())
        for user in (alice, bob):
            await user.connection.subscribe(f"edge/v1/replies/{user.name}/#")
        properties = Properties(response_topic="edge/v1/replies/alice/kitchen/1", expiry_s=9)
        for topic in ("edge/v1/kitchen/models/echo/infer/alice", "edge/v1/kitchen/models/echo/infer"):
            assert not await bob.publish(topic, properties=properties)
        # In his own name, but with alice's reply topic: only he learns what was wrong.
        assert await bob.publish("edge/v1/kitchen/models/echo/infer/bob", properties=properties)
        await until(lambda: [status_of(message) for message in bob.heard] == [400])
        await alice.settle()
        assert alice.heard == []


async def test_client_of_before_is_told_why_it_is_refused_and_served_where_the_list_permits(
    guarded: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(guarded.port, broker_username="kitchen") as rig:
        await rig.service.models.activate(rig.signer.bundle())
        async with AsyncClient(f"mqtt://alice@127.0.0.1:{guarded.port}") as client:
            client._user = ""  # as it was
            target = client.model("kitchen", "echo")._target
            with pytest.raises(BrokerError, match=r"/infer: Not authorized.*name the user") as caught:
                await client.ask(target, RAW, end_s=time.monotonic() + PATIENCE_S)
            assert "\n" not in str(caught.value)
        # The user `test` may publish everywhere.
        async with AsyncClient(f"mqtt://test@127.0.0.1:{guarded.port}") as client:
            client._user = ""
            target = client.model("kitchen", "echo")._target
            message, _ = await client.ask(target, RAW, end_s=time.monotonic() + PATIENCE_S)
            assert status_of(message) == 200


async def test_recipes_work_under_the_access_list(
    guarded: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    """Their topics: what they send and show is tested with their own programs, in tests/clients."""
    needed("mosquitto_pub")
    (tmp_path / "picture.png").write_bytes(b"picture")
    recipe = yaml.safe_load((RECIPES / "home-assistant.yaml").read_text())
    actions = [automation["actions"][0]["data"] for automation in recipe["automation"]]
    async with (
        start_service(guarded.port, broker_username="kitchen") as rig,
        connected(guarded.port, "homeassistant") as [house],
    ):
        await rig.service.models.activate(rig.signer.bundle())
        done = await asyncio.create_subprocess_exec(
            *(RECIPES / "mosquitto.sh", "kitchen", "echo", tmp_path / "picture.png"),
            *("-h", "127.0.0.1", "-p", str(guarded.port), "-u", "alice"),
            env={**os.environ, "EDGEBUNDLE_USER": "alice"},
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await asyncio.wait_for(done.communicate(), PATIENCE_S)
        assert (done.returncode, said) == (0, b"1.0.0:picture\n")
        for action, sensor in zip(actions, recipe["mqtt"], strict=True):
            await house.connection.subscribe(sensor["sensor"]["state_topic"])
            [reply_to] = re.findall(r'"reply_to": "(.*?)"', action["payload"])
            # The models have other names than the one that runs here.
            request = json.dumps({"reply_to": reply_to, "id": "1", "inputs": []}).encode()
            assert await house.publish(action["topic"], request)
        await until(lambda: len(house.heard) == len(actions))
        assert [json.loads(message.payload)["status"] for message in house.heard] == [404, 404]


async def test_device_cannot_be_thrown_out_by_its_client_identifier(
    guarded: BrokerProcess, start_service: StartService, caplog: pytest.LogCaptureFixture
) -> None:
    attackers = ("garage", "alice", "mallory")
    async with (
        connected(guarded.port, *attackers) as users,
        start_service(guarded.port, broker_username="kitchen") as rig,
    ):
        await rig.service.models.activate(rig.signer.bundle())
        # What the attackers can learn at the broker must not contain the identifier.
        for user in users:
            for topic_filter in ("#", "$SYS/#"):
                await user.connection.subscribe(topic_filter)
        broker = Broker(f"mqtt://alice@127.0.0.1:{guarded.port}")
        assert await ask("kitchen", broker) == 200
        ids = [connection.client_id for connection in rig.service.connections]
        for user in users:
            await user.settle()
            for message in user.heard:
                said = f"{message.topic} {message.payload!r} {message.properties}"
                assert not any(client_id in said for client_id in ids)
        guesses = ("kitchen", "kitchen-control", "kitchen-inference", "kitchen-groups", "kitchen-1-control")
        for name, client_id in itertools.product(attackers, guesses):
            attacker = User(guarded.port, name, client_id)
            await attacker.connection.connect()
            await attacker.connection.close()
        assert await ask("kitchen", broker) == 200
        assert all(connection.connected for connection in rig.service.connections)
        assert {connection.connects for connection in rig.service.connections} == {1}
        assert "ended" not in caplog.text


async def test_client_of_a_command_does_not_publish_its_client_identifier(guarded: BrokerProcess) -> None:
    # A device that is asked sees the Response Topic, and could disconnect the client by its identifier.
    async with connected(guarded.port, "kitchen") as [kitchen]:
        await kitchen.connection.subscribe("edge/v1/kitchen/models/+/infer/+")
        async with AsyncClient(f"mqtt://alice@127.0.0.1:{guarded.port}") as client:
            with pytest.raises(NoAnswerError, match="no answer from kitchen"):
                await client.model("kitchen", "echo")(RAW, deadline_s=0.2)
        await until(lambda: bool(kitchen.heard))
        said = kitchen.heard[0].properties
        assert (said.response_topic or "").startswith("edge/v1/replies/alice/kitchen/")
        assert client._link is not None
        assert client._link.client_id not in f"{said}"


ALLOWED, REFUSED = True, False
PUBLISHES = [
    # A client cannot publish as a device, as another client, or as a deployer.
    ("alice", "edge/v1/kitchen/models/echo/infer/alice", ALLOWED),
    ("alice", "edge/v1/groups/door/models/echo/infer/alice", ALLOWED),
    ("alice", "edge/v1/kitchen/models/echo/infer/bob", REFUSED),
    ("bob", "edge/v1/kitchen/models/echo/infer/alice", REFUSED),
    ("alice", "edge/v1/groups/door/models/echo/infer/bob", REFUSED),
    # Nor without a name.
    ("alice", "edge/v1/kitchen/models/echo/infer", REFUSED),
    ("alice", "edge/v1/groups/door/models/echo/infer", REFUSED),
    ("alice", "edge/v1/kitchen/state", REFUSED),
    ("alice", "edge/v1/alice/state", REFUSED),
    ("alice", "edge/v1/alice/models/echo/state", REFUSED),
    ("alice", "edge/v1/kitchen/desired", REFUSED),
    ("alice", "edge/v1/kitchen/bundles/00/block/0", REFUSED),
    ("alice", "edge/v1/replies/bob/kitchen/forged", REFUSED),
    ("alice", "edge/v1/replies/alice/kitchen/forged", REFUSED),
    ("alice", "homeassistant/device/edge_kitchen/config", REFUSED),
    ("alice", "homeassistant/device/edge_alice/config", REFUSED),
    # A device cannot write another device's topics, ask another device, or answer in its place.
    ("kitchen", "edge/v1/kitchen/state", ALLOWED),
    ("kitchen", "edge/v1/replies/alice/kitchen/1", ALLOWED),
    ("kitchen", "edge/v1/replies/alice/door/1", ALLOWED),
    ("kitchen", "homeassistant/device/edge_kitchen/config", ALLOWED),
    ("kitchen", "edge/v1/garage/state", REFUSED),
    ("kitchen", "edge/v1/garage/desired", REFUSED),
    ("kitchen", "edge/v1/garage/jobs/1", REFUSED),
    ("kitchen", "edge/v1/garage/models/echo/state", REFUSED),
    ("kitchen", "edge/v1/garage/models/echo/infer", REFUSED),
    ("kitchen", "edge/v1/garage/models/echo/infer/kitchen", REFUSED),
    ("kitchen", "edge/v1/groups/door/models/echo/infer", REFUSED),
    ("kitchen", "edge/v1/groups/door/models/echo/infer/kitchen", REFUSED),
    ("kitchen", "homeassistant/device/edge_garage/config", REFUSED),
    ("garage", "edge/v1/replies/alice/kitchen/forged", REFUSED),
    ("garage", "edge/v1/replies/alice/door/forged", REFUSED),
    ("garage", "edge/v1/replies/kitchen/kitchen/forged", REFUSED),
    # The other roles.
    ("fleet", "edge/v1/kitchen/desired", ALLOWED),
    ("fleet", "edge/v1/kitchen/bundles/00/block/0", ALLOWED),
    ("fleet", "edge/v1/replies/alice/kitchen/forged", REFUSED),
    ("fleet", "edge/v1/kitchen/state", REFUSED),
    ("fleet", "edge/v1/kitchen/models/echo/infer/fleet", REFUSED),
    ("dashboard", "edge/v1/kitchen/models/echo/infer/dashboard", ALLOWED),
    ("dashboard", "edge/v1/kitchen/models/echo/infer/alice", REFUSED),
    ("dashboard", "edge/v1/kitchen/desired", ALLOWED),
    ("homeassistant", "edge/v1/kitchen/models/echo/infer/homeassistant", ALLOWED),
    ("homeassistant", "edge/v1/kitchen/models/echo/infer/alice", REFUSED),
    ("homeassistant", "edge/v1/kitchen/models/echo/infer", REFUSED),
    ("mallory", "edge/v1/kitchen/models/echo/infer", REFUSED),
    ("mallory", "edge/v1/kitchen/models/echo/infer/mallory", REFUSED),
    ("mallory", "edge/v1/kitchen/models/echo/infer/alice", REFUSED),
    # A name that is a wildcard is not every name.
    ("+", "edge/v1/kitchen/state", REFUSED),
    ("#", "edge/v1/kitchen/state", REFUSED),
]


async def test_each_user_may_publish_what_is_needed_and_nothing_else(guarded: BrokerProcess) -> None:
    names = sorted({user for user, _, _ in PUBLISHES})
    async with connected(guarded.port, *names) as users:
        of = dict(zip(names, users, strict=True))
        wrong = [row for row in PUBLISHES if await of[row[0]].publish(row[1]) != row[2]]
    assert wrong == []


READS = [
    ("alice", "edge/v1/replies/alice/kitchen/1", ALLOWED),
    ("alice", "edge/v1/kitchen/state", ALLOWED),
    ("alice", "edge/v1/replies/bob/kitchen/1", REFUSED),
    ("alice", "edge/v1/replies/kitchen/garage/1", REFUSED),
    ("alice", "edge/v1/kitchen/models/echo/infer/alice", REFUSED),
    ("alice", "edge/v1/groups/door/models/echo/infer/alice", REFUSED),
    ("alice", "edge/v1/kitchen/jobs/7", REFUSED),
    ("alice", "edge/v1/kitchen/desired", REFUSED),
    ("kitchen", "edge/v1/kitchen/models/echo/infer", ALLOWED),
    ("kitchen", "edge/v1/kitchen/models/echo/infer/alice", ALLOWED),
    ("kitchen", "edge/v1/kitchen/desired", ALLOWED),
    ("kitchen", "edge/v1/groups/door/models/echo/infer", ALLOWED),
    ("kitchen", "edge/v1/groups/door/models/echo/infer/alice", ALLOWED),
    ("kitchen", "edge/v1/garage/models/echo/infer/alice", REFUSED),
    ("kitchen", "edge/v1/garage/desired", REFUSED),
    ("kitchen", "edge/v1/garage/state", REFUSED),
    ("kitchen", "edge/v1/replies/alice/kitchen/1", REFUSED),
    ("garage", "edge/v1/groups/door/models/echo/infer/alice", REFUSED),
    ("garage", "edge/v1/replies/alice/kitchen/1", REFUSED),
    ("fleet", "edge/v1/kitchen/jobs/7", ALLOWED),
    ("fleet", "edge/v1/replies/alice/kitchen/1", REFUSED),
    ("fleet", "edge/v1/kitchen/models/echo/infer/alice", REFUSED),
    ("dashboard", "edge/v1/kitchen/metrics", ALLOWED),
    ("homeassistant", "edge/v1/replies/alice/kitchen/1", REFUSED),
    # Nor is a name with a wildcard or a level of a topic another name.
    ("alice/kitchen", "edge/v1/replies/alice/kitchen/1", REFUSED),
    ("alice/#", "edge/v1/replies/alice/kitchen/1", REFUSED),
    ("+", "edge/v1/replies/alice/kitchen/1", REFUSED),
    ("#", "edge/v1/replies/alice/kitchen/1", REFUSED),
]


async def test_each_user_receives_what_is_needed_and_nothing_else(guarded: BrokerProcess) -> None:
    names = sorted({user for user, _, _ in READS})
    async with connected(guarded.port, "test", *names) as [test, *users]:
        of = dict(zip(names, users, strict=True))
        for user in users:
            await user.connection.subscribe("#")  # mosquitto checks rights when it delivers
        for topic in sorted({topic for _, topic, _ in READS}):
            assert await test.publish(topic)
        for user in users:
            await user.settle()
        wrong = [row for row in READS if (row[1] in [m.topic for m in of[row[0]].heard]) != row[2]]
    assert wrong == []


async def test_session_of_another_user_is_not_inherited(guarded: BrokerProcess) -> None:
    """A user who learns a client identifier gets neither the waiting answers nor the subscriptions."""
    alice = User(guarded.port, "alice", "known", persistent=True)
    await alice.connection.connect()
    await alice.connection.subscribe("edge/v1/replies/alice/#")
    await alice.connection.close()
    async with connected(guarded.port, "test") as [test]:
        assert await test.publish("edge/v1/replies/alice/kitchen/1", b"private")
        garage = User(guarded.port, "garage", "known", persistent=True)
        await garage.connection.connect()
        assert await test.publish("edge/v1/replies/alice/kitchen/2", b"private")
        await garage.settle()
        assert garage.heard == []
        await garage.connection.close()


async def test_will_is_not_published_where_its_user_may_not_publish(guarded: BrokerProcess) -> None:
    async with connected(guarded.port, "test") as [test]:
        await test.connection.subscribe("edge/v1/garage/#")
        await test.connection.subscribe("edge/v1/kitchen/#")
        for device in ("kitchen", "garage"):
            user = User(guarded.port, "garage", will=Will(f"edge/v1/{device}/state", b"will"))
            await user.connection.connect()
            socket_of(user.connection).shutdown(socket.SHUT_RDWR)
            await user.connection.close()
        # The broker publishes wills in the order in which it lost their clients.
        await until(lambda: any(message.payload == b"will" for message in test.heard))
        assert {message.topic for message in test.heard if message.payload == b"will"} == {
            "edge/v1/garage/state"
        }
