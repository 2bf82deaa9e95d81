"""Ten times the load that a model can serve: memory, answers, another model's latency, and recovery."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Final

from benchmarks.agent.figures import Figure, quantile
from benchmarks.agent.models import Progress, input_bytes
from benchmarks.agent.requester import Answered, Requester, Tally
from benchmarks.agent.stage import Stage, rss_bytes

_FACTOR: Final = 10
_OTHER_PER_S: Final = 50
_QUIET_S: Final = 4.0
_WATCH_S: Final = 0.2
_RECOVERY_LIMIT_S: Final = 20.0
_MOST_LINE_BYTES: Final = 4 << 20
MODEL, OTHER = "ten", "nothing"


async def measure(stage: Stage, seconds: float, progress: Progress) -> list[Figure]:
    """Offer ten times the capacity for `seconds`, and return the figures."""
    payload = bytes(input_bytes(MODEL))
    async with Requester(stage.port) as requester, bystander(stage.port) as other:
        await requester.ready(MODEL)
        progress("overload: before")
        tally, took_s = await requester.at_once(requester.topic_of(MODEL), payload, 4, _QUIET_S / 2)
        capacity = len(tally.answers) / took_s
        usual_s = quantile(
            (await requester.in_turn(requester.topic_of(MODEL), payload, 50)).latencies_s(), 0.9
        )
        calm, _ = await other(_QUIET_S)
        before = rss_bytes(stage.agent_pid)

        stop = asyncio.Event()
        start_s = time.perf_counter()
        flood = asyncio.create_task(
            requester.at_rate(requester.topic_of(MODEL), payload, _FACTOR * capacity, stop)
        )
        beside = asyncio.create_task(other(seconds))
        memory = [before]
        while (left_s := start_s + seconds - time.perf_counter()) > 0:
            progress(f"overload: {left_s:.0f} s left")
            await asyncio.sleep(min(_WATCH_S, left_s))
            memory.append(rss_bytes(stage.agent_pid))
        stop.set()
        offered_s = time.perf_counter() - start_s
        recovered_s = await _recovery(requester, payload, usual_s)
        tally, during = await flood, await beside
    return _figures(tally, during, calm, memory, offered_s, capacity, recovered_s)


# Sends requests for this many seconds; returns latencies in ascending order, and how many were not
# answered 200.
Bystander = Callable[[float], Coroutine[None, None, tuple[list[float], int]]]


@contextlib.asynccontextmanager
async def bystander(port: int) -> AsyncIterator[Bystander]:
    """Run the other model's client; yield a function that makes it send requests."""
    command = [sys.executable, "-m", "benchmarks.agent.bystander", str(port), OTHER, str(_OTHER_PER_S)]
    pipe = asyncio.subprocess.PIPE
    # A line holds every latency of a minute.
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=_MOST_LINE_BYTES)
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdout.readline()

    async def ask(seconds: float) -> tuple[list[float], int]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{seconds}\n".encode())
        await process.stdin.drain()
        latencies_s, refused = json.loads(await process.stdout.readline())
        return latencies_s, refused

    try:
        yield ask
    finally:
        process.kill()
        await process.wait()


async def _recovery(requester: Requester, payload: bytes, usual_s: float) -> float:
    """Return the time until a request is answered as fast as before the overload, within a factor of two."""
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < _RECOVERY_LIMIT_S:
        answer: Answered = await requester.send(requester.topic_of(MODEL), payload)
        if answer.status == 200 and answer.latency_s <= 2 * usual_s:
            return time.perf_counter() - start_s
        await asyncio.sleep(0.005)
    return _RECOVERY_LIMIT_S


def _figures(
    tally: Tally,
    during: tuple[list[float], int],
    calm: list[float],
    memory: list[int],
    offered_s: float,
    capacity: float,
    recovered_s: float,
) -> list[Figure]:
    statuses = tally.statuses
    asked = len(tally.answers) + tally.unanswered
    other = asked - statuses[200] - statuses[503]
    before = quantile(calm, 0.99) * 1e3
    under = quantile(during[0], 0.99) * 1e3
    note = f"capacity {capacity:.0f}/s, offered {asked / offered_s:.0f}/s for {offered_s:.0f} s"
    return [
        Figure("overload", "requests", asked, note=note),
        Figure("overload", "answered 200", statuses[200]),
        Figure("overload", "answered 503", statuses[503]),
        Figure("overload", "answered otherwise or not at all", other, most=0),
        Figure("overload", "agent's memory before", memory[0] / 2**20, "MiB"),
        Figure("overload", "agent's memory, highest", max(memory) / 2**20, "MiB"),
        Figure("overload", "growth", (max(memory) / memory[0] - 1) * 100, "%", most=10.0),
        Figure("overload", "another model's p99, before", before, "ms"),
        Figure("overload", "another model's p99, during", under, "ms"),
        Figure("overload", "another model's p99, ratio", under / before, "x", most=2.0),
        Figure("overload", "another model's refusals", during[1], most=0),
        Figure("overload", "until answers are as fast as before", recovered_s, "s", most=1.0),
    ]
