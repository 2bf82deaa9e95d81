"""Signed bundles without real kernels, and fakes of the broker and the workers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from agent.bundle.machine import Machine
from agent.bundle.manifest import Runtime, Target
from agent.bundle.verify import VerifiedBundle
from agent.deploy.circumstances import Circumstances
from agent.deploy.deployment import Deployment
from agent.deploy.fetch.allow_list import HttpsSettings
from agent.deploy.interfaces import Condition
from agent.deploy.store.store import Store
from agent.deploy.trial import Score
from agent.errors import NoSpaceError, SelfTestError
from agent.mqtt.limits import LARGEST_PACKET_BYTES
from agent.mqtt.reason_codes import Reason, reason
from agent.wire import topics
from tests.bundles import FILES, KEY, KEYRING, build
from tests.patience import PATIENCE_S, until

DEVICE = "kitchen"
MACHINE = Machine(
    arch="x86_64",
    cpu_model="",
    features=frozenset({"avx2"}),
    glibc="2.36",
    abi="tvm-ffi-0.1",
    compatible=frozenset({"linux-x86_64"}),
)


@dataclass(frozen=True)
class Bundle:
    """A bundle's bytes, and the metadata for a desired document."""

    raw: bytes
    name: str
    version: str
    counter: int

    @cached_property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.raw).hexdigest()}"

    @property
    def hex(self) -> str:
        return self.digest[7:]

    def entry(self, job: str, **changes: Any) -> dict[str, Any]:
        entry = {
            "digest": self.digest,
            "size": len(self.raw),
            "version": self.version,
            "job": job,
            "sources": ["mqtt"],
        }
        return entry | changes


def make_bundle(
    name: str = "digits",
    version: str = "1.0.0",
    counter: int = 1,
    *,
    key: ec.EllipticCurvePrivateKey = KEY,
    params: bytes = b"weights",
    abi: str = "tvm-ffi-0.1",
    features: tuple[str, ...] = ("avx2",),
    target: Target | None = None,
    counter_ahead_of_time: bool | None = None,
) -> Bundle:
    """Pack and sign a bundle that a `FakeModels` runs, for a `target`, or for an x86-64 with `features`."""
    target = target or Target("x86_64-linux-gnu", "x86-64-v3", features)
    raw = build(
        {**FILES, "mod.params": params},
        key=key,
        name=name,
        version=version,
        security_counter=counter,
        counter_ahead_of_time=counter_ahead_of_time,
        target=target,
        compatible=(f"linux-{target.triple.partition('-')[0]}",),
        runtime=Runtime(tvm="0.27.0", tvm_ffi="0.1.14", executor="graph", abi=abi, glibc="2.28"),
    )
    return Bundle(raw, name, version, counter)


class FakeModels:
    """Records the version of each activated bundle; fails those whose parameters are `wrong`."""

    def __init__(self) -> None:
        self.serving: dict[str, str] = {}
        self.history: list[str] = []
        self.expected: set[str] = set()
        # Why requests no longer wait for a model.
        self.given_up: dict[str, str] = {}
        # Versions whose worker does not start.
        self.broken: set[str] = set()
        # Models that fail as soon as they are in service.
        self.stillborn: set[str] = set()
        # Versions that end the agent while they are loaded.
        self.deadly: set[str] = set()
        self.conditions: dict[str, Condition] = {}
        self.scores: dict[str, Score] = {}
        # Models, or their versions, whose activation waits for ever, as on a disk that does not respond.
        self.hanging: set[str] = set()

    def expect(self, names: Iterable[str]) -> None:
        self.expected.update(names)

    def give_up(self, name: str, why: str) -> None:
        self.given_up[name] = why

    def condition(self, name: str) -> Condition | None:
        return self.conditions.get(name, Condition()) if name in self.serving else None

    def score(self, name: str) -> Score:
        return self.scores.get(name, Score())

    def revoke(self, name: str) -> None:
        """Say that the key of the bundle that a model runs is revoked."""
        self.conditions[name] = Condition(revoked=True)

    def fail(self, name: str, message: str = "3 workers died within 60 s") -> None:
        """Take a model out of service, until it is activated again."""
        self.conditions[name] = Condition(failed=True, message=message, next_try_s=2e9)

    async def activate(self, verified: VerifiedBundle) -> None:
        with verified:
            params = os.pread(verified.files["mod.params"], 100, 0)
            await asyncio.sleep(0)
            if self.hanging & {verified.manifest.name, verified.manifest.version}:
                await asyncio.Event().wait()
            if verified.manifest.version in self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            if verified.manifest.version in self.broken:
                raise SelfTestError("its worker does not start: out of memory")
            if params == b"wrong":
                raise SelfTestError("sample 0 is off by 3.5")
            self.conditions.pop(verified.manifest.name, None)
            self.scores.pop(verified.manifest.name, None)
            self.serving[verified.manifest.name] = verified.manifest.version
            if verified.manifest.name in self.stillborn:
                self.fail(verified.manifest.name)
            self.history.append(f"+{verified.manifest.name} {verified.manifest.version}")

    async def deactivate(self, name: str) -> None:
        self.serving.pop(name, None)
        self.history.append(f"-{name}")

    async def suspend(self, name: str, why: str) -> None:
        await self.deactivate(name)
        self.given_up[name] = why


