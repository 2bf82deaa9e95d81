"""A simulated fleet: the documents of many agents, and their metrics once a second each, in one process.

`python -m benchmarks.dashboard.fleet mqtt://127.0.0.1:1883 1000` prints a line when all documents are at the
broker, and goes on until it is ended. The documents are made by the agent's own code.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from typing import Final

from agent.bundle.tensor_spec import TensorSpec
from agent.mqtt.connection import Connection
from agent.mqtt.session import Owner
from agent.service.metrics.metrics import Metrics, to_document
from agent.wire import topics
from agent.wire.info import Hardware, Info
from agent.wire.job import JobState, Result, Status
from agent.wire.metrics import format_metrics
from agent.wire.model_state import ModelPhase, ModelState
from agent.wire.presence import Presence
from agent.wire.reported import Origin, Reported, ReportedModel, ServiceState
from agent.worker.frames import Answer
from edgebundle.broker import Broker

_ROOMS: Final = ("door", "dock", "hall", "kitchen", "lab", "roof", "shelf", "store")
_MODELS: Final = (("people", "2.1.0", "people"), ("parcels", "1.4.2", "boxes"), ("meters", "1.0.3", "digits"))
# In slices of a second, so that the broker has an even load.
_SLICES: Final = 20
_ANSWERS_EVERY_S: Final = 5
# What needs attention: one in a hundred is refused a bundle, one in fifty is away, one in seventy is hot.
_REFUSED, _AWAY, _HOT = 100, 50, 70


class Device:
    """One simulated agent.

    Parameters
    ----------
    number
        Its place in the fleet.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"{_ROOMS[number % len(_ROOMS)]}-{number:04d}"
        self.model, self.version, _ = _MODELS[number % len(_MODELS)]
        self.digest = f"sha256:{number:064x}"
        self._random = random.Random(number)
        self._metrics = Metrics()
        self._answers = b""
        self._rate = self._random.uniform(0.5, 12)

    def documents(self, now_s: float) -> list[tuple[topics.Topic, bytes]]:
        """Return what is retained about it."""
        name, model = self.name, self.model
        is_away = self.number % _AWAY == _AWAY - 1
        board = "Raspberry Pi 4 Model B Rev 1.5" if self.number % 3 else "Raspberry Pi 5 Model B Rev 1.0"
        job = f"deploy-{self.number:012x}"
        is_refused = self.number % _REFUSED == _REFUSED - 2
        state = JobState(
            id=job,
            model=model,
            digest=self.digest,
            status=Status.REJECTED if is_refused else Status.SUCCEEDED,
            result=Result.REJECTED if is_refused else Result.SUCCESSFUL,
            code="ERR_INCOMPATIBLE" if is_refused else None,
            message="expected cortex-a72, got cortex-a53" if is_refused else None,
            time_s=now_s - 3600 * (1 + self.number % 500),
        )
        documents: list[tuple[topics.Topic, bytes]] = [
            (
                topics.State(name),
                Presence(
                    "offline" if is_away else "online", 1, "0.1.0", inference="" if is_away else "online"
                ).to_bytes(),
            ),
            (
                topics.Info(name),
                Info(name, "0.1.0", Hardware("aarch64", board, "Cortex-A72", 4, 4 << 30)).to_bytes(),
            ),
            (
                topics.ModelState(name, model),
                ModelState(
                    name=model,
                    version=self.version,
                    inputs=(TensorSpec("image", "FP32", (1, 3, 416, 416)),),
                    outputs=(TensorSpec("output", "FP32", (1, 3549, 85)),),
                    ready=not is_away,
                    state=ModelPhase.READY,
                    message="",
                    security_counter=1,
                    digest=self.digest,
                    key_id="ab" * 32,
                    image_input="image",
                    postprocess=("detect",),
                ).to_bytes(),
            ),
            (
                topics.Reported(name),
                Reported(
                    None,
                    (
                        ReportedModel(
                            name=model,
                            digest=self.digest,
                            version=self.version,
                            state=ServiceState.ACTIVE,
                            origin=Origin.DESIRED,
                            job=job,
                            previous=f"sha256:{self.number + 5000:064x}",
                            security_counter=1,
                        ),
                    ),
                ).to_bytes(),
            ),
            (topics.Job(name, job), state.to_bytes()),
        ]
        return documents

    def metrics(self, second: int) -> bytes:
        """Return its metrics of one second; answers come in every fifth, which is the costly part."""
        if not self._answers or (second + self.number) % _ANSWERS_EVERY_S == 0:
            self._answer()
        is_hot = self.number % _HOT == _HOT - 3
        heat = (82 if is_hot else 52) + 6 * math.sin(second / 20 + self.number)
        device = format_metrics(
            {
                'edge_temperature_celsius{zone="cpu-thermal"}': round(heat, 1),
                'edge_throttled{cause="soft_temperature_limit"}': int(is_hot and heat > 84),
                "edge_agent_uptime_seconds": 40_000 + 60 * self.number + second,
                "edge_load1": round(0.5 + 0.4 * math.sin(second / 9 + self.number), 2),
                "edge_memory_available_bytes": 2_800_000_000,
                "edge_state_free_bytes": 11_000_000_000,
            }
        )
        return device[:-1] + b"," + self._answers[1:]

    def _answer(self) -> None:
        for _ in range(1 + int(_ANSWERS_EVERY_S * self._rate * self._random.random())):
            total_s = self._random.lognormvariate(math.log(0.04), 0.5)
            queue, decode, compute, encode = (int(total_s * share * 1e6) for share in (0.05, 0.2, 0.65, 0.1))
            answer = Answer(1, 200, queue_us=queue, decode_us=decode, compute_us=compute, encode_us=encode)
            self._metrics.durations(self.model, answer, total_s)
            self._metrics.request(self.model, 200)
        self._answers = format_metrics(to_document(self._metrics.samples({})))


async def run(url: str, count: int) -> None:
    """Publish the documents once, and everybody's metrics each second."""
    connection = Connection(Broker(url).settings(), Owner(lambda _message: None), client_id="fleet")
    await connection.connect()
    devices = [Device(number) for number in range(count)]
    for device in devices:
        for topic, payload in device.documents(time.time()):
            connection.publish(topics.format_topic(topic), payload, qos=0, retain=True)
        await asyncio.sleep(0)
    # The broker reads in order: when it has acknowledged this one, it has the others.
    await connection.publish(topics.format_topic(topics.Job("fleet", "ready")), b"", qos=1)
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    for second in range(1_000_000):
        for part in range(_SLICES):
            for device in devices[part::_SLICES]:
                connection.publish(
                    topics.format_topic(topics.Metrics(device.name)), device.metrics(second), qos=0
                )
            await asyncio.sleep(max(0.0, begun_s + second + (part + 1) / _SLICES - loop.time()))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2])))
