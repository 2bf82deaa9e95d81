"""The agent while one of its connections is sent more than it can read."""

from __future__ import annotations

import json

import pytest

from tests.agent.service.conftest import StartService
from tests.flooding_broker import publish, reply_to
from tests.floods import MOST_IN_A_TURN, flooding

MAX_GROWTH_BYTES = 16 << 20
MOST_LINES = 10


def request(topic: str, number: int) -> bytes:
    return publish(f"{topic}/honest", b"x" * 40, reply_to("edge/v1/replies/honest/x", b"%d" % number), qos=1)


def flooding_request(topic: str) -> bytes:
    return publish(f"{topic}/mallory", bytes(800), reply_to("edge/v1/replies/mallory/x", b""))


INFER, GROUP = "edge/v1/kitchen/models/echo/infer", "edge/v1/groups/door/models/echo/infer"
HONEST = [request(INFER, number) for number in range(100)]
HONEST_OF_GROUP = [request(GROUP, number) for number in range(100)]
ANSWER, REPORT = "edge/v1/replies/honest/x", "edge/v1/kitchen/reported"
DESIRED = [
    publish("edge/v1/kitchen/desired", json.dumps({"version": n, "models": {}}).encode(), qos=1)
    for n in range(1, 30)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "part, flood, honest, answer",
    [
        ("kitchen/models", flooding_request(INFER), HONEST, ANSWER),
        ("kitchen/models", publish(INFER, bytes(400)), HONEST, ANSWER),
        ("groups/door", flooding_request(GROUP), HONEST_OF_GROUP, ANSWER),
        ("kitchen/desired", publish("edge/v1/kitchen/desired", b"{}" + b" " * 800), DESIRED, REPORT),
    ],
    ids=["requests", "unanswerable requests", "requests to a group", "control messages"],
)
async def test_flood_on_any_connection_stops_neither_requests_nor_control_messages(
    start_service: StartService,
    caplog: pytest.LogCaptureFixture,
    part: str,
    flood: bytes,
    honest: list[bytes],
    answer: str,
) -> None:
    async with flooding(part, flood, honest) as going_on:
        async with start_service(going_on.port, models=["echo"], groups=["door"], wait=False) as rig:
            before = rig.service.samples()["edge_agent_resident_memory_bytes"]
            await going_on.wait()
            samples = rig.service.samples()
        assert going_on.topics[answer] > 3
        assert samples["edge_agent_resident_memory_bytes"] - before < MAX_GROWTH_BYTES
        assert samples.get("edge_faults_total", 0) == 0
        dropped = sum(value for name, value in samples.items() if name.startswith("edge_mqtt_dropped_total"))
        assert dropped > 0
        assert going_on.most_in_a_turn(int(dropped)) <= MOST_IN_A_TURN
        assert len(caplog.records) < MOST_LINES
