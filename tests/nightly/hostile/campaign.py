"""The campaign: hostile packets in batches, an honest client beside them, and the verdict.

After each batch the honest client asks for a model that does not exist. The agent answers such a request at
once and in order, so the refusal says that it has taken the batch; the broker's queues stay short, and a
message that stops the agent is in the last batch.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Final

from agent.wire.metrics import parse_metrics
from agent.wire.presence import AgentState, Presence
from tests.nightly.hostile.honest import Honest, asking
from tests.nightly.hostile.outcome import Outcome
from tests.nightly.hostile.packets import Packet, RawClient
from tests.nightly.hostile.stage import HONEST, Stage, stage
from tests.nightly.hostile.strategies import CHUNK, CLIENT, DEPLOYER, DEVICE, NEIGHBOUR, hostile_packets
from tests.nightly.soak.steady import rss_bytes

BATCH: Final = 25
# For the agent to take a batch. The honest client's limit is for itself.
BATCH_LIMIT_S: Final = 15.0
SAMPLE_S: Final = 0.5
# Arenas, caches and the store of answers fill up first.
WARM_UP: Final = 0.2
MAX_GROWTH: Final = 0.10
# At least this share of the honest requests must have been computed; else the promise is empty.
MIN_COMPUTED: Final = 0.5
# The campaign lasts until the honest client has this many outcomes, however fast the machine is.
MIN_ASKED: Final = 30
# The last packets before a failure are saved: this many batches.
_KEPT_BATCHES: Final = 40
# Requests that crash a model take two workers each.
_END_LIMIT_S: Final = 60.0


@dataclass
class Result(Outcome):
    """What a campaign found.

    Attributes
    ----------
    number
        The seed.
    messages, refused
        Hostile packets that were sent, and how many of them made the broker end the connection.
    seconds
        Duration.
    asked, statuses
        Honest requests, and their answers by status.
    slowest_s, median_s
        Latencies of the honest client.
    memory_bytes
        Resident memory of the agent: after the warm-up, and at the end.
    worker_restarts
        Workers that died; requests that crash a model are among the hostile ones.
    """

    number: int
    messages: int = 0
    refused: int = 0
    seconds: float = 0.0
    asked: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    slowest_s: float = 0.0
    median_s: float = 0.0
    memory_bytes: tuple[int, int] = (0, 0)
    worker_restarts: int = 0


Progress = Callable[[Result], None]
Batches = AsyncIterator[Sequence[Packet]]


async def drawn(number: int, messages: int) -> Batches:
    """Draw the packets of a campaign in another process, one chunk ahead."""
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        chunks = range((messages + CHUNK - 1) // CHUNK)
        ahead = loop.run_in_executor(pool, hostile_packets, number * 1_000_003)
        left = messages
        for chunk in chunks:
            packets = (await ahead)[:left]
            ahead = loop.run_in_executor(pool, hostile_packets, number * 1_000_003 + chunk + 1)
            left -= len(packets)
            for batch in _batches(packets):
                yield batch
        ahead.cancel()


async def replayed(path: Path) -> Batches:
    """Read the packets that an earlier campaign saved."""
    for batch in _batches([_read(line) for line in path.read_text().splitlines()]):
        yield batch


async def given(packets: Sequence[Packet]) -> Batches:
    """Use these packets."""
    for batch in _batches(packets):
        yield batch


def _batches(packets: Sequence[Packet]) -> Iterator[Sequence[Packet]]:
    for start in range(0, len(packets), BATCH):
        yield packets[start : start + BATCH]


async def run(
    number: int,
    batches: Batches,
    folder: Path,
    *,
    log: Path,
    save: Path,
    progress: Progress,
    begin: Callable[[Stage], None] = lambda _stage: None,
) -> Result:
    """Send the packets, and return the verdict.

    Parameters
    ----------
    number
        The seed, for the report.
    batches
        The packets.
    folder
        An empty folder for agent and broker.
    log
        The file that the agent's log is appended to.
    save
        Where the last packets are written if something is not as promised.
    progress
        Called after each batch.
    begin
        Called when the agent is ready.
    """
    result = Result(number)
    began_s = time.monotonic()
    async with stage(folder, log) as place:
        honest = Honest(place.broker.port, HONEST, DEVICE)
        start_time = _start_time(place.pid)
        pid = place.pid
        begin(place)
        memory: list[int] = []
        watching = asyncio.create_task(_sample(pid, memory))
        kept: list[Sequence[Packet]] = []
        try:
            async with asking(honest):
                await _send_all(place, batches, honest, kept, result, progress)
                await asyncio.sleep(0)
                await _end(honest, result)
        finally:
            watching.cancel()
        process = place.device.process
        if process is None or process.poll() is not None or _start_time(pid) != start_time:
            result.complaints.append("the agent's process has ended")
    result.seconds = time.monotonic() - began_s
    _judge(result, honest, memory)
    if not result.passed:
        save.write_text("".join(_written(packet) + "\n" for batch in kept for packet in batch))
    return result


async def _send_all(
    place: Stage,
    batches: Batches,
    honest: Honest,
    kept: list[Sequence[Packet]],
    result: Result,
    progress: Progress,
) -> None:
    clients = {user: RawClient(place.broker.port, user) for user in (CLIENT, DEPLOYER, NEIGHBOUR)}
    try:
        async for batch in batches:
            kept.append(batch)
            del kept[:-_KEPT_BATCHES]
            for packet in batch:
                await clients[packet.user].publish(packet)
            for client in clients.values():
                await client.flush()
            result.messages += len(batch)
            result.refused = sum(client.refused for client in clients.values())
            taken = await honest.ask_absent(BATCH_LIMIT_S)
            result.asked, result.statuses = honest.asked, dict(honest.statuses)
            if not taken:
                result.complaints.append(
                    f"after {result.messages} messages the agent did not answer within {BATCH_LIMIT_S:g} s"
                )
                return
            progress(result)
            if honest.complaints:
                return
    finally:
        for client in clients.values():
            await client.close()


async def _end(honest: Honest, result: Result) -> None:
    """Wait until the agent has answered and acknowledged everything, and report what is missing."""
    end_s = time.monotonic() + _END_LIMIT_S
    while True:
        samples = parse_metrics(honest.metrics) if honest.metrics else {}
        in_flight = samples.get("edge_inference_in_flight", -1)
        # The honest client's own requests may be under way at the moment of the sample.
        if (0 <= in_flight <= 3 and honest.asked >= MIN_ASKED) or time.monotonic() > end_s:
            break
        await asyncio.sleep(0.2)
    if not 0 <= in_flight <= 3:
        result.complaints.append(f"at the end {in_flight:g} requests are not answered or acknowledged")
    if honest.asked < MIN_ASKED:
        result.complaints.append(f"expected {MIN_ASKED} honest requests with an outcome, got {honest.asked}")
    faults = samples.get("edge_faults_total", 0)
    if faults:
        result.complaints.append(f"the agent counted {faults:g} internal errors (edge_faults_total)")
    result.worker_restarts = int(
        sum(value for name, value in samples.items() if name.startswith("edge_worker_restarts_total"))
    )


def _judge(result: Result, honest: Honest, memory: Sequence[int]) -> None:
    result.asked, result.statuses = honest.asked, dict(honest.statuses)
    result.complaints += honest.complaints[:20]
    if honest.latencies_s:
        result.slowest_s, result.median_s = max(honest.latencies_s), median(honest.latencies_s)
    if honest.statuses[200] < MIN_COMPUTED * max(1, result.asked):
        result.complaints.append(
            f"only {honest.statuses[200]} of {result.asked} honest requests were computed"
        )
    states = [Presence.from_bytes(raw).state for raw in honest.presence]
    if any(state != AgentState.ONLINE for state in states) or not states:
        result.complaints.append(f"expected presence online, got {states}")
    tenth = max(1, len(memory) // 10)
    steady = memory[int(len(memory) * WARM_UP) :]
    if steady:
        before, after = median(steady[:tenth]), median(steady[-tenth:])
        result.memory_bytes = int(before), int(after)
        if after > before * (1 + MAX_GROWTH):
            result.complaints.append(f"memory grew from {before / 1e6:.1f} to {after / 1e6:.1f} MB")


async def _sample(pid: int, memory: list[int]) -> None:
    with contextlib.suppress(OSError):
        while True:
            memory.append(rss_bytes(pid))
            await asyncio.sleep(SAMPLE_S)


def _start_time(pid: int) -> str:
    """Return when a process was started, in ticks since boot; proc(5), /proc/pid/stat, field 22."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _written(packet: Packet) -> str:
    fields = asdict(packet)
    for name in ("topic", "payload"):
        fields[name] = base64.b64encode(fields[name]).decode()
    fields["properties"] = [(number, base64.b64encode(value).decode()) for number, value in packet.properties]
    return json.dumps(fields)


def _read(line: str) -> Packet:
    fields = json.loads(line)
    for name in ("topic", "payload"):
        fields[name] = base64.b64decode(fields[name])
    fields["properties"] = tuple((number, base64.b64decode(value)) for number, value in fields["properties"])
    return Packet(**fields)
