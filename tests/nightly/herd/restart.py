"""One restart of the broker under a fleet, and what the broker and the fleet saw of it."""

from __future__ import annotations

import asyncio
import collections
import gc
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.conftest import BrokerProcess
from tests.nightly.herd.fleet import SimulatedAgent, settings_for, start_fleet
from tests.nightly.herd.steady_loop import SteadyLoop

MOST_CONNECTS: Final = 150
BACK_WITHIN_S: Final = 30.0
# How long to wait for the fleet after that, so that a failed run still shows how it went.
_PATIENCE_S: Final = 90.0
_POLL_S: Final = 0.05
# Line of mosquitto's log for each socket that it accepts, after the time in seconds.
_ACCEPTED: Final = "New connection from"
_LOG: Final = "mosquitto.log"


@dataclass(frozen=True, slots=True)
class Result:
    """What happened after the broker was back.

    Attributes
    ----------
    agents, connections
        The size of the fleet.
    away_s
        How long the broker was away.
    accepted
        Sockets that the broker accepted in each second, by its own log.
    opened_s
        When each socket to the broker was open, in seconds of the agents' clocks (`steady_loop`) after the
        broker listened again.
    back_s
        When the last agent was back, in the same seconds; None if one never was.
    cpu_s
        Processor time that all agents together took until then.
    lost_s
        For how long the process of the agents did not get a processor, which their clocks leave out.
    """

    agents: int
    connections: int
    away_s: float
    accepted: tuple[int, ...]
    opened_s: tuple[float, ...]
    back_s: float | None
    cpu_s: float
    lost_s: float

    @property
    def busiest(self) -> int:
        """The most connects in any second, whenever it begins."""
        most = first = 0
        for last, moment_s in enumerate(self.opened_s):
            while self.opened_s[first] <= moment_s - 1.0:
                first += 1
            most = max(most, last + 1 - first)
        return most

    def passed(self, most_connects: int = MOST_CONNECTS, back_within_s: float = BACK_WITHIN_S) -> bool:
        """Whether the fleet came back in time, and without a rush."""
        return self.busiest <= most_connects and self.back_s is not None and self.back_s <= back_within_s


async def restart_under(
    agents: int, folder: Path, *, spread_s: float, away_s: float, has_groups: bool
) -> Result:
    """Start a broker and a fleet, kill the broker, start it again, and watch the fleet come back."""
    _allow_descriptors()
    loop = asyncio.get_running_loop()
    broker = _broker(folder)
    broker.start()
    opened_s: list[float] = []
    fleet: list[SimulatedAgent] = []
    try:
        fleet = await start_fleet(
            agents,
            settings_for(broker.port, spread_s),
            has_groups=has_groups,
            opened=lambda: opened_s.append(loop.time()),
        )
        # The garbage collector would stop a thousand agents at once, for half a second; each has its own.
        gc.collect()
        gc.disable()
        # Connections of a settled fleet, not of one that has just been started.
        await asyncio.sleep(3.0)
        broker.stop(signal.SIGKILL)
        await asyncio.sleep(away_s)
        (folder / _LOG).unlink(missing_ok=True)
        opened_s.clear()
        cpu_s = time.process_time()
        await asyncio.to_thread(broker.start)
        began_s = loop.time()
        lost_s = _lost_s()
        back_s = await _until_back(fleet)
        cpu_s = time.process_time() - cpu_s
        return Result(
            agents=agents,
            connections=sum(len(each.connections) for each in fleet),
            away_s=away_s,
            accepted=_accepted(folder / _LOG),
            opened_s=tuple(sorted(moment_s - began_s for moment_s in opened_s)),
            back_s=back_s,
            cpu_s=cpu_s,
            lost_s=_lost_s() - lost_s,
        )
    finally:
        gc.enable()
        for each in fleet:
            await each.close()
        broker.stop()


async def _until_back(fleet: list[SimulatedAgent]) -> float | None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while not all(each.back for each in fleet):
        if loop.time() - began_s > _PATIENCE_S:
            return None
        await asyncio.sleep(_POLL_S)
    return loop.time() - began_s


def _lost_s() -> float:
    loop = asyncio.get_running_loop()
    return loop.lost_s if isinstance(loop, SteadyLoop) else 0.0


def _broker(folder: Path) -> BrokerProcess:
    broker = BrokerProcess("mosquitto", folder)
    broker.configuration = (
        f"listener {broker.port} 127.0.0.1\nallow_anonymous true\npersistence true\n"
        f"persistence_location {folder}/\nlog_dest file {folder / _LOG}\nlog_type notice\nlog_timestamp true"
    )
    return broker


def _accepted(log: Path) -> tuple[int, ...]:
    """Return how many sockets the broker accepted in each second of its clock."""
    counts: collections.Counter[int] = collections.Counter()
    for line in log.read_text().splitlines():
        stamp, _, text = line.partition(": ")
        if text.startswith(_ACCEPTED):
            counts[int(stamp)] += 1
    if not counts:
        return ()
    return tuple(counts[second] for second in range(min(counts), max(counts) + 1))


def _allow_descriptors() -> None:
    """Allow as many open files as this process may have; the broker inherits the limit."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def processor() -> str:
    """Return the processor and the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {cores} cores"
    return f"{cores} cores"
