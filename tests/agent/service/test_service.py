"""The whole agent against a broker: what it publishes, and how it survives restarts."""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.deploy import history, plan
from agent.deploy.installer import Installer
from agent.deploy.jobs import Job as JobRecord
from agent.deploy.jobs import Request
from agent.errors import StoreError
from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.service import presence, service
from agent.wire.job import Status
from agent.wire.reported import Origin
from agent.wire.topics import GroupInfer, Infer, Job, State, format_topic
from tests.agent.service.conftest import Rig, StartService, connected_client, keep_active, status_of
from tests.bundles import Signer
from tests.conftest import BrokerProcess
from tests.patience import PATIENCE_S, until


class Watcher:
    """Everything that is published below a device."""

    def __init__(self, port: int) -> None:
        self.messages: list[Message] = []
        settings = BrokerSettings("127.0.0.1", port)
        self.connection = Connection(settings, Owner(self._take), client_id="watcher")

    def _take(self, message: Message) -> None:
        self.messages.append(message)
        self.connection.ack(message)

    async def __aenter__(self) -> Watcher:
        await self.connection.connect()
        await self.connection.subscribe("edge/v1/kitchen/#")
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.connection.close()

    def latest(self, name: str) -> Any:
        found = [m for m in self.messages if m.topic == f"edge/v1/kitchen/{name}"]
        return json.loads(found[-1].payload) if found and found[-1].payload else None

    async def state(self, expected: str) -> None:
        await until(lambda: (self.latest("state") or {}).get("state") == expected)


