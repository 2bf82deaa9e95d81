"""The faults: how each is caused, how often, and how the requests sent meanwhile were answered."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.agent.cutting_proxy import CuttingProxy
from tests.agent.faults import (
    CONFIG,
    MODEL,
    Load,
    Trial,
    cut_connections,
    kill_agent,
    kill_broker,
    kill_worker,
    restart_broker,
)
from tests.agent.test_agent_process import Device, model_is_ready
from tests.nightly.soak.rig import device_and_broker

AT_ONCE: Final = 16
# On a busy board the slowest fault takes ten seconds, and a request a hundredth of a second.
FAULT_LIMIT_S, REQUEST_LIMIT_S = 60.0, 0.2


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that a device must survive.

    Attributes
    ----------
    name, what
        Its name on the command line, and its description.
    times
        How often it happens during `FULL_REQUESTS` requests; fewer requests get fewer faults.
    happen
        Causes the fault; None for connections that a proxy cuts.
    persistent
        Whether the broker stores its sessions in a file.
    """

    name: str
    what: str
    times: int
    happen: Callable[[Device], Awaitable[None]] | None
    persistent: bool = True


FAULTS: Final = (
    Fault("broker", "broker restarted, with persistence", 100, restart_broker),
    Fault("broker-forgets", "broker restarted, without persistence", 100, restart_broker, persistent=False),
    Fault("broker-killed", "broker SIGKILLed, with persistence", 100, kill_broker),
    Fault("worker", "worker SIGKILLed", 200, kill_worker),
    Fault("agent", "agent SIGKILLed", 50, kill_agent),
    Fault("cuts", "connections cut in mid-packet", 200, None),
)
FULL_REQUESTS: Final = 100_000


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a fault's trial; `statuses` counts requests by the status of their only answer."""

    fault: str
    what: str
    requests: int
    faults: int
    seconds: float
    sent: int
    repeated: int
    statuses: dict[int, int]
    wrong: list[str]

    @property
    def passed(self) -> bool:
        """Whether each request got exactly one answer, and the right one."""
        answered = sum(self.statuses.values()) == self.requests
        failed = self.requests - self.statuses.get(200, 0)
        # A worker that dies loses the request that it is computing.
        return answered and not self.wrong and failed <= (self.faults if self.fault == "worker" else 0)


def times_for(fault: Fault, requests: int) -> int:
    """Return how often a fault happens during `requests` requests."""
    return max(2, round(fault.times * requests / FULL_REQUESTS))


def row_of(result: TrialResult) -> Iterator[str]:
    """Yield the cells of a result's row in the table."""
    yield result.what
    yield f"{result.requests:,}"
    yield f"{result.faults:,}"
    yield f"{result.seconds:.0f}"
    yield f"{result.sent - result.requests:,}"
    yield f"{result.repeated:,}"
    yield ", ".join(f"{count:,} x {status}" for status, count in sorted(result.statuses.items()))
    yield f"{len(result.wrong):,}"
    yield "yes" if result.passed else "NO"


async def run_trial(fault: Fault, requests: int, log: Path, begin: Callable[[Trial], None]) -> TrialResult:
    """Send requests while a fault happens, and check every answer.

    Parameters
    ----------
    fault
        The fault.
    requests
        The number of requests to send.
    log
        The file that the agent's log is appended to.
    begin
        Called with the trial when it begins.
    """
    with device_and_broker(log, persistent=fault.persistent) as (device, broker, library):
        proxy = CuttingProxy(broker.port)
        happen = fault.happen
        if happen is None:
            await proxy.start()
            device.port = proxy.port
            happen = cut_connections(proxy)
        device.start(config=CONFIG)
        device.install(MODEL, library)
        await model_is_ready(device.port, MODEL)
        load = Load(device.port, requests, AT_ONCE)
        trial = Trial(device, load, happen, times_for(fault, requests))
        begin(trial)
        started_s = time.monotonic()
        try:
            await trial.run(trial.times * FAULT_LIMIT_S + requests * REQUEST_LIMIT_S)
        finally:
            if fault.happen is None:
                await proxy.close()
        return TrialResult(
            fault=fault.name,
            what=fault.what,
            requests=load.done,
            faults=trial.happened,
            seconds=time.monotonic() - started_s,
            sent=load.sent,
            repeated=load.repeated,
            statuses=dict(load.statuses),
            wrong=load.wrong,
        )
