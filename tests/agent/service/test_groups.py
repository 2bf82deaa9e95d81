"""Groups: who gets which requests, on a real mosquitto, while members fail, vanish and stop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from agent.mqtt.properties import Properties
from agent.mqtt.settings import BrokerSettings
from agent.service import groups
from agent.service.groups import Groups
from agent.wire.model_state import ModelPhase
from agent.wire.topics import GroupInfer, format_topic, group_filters
from tests.agent.service.conftest import Client, Rig, StartService, connected_client, status_of
from tests.conftest import BrokerProcess
from tests.patience import PATIENCE_S, until

GROUP = "door"
TOPIC = format_topic(GroupInfer(GROUP, "echo", "client"))


class Recorder:
    """A connection that writes down its subscriptions."""

    def __init__(self) -> None:
        self.filters: set[str] = set()
        self.packets = 0

    def want(self, topic_filter: str) -> None:
        assert topic_filter not in self.filters
        self.filters.add(topic_filter)
        self.packets += 1

    def unsubscribe(self, topic_filter: str) -> None:
        self.filters.remove(topic_filter)
        self.packets += 1


def test_member_asks_for_requests_only_while_the_model_is_ready_and_answers_can_leave() -> None:
    connection = Recorder()
    member = Groups(("door", "all"), connection)
    echo = {*group_filters("door", "echo"), *group_filters("all", "echo")}
    member.model_changed("echo", ready=True)
    assert not connection.filters
    member.answers_changed(possible=True)
    assert connection.filters == echo
    member.model_changed("digits", ready=False)
    assert connection.filters == echo
    member.model_changed("echo", ready=False)
    assert not connection.filters
    member.model_changed("echo", ready=True)
    member.answers_changed(possible=False)
    assert not connection.filters
    member.answers_changed(possible=True)
    assert connection.filters == echo


def test_nothing_is_sent_while_nothing_changes() -> None:
    connection = Recorder()
    member = Groups(("door",), connection)
    for _ in range(3):
        member.answers_changed(possible=True)
        member.model_changed("echo", ready=True)
    assert connection.packets == len(group_filters("door", "echo"))


@pytest.mark.parametrize(("configured_s", "used_s"), [(30, 5), (3600, 5), (5, 5), (2, 2)])
def test_keep_alive_is_short(configured_s: int, used_s: int) -> None:
    broker = BrokerSettings("broker", keepalive_s=configured_s)
    assert groups.settings_of(broker) == BrokerSettings("broker", keepalive_s=used_s)


class Asker:
    """Asks a group."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._numbers = itertools.count()

    def send(self, payload: bytes = b"hello") -> bytes:
        correlation = b"g%d" % next(self._numbers)
        properties = Properties(
            content_type="application/octet-stream",
            response_topic="edge/v1/replies/client/x",
            correlation_data=correlation,
            expiry_s=int(PATIENCE_S),
        )
        self._client.connection.publish(TOPIC, payload, properties=properties)
        return correlation

    def answered(self, sent: list[bytes]) -> int:
        """Return how many requests have an answer now."""
        return len({message.properties.correlation_data for message in self._client.received} & {*sent})

    async def statuses(self, sent: list[bytes], limit_s: float = PATIENCE_S) -> Counter[int]:
        """Return how many requests had each status; 0 for those without an answer within the limit."""
        found: Counter[int] = Counter()
        end_s = asyncio.get_running_loop().time() + limit_s
        for correlation in sent:
            left_s = max(0.01, end_s - asyncio.get_running_loop().time())
            try:
                found[status_of(await self._client.answer(correlation, left_s))] += 1
            except TimeoutError:
                found[0] += 1
        return found

    async def ask(self, count: int, limit_s: float = PATIENCE_S) -> Counter[int]:
        return await self.statuses([self.send() for _ in range(count)], limit_s)


async def are_members(*rigs: Rig) -> None:
    """Wait until the broker has granted every member its subscriptions."""
    for rig in rigs:
        assert rig.service.connections.groups is not None
        await until(lambda rig=rig: rig.service.online)  # type: ignore[misc]
        await rig.service.connections.groups.wait_subscribed()
        assert rig.service.connections._groups is not None
        assert rig.service.connections._groups._subscribed


