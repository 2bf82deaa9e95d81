"""`edgebundle agents`: read from the documents that agents have retained at the broker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agent.mqtt.message import Message
from agent.wire import topics
from builder.cli import main
from builder.fleet.agents import AgentSummary, ModelSummary, _Listing, agents_async
from builder.fleet.client import Client
from builder.fleet.presence import PresenceWatch
from edgebundle.broker import Broker
from tests.conftest import BrokerProcess
from tests.patience import PATIENCE_S


async def retain(broker: BrokerProcess, messages: dict[topics.Topic, Any]) -> None:
    async with Client(Broker(broker.url), lambda _topic, _message: None) as client:
        for topic, document in messages.items():
            payload = document if isinstance(document, bytes) else json.dumps(document).encode()
            await client.publish_confirmed(
                topics.format_topic(topic), payload, retain=True, limit_s=PATIENCE_S
            )


async def test_agents_are_listed_with_their_models(broker: BrokerProcess) -> None:
    await retain(
        broker,
        {
            topics.State("kitchen"): {"state": "online", "session_seq": 3, "version": "0.1.0"},
            topics.Info("kitchen"): {
                "agent": "0.1.0",
                "hardware": {"board": "Raspberry Pi 4", "arch": "aarch64", "cpu": "Cortex-A72"},
            },
            topics.Info("attic"): {"sandbox": {"complete": False, "missing": ["land\x1block", "seccomp"]}},
            topics.Info("cellar"): {"sandbox": {"complete": True, "landlock": 7, "missing": []}},
            topics.ModelState("kitchen", "digits"): {
                "ready": True,
                "version": "1.0.0",
                "digest": "sha256:ab",
                "inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 8, 8]}, {"name": 1}],
            },
            topics.ModelState("kitchen", "faces"): {"ready": False, "versions": ["2.0.0"]},
            topics.State("attic"): {"state": "offline"},
            topics.Reported("kitchen"): {
                "models": {
                    "digits": {"state": "rolled_back", "message": "3 workers\x1b died", "version": "1.0.0"},
                    "pets": {"state": "failed", "message": "no space", "version": "3.0.0"},
                }
            },
        },
    )
    found = await agents_async(Broker(broker.url), wait_s=5)
    assert found == (
        AgentSummary("attic", "offline", "", "", (), ("land?lock", "seccomp")),
        AgentSummary("cellar", "unknown", "", "", (), ()),
        AgentSummary(
            "kitchen",
            "online",
            "0.1.0",
            "Raspberry Pi 4, aarch64",
            (
                ModelSummary(
                    "digits",
                    "1.0.0",
                    True,
                    "sha256:ab",
                    ("image FP32 [1,8,8]",),
                    "rolled_back",
                    "3 workers? died",
                ),
                ModelSummary("faces", "2.0.0", False, ""),
                ModelSummary("pets", "3.0.0", False, "", (), "failed", "no space"),
            ),
        ),
    )


def test_condition_of_a_model_says_whether_it_is_what_should_run() -> None:
    def model(service: str, reason: str = "", *, ready: bool = True) -> str:
        return ModelSummary("digits", "1.0.0", ready, "", (), service, reason).condition

    assert model("") == model("active") == "ready"
    assert model("rolled_back", "95 % took long") == "ready, rolled back: 95 % took long"
    assert model("degraded", "no space") == "ready, degraded: no space"
    assert model("failed", "3 workers died", ready=False) == "not ready, failed: 3 workers died"
    assert model("starting", ready=False) == "not ready"


@pytest.mark.parametrize(
    ("said", "condition"),
    [
        ({"state": "online"}, "online"),
        ({"state": "online", "inference": "online", "groups": "online"}, "online"),
        ({"state": "online", "inference": "offline"}, "online (requests offline)"),
        (
            {"state": "online", "inference": "offline", "groups": "offline"},
            "online (requests and groups offline)",
        ),
        ({"state": "offline", "inference": "offline"}, "offline"),
    ],
)
def test_agent_that_cannot_be_asked_is_shown_as_such(said: dict[str, str], condition: str) -> None:
    listing = _Listing()
    topic = topics.State("kitchen")
    message = Message(topics.format_topic(topic), json.dumps(said).encode())
    listing.on_message(topic, message)
    (summary,) = listing.summaries()
    assert summary.condition == condition
    watch = PresenceWatch("kitchen")
    watch.on_message(topic, message)
    assert bool(watch.away) == (condition != "online")


async def test_control_characters_of_an_agent_do_not_reach_the_terminal(mosquitto: BrokerProcess) -> None:
    await retain(
        mosquitto,
        {
            topics.State("kitchen"): {"state": "\x1b[31mred\x07", "version": ["x"]},
            topics.Info("kitchen"): b"\xff\xff",
            topics.ModelState("kitchen", "m"): b"[" * 5000,
        },
    )
    (summary,) = await agents_async(Broker(mosquitto.url), wait_s=5)
    assert (summary.state, summary.version, summary.models) == ("?[31mred?", "", ())


async def test_a_broker_without_agents_lists_none(mosquitto: BrokerProcess) -> None:
    assert await agents_async(Broker(mosquitto.url), wait_s=0.5) == ()


async def test_sandbox_that_is_incomplete_is_marked_in_the_list(
    mosquitto: BrokerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    await retain(
        mosquitto,
        {
            topics.State("attic"): {"state": "online"},
            topics.Info("attic"): {"sandbox": {"complete": False, "missing": ["landlock", "threads"]}},
            topics.State("cellar"): {"state": "online"},
            topics.Info("cellar"): {"sandbox": {"complete": True, "missing": []}},
        },
    )
    assert await asyncio.to_thread(main, ["agents", "--broker", mosquitto.url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "attic  online",
        "    sandbox without landlock, threads",
        "cellar  online",
    ]


async def test_two_agents_with_one_name_are_marked_in_the_list(
    mosquitto: BrokerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"state": "online", "session_seq": 3, "version": "0.1.0"}
    twins: dict[topics.Topic, Any] = {
        topics.State("porch"): state | {"name_conflict": True},
        topics.State("attic"): state,
    }
    await retain(mosquitto, twins)
    assert await asyncio.to_thread(main, ["agents", "--broker", mosquitto.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    marked = [line for line in lines if "TWO AGENTS HAVE THIS NAME" in line]
    assert len(marked) == 1
    assert lines[lines.index(marked[0]) - 1].startswith("porch  online")
