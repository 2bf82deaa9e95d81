"""A requester that sends again until its deadline, while everything around it is torn down and started again.

What must hold: every request gets an answer, the right one, and never two different ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.agent.service.conftest import Client, connected_client, status_of
from tests.agent.test_agent_process import Device, device, kernels, model_is_ready, signer  # noqa: F401 - fixtures

# Long enough for a handful of faults; a soak sets it to hours.
DURATION_S = float(os.environ.get("EDGE_FAULT_SECONDS", "12"))
AT_ONCE = 8
PAUSE_S = 0.02
RESEND_S = 1.0
DEADLINE_S = 60


@dataclass
class Load:
    """Requests with numbers of their own, sent again until they are answered."""

    client: Client
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    done: int = 0
    wrong: list[str] = field(default_factory=list)

    async def run(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        lanes = [asyncio.create_task(self._lane(end_s)) for _ in range(AT_ONCE)]
        await asyncio.gather(*lanes)

    async def _lane(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            await self._one(next(self.numbers))
            self.done += 1
            await asyncio.sleep(PAUSE_S)

    async def _one(self, number: int) -> None:
        payload = struct.pack("<4f", number, number + 0.5, 0, -number)
        expected = struct.pack("<4f", 2 * number, 2 * number + 1, 0, -2 * number)
        correlation = b"%d" % number
        for _ in range(int(DEADLINE_S / RESEND_S)):
            self.client.send(payload, model="twice", correlation=correlation, expiry_s=DEADLINE_S)
            try:
                answer = await self.client.answer(correlation, RESEND_S)
            except TimeoutError:
                continue
            if status_of(answer) not in (200, 500, 503):
                self.wrong.append(f"{number}: {status_of(answer)}")
            if status_of(answer) == 200 and answer.payload != expected:
                self.wrong.append(f"{number}: another's answer")
            return
        self.wrong.append(f"{number}: no answer")

    def distinct_answers(self) -> dict[bytes, set[tuple[int, bytes]]]:
        found: dict[bytes, set[tuple[int, bytes]]] = {}
        for message in self.client.received:
            key = message.properties.correlation_data or b""
            found.setdefault(key, set()).add((status_of(message), message.payload))
        return found


Fault = Callable[[Device], Awaitable[None]]


@contextlib.asynccontextmanager
async def while_it_happens(fault: Fault, victim: Device, pause_s: float) -> AsyncIterator[list[int]]:
    """Let a fault happen again and again; the list's length says how often it did."""
    happened: list[int] = []

    async def again() -> None:
        while True:
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            await fault(victim)
            happened.append(1)

    task = asyncio.create_task(again())
    try:
        yield happened
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def kill_worker(victim: Device) -> None:
    for pid in victim.children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def kill_agent(victim: Device) -> None:
    workers = victim.children()
    await asyncio.to_thread(victim.end, signal.SIGKILL)
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    victim.start(config=CONFIG)
    await model_is_ready(victim.port, "twice")


async def restart_broker(victim: Device) -> None:
    assert victim.broker is not None
    await asyncio.to_thread(victim.broker.restart)


async def kill_broker(victim: Device) -> None:
    assert victim.broker is not None
    await asyncio.to_thread(victim.broker.stop, signal.SIGKILL)
    await asyncio.to_thread(victim.broker.start)


# Workers are killed from outside here: that says nothing about the model.
CONFIG = "[inference]\ncrash_limit = 1000\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "pause_s"),
    [(kill_worker, 1.5), (kill_agent, 2.0), (restart_broker, 2.0), (kill_broker, 2.0)],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_every_request_gets_one_right_answer(
    device: Device,  # noqa: F811
    kernels: Path,  # noqa: F811
    fault: Fault,
    pause_s: float,
) -> None:
    device.start(config=CONFIG)
    device.install("twice", kernels)
    await model_is_ready(device.port, "twice")
    async with connected_client(device.port, "load") as client:
        load = Load(client)
        async with while_it_happens(fault, device, pause_s) as happened:
            await asyncio.wait_for(load.run(DURATION_S), DURATION_S + 2 * DEADLINE_S)
        # What is still on its way may be an answer too many.
        await asyncio.sleep(1.0)
    assert len(happened) >= 2
    assert load.done > 10 * len(happened)
    assert load.wrong == []
    differing = {key: answers for key, answers in load.distinct_answers().items() if len(answers) > 1}
    assert differing == {}
    if fault is not kill_worker:
        assert all(status == 200 for answers in load.distinct_answers().values() for status, _ in answers)