@pytest.mark.slow
async def test_member_whose_model_is_out_of_service_gets_no_requests(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with (
        start_service(mosquitto.port, device="one", models=["echo"], groups=[GROUP]) as one,
        start_service(mosquitto.port, device="two", models=["echo"], groups=[GROUP]) as two,
    ):
        await are_members(one, two)
        client = await two.client()
        while _phase(two) is not ModelPhase.FAILED:
            await until(lambda: _phase(two) is not ModelPhase.RESTARTING)
            model = two.service.models.get("echo")
            if model is not None and model.ready and model.worker_pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(model.worker_pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        assert _phase(two) is ModelPhase.FAILED
        assert two.service.connections.groups is not None
        await two.service.connections.groups.wait_subscribed()
        assert await Asker(client).ask(10) == {200: 10}


def _phase(rig: Rig) -> ModelPhase | None:
    status = rig.service.models.status("echo")
    return None if status is None else status.phase


async def test_member_that_dies_gets_no_more_requests(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with (
        start_service(mosquitto.port, device="one", models=["echo"], groups=[GROUP]) as one,
        start_service(mosquitto.port, device="two", models=["echo"], groups=[GROUP]) as two,
    ):
        await are_members(one, two)
        client = await one.client()
        asker = Asker(client)
        for sock in two.lose_power():
            sock.close()  # what the kernel does with the sockets of a killed process
        await client.settle()
        assert await asker.ask(10) == {200: 10}


@pytest.mark.slow
async def test_member_that_loses_power_gets_no_requests_once_the_broker_has_noticed(
    mosquitto: BrokerProcess, start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "KEEPALIVE_S", 4)
    async with (
        start_service(mosquitto.port, device="one", models=["echo"], groups=[GROUP]) as one,
        start_service(mosquitto.port, device="two", models=["echo"], groups=[GROUP]) as two,
    ):
        await are_members(one, two)
        asker = Asker(await one.client())
        with contextlib.ExitStack() as stack:
            for sock in two.lose_power():
                stack.enter_context(sock)
            sent = [asker.send() for _ in range(10)]
            await until(lambda: asker.answered(sent) == 5)
            async with asyncio.timeout(PATIENCE_S):
                while await asker.ask(10, 1.0) != {200: 10}:
                    pass
            assert asker.answered(sent) == 5


async def test_member_that_stops_leaves_no_request_unanswered(
    mosquitto: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    async with (
        connected_client(mosquitto.port) as client,
        start_service(mosquitto.port, device="one", models=["echo"], groups=[GROUP]) as one,
    ):
        asker = Asker(client)
        async with start_service(mosquitto.port, device="two", models=["echo"], groups=[GROUP]) as two:
            await are_members(one, two)
            # More than mosquitto sends before it waits for acknowledgements (20).
            sent = [asker.send(b"hold:%s" % bytes(tmp_path / "go")) for _ in range(100)]
            await until(lambda: two.service.samples()["edge_inference_in_flight"] >= 20)
            await two.begin_to_stop()
            (tmp_path / "go").touch()
        statuses = await asker.statuses(sent)
        assert statuses[200] + statuses[503] == 100
        assert await asker.ask(10) == {200: 10}


async def test_request_to_a_group_that_cannot_be_served_now_is_answered_503(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, groups=[GROUP]) as rig:
        assert rig.service.connections.groups is not None
        # The broker may deal a request to a member that is just leaving. This one has no model to serve.
        for topic_filter in group_filters(GROUP, "echo"):
            rig.service.connections.groups.want(topic_filter)
        await rig.service.connections.groups.wait_subscribed()
        asker = Asker(await rig.client())
        assert await asker.ask(3) == {503: 3}
        assert rig.service.connections.groups.unacknowledged == 0


async def test_answers_to_groups_leave_although_the_connection_of_the_groups_is_lost(
    mosquitto: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    async with start_service(mosquitto.port, models=["echo"], groups=[GROUP]) as rig:
        await are_members(rig)
        asker = Asker(await rig.client())
        sent = asker.send(b"hold:%s" % bytes(tmp_path / "go"))
        await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 1)
        connection = rig.service.connections.groups
        assert connection is not None
        await connection.close()
        (tmp_path / "go").touch()
        assert await asker.statuses([sent]) == {200: 1}
