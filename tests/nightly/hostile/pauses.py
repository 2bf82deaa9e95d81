"""Floods of one connection of the agent, of a client or of the dashboard, and the pauses of its event loop.

A proxy always has more for the connection than is read (`injector`). Meanwhile an honest client asks through
the same broker, versions of a model are deployed, one after the other, and the program's pauses and memory
are measured. With `share` below 1 the program has this share of a processor, as a control group limits it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Final

from agent.wire.metrics import format_metrics, parse_metrics
from builder.errors import BuildError
from builder.fleet.deploy import deploy_async
from edgebundle.broker import Broker
from edgebundle.errors import ClientError
from tests.agent.test_agent_process import KERNELS
from tests.agent.worker.conftest import compile_c
from tests.nightly.hostile import watched
from tests.nightly.hostile.flood import MAX_GROWTH_BYTES
from tests.nightly.hostile.honest import Honest, asking
from tests.nightly.hostile.injector import inject
from tests.nightly.hostile.outcome import Outcome
from tests.nightly.hostile.packets import RESPONSE_TOPIC, Packet, string
from tests.nightly.hostile.stage import HONEST, Stage, pack, stage
from tests.nightly.hostile.strategies import CLIENT, DEVICE
from tests.nightly.hostile.watched import PausesFile
from tests.nightly.soak.steady import rss_bytes
from tests.patience import PATIENCE_S

_REPLY: Final = ((RESPONSE_TOPIC, string(b"edge/v1/replies/mallory/x")),)
_METRICS: Final = format_metrics({f"edge_load{number}": 1.0 for number in range(50)})
_WARM_UP_S: Final = 5.0
_DEPLOY_S: Final = 120.0
_RECOVERY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Victim:
    """What is flooded.

    Attributes
    ----------
    part
        A part of a filter to which the flooded connection subscribes.
    packet
        The flood.
    program
        `agent`, `client` or `dashboard`.
    growth_bytes
        How much memory it may take.
    pause_s
        How long its event loop may pause with a whole processor.
    deaf
        Whether the broker reads nothing meanwhile.
    """

    part: str
    packet: Packet
    program: str = "agent"
    growth_bytes: int = MAX_GROWTH_BYTES
    pause_s: float = 0.05
    deaf: bool = False


def _request(place: str) -> Packet:
    return Packet(
        CLIENT, f"edge/v1/{place}/models/twice/infer/{CLIENT}".encode(), bytes(16), properties=_REPLY
    )


VICTIMS: Final = {
    "inference": Victim(f"{DEVICE}/models/+/infer", _request(DEVICE)),
    "groups": Victim("groups/door/models/", _request("groups/door")),
    "control": Victim(f"{DEVICE}/desired", Packet("fleet", f"edge/v1/{DEVICE}/desired".encode(), b"{}")),
    "deaf": Victim(f"{DEVICE}/models/+/infer", _request(DEVICE), growth_bytes=16 << 20, deaf=True),
    "client": Victim(
        f"replies/{HONEST}/",
        Packet("", f"edge/v1/replies/{HONEST}/{DEVICE}/x".encode(), bytes(100)),
        program="client",
        pause_s=0.1,
    ),
    "dashboard": Victim(
        "+/metrics", Packet("", b"edge/v1/garage/metrics", _METRICS), program="dashboard", pause_s=0.1
    ),
}
# A processor that has a tenth of the time stands still for nine tenths of it.
SLOW_PAUSE_S: Final = 0.5


@dataclass
class PauseResult(Outcome):
    """What a flood did.

    Attributes
    ----------
    victim, share, seconds
        What was flooded, its share of a processor, and for how long.
    sent
        How many messages it was sent.
    dropped
        How many of them the agent dropped unread.
    longest_s, longest_own_s
        The longest pause of its event loop, and without the time that the machine gave to others.
    turns, late
        Turns of the event loop, and how many were longer than 50 ms, so without that time, and than 500 ms.
    memory_bytes
        Its resident memory before the flood, and the most during it.
    asked, lost
        Honest requests, and those without an answer.
    calm_s, median_s, slowest_s
        Their latencies: the median before the flood, and the median and the longest during it.
    deployments_s
        How long each deployment took.
    """

    victim: str
    share: float
    seconds: float
    sent: int = 0
    dropped: int = 0
    longest_s: float = 0.0
    longest_own_s: float = 0.0
    turns: int = 0
    late: tuple[int, int, int] = (0, 0, 0)
    memory_bytes: tuple[int, int] = (0, 0)
    asked: int = 0
    lost: int = 0
    calm_s: float = 0.0
    median_s: float = 0.0
    slowest_s: float = 0.0
    deployments_s: list[float] = field(default_factory=list)


async def run_pauses(name: str, share: float, seconds: float, folder: Path, *, log: Path) -> PauseResult:
    """Flood one of `VICTIMS`, and return the verdict.

    Parameters
    ----------
    name, share, seconds
        The victim, its share of a processor, and how long.
    folder
        An empty folder.
    log
        The file that the agent's log is appended to.
    """
    victim = VICTIMS[name]
    result = PauseResult(name, share, seconds)
    context = get_context("spawn")
    on, shared = context.Event(), context.Array("q", 2, lock=False)
    file = PausesFile(folder / "pauses", make=True)
    command = (sys.executable, watched.__file__, str(folder / "pauses"), victim.program)

    def through(port: int) -> int:
        arguments = (port, victim.part.encode(), victim.packet.encode(1), shared, on)
        context.Process(target=inject, args=arguments, kwargs={"deaf": victim.deaf}, daemon=True).start()
        while not shared[0]:
            time.sleep(0.01)
        return int(shared[0])

    with _limited(share, command) as limited:
        is_agent = victim.program == "agent"
        agent = {"through": through, "program": limited} if is_agent else {}
        async with stage(folder, log, **agent) as place:  # type: ignore[arg-type]
            honest = Honest(
                place.broker.port, HONEST, DEVICE, pause_s=0.25, group="door" if name == "groups" else ""
            )
            async with contextlib.AsyncExitStack() as stack:
                pid, pages = place.pid, None
                if not is_agent:
                    url = f"mqtt://{HONEST if victim.program == 'client' else 'dashboard'}@127.0.0.1"
                    started = stack.enter_context(_started(limited, f"{url}:{through(place.broker.port)}"))
                    pid, pages = started
                await stack.enter_async_context(asking(honest))
                await asyncio.sleep(_WARM_UP_S)
                before = most = rss_bytes(pid)
                began = len(honest.latencies_s), len(honest.complaints)
                file.write()
                on.set()
                end_s = time.monotonic() + seconds
                busy = [asyncio.create_task(_deploy(place, folder, end_s, result))] if not victim.deaf else []
                busy += [asyncio.create_task(_open(pages, end_s, result))] if pages else []
                while time.monotonic() < end_s:
                    await asyncio.sleep(0.5)
                    most = max(most, rss_bytes(pid))
                await asyncio.gather(*busy)
                pauses, ended = file.read(), (len(honest.latencies_s), len(honest.complaints))
                on.clear()
                if victim.deaf:
                    await _recovered(honest, result)
                await asyncio.sleep(2 * _WARM_UP_S if is_agent else 0)
            if place.device.process is None or place.device.process.poll() is not None:
                result.complaints.append("the agent's process has ended")
    latencies = honest.latencies_s[began[0] : ended[0]]
    result.sent, result.memory_bytes = shared[1], (before, most)
    result.longest_s, result.longest_own_s = pauses.longest_s, pauses.longest_own_s
    result.turns = int(pauses.turns)
    result.late = int(pauses.above_50_ms), int(pauses.own_above_50_ms), int(pauses.above_500_ms)
    result.lost = ended[1] - began[1]
    result.asked, result.slowest_s = len(latencies) + result.lost, max(latencies, default=0.0)
    result.median_s = median(latencies) if latencies else 0.0
    result.calm_s = median(honest.latencies_s[: began[0]] or [0.0])
    if victim.program == "client":
        result.asked, result.slowest_s, result.median_s = int(pauses.asked), pauses.slowest_s, 0.0
    samples = parse_metrics(honest.metrics) if honest.metrics else {}
    result.dropped = int(sum(v for key, v in samples.items() if key.startswith("edge_mqtt_dropped_total")))
    _judge(victim, result)
    return result


def _judge(victim: Victim, result: PauseResult) -> None:
    most_s, longest_s = victim.pause_s, result.longest_own_s
    if result.share < 1:
        most_s, longest_s = SLOW_PAUSE_S, result.longest_s
    if longest_s > most_s:
        result.complaints.append(
            f"the event loop paused for {longest_s * 1000:.0f} ms, {most_s * 1000:.0f} allowed"
        )
    before, most = result.memory_bytes
    if most > before + victim.growth_bytes:
        result.complaints.append(
            f"memory grew by {(most - before) >> 10} KiB, {victim.growth_bytes >> 10} allowed"
        )
    if result.lost and not victim.deaf:
        result.complaints.append(f"{result.lost} of {result.asked} honest requests had no answer")
    if not result.sent:
        result.complaints.append("nothing was sent: the connection did not subscribe as expected")
    if not result.asked and not victim.deaf:
        result.complaints.append("no honest request was answered")


async def _deploy(place: Stage, folder: Path, end_s: float, result: PauseResult) -> None:
    library = compile_c(KERNELS, folder / "later.so")
    path = folder / "later.bundle"
    broker = Broker.of(f"mqtt://fleet@127.0.0.1:{place.broker.port}")
    for number in range(1, 1000):
        path.write_bytes(pack(place.device.signer, "later", library, f"{number}.0.0", kernel="twice"))
        began_s = time.monotonic()
        try:
            done = await deploy_async(path, DEVICE, broker, wait_s=_DEPLOY_S)
            if done.status != "SUCCEEDED":
                result.complaints.append(f"a deployment ended with {done.status} {done.code} {done.message}")
        except (BuildError, ClientError) as error:
            result.complaints.append(f"a deployment did not end: {error}")
        result.deployments_s.append(round(time.monotonic() - began_s, 1))
        if time.monotonic() + 10 > end_s:
            return
        await asyncio.sleep(10)


async def _open(page: str, end_s: float, result: PauseResult) -> None:
    """Open the dashboard's page each second; what it takes is the latency."""

    def get() -> None:
        with urllib.request.urlopen(page, timeout=PATIENCE_S) as answer:
            answer.read()

    while time.monotonic() < end_s:
        began_s = time.monotonic()
        try:
            await asyncio.to_thread(get)
        except OSError as error:
            result.complaints.append(f"the page: {error}")
        took_s = time.monotonic() - began_s
        if took_s > 0.5:
            result.complaints.append(f"the page took {took_s:.1f} s")
        await asyncio.sleep(1)


