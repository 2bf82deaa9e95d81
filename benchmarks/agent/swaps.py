"""Two versions replace each other: no request may fail, no answer may have the wrong version's label."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import numpy as np

from benchmarks.agent.figures import Figure, quantile
from benchmarks.agent.models import VERSIONS, Bundles, Progress
from benchmarks.agent.requester import Answered, Requester
from benchmarks.agent.stage import DEVICE, Stage
from builder.fleet.deploy import deploy_async
from edgebundle.broker import Broker

MODEL: Final = "nothing"
_PER_S: Final = 50


async def measure(stage: Stage, bundles: Bundles, swaps: int, progress: Progress) -> list[Figure]:
    """Deploy the two versions in turn, as `edgebundle deploy` does, during requests; return the figures."""
    values = np.arange(4, dtype=np.float32)
    broker = Broker(stage.url)
    versions = list(VERSIONS)
    async with Requester(stage.port) as requester:
        await requester.ready(MODEL)
        stop = asyncio.Event()
        asking = asyncio.create_task(
            requester.at_rate(requester.topic_of(MODEL), values.tobytes(), _PER_S, stop)
        )
        start_s = time.perf_counter()
        failed_deployments = 0
        for number in range(swaps):
            progress(f"swap {number + 1} of {swaps}")
            version = versions[(number + 1) % len(versions)]
            result = await deploy_async(bundles.path(MODEL, version), DEVICE, broker, wait_s=60)
            failed_deployments += not result.ok
        took_s = time.perf_counter() - start_s
        stop.set()
        tally = await asking
    failed = tally.unanswered + len(tally.answers) - tally.statuses[200]
    wrong = sum(not _is_right(answer, values) for answer in tally.answers if answer.status == 200)
    seen = {version: sum(a.version == version for a in tally.answers) for version in versions}
    note = f"{took_s:.0f} s, {len(tally.answers)} requests, by version {list(seen.values())}"
    return [
        Figure("swaps", "swaps", swaps - failed_deployments, least=swaps, note=note),
        Figure("swaps", "requests that failed", failed, most=0),
        Figure("swaps", "answers with the wrong version's label", wrong, most=0),
        Figure("swaps", "p99 meanwhile", quantile(tally.latencies_s(200), 0.99) * 1e3, "ms"),
    ]


def _is_right(answer: Answered, values: np.ndarray) -> bool:
    number = VERSIONS.get(answer.version)
    return number is not None and answer.payload == (values + np.float32(number)).tobytes()
