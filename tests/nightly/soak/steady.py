"""An agent under steady load for a long time: memory, threads and file descriptors must stay flat."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.wire.topics import Infer, Reply, format_topic
from tests.agent.faults import MODEL
from tests.agent.service.conftest import Client, connected_client, status_of
from tests.agent.test_agent_process import model_is_ready
from tests.nightly.soak.rig import device_and_broker

RATE: Final = 40.0
SAMPLE_S: Final = 2.0
# Fewer requests than a model's queue holds: load shedding is not tested here.
MAX_WAITING: Final = 32
ANSWER_LIMIT_S: Final = 10.0
# The share of the time that is left out at the beginning: arenas, caches and the store of answers fill up.
WARM_UP: Final = 0.2
# Flat means: after the warm-up, the median of the last third exceeds that of the first third by at most this.
MAX_GROWTH, MAX_GROWTH_BYTES = 0.03, 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory, threads and file descriptors of one process at one moment, `at_s` seconds after the start."""

    at_s: float
    process: str
    rss_bytes: int
    threads: int
    descriptors: int


@dataclass
class SteadyResult:
    """The requests and samples of a steady load.

    Attributes
    ----------
    seconds
        How long the load lasted.
    requests, unanswered
        Requests, and those without an answer in time.
    statuses
        Status -> number of answers.
    samples
        Of agent and worker, in order of time.
    """

    seconds: float = 0.0
    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: int = 0
    samples: list[Sample] = field(default_factory=list)

    def of(self, process: str) -> list[Sample]:
        """Return one process's samples after the warm-up."""
        from_s = self.seconds * WARM_UP
        return [sample for sample in self.samples if sample.process == process and sample.at_s >= from_s]

    @property
    def passed(self) -> bool:
        """Whether everything stayed flat and every request was answered."""
        return not self.unanswered and all(verdict.flat for verdict in self.verdicts())

    def verdicts(self) -> Iterator[Verdict]:
        """Compare the first third of each series with its last."""
        for process in ("agent", "worker"):
            samples = self.of(process)
            third = max(1, len(samples) // 3)
            for what in ("rss_bytes", "threads", "descriptors"):
                values = [getattr(sample, what) for sample in samples]
                if values:
                    yield Verdict(process, what, median(values[:third]), median(values[-third:]), max(values))

    def to_json(self) -> dict[str, object]:
        """Return the report's JSON document."""
        return {
            "seconds": round(self.seconds, 1),
            "requests": self.requests,
            "statuses": dict(self.statuses),
            "unanswered": self.unanswered,
            "verdicts": [asdict(verdict) for verdict in self.verdicts()],
            "samples": [asdict(sample) for sample in self.samples],
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """One series of one process: the medians of its first and last third, and its maximum."""

    process: str
    what: str
    first: float
    last: float
    highest: float

    @property
    def flat(self) -> bool:
        """Whether it stayed within the allowed growth."""
        grown = self.last - self.first
        if self.what == "rss_bytes":
            return grown <= max(MAX_GROWTH_BYTES, MAX_GROWTH * self.first)
        return grown <= 0


def rss_bytes(pid: int) -> int:
    """Return a process's resident memory, which `/proc` shows to everyone."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(process: str, pid: int, at_s: float) -> Sample:
    """Read a process's memory, threads and file descriptors from `/proc`."""
    folder = Path(f"/proc/{pid}")
    return Sample(
        at_s=round(at_s, 1),
        process=process,
        rss_bytes=rss_bytes(pid),
        threads=len(list((folder / "task").iterdir())),
        descriptors=len(list((folder / "fd").iterdir())),
    )


def requests() -> Iterator[tuple[str, bytes, str]]:
    """Yield requests (model, payload, content type), both valid ones and typical mistakes."""
    for number in itertools.count():
        values = [number % 1000, 1.0, 2.0, 3.0]
        document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": values}]}
        as_json = json.dumps(document).encode()
        match number % 20:
            case 0:
                yield MODEL, b"123", "application/octet-stream"  # 400
            case 1:
                yield f"unknown-{number}", as_json, "application/json"  # 404, each under another name
            case 2:
                yield MODEL, os.urandom(200_000), "image/png"  # 400 or 415, and large
            case 3:
                yield MODEL, b"x", f"text/x-{number}"  # 415
            case kind if kind % 2:
                yield MODEL, as_json, "application/json"
            case _:
                yield MODEL, struct.pack("<4f", *values), "application/octet-stream"


async def run_steady(minutes: float, log: Path, progress: Callable[[SteadyResult], None]) -> SteadyResult:
    """Put an agent under steady load, and take samples every two seconds.

    Parameters
    ----------
    minutes
        Minutes of load.
    log
        The file that the agent's log is appended to.
    progress
        Called with the result so far, after each sample.
    """
    result = SteadyResult()
    with device_and_broker(log) as (device, _broker, library):
        device.start(config="[metrics]\ninterval_s = 1.0\n")
        device.install(MODEL, library)
        await model_is_ready(device.port, MODEL)
        assert device.process is not None
        agent, started_s = device.process.pid, time.monotonic()
        async with connected_client(device.port, "steady") as client:
            asking = asyncio.create_task(_ask(client, result))
            try:
                while (at_s := time.monotonic() - started_s) < 60 * minutes:
                    result.samples.append(measure("agent", agent, at_s))
                    result.samples += [measure("worker", pid, at_s) for pid in device.children()]
                    result.seconds = at_s
                    progress(result)
                    if asking.done():
                        asking.result()
                    await asyncio.sleep(SAMPLE_S)
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
    return result


async def _ask(client: Client, result: SteadyResult) -> None:
    """Send requests at a constant rate, or as fast as a busy machine answers."""
    waiting: dict[bytes, float] = {}
    reply = format_topic(Reply(client.name, "answers"))
    clock_s = time.monotonic()
    for number, (model, payload, content_type) in enumerate(requests()):
        while len(waiting) >= MAX_WAITING:
            await asyncio.sleep(0.01)
            clock_s = time.monotonic()
            _take(client.received, waiting, result)
        correlation = b"%d" % number
        waiting[correlation] = time.monotonic()
        client.connection.publish(
            format_topic(Infer(client.device, model, client.name)),
            payload,
            properties=Properties(
                content_type=content_type, response_topic=reply, correlation_data=correlation, expiry_s=30
            ),
        )
        result.requests += 1
        clock_s += 1 / RATE
        await asyncio.sleep(max(0.0, clock_s - time.monotonic()))
        _take(client.received, waiting, result)


def _take(received: Sequence[Message], waiting: dict[bytes, float], result: SteadyResult) -> None:
    for message in received:
        if waiting.pop(message.properties.correlation_data or b"", None) is not None:
            result.statuses[status_of(message)] += 1
    assert isinstance(received, list)
    received.clear()
    late_s = time.monotonic() - ANSWER_LIMIT_S
    for correlation in [key for key, asked_s in waiting.items() if asked_s < late_s]:
        del waiting[correlation]
        result.unanswered += 1
