"""The client on asyncio: one answer despite restarts, or an error with the reason and a hint."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest

from agent.mqtt.message import Message
from agent.wire import topics
from edgebundle import (
    AsyncClient,
    BadAnswerError,
    BrokerError,
    ClosedError,
    NoAnswerError,
    OverloadedError,
    RefusedError,
    UnknownAgentError,
    UnknownModelError,
    UsageError,
    errors,
)
from tests.conftest import BrokerProcess
from tests.edgebundle.rig import JPEG, PNG, STATE, TOP, Reply, Responder
from tests.patience import PATIENCE_S, until

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def always(reply: Reply) -> Any:
    return lambda _count, _message: reply


def identifier(message: Message) -> bytes | str:
    found = message.properties.correlation_data
    return json.loads(message.payload)["id"] if found is None else found


async def test_image_is_answered_with_labels_over_either_broker(broker: BrokerProcess) -> None:
    async with Responder(broker, always((200, TOP))) as responder, AsyncClient(broker.url) as client:
        answer = await client.model("kitchen", "digits")(image=PNG, deadline_s=10 * PATIENCE_S)
    assert (answer.version, answer.attempts) == ("1.0.0", 1)
    assert [(row.label, row.index) for row in answer.labels] == [("seven", 7), ("one", 1)]
    assert answer.labels[0].score == pytest.approx(0.9)
    assert answer.boxes == ()
    (request,) = responder.requests
    if broker.kind == "mosquitto":
        assert (request.payload, request.properties.content_type) == (PNG, "image/png")
        assert request.properties.expiry_s is not None
        assert 9 * PATIENCE_S < request.properties.expiry_s <= 10 * PATIENCE_S
    else:
        document = json.loads(request.payload)
        assert 9 * PATIENCE_S < document["deadline_s"] <= 10 * PATIENCE_S
        assert document["inputs"] == [
            {
                "name": "image",
                "datatype": "BYTES",
                "shape": [1],
                "data": [base64.b64encode(PNG).decode()],
                "parameters": {"content_type": "image/png"},
            }
        ]


async def test_tensors_are_arrays_both_ways_over_either_broker(broker: BrokerProcess) -> None:
    def reply(_count: int, _message: Message) -> Reply:
        if broker.kind == "mosquitto":
            body = np.array([1.5, -2.0], "<f4").tobytes() + b"\x05\x00\x00\x00hello"
            return ("y;FP32;2,1", "words;BYTES;1"), body
        outputs = [
            {"name": "y", "datatype": "FP32", "shape": [2, 1], "data": [[1.5], [-2.0]]},
            {"name": "words", "datatype": "BYTES", "shape": [1], "data": ["hello"]},
        ]
        return 200, {"outputs": outputs}

    given = np.arange(6).reshape(2, 3)  # int64 without the first dimensions: both are completed
    async with Responder(broker, reply) as responder, AsyncClient(broker.url) as client:
        model = client.model("kitchen", "digits")
        first = await model(given)
        second = await model({"image": given.astype(np.float64)}, traceparent=TRACE, tracestate="a=b")
    for answer in (first, second):
        np.testing.assert_array_equal(answer["y"], np.array([[1.5], [-2.0]], np.float32))
        assert list(answer) == ["y", "words"]
        assert answer["words"].tolist() == ["hello"]
    for request in responder.requests:
        if broker.kind == "mosquitto":
            assert request.properties.all("tensor") == ("image;FP32;1,1,2,3",)
            assert request.properties.first("accept") == "application/octet-stream"
            assert request.payload == given.astype("<f4").tobytes()
        else:
            (tensor,) = json.loads(request.payload)["inputs"]
            assert tensor == {
                "name": "image",
                "datatype": "FP32",
                "shape": [1, 1, 2, 3],
                "data": [0, 1, 2, 3, 4, 5],
            }
    if broker.kind == "mosquitto":
        assert second.trace == (("traceparent", TRACE), ("tracestate", "a=b"))
        assert (second.timing.queue_s, second.timing.encode_s) == pytest.approx((1e-4, 4e-4))
        assert (
            second.timing.network_s == pytest.approx(second.latency_s - 1e-3, abs=1e-9)
            or second.latency_s < 1e-3
        )


async def test_raw_asks_for_the_models_own_outputs_over_either_broker(broker: BrokerProcess) -> None:
    async with Responder(broker, always((200, TOP))) as responder, AsyncClient(broker.url) as client:
        model = client.model("kitchen", "digits")
        await model(image=PNG, raw=True)
        await model(row={"light": 0.5}, raw=True)
        await model.session()(row={"light": 0.5}, raw=True)
        with pytest.raises(UsageError, match="raw: expected True or False, got ndarray") as caught:
            await model(raw=np.zeros(3))  # type: ignore[arg-type]
    assert "model({'raw': array})" in (caught.value.hint or "")
    assert len(responder.requests) == 3
    for request in responder.requests:
        if broker.kind == "mosquitto":
            assert request.properties.first("accept") == "application/octet-stream;postprocess=none"
        else:
            assert json.loads(request.payload)["parameters"] == {"postprocess": "none"}


async def test_many_in_flight_are_matched_and_map_keeps_the_order(mosquitto: BrokerProcess) -> None:
    waiting: list[Message] = []

    def reply(_count: int, message: Message) -> Reply:
        # Answers go out backwards, three at a time.
        waiting.append(message)
        if len(waiting) == 3:
            for each in reversed(waiting):
                responder.answer(each, (("y;FP32;1,1,2,3",), each.payload))
            waiting.clear()
        return None

    async with Responder(mosquitto, reply) as responder, AsyncClient(mosquitto.url) as client:
        model = client.model("kitchen", "digits")
        batch = np.arange(36, dtype=np.float32).reshape(6, 1, 2, 3)
        answers = [answer async for answer in model.map(batch, in_flight=3)]
        together = await asyncio.gather(*(model(item) for item in batch))
    for found in (answers, together):
        np.testing.assert_array_equal(np.concatenate([answer["y"] for answer in found]), batch)
    assert len(responder.requests) == 12


async def test_second_and_late_answers_are_dropped(mosquitto: BrokerProcess) -> None:
    other = {**TOP, "model_version": "2.0.0"}

    def reply(count: int, message: Message) -> Reply:
        if count == 2:
            responder.answer(responder.requests[0], (200, other))  # late
        responder.answer(message, (200, TOP), retain=count == 3)
        responder.answer(message, (200, other))  # the second one
        return None

    async with Responder(mosquitto, reply) as responder, AsyncClient(mosquitto.url) as client:
        model = client.model("kitchen", "digits")
        for _ in range(3):
            assert (await model(image=JPEG)).version == "1.0.0"


async def test_unanswered_request_is_sent_again_with_its_identifier(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgebundle.exchange.RESEND_S", 0.1)
    async with (
        Responder(broker, lambda count, _message: (200, TOP) if count == 3 else None) as responder,
        AsyncClient(broker.url) as client,
    ):
        answer = await client.model("kitchen", "digits")(image=JPEG)
    assert answer.attempts == 3
    assert answer.latency_s >= 0.2
    assert len({identifier(message) for message in responder.requests}) == 1
    assert len({message.payload for message in responder.requests}) == 1


async def test_overloaded_model_gets_a_new_request(
    mosquitto: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgebundle.async_model._OVERLOAD_PAUSE_S", 0.02)
    async with (
        Responder(
            mosquitto, lambda count, _message: (200, TOP) if count == 3 else (503, {"error": "full"})
        ) as responder,
        AsyncClient(mosquitto.url) as client,
    ):
        model = client.model("kitchen", "digits")
        assert (await model(image=JPEG)).attempts == 3
        assert len({identifier(message) for message in responder.requests}) == 3
        with pytest.raises(OverloadedError, match=r"full \(try again later"):
            await model(image=JPEG, deadline_s=2)


async def test_overloaded_model_is_not_asked_again_without_time_for_an_answer(
    mosquitto: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgebundle.async_model._OVERLOAD_PAUSE_S", 6.0)
    async with (
        Responder(mosquitto, lambda _count, _message: (503, {"error": "full"})) as responder,
        AsyncClient(mosquitto.url) as client,
    ):
        with pytest.raises(OverloadedError):
            await client.model("kitchen", "digits")(image=JPEG, deadline_s=9)
        assert len(responder.requests) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.InputError),
        (408, errors.DeadlineError),
        (413, errors.PayloadError),
        (415, errors.MediaTypeError),
        (500, errors.ExecutionError),
        (418, errors.RefusedError),
    ],
)
async def test_refusal_is_an_error_of_its_own_and_not_repeated(
    broker: BrokerProcess, status: int, kind: type[RefusedError]
) -> None:
    said = {"error": "expected x, got y", "hint": "give x"}
    async with Responder(broker, always((status, said))) as responder, AsyncClient(broker.url) as client:
        with pytest.raises(RefusedError, match=r"expected x, got y \(give x\)") as caught:
            await client.model("kitchen", "digits")(image=JPEG)
    assert (type(caught.value), caught.value.status, caught.value.hint) == (kind, status, "give x")
    assert isinstance(caught.value, TimeoutError) == (status == 408)
    assert len(responder.requests) == 1


async def test_wrong_model_is_told_with_those_that_are_there(mosquitto: BrokerProcess) -> None:
    async with (
        Responder(mosquitto, always((404, {"error": "no model"}))),
        AsyncClient(mosquitto.url) as client,
    ):
        model = client.model("kitchen", "digit")
        with pytest.raises(UnknownModelError, match="no model") as caught:
            await model(image=JPEG)
        assert caught.value.hint == "use one of the models of kitchen: digits"
        with pytest.raises(UnknownModelError, match="kitchen has no model 'digit'"):
            await client.directory.info(model._target, 0.1)


async def test_wrong_agent_is_told_within_two_seconds_with_the_known_names(broker: BrokerProcess) -> None:
    # `tests/cli/test_wrong_names.py` counts the seconds; here, it is long before the deadline.
    async with Responder(broker, always(None)), AsyncClient(broker.url) as client:
        model = client.model("kitchne", "digits")
        calls = (model({"image": [1.0]}, deadline_s=10 * PATIENCE_S) for _ in range(3))
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(UnknownAgentError, match="no agent called kitchne is known") as caught:
                await asyncio.gather(*calls)
    assert caught.value.hint == "use one of the agents at this broker: kitchen"


async def test_agents_without_any_agent(mosquitto: BrokerProcess) -> None:
    async with AsyncClient(mosquitto.url) as client:
        assert await client.agents() == ()
        with pytest.raises(UnknownAgentError, match="the broker knows no agent: check that edge-agent runs"):
            await client.model("kitchen", "digits")(image=JPEG)


async def test_group_is_asked_and_a_wrong_group_is_told(mosquitto: BrokerProcess) -> None:
    async with (
        Responder(mosquitto, always((200, TOP)), group="door") as responder,
        AsyncClient(mosquitto.url) as client,
    ):
        answer = await client.group_model("door", "digits")(image=JPEG)
        assert (answer.agent, answer.labels[0].label) == ("door", "seven")
        assert responder.requests[0].topic == "edge/v1/groups/door/models/digits/infer"
        assert "/door/" in (responder.requests[0].properties.response_topic or "")
        assert (await client.group_model("door", "digits").info()).agent == "kitchen"
        with pytest.raises(UnknownAgentError, match="no group called dor") as caught:
            await client.group_model("dor", "digits")(image=JPEG)
        assert caught.value.hint == "use one of the groups at this broker: door"
        with pytest.raises(NoAnswerError, match="no member of the group serves other"):
            await client.group_model("door", "other")(image=JPEG, deadline_s=0.3)


@pytest.mark.parametrize(
    ("user", "asked_as", "answered_to"),
    [
        ("alice@", "/alice", "alice"),
        ("a%40b.org@", "/a@b.org", "a@b.org"),
        # Names that cannot be levels, or that no user has.
        ("", "", "anonymous-"),
        ("a%20b@", "", "anonymous-"),
        ("groups@", "", "anonymous-"),
        ("%2B@", "", "anonymous-"),
        ("anonymous@", "", "anonymous"),
    ],
)
@pytest.mark.parametrize("version", ["5", "3.1.1"])
async def test_user_of_the_broker_is_in_the_topics_of_request_and_answer(
    mosquitto: BrokerProcess, user: str, asked_as: str, answered_to: str, version: str
) -> None:
    url = mosquitto.url.replace("//", f"//{user}")
    async with (
        Responder(mosquitto, always(None)) as responder,
        AsyncClient(url, mqtt_version=version) as client,
    ):
        with pytest.raises(NoAnswerError):
            await client.model("kitchen", "digits")(row=[1.0], deadline_s=0.2)
    [request] = responder.requests
    assert request.topic == f"edge/v1/kitchen/models/digits/infer{asked_as}"
    reply_to = request.properties.response_topic or json.loads(request.payload)["reply_to"]
    assert reply_to.startswith(f"edge/v1/replies/{answered_to}")


async def test_no_answer_says_what_the_agent_is_and_progress_says_it_before(
    mosquitto: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgebundle.exchange.RESEND_S", 0.05)
    lines: list[str] = []
    async with (
        Responder(mosquitto, always(None), presence=b'{"state":"stopped"}') as responder,
        AsyncClient(mosquitto.url, progress=lines.append) as client,
    ):
        model = client.model("kitchen", "digits")
        with pytest.raises(NoAnswerError, match=r"no answer from kitchen within 0\.\d s: kitchen is stopped"):
            await model(image=JPEG, deadline_s=0.3)
        (line,) = lines
        assert line.startswith("kitchen is stopped; waiting for up to")
        state = topics.format_topic(topics.State("kitchen"))
        await responder.connection.publish(state, b'{"state":"online","inference":"online"}', retain=True)
        await until(lambda: getattr(client.directory.presence("kitchen"), "state", "") == "online")
        with pytest.raises(NoAnswerError, match="it is online") as caught:
            await model(image=JPEG, deadline_s=0.2)
    assert isinstance(caught.value, TimeoutError)
    hint = str(caught.value.hint)
    assert "write edge/v1/kitchen/models/digits/infer and read edge/v1/replies/anonymous-" in hint


async def test_new_connection_sends_again_at_once(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgebundle.exchange.RESEND_S", 60.0)
    async with (
        Responder(broker, lambda count, _message: (200, TOP) if count == 2 else None) as responder,
        AsyncClient(broker.url) as client,
    ):
        call = asyncio.create_task(client.model("kitchen", "digits")(image=JPEG))
        await until(lambda: len(responder.requests) == 1)
        [exchange] = client._exchanges.values()
        await until(lambda: not exchange._unsettled)  # otherwise the connection repeats it
        assert client._link is not None
        client._link.renew()
        assert (await asyncio.wait_for(call, PATIENCE_S)).attempts == 2


@pytest.mark.slow
async def test_broker_that_restarts_costs_only_time(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgebundle.exchange.RESEND_S", 0.5)
    lines: list[str] = []
    async with (
        Responder(broker, lambda count, _message: (200, TOP) if count > 2 else None) as responder,
        AsyncClient(broker.url, progress=lines.append) as client,
    ):
        model = client.model("kitchen", "digits")
        calls = [asyncio.create_task(model(image=JPEG, deadline_s=PATIENCE_S)) for _ in range(2)]
        await until(lambda: len(responder.requests) == 2)
        await asyncio.to_thread(broker.restart)
        answers = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)
        assert all(answer.attempts >= 2 for answer in answers)
        assert (await model(image=JPEG)).labels
    assert "connecting again" in lines[0]


async def test_deadline_without_a_broker(mosquitto: BrokerProcess) -> None:
    async with AsyncClient(mosquitto.url) as client:
        mosquitto.stop()
        with pytest.raises(NoAnswerError, match="there is no connection to mqtt://127"):
            await client.model("kitchen", "digits")(image=JPEG, deadline_s=0.3)


async def test_cancelled_request_is_forgotten(mosquitto: BrokerProcess) -> None:
    async with Responder(mosquitto, always(None)) as responder, AsyncClient(mosquitto.url) as client:
        model = client.model("kitchen", "digits")
        call = asyncio.create_task(model(image=JPEG))
        await until(lambda: bool(responder.requests))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client._exchanges == {}
        responder.answer(responder.requests[0], (200, TOP))  # too late for anybody
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await model(image=JPEG)
        many = model.map([JPEG] * 20, in_flight=5)
        reading = asyncio.ensure_future(anext(many))
        await until(lambda: len(client._exchanges) == 5)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert client._exchanges == {}


async def test_closing_ends_requests_and_forbids_new_ones(mosquitto: BrokerProcess) -> None:
    async with Responder(mosquitto, always(None)) as responder:
        client = AsyncClient(mosquitto.url)
        calls = [asyncio.create_task(client.model("kitchen", "digits")(image=JPEG)) for _ in range(3)]
        await until(lambda: len(responder.requests) == 3)
        await client.close()
        for call in calls:
            with pytest.raises(ClosedError, match="closed while the request was under way"):
                await call
        with pytest.raises(ClosedError, match="the client is closed"):
            await client.model("kitchen", "digits")(image=JPEG)
        await client.close()


async def test_closing_has_a_time_limit_while_a_connection_is_made(
    mosquitto: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def connect(_self: AsyncClient) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()  # a name that the system is looking up

    monkeypatch.setattr(AsyncClient, "_connect", connect)
    client = AsyncClient(mosquitto.url)
    connecting = asyncio.create_task(client.connect())
    await begun.wait()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    closing.cancel()
    await until(closing.cancelled)
    connecting.cancel()


async def test_two_clients_of_one_name_get_their_own_answers(mosquitto: BrokerProcess) -> None:
    url = mosquitto.url.replace("mqtt://", "mqtt://alice@")

    def reply(_count: int, message: Message) -> Reply:
        return (f"y;UINT8;{len(message.payload)}",), message.payload

    async with Responder(mosquitto, reply), AsyncClient(url) as first, AsyncClient(url) as second:
        calls = [
            client.model("kitchen", "digits")(image=JPEG + bytes([i]))
            for i in range(5)
            for client in (first, second)
        ]
        answers = await asyncio.gather(*calls)
    assert [answer["y"][-1] for answer in answers] == [i for i in range(5) for _ in range(2)]


async def test_client_identifier_appears_in_no_message(mosquitto: BrokerProcess) -> None:
    url = mosquitto.url.replace("mqtt://", "mqtt://alice@")
    async with Responder(mosquitto, always((200, TOP))) as responder, AsyncClient(url) as client:
        await client.model("kitchen", "digits")(image=JPEG)
        assert client._link is not None
        [request] = responder.requests
        assert (request.properties.response_topic or "").startswith("edge/v1/replies/alice/kitchen/")
        assert client._link.client_id not in f"{request}"


async def test_unusable_broker_is_an_error() -> None:
    with pytest.raises(BrokerError, match=r"cannot reach the broker at mqtt://127\.0\.0\.1:1") as caught:
        await AsyncClient("mqtt://127.0.0.1:1").connect()
    assert caught.value.hint == "check the address, and whether the broker runs there"
    for url in ("broker", "http://broker", "mqtt://b:x", "mqtt://[::1", "mqtt://b/c"):
        with pytest.raises(UsageError):
            AsyncClient(url)
    with pytest.raises(UsageError, match="MQTT version"):
        AsyncClient("mqtt://b", mqtt_version="4")


async def test_request_that_the_broker_does_not_take_is_an_error_at_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("mosquitto")
    (folder / "acl").write_text(
        "topic read #\ntopic write edge/v1/kitchen/#\ntopic write edge/v1/replies/#\n"
    )
    broker = BrokerProcess("mosquitto", folder, extra=f"acl_file {folder}/acl\nmax_packet_size 2000\n")
    broker.start()
    try:
        async with Responder(broker, always((200, TOP))), AsyncClient(broker.url) as client:
            with pytest.raises(
                BrokerError, match=r"refused the request to edge/v1/garage/.*Not authorized.*mqtt://USER@HOST"
            ):
                await client.model("garage", "digits")(image=JPEG)
            with pytest.raises(BrokerError, match="does not take a request of 3050 bytes"):
                await client.model("kitchen", "digits")(image=PNG + bytes(2992))
            assert (await client.model("kitchen", "digits")(image=PNG)).labels
    finally:
        broker.stop()


@pytest.mark.parametrize(
    "names", [("a/b", "m"), ("kitchen", "#"), ("groups", "m"), ("", "m"), ("kitchen", "A")]
)
def test_name_that_no_agent_or_model_can_have_is_refused(names: tuple[str, str]) -> None:
    for make in (AsyncClient("mqtt://b").model, AsyncClient("mqtt://b").group_model):
        with pytest.raises(UsageError, match="expected the names of"):
            make(*names)


async def test_arguments_that_contradict_each_other_are_refused(mosquitto: BrokerProcess) -> None:
    two = {**STATE, "inputs": [{"name": name, "datatype": "FP32", "shape": [1]} for name in "ab"]}
    async with (
        Responder(mosquitto, always((200, TOP)), state=two) as responder,
        AsyncClient(mosquitto.url) as client,
    ):
        model = client.model("kitchen", "digits")
        cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
            ((), {}, "expected a picture or tensors, got nothing"),
            ((np.zeros(1),), {"image": JPEG}, "expected one picture"),
            ((np.zeros(1),), {"a": np.zeros(1)}, "expected one picture"),
            ((np.zeros(1),), {}, "expected arrays for 2 inputs, got one array"),
            ((), {"c": np.zeros(1)}, "does not have an input 'c'"),
            ((), {"image": JPEG, "deadline_s": 0}, "expected a positive number"),
            ((), {"image": JPEG, "deadline_s": float("nan")}, "expected a positive number"),
            ((), {"image": JPEG, "traceparent": "1"}, "traceparent: expected"),
            ((), {"image": JPEG, "tracestate": "a\n"}, "tracestate: expected"),
        ]
        for positional, named, words in cases:
            with pytest.raises(UsageError, match=words):
                await model(*positional, **named)
        for wrong in ({"in_flight": 0}, {"deadline_s": -1.0}):
            with pytest.raises(UsageError, match="expected"):
                model.map([], **wrong)
        assert responder.requests == []


async def test_hostile_answers_are_one_error_each_and_harm_no_other(mosquitto: BrokerProcess) -> None:
    hostile: list[Reply] = [
        (200, {"outputs": [{"name": 1}]}),
        (200, {"outputs": [{"name": "y", "datatype": "FP32", "shape": [2], "data": [1]}]}),
        (200, {"outputs": [{"name": "y", "datatype": "INT8", "shape": [1], "data": [1000]}]}),
        (200, {"outputs": [{"name": "y", "datatype": "INT8", "shape": [1], "data": ["x"]}]}),
        (200, {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [10**400]}]}),
        (200, {"outputs": "y"}),
        (("y;FP32;4294967295",), b""),
        (("y;FP32;1",), bytes(5)),
        (("y;BYTES;4294967295",), bytes(4)),
        (("y;BYTES;1",), b"\xff\xff\xff\xff"),
        (("y;NONE;1",), b""),
        (("y;FP32;1", "y;FP32;1"), bytes(8)),
        (("é;FP32;1",), bytes(4)),
        (tuple(f"y{i};FP32;0" for i in range(300)), b""),
    ]

    def reply(count: int, message: Message) -> Reply:
        if count <= len(hostile):
            return hostile[count - 1]
        if count == len(hostile) + 1:
            assert message.properties.response_topic is not None
            responder.connection.publish(message.properties.response_topic, b"[" * 100_000)
            return None
        return (200, TOP)

    async with Responder(mosquitto, reply) as responder, AsyncClient(mosquitto.url) as client:
        model = client.model("kitchen", "digits")
        for each in range(len(hostile) + 1):
            with pytest.raises(BadAnswerError, match="the answer of kitchen cannot be read") as caught:
                await model(image=JPEG)
            assert len(str(caught.value)) < 600, each
        assert (await model(image=JPEG)).labels
        for topic in ("edge/v1/kitchen/state", "edge/v1/kitchen/models/digits/state"):
            await responder.connection.publish(topic, b"\xff[" * 1000, retain=True)
        assert (await model(image=JPEG)).labels


def test_user_that_cannot_be_in_a_topic_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    for user in ("alice", "", "alice%2Fkitchen"):
        AsyncClient(f"mqtt://{user}@localhost" if user else "mqtt://localhost", progress=lines.append)
    assert lines == ["no user in a topic can be 'alice/kitchen': this client asks without one"]
    assert caplog.messages == []
    AsyncClient("mqtt://a%2Fb%1B@localhost")
    assert caplog.messages == ["no user in a topic can be 'a/b\\x1b': this client asks without one"]
