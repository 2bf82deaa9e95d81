"""docs/asyncapi.yaml agrees with the topics, the parsers and a running agent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml

from agent.bundle.archive import MAX_BUNDLE_BYTES
from agent.errors import BundleError
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.service.metrics.metric_table import METRICS
from agent.wire import content_types, desired, properties, server_timing, topics
from agent.wire.answer import STATUSES
from agent.wire.answer_head import MAX_STATUS_MESSAGE_CHARACTERS
from agent.wire.blocks import MAX_BLOCK_BYTES, MAX_COUNT
from agent.wire.envelope import MAX_ID_CHARACTERS
from agent.wire.job import MAX_MESSAGE_CHARACTERS, Result, Status, Step
from agent.wire.model_state import ModelPhase
from agent.wire.presence import AgentState
from agent.wire.request import InferMessage
from agent.wire.topics import Reply, Topic, format_topic, parse_topic
from tests.agent.service.conftest import Client, StartService, status_of
from tests.agent.service.test_service import Watcher
from tests.conftest import BrokerProcess
from tests.patience import until

DOCUMENT: dict[str, Any] = yaml.safe_load((Path(__file__).parents[3] / "docs" / "asyncapi.yaml").read_text())
CHANNELS: dict[str, Any] = DOCUMENT["channels"]
MESSAGES: dict[str, Any] = DOCUMENT["components"]["messages"]
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def resolve(reference: str) -> Any:
    at: Any = DOCUMENT
    for part in reference.removeprefix("#/").split("/"):
        at = at[part]
    return at


def references(at: Any) -> Iterator[str]:
    if isinstance(at, dict):
        if "$ref" in at:
            assert at.keys() == {"$ref"}
            yield at["$ref"]
        for value in at.values():
            yield from references(value)
    elif isinstance(at, list):
        for value in at:
            yield from references(value)


def topic_of(channel: dict[str, Any]) -> Topic | None:
    def example(match: re.Match[str]) -> str:
        return str(resolve(channel["parameters"][match[1]]["$ref"])["examples"][0])

    return parse_topic(re.sub(r"\{(\w+)\}", example, channel["address"]))


def check(schema: str, payload: object) -> None:
    """Check a payload against a schema of the document."""
    whole = {"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]}
    jsonschema.Draft7Validator(whole).validate(payload)


def test_every_reference_leads_somewhere_and_every_part_is_used() -> None:
    found = set(references(DOCUMENT))
    for reference in found:
        resolve(reference)
    for kind, parts in DOCUMENT["components"].items():
        if kind != "operationBindings":
            assert {f"#/components/{kind}/{name}" for name in parts} <= found, kind
    assert {f"#/channels/{name}" for name in CHANNELS} <= found


def test_topics_are_those_of_the_code_and_the_code_has_no_others() -> None:
    described = [topic_of(channel) for channel in CHANNELS.values()]
    assert None not in described
    with_user = [topic for name, topic in zip(CHANNELS, described, strict=True) if "Anonymous" not in name]
    assert {type(topic) for topic in with_user} == set(get_args(Topic))
    assert len(with_user) == len(get_args(Topic))
    for name, topic in zip(CHANNELS, described, strict=True):
        assert topic is not None
        named, anonymous, _ = name.partition("Anonymous")
        assert named.lower() == type(topic).__name__.lower()
        parameters = set(re.findall(r"\{(\w+)\}", CHANNELS[name]["address"]))
        members = set(type(topic).__match_args__) - ({"user"} if anonymous else set())
        assert parameters == set(CHANNELS[name]["parameters"]) == members


def test_document_says_what_is_subscribed_to_and_retained() -> None:
    operations = {
        operation["channel"]["$ref"].rpartition("/")[2]: operation
        for operation in DOCUMENT["operations"].values()
    }
    received = {name for name, operation in operations.items() if operation["action"] == "receive"}
    asked = {"infer", "inferAnonymous", "groupInfer", "groupInferAnonymous"}
    assert received == {*asked, "desired", "block"}
    retained = {
        name
        for name, operation in operations.items()
        if resolve(operation["bindings"]["$ref"])["mqtt"]["retain"]
    }
    assert retained == {"state", "info", "modelState", "desired", "reported", "job"}
    assert operations.keys() | {"reply"} == CHANNELS.keys()


@pytest.mark.parametrize("name", [name for name, message in MESSAGES.items() if "examples" in message])
def test_examples_are_what_their_schemas_say(name: str) -> None:
    message = MESSAGES[name]
    for example in message["examples"]:
        check(message["payload"]["$ref"].rpartition("/")[2], example["payload"])


def test_desired_example_is_taken_and_the_schema_is_as_strict_as_the_parser() -> None:
    [example] = MESSAGES["desired"]["examples"]
    document = example["payload"]
    desired.Desired.from_bytes(json.dumps(document).encode())
    model = document["models"]["digits"]
    broken: dict[str, Any]
    for broken in (
        {**document, "more": 1},
        {"models": {}},
        {**document, "models": {"digits": {**model, "size": 0}}},
        {**document, "models": {"digits": {**model, "sources": []}}},
        {**document, "models": {"digits": {**model, "digest": "md5:1"}}},
    ):
        with pytest.raises(BundleError):
            desired.Desired.from_bytes(json.dumps(broken).encode())
        with pytest.raises(jsonschema.ValidationError):
            check("desired", broken)


def test_request_examples_are_read() -> None:
    tensor, without_properties = (example["payload"] for example in MESSAGES["requestJson"]["examples"])
    topic = format_topic(topics.Infer("kitchen", "digits", "alice"))
    reply = format_topic(Reply("alice", "kitchen/3f9c5a1be07d2264"))
    properties = Properties(response_topic=reply)
    with_properties = Message(topic, json.dumps(tensor).encode(), 1, properties=properties)
    bare = Message(topic, json.dumps(without_properties).encode(), 1)
    first, second = (InferMessage.from_message(message, "alice") for message in (with_properties, bare))
    assert first.refusal is second.refusal is None
    assert first.reply_to == second.reply_to == reply
    assert (first.has_envelope, second.has_envelope, second.id) == (False, True, "2")


def test_words_are_those_of_the_code() -> None:
    job = SCHEMAS["job"]["properties"]
    assert set(job["status"]["enum"]) == set(Status)
    assert set(job["step"]["enum"]) == {None, *Step}
    assert set(job["result"]["enum"]) == {None, *Result}
    assert set(SCHEMAS["modelState"]["properties"]["state"]["enum"]) == set(ModelPhase)
    assert set(SCHEMAS["state"]["properties"]["state"]["enum"]) == set(AgentState)
    answer = DOCUMENT["components"]["messageTraits"]["answer"]["headers"]["properties"]
    sent = {properties.STATUS, properties.STATUS_MESSAGE, properties.MODEL_VERSION, properties.TENSOR}
    sent |= {properties.SERVER_TIMING, properties.SESSION_STEP}
    assert answer.keys() == {*sent, *properties.TRACE}
    assert {int(status) for status in answer[properties.STATUS]["enum"]} == set(STATUSES)
    assert answer[properties.STATUS_MESSAGE]["maxLength"] == MAX_STATUS_MESSAGE_CHARACTERS
    assert answer[properties.SERVER_TIMING]["maxLength"] == server_timing.MAX_CHARACTERS
    request = DOCUMENT["components"]["messageTraits"]["request"]["headers"]["properties"]
    session = {properties.SESSION, properties.SESSION_STEP, properties.SESSION_END}
    taken = {"responseTopic", properties.TENSOR, properties.ACCEPT, *session}
    assert request.keys() == {*taken, *properties.TRACE}
    named = {message["contentType"] for name, message in MESSAGES.items() if name.startswith("request")}
    assert named < set(content_types.REQUESTS)
    for key in MESSAGES["metrics"]["examples"][0]["payload"]:
        assert key.partition("{")[0] in METRICS


def test_limits_are_those_of_the_code() -> None:
    model, document = SCHEMAS["desiredModel"]["properties"], SCHEMAS["desired"]["properties"]
    assert model["size"]["maximum"] == MAX_BUNDLE_BYTES
    assert model["sources"]["maxItems"] == desired.MAX_SOURCES
    assert model["sources"]["items"]["maxLength"] == desired.MAX_SOURCE_CHARACTERS
    assert document["models"]["maxProperties"] == desired.MAX_MODELS
    assert document["version"]["maximum"] == desired.MAX_VERSION
    want = SCHEMAS["want"]["properties"]
    assert (want["count"]["maximum"], want["block_bytes"]["maximum"]) == (MAX_COUNT, MAX_BLOCK_BYTES)
    assert SCHEMAS["request"]["properties"]["id"]["maxLength"] == MAX_ID_CHARACTERS
    assert SCHEMAS["request"]["properties"]["reply_to"]["maxLength"] == topics.MAX_TOPIC_CHARACTERS
    assert SCHEMAS["job"]["properties"]["message"]["maxLength"] == MAX_MESSAGE_CHARACTERS


async def test_running_agent_says_what_the_document_says(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    seen: set[str] = set()
    # Channels with a user stand before those without.
    names = {type(topic_of(channel)): name for name, channel in reversed(CHANNELS.items())}
    async with (
        Watcher(mosquitto.port) as watcher,
        start_service(mosquitto.port, metrics_interval_s=0.1) as rig,
    ):
        await rig.service.models.activate(rig.signer.bundle())
        client = await rig.client()
        assert status_of(await client.ask(b"hello")) == 200
        await refused(client)
        request = MESSAGES["desired"]["examples"][0]["payload"]
        await client.connection.publish("edge/v1/kitchen/desired", json.dumps(request).encode(), retain=True)
        await client.connection.publish("edge/v1/kitchen/desired", b"nonsense", retain=True)
        await until(lambda: (watcher.latest("reported") or {}).get("error") is not None)
        await until(lambda: any("/want" in message.topic for message in watcher.messages))
    for message in watcher.messages:
        topic = parse_topic(message.topic)
        assert topic is not None, message.topic
        name = names[type(topic)]
        seen.add(name)
        [reference] = [part["$ref"] for part in CHANNELS[name]["messages"].values()][:1]
        described = MESSAGES[reference.rpartition("/")[2]]["payload"]
        if "$ref" in described and message.payload not in (b"", b"hello", b"nonsense"):
            check(described["$ref"].rpartition("/")[2], json.loads(message.payload))
    assert seen >= {
        "state",
        "info",
        "metrics",
        "modelState",
        "infer",
        "desired",
        "reported",
        "job",
        "blockWant",
    }


async def refused(client: Client) -> None:
    answer = await client.ask(b"hello", model="nobody")
    assert status_of(answer) == 404
    check("refusal", json.loads(answer.payload))
