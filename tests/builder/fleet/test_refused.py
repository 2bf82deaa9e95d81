"""A refused deployment stays in every view, whatever else is deployed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from agent.deploy import deployment
from agent.mqtt.message import Message
from agent.service.gauges import of_deployment
from agent.wire import topics
from agent.wire.presence import Presence
from builder.fleet.agents import _Listing
from dashboard.fleet_state import FleetState
from tests.agent.deploy.rig import DEVICE, Agent, make_bundle

STRANGERS_KEY = ec.generate_private_key(ec.SECP256R1())
NEVER_SERVED = make_bundle("faces", key=STRANGERS_KEY)
NOT_SUCCEEDED = make_bundle("digits", version="2.0.0", key=STRANGERS_KEY)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "INBOX_INTERVAL_S", 0.005)


async def refused(root: Path) -> Agent:
    """Return an agent that refused two models, got a third one after them, and was started again."""
    agent = await Agent(root).start()
    await agent.deploy(make_bundle("digits"), "job-1")
    wanted = {"faces": NEVER_SERVED.entry("job-2"), "digits": NOT_SUCCEEDED.entry("job-3")}
    pets = make_bundle("pets")
    agent.offer(NEVER_SERVED, NOT_SUCCEEDED, pets)
    agent.desire(wanted)
    for job in wanted.values():
        await agent.finished(job["job"])
    agent.desire(wanted | {"pets": pets.entry("job-4")})
    await agent.finished("job-4")
    await agent.settle()
    await agent.stop()
    await agent.start()
    await agent.settle()
    await agent.stop()
    return agent


def documents(agent: Agent) -> dict[topics.Topic, bytes]:
    """Return what the agent has retained at its broker."""
    found = ((topics.parse_topic(topic), payload) for topic, payload in agent.control.retained.items())
    return {topic: payload for topic, payload in found if topic is not None}


async def test_refused_models_are_in_the_list_of_agents(tmp_path: Path) -> None:
    agent = await refused(tmp_path)
    listing = _Listing()
    for topic, payload in documents(agent).items():
        listing.on_message(topic, Message("", payload))
    listing.on_message(topics.State(DEVICE), Message("", Presence("online", 1, "1.0.0").to_bytes()))
    (summary,) = listing.summaries()
    shown = {model.name: (model.service, "not trusted" in model.condition) for model in summary.models}
    assert shown == {"digits": ("degraded", True), "faces": ("failed", True), "pets": ("active", False)}


async def test_refused_models_need_attention_in_the_dashboard(tmp_path: Path) -> None:
    agent = await refused(tmp_path)
    state = FleetState(lambda: 1000.0, lambda: 1000.0)
    state.on_message(topics.State(DEVICE), Presence("online", 1, "1.0.0").to_bytes(), is_retained=True)
    for topic, payload in documents(agent).items():
        state.on_message(topic, payload, is_retained=True)
    state.settle()
    (row,) = [json.loads(row) for row in state.rows_since(0)[0]]
    assert row["alerts"] == ["digits: degraded", "faces: failed"]
    device = state.get(DEVICE)
    assert device is not None
    details = device.detail(None)["allModels"]
    reasons = {model["name"]: "not trusted" in model["reason"] for model in details}
    assert reasons == {"digits": True, "faces": True, "pets": False}


async def test_refused_models_are_in_the_metric(tmp_path: Path) -> None:
    agent = await refused(tmp_path)
    gauges = of_deployment(agent.deployment.reported.states())
    current = {dict(labels)["model"]: dict(labels)["state"] for (_, labels), on in gauges.items() if on}
    assert current == {"digits": "degraded", "faces": "failed", "pets": "active"}
