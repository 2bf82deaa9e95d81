"""A year in an hour: everything that happens to a device in years, one after the other and at once.

One device, as systemd runs it, with a real broker and the deploy tool. Power is cut, the disk is full,
read-only or lost, the clock is wrong, the broker is away, forgets or is slow, a model dies on one request
in a thousand, and versions are deployed, good and bad. An honest client asks all the time. Afterwards,
without a hand on the device, every desired model serves; and the device never served nothing for more than
a minute while its broker was there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.errors import EdgeError
from agent.mqtt.settings import BrokerSettings
from builder.errors import BuildError
from builder.fleet.deploy import DeployResult, deploy_async
from edgebundle.broker import Broker
from tests.agent.service.conftest import Client, status_of
from tests.agent.test_agent_process import pack
from tests.agent.worker.conftest import compile_c
from tests.bundles import Signer
from tests.conftest import BrokerProcess
from tests.nightly.soak.disk import Disk, disk
from tests.nightly.soak.patient import DEVICE, Patient
from tests.nightly.soak.slow_proxy import SlowProxy
from tests.nightly.soak.timeline import MAX_DARK_S, Event, Timeline

# `steady` is deployed again and again; `fragile` is deployed once, and dies on one request in a thousand.
STEADY, FRAGILE = "steady", "fragile"
ASK_EVERY_S: Final = 0.1
ANSWER_LIMIT_S: Final = 3.0
DIES_EVERY: Final = 1000
DEPLOY_LIMIT_S: Final = 60.0
TICK_S: Final = 0.05
# From the beginning of one event to that of the next, on average.
PAUSE_S: Final = 8.0
# A broker that comes and goes all the time would leave no minute to measure.
BROKER_REST_S: Final = 45.0
# After the last event: what the slowest retry of the agent takes.
CONVERGE_LIMIT_S: Final = 300.0
_START_LIMIT_S: Final = 60.0
_TO_1970_S: Final = -1.79e9
_TEN_YEARS_S: Final = 3.2e8


@dataclass
class YearResult:
    """What a year showed.

    Attributes
    ----------
    number
        The seed.
    timeline
        What happened.
    has_disk
        Whether the disk's faults were among it.
    starts
        How often the agent was started.
    deployments
        Outcome -> number of deployments.
    converged_s
        Seconds after the last event until every desired model served; None if they never did.
    missing
        The models that did not serve at the end.
    """

    number: int
    timeline: Timeline = field(default_factory=Timeline)
    has_disk: bool = False
    starts: int = 0
    deployments: dict[str, int] = field(default_factory=dict)
    converged_s: float | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether both promises were kept."""
        return self.converged_s is not None and self.timeline.longest_dark_s <= MAX_DARK_S

    def to_json(self) -> dict[str, object]:
        """Return the report's JSON document."""
        return {
            "seed": self.number,
            "passed": self.passed,
            "has_disk": self.has_disk,
            "starts": self.starts,
            "deployments": self.deployments,
            "converged_s": self.converged_s,
            "missing": self.missing,
            **self.timeline.to_json(),
        }


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of event: its name, what it needs for itself, what it does, and how often it happens."""

    name: str
    needs: tuple[str, ...]
    do: Callable[[], Awaitable[None]]
    weight: int


class Year:
    """A device, everything around it, and what happens to them."""

    def __init__(self, number: int, folder: Path, place: Disk | None, log: Path, pace: float) -> None:
        self.result = YearResult(number, has_disk=place is not None)
        self.chance = random.Random(number)
        self._folder = folder
        self._disk = place
        self._log = log
        self._pace = pace
        self._began_s = time.monotonic()
        (folder / "broker").mkdir()
        self._broker = BrokerProcess("mosquitto", folder / "broker")
        self._broker_there = False
        self._signer = Signer(folder / "trust")
        self._library = compile_c(Path(__file__).with_name("kernels.c"), folder / "mod.so")
        self._versions = 0
        self._last_good = folder / "none"
        self._locks = {name: asyncio.Lock() for name in ("power", "disk", "clock", "broker", "net", "deploy")}
        self._asked = 0
        self._resting = True

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began_s

    async def run(
        self, minutes: float, only: Collection[str], progress: Callable[[YearResult], None]
    ) -> YearResult:
        """Let things happen for `minutes`, then wait until all is well again."""
        self._broker.start()
        self._broker_there = True
        proxy = self._proxy = SlowProxy(self._broker.port)
        await proxy.start()
        patient = self._patient = Patient(self._folder, self._disk, self._signer.trust, proxy.port, self._log)
        tasks: set[asyncio.Task[None]] = set()
        try:
            patient.switch_on()
            tasks.add(asyncio.create_task(patient.keep()))
            await self._install()
            self._began_s = time.monotonic()
            tasks.add(asyncio.create_task(self._tick()))
            tasks.add(asyncio.create_task(self._ask()))
            await self._happen(60 * minutes, only, progress)
            await self._converge()
            progress(self.result)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            patient.close()
            await proxy.close()
            self._broker.stop(signal.SIGKILL)
        self.result.starts = patient.starts
        return self.result

    # What happens.

    def _events(self) -> Iterator[_Kind]:
        yield _Kind("power cut", ("power", "disk"), self._cut_power, 5)
        yield _Kind("agent killed", ("power",), self._kill_agent, 2)
        yield _Kind("worker killed", (), self._kill_worker, 2)
        yield _Kind("agent hangs", ("power",), self._hang, 1)
        yield _Kind("clock in 1970", ("clock",), self._clock_of(_TO_1970_S), 2)
        yield _Kind("clock ten years ahead", ("clock",), self._clock_of(_TEN_YEARS_S), 2)
        yield _Kind("broker stopped", ("broker",), self._stop_broker, 2)
        yield _Kind("broker killed", ("broker",), self._kill_broker, 2)
        yield _Kind("broker forgets all", ("broker",), self._forget, 2)
        yield _Kind("slow network", ("net",), self._slow, 2)
        yield _Kind("good version deployed", ("deploy",), self._deploy_good, 4)
        yield _Kind("same version deployed", ("deploy",), self._deploy_same, 2)
        yield _Kind("version that cannot start", ("deploy",), self._deploy_broken, 2)
        yield _Kind("version that dies in use", ("deploy",), self._deploy_dying, 2)
        yield _Kind("version of a stranger", ("deploy",), self._deploy_foreign, 1)
        if self._disk is not None:
            yield _Kind("disk full", ("disk",), self._fill_disk, 3)
            yield _Kind("disk full at boot", ("power", "disk"), self._boot_full, 2)
            yield _Kind("disk fails", ("power", "disk"), self._fail_disk, 2)
            yield _Kind("disk read-only at boot", ("power", "disk"), self._boot_read_only, 2)

    async def _happen(
        self, seconds: float, only: Collection[str], progress: Callable[[YearResult], None]
    ) -> None:
        kinds = [kind for kind in self._events() if not only or kind.name in only]
        weights = [kind.weight for kind in kinds]
        going_on: set[asyncio.Task[None]] = set()
        # Each kind happens once before chance decides.
        first = kinds[:]
        self.chance.shuffle(first)
        while self.now_s < seconds:
            free = [kind for kind in first if self._is_free(kind)]
            kind = free[0] if free else self.chance.choices(kinds, weights)[0]
            if self._is_free(kind):
                first = [other for other in first if other is not kind]
                task = asyncio.create_task(self._one(kind))
                going_on.add(task)
                await asyncio.sleep(0)  # it takes what it needs
            await self._for(0.5 * PAUSE_S, 1.5 * PAUSE_S)
            for task in [task for task in going_on if task.done()]:
                going_on.discard(task)
                task.result()
            progress(self.result)
        self._resting = False
        await asyncio.gather(*going_on)

    def _is_free(self, kind: _Kind) -> bool:
        return not any(self._locks[need].locked() for need in kind.needs)

    async def _one(self, kind: _Kind) -> None:
        async with contextlib.AsyncExitStack() as held:
            for need in kind.needs:
                await held.enter_async_context(self._locks[need])
            began_s = self.now_s
            await kind.do()
            self.result.timeline.events.append(Event(began_s, kind.name, self.now_s - began_s))
            if "broker" in kind.needs:
                until_s = time.monotonic() + BROKER_REST_S * self._pace
                while self._resting and time.monotonic() < until_s:
                    await asyncio.sleep(0.2)

    async def _for(self, low_s: float, high_s: float) -> None:
        await asyncio.sleep(self.chance.uniform(low_s, high_s) * self._pace)

    async def _cut_power(self) -> None:
        await asyncio.to_thread(self._patient.cut_power)
        await self._for(0.2, 4.0)
        self._patient.switch_on()

    async def _kill_agent(self) -> None:
        await asyncio.to_thread(self._patient.kill)

    async def _kill_worker(self) -> None:
        for pid in self._patient.workers[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _hang(self) -> None:
        pid = self._patient.pid
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
        while self._patient.pid == pid:  # until the watchdog has killed it
            await asyncio.sleep(0.2)

    def _clock_of(self, shift_s: float) -> Callable[[], Awaitable[None]]:
        async def set_clock() -> None:
            self._patient.shift_clock(shift_s)
            await self._for(5.0, 20.0)
            if self.chance.random() < 0.5:
                # A device without a battery for its clock boots with the wrong time.
                if not self._locks["power"].locked():
                    async with self._locks["power"]:
                        await self._kill_agent()
                await self._for(5.0, 20.0)
            self._patient.shift_clock(0.0)

        return set_clock

    async def _stop_broker(self) -> None:
        self._broker_there = False
        self._broker.pause()
        await self._for(3.0, 20.0)
        self._broker.resume()
        self._broker_there = True

    async def _kill_broker(self) -> None:
        self._broker_there = False
        await asyncio.to_thread(self._broker.stop, signal.SIGKILL)
        await self._for(0.5, 15.0)
        await asyncio.to_thread(self._broker.start)
        self._broker_there = True

    async def _forget(self) -> None:
        self._broker_there = False
        await asyncio.to_thread(self._broker.stop, signal.SIGKILL)
        for path in (self._folder / "broker").glob("*.db*"):
            path.unlink()
        await self._for(0.2, 3.0)
        await asyncio.to_thread(self._broker.start)
        self._broker_there = True

    async def _slow(self) -> None:
        self._proxy.delay_s = self.chance.uniform(0.05, 0.5)
        await self._for(5.0, 25.0)
        self._proxy.delay_s = 0.0

    async def _fill_disk(self) -> None:
        assert self._disk is not None
        await asyncio.to_thread(self._disk.fill)
        await self._for(5.0, 30.0)
        self._disk.empty()

    async def _boot_full(self) -> None:
        assert self._disk is not None
        await asyncio.to_thread(self._disk.fill)
        await asyncio.to_thread(self._patient.kill)
        await self._for(10.0, 30.0)
        self._disk.empty()

    async def _fail_disk(self) -> None:
        assert self._disk is not None
        self._disk.fail()
        await self._for(5.0, 30.0)
        # Only a boot, which checks the file system, makes it writable again.
        await self._cut_power()

    async def _boot_read_only(self) -> None:
        await asyncio.to_thread(self._patient.cut_power)
        self._patient.switch_on(read_only=True)
        await self._for(10.0, 30.0)
        await self._cut_power()

    # Deployments.

    def _pack(self, name: str, kernel: str, *, library: bytes | None = None, stranger: bool = False) -> Path:
        self._versions += 1
        path = self._folder / f"{name}-{self._versions}.bundle"
        path.write_bytes(
            pack(
                Signer(self._folder / "stranger") if stranger else self._signer,
                kernel,
                self._library.read_bytes() if library is None else library,
                name=name,
                version=f"1.{self._versions}.0",
            )
        )
        return path

    async def _deploy(self, path: Path, limit_s: float = DEPLOY_LIMIT_S) -> DeployResult | None:
        broker = Broker(f"mqtt://127.0.0.1:{self._broker.port}")
        try:
            result = await asyncio.wait_for(deploy_async(path, DEVICE, broker, wait_s=limit_s), 2 * limit_s)
            outcome = result.code or str(result.status)
        except (EdgeError, BuildError, OSError) as error:  # TimeoutError is one
            result, outcome = None, f"the tool gave up ({type(error).__name__})"
        self.result.deployments[outcome] = self.result.deployments.get(outcome, 0) + 1
        return result

    async def _deploy_good(self) -> None:
        path = self._pack(STEADY, "twice")
        if await self._deploy(path) is not None:
            self._last_good = path

    async def _deploy_same(self) -> None:
        if self._last_good.exists():
            await self._deploy(self._last_good)

    async def _deploy_broken(self) -> None:
        await self._deploy(self._pack(STEADY, "twice", library=b"\x7fELF is not a library"))

    async def _deploy_dying(self) -> None:
        await self._deploy(self._pack(STEADY, "dies_in_use"))

    async def _deploy_foreign(self) -> None:
        await self._deploy(self._pack(STEADY, "twice", stranger=True))

    async def _install(self) -> None:
        for name, kernel in ((STEADY, "twice"), (FRAGILE, "segfault")):
            path = self._pack(name, kernel)
            end_s = time.monotonic() + _START_LIMIT_S
            while (result := await self._deploy(path)) is None or not result.ok:
                if time.monotonic() > end_s:
                    raise TimeoutError(f"{name} was not in service within {_START_LIMIT_S:g} s")
                await asyncio.sleep(1.0)
        self.result.deployments.clear()

    # What is measured.

    async def _tick(self) -> None:
        while True:
            self.result.timeline.tick(self.now_s, broker=self._broker_there)
            await asyncio.sleep(TICK_S)

    async def _ask(self) -> None:
        """Ask each model in turn, for ever."""
        client = Client(BrokerSettings("127.0.0.1", self._broker.port), "probe", DEVICE)
        await client.start()
        asking: set[asyncio.Task[bool]] = set()
        try:
            while True:
                self._asked += 1
                model = (STEADY, FRAGILE)[self._asked % 2]
                fatal = model == FRAGILE and self._asked % DIES_EVERY == DIES_EVERY // 2 + 1
                if self._broker_there:
                    task = asyncio.create_task(self._ask_one(client, model, fatal=fatal))
                    asking.add(task)
                    task.add_done_callback(asking.discard)
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            for task in asking:
                task.cancel()
            await client.connection.close()

    async def _ask_one(self, client: Client, model: str, *, fatal: bool = False) -> bool:
        values = (13.0 if fatal else 1.0, float(self._asked % 10_000), 2.0, 0.5)
        correlation = client.send(struct.pack("<4f", *values), model=model, expiry_s=round(ANSWER_LIMIT_S))
        try:
            answer = await client.answer(correlation, ANSWER_LIMIT_S)
        except TimeoutError:
            self.result.timeline.statuses[0] += 1
            return False
        client.received.remove(answer)
        right = struct.pack("<4f", *(2 * value for value in values))
        if status_of(answer) == 200 and answer.payload == right:
            self.result.timeline.answered(self.now_s, model)
            return True
        self.result.timeline.statuses[status_of(answer)] += 1
        return False

    async def _converge(self) -> None:
        """Wait until every model serves; each was desired when the last event was over."""
        began_s = time.monotonic()
        client = Client(BrokerSettings("127.0.0.1", self._broker.port), "judge", DEVICE)
        await client.start()
        try:
            missing = {STEADY, FRAGILE}
            while missing and time.monotonic() - began_s < CONVERGE_LIMIT_S:
                for model in sorted(missing):
                    if await self._ask_one(client, model):
                        missing.discard(model)
            self.result.missing = sorted(missing)
            # The device can still be managed: one more version, and the same two answers.
            if not missing:
                result = await self._deploy(self._pack(STEADY, "twice"), CONVERGE_LIMIT_S)
                if result is None or not result.ok or not await self._ask_one(client, STEADY):
                    self.result.missing = ["a new version"]
        finally:
            await client.connection.close()
        if not self.result.missing:
            self.result.converged_s = time.monotonic() - began_s


async def run_year(
    minutes: float,
    log: Path,
    progress: Callable[[YearResult], None],
    *,
    number: int,
    pace: float = 1.0,
    only: Collection[str] = (),
) -> YearResult:
    """Let a year happen to a device.

    Parameters
    ----------
    minutes
        How long things happen.
    log
        The file that the agent's log is appended to.
    progress
        Called after each event with the result so far.
    number
        The seed of what happens when.
    pace
        Factor for how long things last, and for the time between them.
    only
        The kinds of events; none for all.
    """
    with tempfile.TemporaryDirectory(prefix="edgebundle-year-") as name, disk(Path(name)) as place:
        return await Year(number, Path(name), place, log, pace).run(minutes, only, progress)
