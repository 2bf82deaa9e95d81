"""Requests and answers through a real broker, with a fake worker that obeys the payload."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.bundle.machine import Machine
from agent.errors import SelfTestError
from agent.mqtt.properties import Properties
from agent.service.inference import most_held_bytes
from agent.service.requests.payload_digest import SLICE_BYTES, PayloadDigests
from agent.wire.desired import Desired as DesiredDocument
from agent.wire.topics import Desired, Infer, format_topic
from tests.agent.service.conftest import StartService, status_of
from tests.conftest import BrokerProcess
from tests.patience import PATIENCE_S, least_s_async, until


async def test_request_is_answered_with_its_correlation_and_version(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        answer = await client.ask(b"hello")
        assert status_of(answer) == 200
        assert answer.payload == b"1.0.0:hello"
        assert answer.properties.content_type == "application/octet-stream"
        assert answer.properties.first("model_version") == "1.0.0"
        assert answer.properties.all("tensor") == ("y;UINT8;11",)
        assert answer.properties.expiry_s is not None
        assert 0 < answer.properties.expiry_s <= PATIENCE_S


async def test_unknown_model_is_answered_404(mosquitto: BrokerProcess, start_service: StartService) -> None:
    async with start_service(mosquitto.port) as rig:
        client = await rig.client()
        answer = await client.ask(b"hello", model="nobody")
        assert status_of(answer) == 404
        assert "nobody" in json.loads(answer.payload)["error"]


async def test_expired_request_is_answered_408_and_its_late_result_is_dropped(
    mosquitto: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        late = client.send(b"hold:%s" % bytes(tmp_path / "go"), expiry_s=1)
        answer = await client.answer(late)
        assert status_of(answer) == 408
        assert "while it was computed" in json.loads(answer.payload)["error"]
        (tmp_path / "go").touch()
        assert status_of(await client.ask(b"next")) == 200
        await rig.settle()
        assert len(await client.answers(late, 1)) == 1


async def test_full_queue_is_answered_503_at_once_and_other_models_are_not_held_up(
    mosquitto: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    async with start_service(mosquitto.port, inference_queue_requests=2) as rig:
        await rig.service.models.activate(rig.signer.bundle("slow"))
        await rig.service.models.activate(rig.signer.bundle("fast"))
        client = await rig.client()
        # Two in the worker, two in the queue, and four too many.
        sent = [client.send(b"hold:%s" % bytes(tmp_path / "go"), model="slow") for _ in range(8)]
        for correlation in sent[4:]:
            assert status_of(await client.answer(correlation)) == 503
        assert (await client.ask(b"quick", model="fast")).payload == b"1.0.0:quick"
        (tmp_path / "go").touch()
        for correlation in sent[:4]:
            assert status_of(await client.answer(correlation)) == 200


async def test_foreign_response_topic_gets_no_answer_and_is_acknowledged(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, broker_receive_maximum=1) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        await client.connection.subscribe("edge/v1/other/desired")
        client.send(b"evil", reply_to="edge/v1/other/desired")
        # With a Receive Maximum of one, this is only delivered when the one before it is acknowledged.
        assert status_of(await client.ask(b"good")) == 200
        assert [message.topic for message in client.received] == ["edge/v1/replies/client/answers"]


async def test_user_cannot_have_an_answer_sent_to_another(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        alice, mallory = await rig.client("alice"), await rig.client("mallory")
        for model in ("echo", "Not A Model"):
            topic = f"edge/v1/{rig.device}/models/{model}/infer/mallory"
            correlation = mallory.send(b"x", topic=topic, reply_to="edge/v1/replies/alice/answers")
            refusal = await mallory.answer(correlation)
            assert status_of(refusal) == 400
            assert "edge/v1/replies/mallory/" in json.loads(refusal.payload)["error"]
        assert status_of(await alice.ask(b"mine")) == 200
        assert len(alice.received) == 1


async def test_all_who_ask_without_a_user_are_one_client_whatever_they_are_called(
    mosquitto: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    async with start_service(mosquitto.port, inference_queue_requests=4) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        alice, mallory = await rig.client("alice"), await rig.client("mallory")
        held = alice.send(b"hold:%s" % bytes(tmp_path / "go"))
        # A flood without a user has one client's share of the queue, whatever the names in it.
        names = [f"edge/v1/replies/{name}/x" for name in ("alice", "bob", "mallory") for _ in range(6)]
        for reply_to in names:
            mallory.send(b"flood", reply_to=reply_to, topic=format_topic(Infer(rig.device, "echo")))
        await until(lambda: rig.service.samples()["edge_inference_in_flight"] >= 4)
        asked = [alice.send(b"mine %d" % number) for number in range(2)]
        (tmp_path / "go").touch()
        for correlation in (held, *asked):
            assert status_of(await alice.answer(correlation)) == 200


async def test_request_without_response_topic_is_acknowledged_and_counted(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, broker_receive_maximum=1) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        client.connection.publish(format_topic(Infer(rig.device, "echo")), b"\xff\xd8", qos=1)
        assert status_of(await client.ask(b"good")) == 200
        samples = rig.service.samples()
        assert samples['edge_inference_unanswerable_total{reason="no_response_topic"}'] == 1
        assert samples['edge_inference_requests_total{model="echo",status="200"}'] == 1


OVER_LIMIT: tuple[tuple[dict[str, Any], int], ...] = (
    ({"user": (("a", "b"),) * 257}, 400),
    ({"user": (("a", "b" * 60_000),) * 3}, 400),
    ({"content_type": "x" * 22_000}, 415),
    ({"user": (("tensor", "x" * 22_000),)}, 400),
    ({"user": (("accept", "x" * 22_000),)}, 415),
    ({"correlation_data": b"x" * 22_000}, 400),
)


async def test_request_over_a_limit_is_answered_and_acknowledged(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, broker_receive_maximum=1) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        for number, (properties, status) in enumerate(OVER_LIMIT):
            correlation = properties.get("correlation_data", b"bad %d" % number)
            sent = Properties(
                **{**properties, "correlation_data": correlation},
                response_topic="edge/v1/replies/client/x",
            )
            topic = format_topic(Infer(rig.device, "echo"))
            client.connection.publish(topic, b"hello", qos=1, properties=sent)
            assert sent.correlation_data is not None
            answer = await client.answer(sent.correlation_data)
            assert status_of(answer) == status
            assert "expected" in json.loads(answer.payload)["error"]
        assert status_of(await client.ask(b"good")) == 200
        samples = rig.service.samples()
        assert samples['edge_inference_requests_total{model="echo",status="400"}'] == 4
        assert samples['edge_inference_requests_total{model="echo",status="415"}'] == 2
        assert samples['edge_mqtt_over_limit_total{connection="inference"}'] == 2
        assert samples['edge_mqtt_connects_total{connection="inference"}'] == 1
        assert samples['edge_worker_restarts_total{model="echo"}'] == 0


async def test_desired_document_with_many_user_properties_does_not_hold_the_connection_down(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig:
        client = await rig.client()
        await client.connection.publish(
            format_topic(Desired(rig.device)),
            b'{"version":1,"models":{}}',
            retain=True,
            properties=Properties(user=(("a", "b"),) * 257),
        )
        over_limit = 'edge_mqtt_over_limit_total{connection="control"}'
        await until(lambda: rig.service.samples()[over_limit] == 1)
        rig.cut()
        await until(lambda: rig.service.samples()[over_limit] == 2 and rig.service.online)
        assert rig.service._deployment._desired.document == DesiredDocument(1, ())
        assert rig.service.samples()['edge_mqtt_connects_total{connection="control"}'] == 2


async def test_request_to_a_name_that_no_model_can_have_is_answered_404(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig:
        client = await rig.client()
        properties = Properties(response_topic="edge/v1/replies/client/x", correlation_data=b"n")
        for topic in (f"edge/v1/{rig.device}/models/Not A Model/infer{user}" for user in ("", "/client")):
            client.connection.publish(topic, b"hello", properties=properties)
        assert [status_of(answer) for answer in await client.answers(b"n", 2)] == [404, 404]


async def test_duplicate_request_gets_the_same_answer_and_runs_once(
    mosquitto: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    held = b"hold:%s" % bytes(tmp_path / "go")
    duplicates = "edge_inference_duplicates_total"
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        client.send(held, correlation=b"same")
        client.send(held, correlation=b"same")  # while the first one runs: one answer for both
        await until(lambda: rig.service.samples().get(duplicates) == 1)
        (tmp_path / "go").touch()
        first = await client.answer(b"same")
        await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 0)
        client.send(held, correlation=b"same")  # after it was answered: the same answer again
        both = await client.answers(b"same", 2)
        assert both[1].payload == first.payload
        samples = rig.service.samples()
        assert samples['edge_inference_requests_total{model="echo",status="200"}'] == 1
        assert samples[duplicates] == 2


async def test_large_request_is_recognised_when_it_is_delivered_again(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, broker_receive_maximum=2) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        large = b"x" * (3 * SLICE_BYTES + 1)
        for _ in range(3):
            client.send(large, correlation=b"same")
        small = client.send(b"small")
        answers = await client.answers(b"same", 1)
        assert answers[0].payload == b"1.0.0:" + large
        assert status_of(await client.answer(small)) == 200
        await until(lambda: rig.service.samples().get("edge_inference_duplicates_total") == 2)


async def test_large_request_that_is_an_envelope_is_read(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        envelope = {"reply_to": "edge/v1/replies/client/a", "id": "7", "inputs": [{"name": "x" * (2 << 20)}]}
        topic = format_topic(Infer("kitchen", "echo", "client"))
        client.connection.publish(topic, json.dumps(envelope).encode())
        await until(lambda: client.received)
        answer = json.loads(client.received[0].payload)
        assert (answer["id"], answer["status"]) == ("7", 200)
        assert rig.service.samples().get("edge_faults_total", 0) == 0


async def test_large_request_behind_too_many_others_is_refused_unread(
    mosquitto: BrokerProcess, start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PayloadDigests, "has_room", lambda _self, _nbytes: False)
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        large = bytes(SLICE_BYTES + 1)
        assert status_of(await client.ask(large, correlation=b"same")) == 503
        monkeypatch.undo()
        # It was not remembered: the same request is computed when there is room.
        client.received.clear()
        assert status_of(await client.ask(large, correlation=b"same")) == 200


async def test_client_with_large_requests_in_several_models_has_no_more_than_its_share(
    mosquitto: BrokerProcess, start_service: StartService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    large = b"hold:%s%sgo" % (bytes(tmp_path), b"/" * SLICE_BYTES)  # the path of `go`, as Python reads it
    monkeypatch.setattr("agent.service.inference._MAX_HELD_BYTES", 2 * len(large))
    async with start_service(mosquitto.port, models=["echo", "other"]) as rig:
        one, two = await rig.client("one"), await rig.client("two")
        held = [one.send(large, model=model) for model in ("echo", "other")]
        await until(lambda: all(model.busy for model in rig.service.models))
        assert status_of(await one.ask(large)) == 503
        waiting = two.send(large)
        (tmp_path / "go").touch()
        assert {status_of(await one.answer(each)) for each in held} == {200}
        assert status_of(await two.answer(waiting)) == 200


async def test_model_called_infer_is_no_user_whose_large_requests_are_counted_apart(
    mosquitto: BrokerProcess, start_service: StartService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    large = b"hold:%s%sgo" % (bytes(tmp_path), b"/" * SLICE_BYTES)
    monkeypatch.setattr("agent.service.inference._MAX_HELD_BYTES", len(large))
    async with start_service(mosquitto.port, models=["infer"]) as rig:
        client, topic = await rig.client(), format_topic(Infer("kitchen", "infer"))
        held = client.send(large, topic=topic)
        await until(lambda: any(model.busy for model in rig.service.models))
        assert status_of(await client.ask(large, topic=topic)) == 503
        (tmp_path / "go").touch()
        assert status_of(await client.answer(held)) == 200


async def test_large_requests_of_all_clients_in_all_models_take_a_share_of_the_memory(
    mosquitto: BrokerProcess, start_service: StartService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    large = b"hold:%s%sgo" % (bytes(tmp_path), b"/" * SLICE_BYTES)
    monkeypatch.setattr("agent.service.service.most_held_bytes", lambda _machine: 2 * len(large))
    async with start_service(mosquitto.port, models=["echo", "other"]) as rig:
        one, two, three = await rig.client("one"), await rig.client("two"), await rig.client("three")
        held = one.send(large)
        await until(lambda: any(model.busy for model in rig.service.models))
        waiting = two.send(large)
        await until(lambda: sum(model.nbytes for model in rig.service.models) == 2 * len(large))
        assert status_of(await three.ask(large, model="other")) == 503
        (tmp_path / "go").touch()
        assert status_of(await three.ask(b"small", model="other")) == 200
        assert status_of(await one.answer(held)) == 200
        assert status_of(await two.answer(waiting)) == 200
        assert status_of(await three.ask(large, model="other")) == 200


@pytest.mark.parametrize(
    ("memory", "limit", "most"),
    [
        (None, None, 128 << 20),
        (512 << 20, None, 128 << 20),
        (8 << 30, None, 2 << 30),
        (8 << 30, 1 << 30, 256 << 20),
        (8 << 30, 64 << 20, 128 << 20),
    ],
)
def test_large_requests_take_a_quarter_of_the_memory_but_one_client_always_has_its_share(
    memory: int | None, limit: int | None, most: int
) -> None:
    machine = replace(Machine.detect(), memory_bytes=memory, memory_limit_bytes=limit)
    assert most_held_bytes(machine) == most


async def test_equal_correlation_of_another_client_or_payload_is_another_request(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        one, two = await rig.client("one"), await rig.client("two")
        one.send(b"a", correlation=b"0")
        two.send(b"a", correlation=b"0")
        two.send(b"b", correlation=b"0")
        assert (await one.answer(b"0")).payload == b"1.0.0:a"
        assert {message.payload for message in await two.answers(b"0", 2)} == {b"1.0.0:a", b"1.0.0:b"}


async def test_killed_worker_costs_no_request(
    mosquitto: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        victim = client.send(b"hold:%s" % bytes(tmp_path / "go"))
        others = [client.send(b"other %d" % number) for number in range(4)]
        model = rig.service.models.get("echo")
        assert model is not None
        await until(lambda: model.busy == 2)
        pid = model.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert status_of(await client.answer(victim)) == 200
        for number, correlation in enumerate(others):
            assert (await client.answer(correlation)).payload == b"1.0.0:other %d" % number


async def test_aborting_model_is_back_within_two_seconds(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async def away_s() -> float:
        async with start_service(mosquitto.port) as rig:
            await rig.service.models.activate(rig.signer.bundle())
            client = await rig.client()
            assert status_of(await client.ask(b"crash")) == 500
            began_s = time.monotonic()
            assert (await client.ask(b"again")).payload == b"1.0.0:again"
            return time.monotonic() - began_s

    assert await least_s_async(away_s, 2.0) <= 2.0


@pytest.mark.slow
async def test_requests_that_crash_the_model_do_not_take_it_from_others(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, inference_crash_limit=1) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client, other = await rig.client(), await rig.client("other")
        for _ in range(2):
            answer = await client.ask(b"crash")
            assert status_of(answer) == 500
            assert "this request crashed the model" in json.loads(answer.payload)["error"]
        assert (await other.ask(b"still here?")).payload == b"1.0.0:still here?"
        samples = rig.service.samples()
        assert samples['edge_worker_restarts_total{model="echo"}'] == 2
        assert samples['edge_inference_quarantined_total{model="echo"}'] == 1


@pytest.mark.slow
async def test_three_deaths_of_an_idle_worker_take_the_model_out_of_service(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        model = rig.service.models.get("echo")
        assert model is not None
        for deaths in range(1, 4):
            assert status_of(await client.ask(b"alive?")) == 200
            pid = model.worker_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda deaths=deaths: model.status().restarts == deaths)  # type: ignore[misc, union-attr]
        answer = await client.ask(b"anyone?")
        assert status_of(answer) == 503
        assert "out of service" in json.loads(answer.payload)["error"]
        status = rig.service.models.status("echo")
        assert status is not None
        assert status.phase == "failed"
        # A new deployment brings it back.
        await rig.service.models.activate(rig.signer.bundle(version="2.0.0"))
        assert (await client.ask(b"better")).payload == b"2.0.0:better"


async def test_hanging_worker_is_ended_and_its_request_answered_408(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, inference_compute_limit_s=1.5) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        hanging = client.send(b"hang")
        behind = client.send(b"behind")
        assert status_of(await client.answer(hanging)) == 408
        assert (await client.answer(behind)).payload == b"1.0.0:behind"


async def test_worker_that_writes_garbage_is_replaced(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        assert status_of(await client.ask(b"garbage")) == 500
        assert (await client.ask(b"fine")).payload == b"1.0.0:fine"


@pytest.mark.slow
async def test_worker_that_lies_costs_its_request_and_no_connection(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, broker_receive_maximum=1) as rig:
        await rig.service.models.activate(rig.signer.bundle("liar"))
        await rig.service.models.activate(rig.signer.bundle("other"))
        client = await rig.client()
        for number in (0, 2):
            answer = await client.ask(b"lie:%d" % number, model="liar")
            assert status_of(answer) == 500
            assert "its worker sent an invalid answer" in json.loads(answer.payload)["error"]
            assert (await client.ask(b"hello", model="other")).payload == b"1.0.0:hello"
        assert (await client.ask(b"hello", model="liar")).payload == b"1.0.0:hello"
        await rig.settle()
        samples = rig.service.samples()
        assert samples['edge_mqtt_connects_total{connection="inference"}'] == 1
        assert samples["edge_inference_in_flight"] == 0
        assert samples.get("edge_faults_total", 0) == 0


@pytest.mark.slow
async def test_swap_between_versions_fails_no_request(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    # A long queue, because a worker starts slowly on a busy machine.
    async with start_service(mosquitto.port, inference_queue_requests=10_000) as rig:
        await rig.service.models.activate(rig.signer.bundle(version="1.0.0"))
        client = await rig.client()
        sent: list[bytes] = []
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                sent.append(client.send(b"sleep:0.005"))
                await asyncio.sleep(0.01)

        loading = asyncio.create_task(load())
        for number in range(2, 6):
            await asyncio.sleep(0.1)
            await rig.service.models.activate(rig.signer.bundle(version=f"{number}.0.0"))
        stop.set()
        await loading
        for correlation in sent:
            answer = await client.answer(correlation)
            assert status_of(answer) == 200
            assert answer.payload.split(b":")[0].decode() == answer.properties.first("model_version")
        assert (await client.ask(b"now")).payload == b"5.0.0:now"


async def test_version_that_fails_its_samples_leaves_the_old_one_serving(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        for version in ("2.0.0-bad", "2.0.0-dead"):
            with pytest.raises(SelfTestError):
                await rig.service.models.activate(rig.signer.bundle(version=version))
        assert (await client.ask(b"still")).payload == b"1.0.0:still"


async def test_json_request_without_properties_names_its_reply_topic(
    broker: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(broker.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        body = {"id": "7", "inputs": [], "reply_to": "edge/v1/replies/client/plain"}
        client.connection.publish(
            format_topic(Infer(rig.device, "echo")), json.dumps(body).encode(), properties=Properties()
        )
        await until(lambda: bool(client.received))
        answer = client.received[0]
        assert answer.topic == "edge/v1/replies/client/plain"
        assert json.loads(answer.payload) == {"id": "7", "status": 200, "message": "", "version": "1.0.0"}


async def test_json_request_that_cannot_be_served_is_refused_in_json(
    broker: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(broker.port) as rig:
        client = await rig.client()
        body = {"id": "7", "inputs": [], "reply_to": "edge/v1/replies/client/plain"}
        client.connection.publish(format_topic(Infer(rig.device, "none")), json.dumps(body).encode())
        await until(lambda: bool(client.received))
        answer = json.loads(client.received[0].payload)
        assert (answer["id"], answer["status"], answer["model_name"]) == ("7", 404, "none")


@pytest.mark.slow
async def test_tenfold_overload_is_answered_to_the_last_request_and_leaves_nothing_behind(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, inference_queue_requests=8) as rig:
        await rig.service.models.activate(rig.signer.bundle("slow"))
        await rig.service.models.activate(rig.signer.bundle("fast"))
        client = await rig.client()
        sent = []
        for _ in range(40):
            sent += [client.send(b"sleep:0.005", model="slow") for _ in range(50)]
            assert (await client.ask(b"quick", model="fast")).payload == b"1.0.0:quick"
        statuses = [status_of(await client.answer(correlation)) for correlation in sent]
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) > 0
        assert statuses.count(503) > len(sent) / 2
        await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 0)
        assert client.connection.connects == 1
        assert rig.service.samples()['edge_mqtt_connects_total{connection="inference"}'] == 1
        assert (await client.ask(b"sleep:0", model="slow")).payload == b"1.0.0:sleep:0"
