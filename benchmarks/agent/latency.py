"""Round trips at QoS 1, to the agent and to the echo in turn, and the processor time per request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from benchmarks.agent.echo import TOPIC as ECHO
from benchmarks.agent.figures import Figure, quantile
from benchmarks.agent.models import Bundles, Progress, input_bytes
from benchmarks.agent.requester import Requester
from benchmarks.agent.stage import BareExecutor, Stage, cpu_s

_BLOCK: Final = 50
_WARM_UP: Final = 200
# A latency between these bounds would come from a delayed TCP acknowledgement.
_DELAYED_MS: Final = (30.0, 60.0)
# This share may be between them by chance: a busy machine pauses every process.
_DELAYED_SHARE: Final = 0.005


@dataclass
class Latencies:
    """The measured latencies.

    Attributes
    ----------
    figures
        For the table.
    series
        For the picture: label -> latencies in seconds.
    """

    figures: list[Figure] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)


async def measure(stage: Stage, bundles: Bundles, requests: int, large: int, progress: Progress) -> Latencies:
    """Measure small and large requests.

    Parameters
    ----------
    stage, bundles
        The running agent and echo, and the models.
    requests, large
        The number of small requests, and of requests of 600 KB, to the agent and to the echo each.
    progress
        Called with what is being measured.
    """
    out = Latencies()
    async with Requester(stage.port) as requester:
        await requester.ready("nothing")
        payload = np.arange(4, dtype=np.float32).tobytes()
        agent_s, echo_s, used_s = await _alternate(stage, requester, "nothing", payload, requests, progress)
        out.series["agent, 16 bytes"], out.series["echo, 16 bytes"] = agent_s, echo_s
        _small(out, agent_s, echo_s)
        out.figures.append(
            Figure("latency", "CPU per request, agent and worker", used_s * 1e3, "ms", most=0.4, note="/proc")
        )
        await requester.ready("picture")
        progress("600 KB")
        picture = np.random.default_rng(0).random(input_bytes("picture") // 4, np.float32).tobytes()
        agent_s, echo_s, _ = await _alternate(stage, requester, "picture", picture, large, progress)
        out.series["agent, 600 KB"], out.series["echo, 600 KB"] = agent_s, echo_s
    bare_executor = BareExecutor(bundles.path("picture"))
    run_s = sorted(bare_executor.times_s(0.5))
    bare_executor.stop()
    _large(out, agent_s, echo_s, quantile(run_s, 0.5))
    return out


async def _alternate(
    stage: Stage, requester: Requester, model: str, payload: bytes, requests: int, progress: Progress
) -> tuple[list[float], list[float], float]:
    block = min(_BLOCK, requests)
    await requester.in_turn(requester.topic_of(model), payload, min(_WARM_UP, requests))
    await requester.in_turn(ECHO, payload, min(_WARM_UP, requests))
    agent: list[float] = []
    echo: list[float] = []
    used_s = 0.0
    pids = [stage.agent_pid, *stage.worker_pids]
    while len(agent) < requests:
        before_s = sum(map(cpu_s, pids))
        tally = await requester.in_turn(requester.topic_of(model), payload, block)
        used_s += sum(map(cpu_s, pids)) - before_s
        wrong = [answer.status for answer in tally.answers if answer.status != 200]
        if wrong:
            raise RuntimeError(f"{model}: expected status 200, got {wrong[0]}")
        agent += tally.latencies_s()
        echo += (await requester.in_turn(ECHO, payload, block)).latencies_s()
        progress(f"{model}: {len(agent)} of {requests} requests")
    return sorted(agent), sorted(echo), used_s / len(agent)


def _small(out: Latencies, agent_s: list[float], echo_s: list[float]) -> None:
    note = f"{len(agent_s)} requests in turn, 16 bytes, QoS 1"
    for q in (0.5, 0.9, 0.99):
        value = quantile(agent_s, q) * 1e3
        most = 1.0 if q == 0.5 else None
        out.figures.append(Figure("latency", f"small request, p{q * 100:g}", value, "ms", most, note=note))
    for q in (0.5, 0.9, 0.99):
        out.figures.append(Figure("latency", f"echo, p{q * 100:g}", quantile(echo_s, q) * 1e3, "ms"))
    ratio = quantile(agent_s, 0.5) / quantile(echo_s, 0.5)
    out.figures.append(Figure("latency", "small request over echo, p50", ratio, "x", most=3.0))
    low, high = _DELAYED_MS
    share = sum(low <= value * 1e3 <= high for value in agent_s) / len(agent_s)
    out.figures.append(
        Figure(
            "latency", "share around 40 ms", share, "", most=_DELAYED_SHARE, note=f"{low:g} to {high:g} ms"
        )
    )


def _large(out: Latencies, agent_s: list[float], echo_s: list[float], run_s: float) -> None:
    over = (quantile(agent_s, 0.99) - run_s) * 1e3
    note = f"{len(agent_s)} requests in turn; a bare run {run_s * 1e3:.2f} ms"
    out.figures += [
        Figure("latency", "600 KB, p50", quantile(agent_s, 0.5) * 1e3, "ms"),
        Figure("latency", "600 KB, p99 over run()", over, "ms", most=10.0, note=note),
        Figure("latency", "echo of 600 KB there and back, p50", quantile(echo_s, 0.5) * 1e3, "ms"),
    ]
