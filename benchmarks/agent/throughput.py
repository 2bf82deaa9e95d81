"""How much of an executor's speed is left when it serves, and what two models leave each other."""

from __future__ import annotations

import asyncio

from benchmarks.agent.figures import Figure
from benchmarks.agent.models import Bench, Progress, input_bytes
from benchmarks.agent.requester import Requester, Tally, topic_of
from benchmarks.agent.stage import Alone, Stage, cpu_s

# Requests under way at once: one computes, one waits in the worker, the others are on their way.
_WIDTH = 6
_WARM_UP_S = 0.5


async def measure(
    stage: Stage, bench: Bench, seconds: float, rounds: int, progress: Progress
) -> list[Figure]:
    """Measure in rounds, so that a busy moment of the machine meets all of them.

    Parameters
    ----------
    seconds
        Of each measurement.
    """
    alone = Alone(bench.bundle("three"))
    served, bare = 0.0, 0.0
    # Processor time of a request and of a run: what a busy machine takes from either does not show in it.
    worker_s, run_s = 0.0, 0.0
    each = {"thirty": 0.0, "thirty-b": 0.0}
    both = dict(each)
    try:
        async with Requester(stage.port) as requester:
            for model in ("three", *each):
                await requester.ready(model)
            before = {pid: cpu_s(pid) for pid in stage.worker_pids}
            await requester.at_once(topic_of("three"), _payload("three"), _WIDTH, _WARM_UP_S)
            three = max(before, key=lambda pid: cpu_s(pid) - before[pid])
            for turn in range(rounds):
                progress(f"throughput, round {turn + 1} of {rounds}")
                before_s = cpu_s(alone.pid)
                times = await asyncio.to_thread(alone.times_s, seconds)
                run_s += (cpu_s(alone.pid) - before_s) / len(times) / rounds
                bare += len(times) / sum(times)
                before_s = cpu_s(three)
                tally, took_s = await requester.at_once(topic_of("three"), _payload("three"), _WIDTH, seconds)
                worker_s += (cpu_s(three) - before_s) / len(tally.answers) / rounds
                served += _rate("three", tally, took_s)
                for model in each:
                    each[model] += await _per_s(requester, model, seconds)
                pair = await asyncio.gather(*(_per_s(requester, model, seconds) for model in each))
                for model, per_s in zip(each, pair, strict=True):
                    both[model] += per_s
    finally:
        alone.stop()
    worst = min(both[model] / each[model] for model in each)
    note = f"{rounds} rounds of {seconds:g} s, one thread each"
    return [
        Figure("throughput", "3 ms model, served", served / rounds, "/s"),
        Figure("throughput", "3 ms model, executor alone", bare / rounds, "/s"),
        Figure("throughput", "served over alone", served / bare * 100, "%", least=95.0, note=note),
        Figure("throughput", "the same in processor time", run_s / worker_s * 100, "%"),
        *(
            Figure("throughput", f"30 ms model {name}, by itself", each[model] / rounds, "/s")
            for name, model in zip("ab", each, strict=True)
        ),
        Figure("throughput", "two at once, the worse over itself", worst * 100, "%", least=90.0, note=note),
    ]


async def _per_s(requester: Requester, model: str, seconds: float) -> float:
    return _rate(model, *await requester.at_once(topic_of(model), _payload(model), _WIDTH, seconds))


def _rate(model: str, tally: Tally, took_s: float) -> float:
    refused = [answer for answer in tally.answers if answer.status != 200]
    if refused:
        raise RuntimeError(f"{model} answered {refused[0].status}")
    # The first answers fill the pipe.
    return (len(tally.answers) - 1) / (took_s - min(a.latency_s for a in tally.answers))


def _payload(model: str) -> bytes:
    return bytes(input_bytes(model))
