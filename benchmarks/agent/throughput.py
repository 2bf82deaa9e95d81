"""The speed of a served model relative to a bare executor, and how much two models slow each other down."""

from __future__ import annotations

import asyncio
from typing import Final

from benchmarks.agent.figures import Figure
from benchmarks.agent.models import Bundles, Progress, input_bytes
from benchmarks.agent.requester import Requester, Tally
from benchmarks.agent.stage import BareExecutor, Stage, cpu_s

# Requests in flight: one is computed, one waits in the worker, the others are in transit.
_WIDTH: Final = 6
_WARM_UP_S: Final = 0.5


async def measure(
    stage: Stage, bundles: Bundles, seconds: float, rounds: int, progress: Progress
) -> list[Figure]:
    """Measure in rounds, so that a busy moment of the machine affects all measurements alike.

    Parameters
    ----------
    stage, bundles
        The running agent, and the models.
    seconds, rounds
        The length of a measurement, and how often it is repeated.
    progress
        Called with the number of the round.
    """
    bare_executor = BareExecutor(bundles.path("three"))
    served, bare = 0.0, 0.0
    # Processor time per request and per run: other work on the machine does not add to it.
    worker_s, run_s = 0.0, 0.0
    each = {"thirty": 0.0, "thirty-b": 0.0}
    both = dict(each)
    try:
        async with Requester(stage.port) as requester:
            for model in ("three", *each):
                await requester.ready(model)
            before = {pid: cpu_s(pid) for pid in stage.worker_pids}
            await requester.at_once(requester.topic_of("three"), _payload("three"), _WIDTH, _WARM_UP_S)
            three = max(before, key=lambda pid: cpu_s(pid) - before[pid])
            for turn in range(rounds):
                progress(f"throughput, round {turn + 1} of {rounds}")
                before_s = cpu_s(bare_executor.pid)
                times = await asyncio.to_thread(bare_executor.times_s, seconds)
                run_s += (cpu_s(bare_executor.pid) - before_s) / len(times) / rounds
                bare += len(times) / sum(times)
                before_s = cpu_s(three)
                tally, took_s = await requester.at_once(
                    requester.topic_of("three"), _payload("three"), _WIDTH, seconds
                )
                worker_s += (cpu_s(three) - before_s) / len(tally.answers) / rounds
                served += _rate("three", tally, took_s)
                for model in each:
                    each[model] += await _per_s(requester, model, seconds)
                pair = await asyncio.gather(*(_per_s(requester, model, seconds) for model in each))
                for model, per_s in zip(each, pair, strict=True):
                    both[model] += per_s
    finally:
        bare_executor.stop()
    worst = min(both[model] / each[model] for model in each)
    note = f"{rounds} rounds of {seconds:g} s, one thread each"
    return [
        Figure("throughput", "3 ms model, served", served / rounds, "/s"),
        Figure("throughput", "3 ms model, bare executor", bare / rounds, "/s"),
        Figure("throughput", "served over bare executor", served / bare * 100, "%", least=95.0, note=note),
        Figure("throughput", "the same in processor time", run_s / worker_s * 100, "%"),
        *(
            Figure("throughput", f"30 ms model {name}, by itself", each[model] / rounds, "/s")
            for name, model in zip("ab", each, strict=True)
        ),
        Figure(
            "throughput", "two at once, the slower over its own rate", worst * 100, "%", least=90.0, note=note
        ),
    ]


async def _per_s(requester: Requester, model: str, seconds: float) -> float:
    return _rate(model, *await requester.at_once(requester.topic_of(model), _payload(model), _WIDTH, seconds))


def _rate(model: str, tally: Tally, took_s: float) -> float:
    refused = [answer for answer in tally.answers if answer.status != 200]
    if refused:
        raise RuntimeError(f"{model}: expected status 200, got {refused[0].status}")
    if len(tally.answers) == 1:
        return 1 / took_s
    # Do not count the time until the first answer.
    return (len(tally.answers) - 1) / (took_s - min(a.latency_s for a in tally.answers))


def _payload(model: str) -> bytes:
    return bytes(input_bytes(model))