async def _recovered(honest: Honest, result: PauseResult) -> None:
    try:
        async with asyncio.timeout(_RECOVERY_S):
            while not await honest.ask_absent(1.0):
                pass
    except TimeoutError:
        result.complaints.append(f"no answer {_RECOVERY_S:g} s after the broker began to read again")


@contextlib.contextmanager
def _started(command: Sequence[str], url: str) -> Iterator[tuple[int, str | None]]:
    """Start a client or the dashboard; yield its process, and the address of the page."""
    is_page = command[-1] == "dashboard"
    arguments = ["--broker", url, "--listen", "127.0.0.1:0"] if is_page else [url]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        page = process.stdout.readline().split()[-1].partition("#")[0] if is_page else None
        yield process.pid, page
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _limited(share: float, command: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the command under a control group with a share of a processor, which root may make."""
    if share >= 1:
        yield tuple(command)
        return
    old = Path("/sys/fs/cgroup/cpu")
    lines = (line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines())
    ours = next((path.strip("/") for _, kind, path in lines if "cpu" in kind.split(",")), "")
    group = (old / ours if old.is_dir() else Path("/sys/fs/cgroup")) / f"edgebundle-{os.getpid()}"
    group.mkdir()
    period = 100_000
    if old.is_dir():
        (group / "cpu.cfs_period_us").write_text(str(period))
        (group / "cpu.cfs_quota_us").write_text(str(int(period * share)))
    else:
        (group / "cpu.max").write_text(f"{int(period * share)} {period}")
    try:
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command)
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)