@dataclass
class FakeControl:
    """A broker's retained messages, and an offering side that answers every want document."""

    connected: bool = True
    retained: dict[str, bytes] = field(default_factory=dict)
    log: list[tuple[str, bytes]] = field(default_factory=list)
    offers: dict[str, bytes] = field(default_factory=dict)
    deployment: Deployment | None = None
    filters: set[str] = field(default_factory=set)
    sent_bytes: int = 0
    version: int = 5
    max_packet_bytes: int = LARGEST_PACKET_BYTES
    # Called with how often blocks from the beginning of a bundle were asked for.
    on_want: Callable[[int], None] = lambda _count: None
    _wants: int = 0

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False
    ) -> asyncio.Future[Reason]:
        assert qos in (0, 1)
        self.log.append((topic, payload))
        if retain and payload:
            self.retained[topic] = payload
        elif retain:
            self.retained.pop(topic, None)
        parsed = topics.parse_topic(topic)
        if isinstance(parsed, topics.BlockWant) and parsed.digest in self.offers:
            asyncio.get_running_loop().call_soon(self._answer, parsed.digest, json.loads(payload))
        done: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        done.set_result(reason(0))
        return done

    def _answer(self, digest: str, want: dict[str, int]) -> None:
        assert self.deployment is not None
        if want["offset"] == 0:
            self._wants += 1
            self.on_want(self._wants)
        for index in range(want["count"]):
            offset = want["offset"] + index * want["block_bytes"]
            data = self.offers[digest][offset : offset + want["block_bytes"]]
            self.sent_bytes += len(data)
            self.deployment.on_message(topics.Block(DEVICE, digest, offset), data)

    def want(self, topic_filter: str, qos: int = 1) -> None:
        assert qos in (0, 1)
        self.filters.add(topic_filter)

    def unsubscribe(self, topic_filter: str) -> None:
        self.filters.discard(topic_filter)

    def job(self, job: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.retained[topics.format_topic(topics.Job(DEVICE, job))])
        return document

    def reported(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.retained[topics.format_topic(topics.Reported(DEVICE))])
        return document


class Agent:
    """A deployment with fakes around it, on a state directory that outlives it."""

    def __init__(
        self, root: Path, *, https: HttpsSettings | None = None, silence_limit_s: float = 5.0
    ) -> None:
        self.root = root
        self.models = FakeModels()
        self.control = FakeControl()
        self.https = https or HttpsSettings()
        self.silence_limit_s = silence_limit_s
        self.keyring = KEYRING
        self.serves_revoked = False
        self.checkpoint: Callable[[str], None] = lambda _name: None
        self.version = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self, *, wait: bool = True) -> Agent:
        self.store = Store(self.root, checkpoint=self.checkpoint, opened=False)
        self.models.serving.clear()
        self.deployment = Deployment(
            device=DEVICE,
            store=self.store,
            circumstances=Circumstances(
                lambda: self.keyring, MACHINE, self.https.allow, serves_revoked=self.serves_revoked
            ),
            models=self.models,
            control=self.control,
            https=self.https,
            silence_limit_s=self.silence_limit_s,
        )
        self.control.deployment = self.deployment
        await self.deployment.start()
        self.deployment.on_connected()
        self._task = asyncio.create_task(self.deployment.run())
        if wait:
            task = self._task
            await until(lambda: self.deployment.restored or task.done())
        return self

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        try:
            await self._task
        except asyncio.CancelledError:
            pass
        finally:
            await self.deployment.close()

    async def cut_power(self) -> None:
        """End the agent as a power cut does: nothing is written any more."""

        async def close() -> None:
            self.store.unlock()

        self.deployment.close = close  # type: ignore[method-assign,assignment]
        await self.stop()

    @staticmethod
    def full_disk(_document: object) -> None:
        raise NoSpaceError("writing: No space left on device")

    def offer(self, *bundles: Bundle) -> None:
        self.control.offers.update({bundle.hex: bundle.raw for bundle in bundles})

    def desire(self, models: dict[str, Any], version: int | None = None) -> None:
        self.version = self.version + 1 if version is None else version
        payload = json.dumps({"version": self.version, "models": models}).encode()
        self.deployment.on_message(topics.Desired(DEVICE), payload)

    async def finished(self, job: str, limit_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until a job has ended and its outcome is reported; return its final state."""
        async with asyncio.timeout(limit_s):
            while True:
                assert self._task is not None
                if self._task.done():
                    self._task.result()
                topic = topics.format_topic(topics.Job(DEVICE, job))
                if topic in self.control.retained:
                    state = self.control.job(job)
                    if state["status"] not in ("QUEUED", "IN_PROGRESS"):
                        return state
                await asyncio.sleep(0.005)

    async def settle(self, limit_s: float = PATIENCE_S) -> None:
        """Wait until the deployment has nothing left to do; without new input, nothing happens after that."""
        async with asyncio.timeout(limit_s):
            while not self.deployment.idle:
                await asyncio.sleep(0.001)

    async def reached(self, job: str, step: str, limit_s: float = PATIENCE_S) -> None:
        """Wait until a job is in a step."""
        async with asyncio.timeout(limit_s):
            while ("IN_PROGRESS", step) not in self.statuses(job):
                await asyncio.sleep(0.001)

    async def deploy(self, bundle: Bundle, job: str, **changes: Any) -> dict[str, Any]:
        self.offer(bundle)
        self.desire({bundle.name: bundle.entry(job, **changes)})
        state = await self.finished(job)
        await self.settle()  # everything is on disk
        return state

    def statuses(self, job: str) -> list[tuple[str, str | None]]:
        topic = topics.format_topic(topics.Job(DEVICE, job))
        seen = [json.loads(payload) for where, payload in self.control.log if where == topic and payload]
        return [(state["status"], state["step"]) for state in seen]

    def disk(self) -> dict[str, bytes]:
        """All files of the state directory except the journal, the desired document and the lock."""
        left_out = ("jobs.json", "desired.json", "desired.json.mirror", "lock")
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and path.name not in left_out
        }