async def test_agent_publishes_what_it_is_and_that_it_stops(
    broker: BrokerProcess, start_service: StartService
) -> None:
    async with Watcher(broker.port) as watcher:
        async with start_service(broker.port, metrics_interval_s=0.1) as rig:
            await watcher.state("online")
            await rig.service.models.activate(rig.signer.bundle())
            await until(lambda: (watcher.latest("models/echo/state") or {}).get("ready") is True)
            model = watcher.latest("models/echo/state")
            assert model["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [1, 4]}]
            assert (model["state"], model["version"], model["versions"]) == ("ready", "1.0.0", ["1.0.0"])
            assert model["digest"].startswith("sha256:")
            info = watcher.latest("info")
            assert info["device"] == "kitchen"
            assert info["hardware"]["cores"] >= 1
            assert "image/png" in info["capabilities"]["content_types"]
            await until(lambda: 'edge_model_ready{model="echo"}' in (watcher.latest("metrics") or {}))
            metrics = watcher.latest("metrics")
            assert metrics["edge_agent_resident_memory_bytes"] > 1e6
            assert metrics['edge_worker_resident_memory_bytes{model="echo"}'] > 1e6
            seq = watcher.latest("state")["session_seq"]
        await watcher.state("stopped")
        assert watcher.latest("state")["session_seq"] == seq


async def test_incomplete_sandbox_is_in_info_as_soon_as_a_worker_is_ready_in_a_metric_and_in_the_log(
    broker: BrokerProcess, start_service: StartService, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        Watcher(broker.port) as watcher,
        start_service(broker.port, metrics_interval_s=0.1) as rig,
    ):
        await until(lambda: watcher.latest("info") is not None)
        assert watcher.latest("info")["sandbox"] is None
        await rig.service.models.activate(rig.signer.bundle())
        missing = {"complete": False, "landlock": 0, "missing": ["landlock", "seccomp", "threads"]}
        await until(lambda: watcher.latest("info")["sandbox"] == missing)
        await until(lambda: (watcher.latest("metrics") or {}).get('edge_sandbox_complete{model="echo"}') == 0)
        warnings = [record.getMessage() for record in caplog.records if "sandbox" in record.getMessage()]
        assert warnings == [
            "echo: its worker's sandbox lacks landlock, seccomp, threads: 'no sandbox: a test'"
        ]
        published = [message for message in watcher.messages if message.topic.endswith("/info")]
        # Not again for a worker with the same sandbox.
        await rig.service.models.activate(rig.signer.bundle("echo", "2.0.0"))
        await until(lambda: (watcher.latest("models/echo/state") or {}).get("version") == "2.0.0")
        assert len(published) == len([each for each in watcher.messages if each.topic.endswith("/info")])


async def test_model_that_is_taken_out_of_service_leaves_nothing_retained(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig, Watcher(mosquitto.port) as watcher:
        await rig.service.models.activate(rig.signer.bundle())
        await until(lambda: (watcher.latest("models/echo/state") or {}).get("ready") is True)
        await rig.service.models.deactivate("echo")
        await until(lambda: watcher.latest("models/echo/state") is None)
        client = await rig.client()
        assert status_of(await client.ask(b"anyone?")) == 404


async def test_late_will_of_an_earlier_session_does_not_leave_the_agent_offline(
    mosquitto: BrokerProcess, start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "_REASSERT_INTERVAL_S", 0.0)
    async with start_service(mosquitto.port), Watcher(mosquitto.port) as watcher:
        await watcher.state("online")
        late = b'{"state":"offline","session_seq":0}'
        watcher.connection.publish(format_topic(State("kitchen")), late, retain=True)
        await until(lambda: late in [message.payload for message in watcher.messages])
        await watcher.state("online")


async def test_state_says_that_requests_cannot_arrive_and_that_they_can_again(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig, Watcher(mosquitto.port) as watcher:
        await until(lambda: (watcher.latest("state") or {}).get("inference") == "online")
        before = len(watcher.messages)
        _control, requests = rig.service.connections
        requests._session.drop()
        await until(lambda: (watcher.latest("state") or {}).get("inference") == "online", 10)
        await until(lambda: len(watcher.messages) > before + 1)
    said = [json.loads(m.payload) for m in watcher.messages[before:] if m.topic == "edge/v1/kitchen/state"]
    assert [(state["state"], state.get("inference")) for state in said[:2]] == [
        ("online", "offline"),
        ("online", "online"),
    ]


@pytest.mark.slow
async def test_everything_is_published_again_to_a_broker_that_forgot_it(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        for restart in range(3):
            mosquitto.stop(signal.SIGKILL)  # nothing is written down
            for path in mosquitto.folder.glob("mosquitto.db*"):
                path.unlink()
            mosquitto.start()
            async with Watcher(mosquitto.port) as watcher:
                await watcher.state("online")
                await until(lambda: watcher.latest("info") is not None)
                await until(lambda: (watcher.latest("models/echo/state") or {}).get("ready") is True)
            await until(lambda: rig.service.online and client.connection.settled)
            assert status_of(await client.ask(b"restart %d" % restart)) == 200


async def test_agent_without_a_broker_is_up_and_serves_when_one_comes(
    start_service: StartService, mosquitto: BrokerProcess
) -> None:
    mosquitto.stop()
    port = mosquitto.port
    async with start_service(port, wait=False) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        mosquitto.start()
        await until(lambda: rig.service.online)
        client = await rig.client()
        assert status_of(await client.ask(b"late")) == 200


async def test_agent_that_stops_answers_what_it_accepted(
    mosquitto: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    async with start_service(mosquitto.port, shutdown_limit_s=PATIENCE_S) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        sent = [client.send(b"hold:%s" % bytes(tmp_path / "go")) for _ in range(4)]
        await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 4)
        await rig.begin_to_stop()
        (tmp_path / "go").touch()
        for correlation in sent:
            assert status_of(await client.answer(correlation)) == 200


async def test_request_that_comes_while_the_agent_stops_is_left_to_the_next_one(
    mosquitto: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    async with connected_client(mosquitto.port) as client:
        async with start_service(mosquitto.port, models=["echo"], shutdown_limit_s=PATIENCE_S) as rig:
            accepted = client.send(b"hold:%s" % bytes(tmp_path / "go"))
            await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 1)
            await rig.begin_to_stop()
            late = client.send(b"late")
            await client.settle()
            (tmp_path / "go").touch()
            assert status_of(await client.answer(accepted)) == 200
        assert late not in [message.properties.correlation_data for message in client.received]
        async with start_service(mosquitto.port, models=["echo"]):
            assert (await client.answer(late)).payload == b"1.0.0:late"


async def test_answer_that_could_not_be_delivered_is_delivered_by_the_next_agent_without_its_model(
    mosquitto: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    held = b"hold:%s" % bytes(tmp_path / "go")
    async with connected_client(mosquitto.port) as client:
        async with start_service(mosquitto.port, models=["echo"], shutdown_limit_s=0.1) as rig:
            correlation = client.send(held)
            await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 1)
            mosquitto.stop(signal.SIGKILL)
            (tmp_path / "go").touch()
            counter = 'edge_inference_requests_total{model="echo",status="200"}'
            await until(lambda: counter in rig.service.samples())
        for path in mosquitto.folder.glob("mosquitto.db*"):
            path.unlink()  # no request comes again
        mosquitto.start()
        await until(lambda: client.connection.settled)
        async with start_service(mosquitto.port):
            assert (await client.answer(correlation)).payload == b"1.0.0:" + held


@pytest.mark.slow
async def test_answer_larger_than_the_broker_accepts_is_an_error_that_says_so_and_holds_nothing_up(
    tmp_path: Path, start_service: StartService
) -> None:
    broker = BrokerProcess("mosquitto", tmp_path, extra="max_packet_size 20000\n")
    broker.start()
    large, held = b"x" * 19_780, b"hold:%s" % bytes(tmp_path / "go")
    try:
        async with connected_client(broker.port) as client:
            async with start_service(broker.port, models=["echo", "other"], shutdown_limit_s=0.1) as rig:
                answer = await client.ask(large, correlation=b"c" * 100)
                assert status_of(answer) == 500
                assert "at most 20000 bytes" in json.loads(answer.payload)["error"]
                assert "got an answer of 19786 bytes" in json.loads(answer.payload)["error"]
                assert (await client.ask(b"small", model="other")).payload == b"1.0.0:small"
                samples = rig.service.samples()
                assert samples['edge_inference_requests_total{model="echo",status="500"}'] == 1
                assert samples['edge_mqtt_connects_total{connection="inference"}'] == 1
                # An answer that only the next agent delivers, to a broker that accepts less by then.
                # (The answer of the last request may have come before the broker's acknowledgement.)
                await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 0)
                left = client.send(held)
                await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 1)
                broker.stop(signal.SIGKILL)
                (tmp_path / "go").touch()
                counter = 'edge_inference_requests_total{model="echo",status="200"}'
                await until(lambda: counter in rig.service.samples())
            for path in broker.folder.glob("mosquitto.db*"):
                path.unlink()
            answers = sqlite3.connect(rig.service._config.answers_dir / "answers.db")
            with answers:
                answers.execute("UPDATE answers SET payload = ?", (bytes(30_000),))
            answers.close()
            broker.start()
            await until(lambda: client.connection.settled)
            async with start_service(broker.port, models=["other"]):
                assert status_of(await client.answer(left)) == 500
                assert (await client.ask(b"small", model="other")).payload == b"1.0.0:small"
    finally:
        broker.stop()


async def test_request_that_a_stopped_agent_did_not_take_is_answered_by_the_next_one(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port):
        pass
    async with connected_client(mosquitto.port) as client:
        waiting = client.send(b"patience")
        async with start_service(mosquitto.port, models=["echo"]):
            assert (await client.answer(waiting)).payload == b"1.0.0:patience"


async def test_request_in_the_hands_of_an_agent_that_lost_its_connection_is_answered_once(
    mosquitto: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    duplicates = "edge_inference_duplicates_total"
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        slow = client.send(b"hold:%s" % bytes(tmp_path / "go"))
        await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 1)
        # The broker delivers it again after this, and the answer must still be one.
        rig.cut()
        await until(lambda: rig.service.samples().get(duplicates) == 1)
        (tmp_path / "go").touch()
        assert status_of(await client.answer(slow)) == 200
        await rig.settle()
        assert len(await client.answers(slow, 1)) == 1
        samples = rig.service.samples()
        assert samples['edge_inference_requests_total{model="echo",status="200"}'] == 1
        assert samples[duplicates] == 1


@pytest.mark.slow
async def test_group_shares_requests_among_its_members(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with (
        start_service(mosquitto.port, device="one", groups=["all"]) as one,
        start_service(mosquitto.port, device="two", groups=["all"]) as two,
    ):
        for rig in (one, two):
            await rig.service.models.activate(rig.signer.bundle())
        await until(lambda: one.service.online and two.service.online)
        client = await one.client()
        topic = format_topic(GroupInfer("all", "echo"))
        for number in range(10):
            properties = Properties(
                response_topic="edge/v1/replies/client/x", correlation_data=b"g%d" % number, expiry_s=30
            )
            client.connection.publish(topic, b"hello", properties=properties)
        for number in range(10):
            assert status_of(await client.answer(b"g%d" % number)) == 200
        key = 'edge_inference_requests_total{model="echo",status="200"}'
        assert one.service.samples()[key] == two.service.samples()[key] == 5


async def test_retained_request_is_not_computed_at_each_connect(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        properties = Properties(response_topic="edge/v1/replies/client/x", correlation_data=b"r", expiry_s=30)
        topic = format_topic(Infer(rig.device, "echo"))
        mosquitto_client = client.connection
        await mosquitto_client.publish(topic, b"hello", retain=True, properties=properties)
        assert status_of(await client.answer(b"r")) == 200  # live once
        await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 0)
        rig.cut()
        connects = 'edge_mqtt_connects_total{connection="inference"}'
        await until(lambda: rig.service.samples()[connects] == 2 and rig.service.online)
        # Everything that the broker had for the agent was delivered before this request.
        assert status_of(await client.ask(b"next")) == 200
        await rig.settle()
        assert len(await client.answers(b"r", 1)) == 1


@pytest.mark.slow
async def test_second_agent_on_a_state_directory_is_refused(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port):
        with pytest.raises(StoreError, match="in use by another agent"):
            async with start_service(mosquitto.port):
                pass


async def test_old_jobs_are_published_again_only_to_a_broker_that_forgot_them(
    mosquitto: BrokerProcess, start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(
        job="deploy-1",
        model="echo",
        digest="sha256:0",
        size=1,
        version="1",
        sources=(),
        origin=Origin.DESIRED,
    )
    job = JobRecord(request, Status.SUCCEEDED)
    document = job.state().to_bytes()
    async with start_service(mosquitto.port) as rig:
        published = rig.service._deployment._parts.history
        rig.service._deployment._journal.put(job)
        published.publish(job)
        await until(lambda: rig.service.online)
        async with Watcher(mosquitto.port) as watcher:
            await until(lambda: watcher.latest("jobs/deploy-1") is not None)
            rig.cut()
            connects = 'edge_mqtt_connects_total{connection="control"}'
            await until(lambda: rig.service.samples()[connects] == 2 and published._awaited is None)
            assert [m.payload for m in watcher.messages if m.topic.endswith("/jobs/deploy-1")] == [document]
        monkeypatch.setattr(history, "PATIENCE_S", 0.1)
        mosquitto.stop(signal.SIGKILL)
        for path in mosquitto.folder.glob("mosquitto.db*"):
            path.unlink()
        mosquitto.start()
        async with Watcher(mosquitto.port) as watcher:
            await until(lambda: watcher.latest("jobs/deploy-1") is not None)


async def test_end_of_a_job_is_published_by_the_next_agent_to_a_broker_that_was_away(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    ended, over = Job("kitchen", "deploy-1"), Job("kitchen", "deploy-0")
    async with start_service(mosquitto.port) as rig:
        kept = 'edge_outbox_messages{kind="reports"}'
        await until(lambda: rig.service.samples()[kept] == 0)
        mosquitto.stop(signal.SIGKILL)  # what it held is gone too
        for path in mosquitto.folder.glob("mosquitto.db*"):
            path.unlink()
        await until(lambda: not any(connection.connected for connection in rig.service.connections))
        end = b'{"status":"SUCCEEDED"}'
        await rig.service._outbox.publish(format_topic(ended), end, retain=True)
        await rig.service._outbox.publish(format_topic(over), b"", retain=True)
        assert rig.service.samples()[kept] == 2
    mosquitto.start()
    async with Watcher(mosquitto.port) as watcher:
        await watcher.connection.publish(format_topic(over), b'"still at the broker"', retain=True)
        async with start_service(mosquitto.port) as rig:
            await until(lambda: watcher.latest("jobs/deploy-1") == {"status": "SUCCEEDED"})
            await until(lambda: watcher.latest("jobs/deploy-0") is None)
            await until(lambda: rig.service.samples()['edge_outbox_messages{kind="reports"}'] == 0)


@dataclass
class Loading:
    """The loading of the bundle echo: it waits for `go_on`, and fails if there is an error."""

    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    error: StoreError | None = None


@pytest.fixture
def loading(signer: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loading:
    """Leave the bundle echo to the agent kitchen, and hold up its loading."""
    held_up = Loading()
    restore = Installer.restore

    async def restore_later(installer: Installer, *arguments: Any) -> Any:
        await held_up.go_on.wait()
        if held_up.error is not None:
            raise held_up.error
        return await restore(installer, *arguments)

    monkeypatch.setattr(Installer, "restore", restore_later)
    keep_active(tmp_path / "state-kitchen", signer.packed())
    return held_up


async def test_presence_is_shown_and_requests_wait_while_models_are_loaded(
    mosquitto: BrokerProcess, start_service: StartService, loading: Loading
) -> None:
    async with Watcher(mosquitto.port) as watcher, start_service(mosquitto.port) as rig:
        await watcher.state("online")
        await until(lambda: (watcher.latest("models/echo/state") or {}).get("state") == "starting")
        assert watcher.latest("models/echo/state")["ready"] is False
        client = await rig.client()
        early = client.send(b"early")
        short = client.send(b"short", expiry_s=1)
        assert status_of(await client.ask(b"other", model="other")) == 404
        assert status_of(await client.answer(short)) == 408
        loading.go_on.set()
        assert (await client.answer(early)).payload == b"1.0.0:early"
        await until(lambda: (watcher.latest("models/echo/state") or {}).get("ready") is True)
        assert status_of(await client.ask(b"late")) == 200


async def test_requests_for_a_model_that_cannot_be_loaded_are_refused_with_the_reason(
    mosquitto: BrokerProcess, start_service: StartService, loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_for_ever(*_arguments: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Installer, "run", wait_for_ever)  # the next attempt
    loading.error = StoreError("the bundle is damaged")
    async with Watcher(mosquitto.port) as watcher, start_service(mosquitto.port) as rig:
        client = await rig.client()
        await until(lambda: (watcher.latest("models/echo/state") or {}).get("state") == "starting")
        waiting = client.send(b"waiting")
        await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 1)
        loading.go_on.set()
        for answer in (await client.answer(waiting), await client.ask(b"late")):
            assert status_of(answer) == 503
            assert json.loads(answer.payload)["error"] == "echo is out of service: the bundle is damaged"
        assert watcher.latest("models/echo/state")["message"] == "the bundle is damaged"


async def test_model_whose_key_is_revoked_while_it_runs_is_reported_and_serves_if_it_should(
    mosquitto: BrokerProcess,
    start_service: StartService,
    signer: Signer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(service, "_FILES_INTERVAL_S", 0.05)
    keep_active(tmp_path / "state-kitchen", signer.packed())
    serving = functools.partial(start_service, mosquitto.port, trust_on_revoke="serve")
    async with Watcher(mosquitto.port) as watcher:
        async with serving() as rig:
            await until(lambda: reported(watcher) == ("active", None))
            assert rig.service.samples()[REVOKED] == 0
            revoke(rig, signer)
            await until(lambda: rig.service.samples()[REVOKED] == 1)
            await until(lambda: str(reported(watcher)[1]).startswith("key revoked"))
            client = await rig.client()
            assert status_of(await client.ask(b"still there")) == 200
        async with serving() as rig:  # a restart changes nothing
            await until(lambda: caplog.text.count("is revoked; it serves until it is replaced") == 2)
            assert rig.service.samples()[REVOKED] == 1
            client = await rig.client()
            assert status_of(await client.ask(b"after a restart")) == 200
            (signer.trust / "revoked").unlink()
            await until(lambda: reported(watcher) == ("active", None))


async def test_model_whose_key_is_revoked_while_it_runs_is_stopped_until_the_key_is_trusted_again(
    mosquitto: BrokerProcess,
    start_service: StartService,
    signer: Signer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_FILES_INTERVAL_S", 0.05)
    monkeypatch.setattr(plan, "KEYS_INTERVAL_S", 0.05)
    keep_active(tmp_path / "state-kitchen", signer.packed())

    async def is_stopped(rig: Rig) -> None:
        await until(
            lambda: reported(watcher)[0] == "failed" and "which is revoked" in str(reported(watcher)[1])
        )
        assert rig.service.samples()[REVOKED] == 1
        await until(
            lambda: "which is revoked" in (watcher.latest("models/echo/state") or {}).get("message", "")
        )
        assert watcher.latest("models/echo/state")["state"] == "failed"
        answer = await (await rig.client()).ask(b"anyone?")
        assert (status_of(answer), "which is revoked" in str(answer.properties)) == (503, True)

    async with Watcher(mosquitto.port) as watcher:
        async with start_service(mosquitto.port) as rig:
            await until(lambda: reported(watcher) == ("active", None))
            assert rig.service.samples()[REVOKED] == 0
            revoke(rig, signer)
            await is_stopped(rig)
        async with start_service(mosquitto.port) as rig:  # a restart changes nothing
            await is_stopped(rig)
            (signer.trust / "revoked").unlink()
            await until(lambda: reported(watcher) == ("active", None))
            assert rig.service.samples()[REVOKED] == 0
            assert status_of(await rig.clients[0].ask(b"again")) == 200


REVOKED = 'edge_model_key_revoked{model="echo"}'


def reported(watcher: Watcher) -> tuple[str, str | None]:
    (model,) = (watcher.latest("reported") or {}).get("models", {}).values() or [None]
    return ("", None) if model is None else (model["state"], model["message"])


def revoke(rig: Rig, signer: Signer) -> None:
    """Revoke the key of the bundle that `echo` runs."""
    status = rig.service.models.status("echo")
    assert status is not None
    (signer.trust / "revoked").write_text(f"{status.key_id}\n")
