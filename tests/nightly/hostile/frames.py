"""Hostile frames: for the decoder in memory, and from a worker that was taken over for a running agent."""

from __future__ import annotations

import asyncio
import functools
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.errors import ChannelError
from agent.service.models.worker_process import WorkerProcess
from agent.service.notify import Notifier
from agent.service.service import Service
from agent.worker.channel import Decoder
from tests.agent.launching import executed
from tests.agent.service.conftest import FAKE_WORKER, Client, configure, connected_client, status_of
from tests.bundles import Signer
from tests.conftest import BrokerProcess
from tests.nightly.hostile.hostile_worker import damage, hostile_frame, valid_frames
from tests.nightly.hostile.outcome import Outcome
from tests.patience import PATIENCE_S, until

HOSTILE_WORKER: Final = (sys.executable, str(Path(__file__).with_name("hostile_worker.py")))
_ANSWER_LIMIT_S: Final = 30.0
_HONEST_LIMIT_S: Final = 5.0
_IN_ADVANCE: Final = 8
# At least so many honest requests, however fast the machine is.
_MIN_HONEST: Final = 10
_MAX_COMPLAINTS: Final = 20
# If more are refused at once, they are not frames of the present protocol, and nothing behind it is tested.
_MOST_REFUSED: Final = 0.8


@dataclass
class FramesResult(Outcome):
    """What hostile frames did.

    Attributes
    ----------
    frames, refused
        Streams of bytes that were read, and those that were refused as a whole.
    answers, honest
        Requests to the hostile worker, and to an honest one beside it.
    statuses
        Status -> number of answers for the hostile worker's requests.
    slowest_s
        Latency of the slowest honest answer.
    """

    frames: int = 0
    refused: int = 0
    answers: int = 0
    honest: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    slowest_s: float = 0.0


async def run_frames(number: int, frames: int, answers: int) -> FramesResult:
    """Read hostile frames in memory, and let a hostile worker of an agent answer."""
    result = FramesResult()
    _decode(number, frames, result)
    if result.refused > _MOST_REFUSED * frames:
        result.complaints.append(f"{result.refused} of {frames} frames were refused at once")
    with tempfile.TemporaryDirectory(prefix="edgebundle-frames-") as name:
        await _serve(number, answers, Path(name), result)
    return result


def _decode(number: int, count: int, result: FramesResult) -> None:
    chance = random.Random(number)
    valid = valid_frames()
    for _ in range(count):
        raw = hostile_frame(chance, 1) if chance.randrange(2) else damage(chance, chance.choice(valid))
        decoder = Decoder()
        result.frames += 1
        try:
            for at in range(
                0, len(raw), step := chance.choice((1 << 20, 4096, 7 if len(raw) < 1000 else 5000))
            ):
                decoder.feed(raw[at : at + step])
        except ChannelError:
            result.refused += 1
        except Exception as error:  # noqa: BLE001 - the finding
            result.complaints.append(f"a frame raised {type(error).__name__}: {error}: {raw[:80]!r}")
            if len(result.complaints) >= _MAX_COMPLAINTS:
                return


async def _serve(number: int, count: int, folder: Path, result: FramesResult) -> None:
    (folder / "broker").mkdir()
    broker = BrokerProcess("mosquitto", folder / "broker")
    broker.start()
    signer = Signer(folder / "trust")
    # The hostile worker dies for most answers; how often it may is not the question here.
    config = configure(folder, signer.trust, broker.port, inference_crash_limit=1000)

    def spawn(name: str, **callbacks: object) -> WorkerProcess:
        command = HOSTILE_WORKER if name == "hostile" else FAKE_WORKER
        return functools.partial(WorkerProcess, launch=executed(command))(name, **callbacks)  # type: ignore[arg-type]

    service = Service(config, Notifier({}), spawn=spawn)
    for name in ("hostile", "echo"):
        await service.models.activate(signer.bundle(name))
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    try:
        await until(lambda: service.online or running.done())
        async with (
            connected_client(broker.port, "attacker") as attacker,
            connected_client(broker.port) as honest,
        ):
            await _ask(number, count, attacker, honest, result)
            await until(lambda: not service.samples()["edge_inference_in_flight"], _ANSWER_LIMIT_S)
        if faults := service.samples().get("edge_faults_total"):
            result.complaints.append(f"the agent counted {faults:g} internal errors (edge_faults_total)")
        if {connection.connects for connection in service.connections} != {1}:
            result.complaints.append("a worker's answer made the broker end a connection")
    except TimeoutError:
        result.complaints.append("requests to a hostile worker were never answered or acknowledged")
    finally:
        stop.set()
        await asyncio.wait_for(running, PATIENCE_S)
        broker.stop()


async def _ask(number: int, count: int, attacker: Client, honest: Client, result: FramesResult) -> None:
    lanes = asyncio.Semaphore(_IN_ADVANCE)

    async def one(which: int) -> None:
        async with lanes:
            correlation = attacker.send(b"%d %d" % (number, which), model="hostile")
            answer = await attacker.answer(correlation, _ANSWER_LIMIT_S)
            status = status_of(answer)
            result.statuses[status] = result.statuses.get(status, 0) + 1
            result.answers += 1

    asking = asyncio.gather(*(one(which) for which in range(count)))
    try:
        while not asking.done() or result.honest < _MIN_HONEST:
            began_s = time.monotonic()
            correlation = honest.send(b"hello %d" % result.honest)
            try:
                answer = await honest.answer(correlation, _HONEST_LIMIT_S)
            except TimeoutError:
                result.complaints.append(f"an honest request had no answer within {_HONEST_LIMIT_S:g} s")
                return
            result.honest += 1
            result.slowest_s = max(result.slowest_s, time.monotonic() - began_s)
            if status_of(answer) not in (200, 503):
                result.complaints.append(f"an honest request was answered with {status_of(answer)}")
            honest.received.clear()
            await asyncio.sleep(0.02)
        await asking
    finally:
        asking.cancel()
