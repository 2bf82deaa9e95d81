"""The flood: requests, requests to a group and control messages at QoS 0, as fast as the broker takes them.

Meanwhile an honest client asks at QoS 1. The agent must go on, and its memory stay within `MAX_GROWTH_BYTES`.
A broker whose queue for the agent is full drops messages of any QoS without a word, mosquitto among them: so
half of the honest requests must have their answers, and none a wrong one.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Final

from agent.wire.metrics import parse_metrics
from tests.nightly.hostile.firehose import pour
from tests.nightly.hostile.honest import Honest, asking
from tests.nightly.hostile.outcome import Outcome
from tests.nightly.hostile.packets import RESPONSE_TOPIC, Packet, string
from tests.nightly.hostile.stage import HONEST, stage
from tests.nightly.hostile.strategies import CLIENT, DEPLOYER, DEVICE
from tests.nightly.soak.steady import rss_bytes

MAX_GROWTH_BYTES: Final = 10 << 20
MAX_LOST: Final = 0.5
# What is allocated once, by the first requests.
WARM_UP_S: Final = 3.0
_PAUSE_S: Final = 0.25
# A broker whose queue for the agent is full drops messages without a word.
_REPEAT_S: Final = 0.5
_REPLY: Final = ((RESPONSE_TOPIC, string(b"edge/v1/replies/mallory/x")),)
_FLOODS: Final = (
    Packet(CLIENT, f"edge/v1/{DEVICE}/models/twice/infer/{CLIENT}".encode(), bytes(16), properties=_REPLY),
    Packet(CLIENT, f"edge/v1/groups/door/models/twice/infer/{CLIENT}".encode(), bytes(16), properties=_REPLY),
    Packet(CLIENT, f"edge/v1/{DEVICE}/models/twice/infer/{CLIENT}".encode(), bytes(16)),
    Packet(DEPLOYER, f"edge/v1/{DEVICE}/desired".encode(), b"{}"),
)


@dataclass
class FloodResult(Outcome):
    """What a flood did.

    Attributes
    ----------
    seconds, sent
        How long it lasted, and how many messages the broker took.
    dropped
        How many of them the agent dropped unread.
    asked, statuses
        Honest requests, and their answers by status.
    slowest_s, median_s
        Latencies of the honest client.
    memory_bytes
        Resident memory of the agent before the flood, and the most during it.
    lost
        Honest requests without an answer.
    """

    seconds: float = 0.0
    sent: int = 0
    dropped: int = 0
    asked: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    median_s: float = 0.0
    memory_bytes: tuple[int, int] = (0, 0)
    lost: int = 0


async def run_flood(seconds: float, folder: Path, *, log: Path) -> FloodResult:
    """Flood an agent, and return the verdict.

    Parameters
    ----------
    seconds
        How long.
    folder
        An empty folder for agent and broker.
    log
        The file that the agent's log is appended to.
    """
    result = FloodResult()
    context = get_context("spawn")
    over, sent = context.Event(), context.Array("q", len(_FLOODS))
    async with stage(folder, log) as place:
        honest = Honest(place.broker.port, HONEST, DEVICE, pause_s=_PAUSE_S, repeat_s=_REPEAT_S)
        pid = place.pid
        floods = [
            context.Process(target=pour, args=(place.broker.port, packet, over, sent, at), daemon=True)
            for at, packet in enumerate(_FLOODS)
        ]
        async with asking(honest):
            await asyncio.sleep(WARM_UP_S)
            before = most = rss_bytes(pid)
            for flood in floods:
                flood.start()
            while not all(sent[at] for at in range(len(floods))):
                await asyncio.sleep(0.1)
            began_s = time.monotonic()
            while time.monotonic() < began_s + seconds and pid == place.pid:
                await asyncio.sleep(0.5)
                most = max(most, rss_bytes(pid))
            over.set()
            for flood in floods:
                await asyncio.to_thread(flood.join)
        result.seconds = time.monotonic() - began_s
        result.sent = sum(sent[at] for at in range(len(floods)))
        result.memory_bytes = before, most
        if place.device.process is None or place.device.process.poll() is not None:
            result.complaints.append("the agent's process has ended")
    _judge(result, honest)
    return result


def _judge(result: FloodResult, honest: Honest) -> None:
    result.asked, result.statuses = honest.asked, dict(honest.statuses)
    wrong = [line for line in honest.complaints if "no answer" not in line]
    result.complaints += wrong[:20]
    result.lost = len(honest.complaints) - len(wrong)
    if result.lost > MAX_LOST * result.asked:
        result.complaints.append(f"{result.lost} of {result.asked} honest requests had no answer")
    if honest.latencies_s:
        result.slowest_s, result.median_s = max(honest.latencies_s), median(honest.latencies_s)
    samples = parse_metrics(honest.metrics) if honest.metrics else {}
    result.dropped = int(
        sum(value for name, value in samples.items() if name.startswith("edge_mqtt_dropped_total"))
    )
    before, most = result.memory_bytes
    if most > before + MAX_GROWTH_BYTES:
        result.complaints.append(
            f"memory grew by {(most - before) >> 10} KiB, {MAX_GROWTH_BYTES >> 10} KiB allowed"
        )
    faults = samples.get("edge_faults_total", 0)
    if faults:
        result.complaints.append(f"the agent counted {faults:g} internal errors (edge_faults_total)")
