"""Bring a bundle to an agent: say that it is desired, offer its bytes, and watch what becomes of it.

Promises: what else the agent should run stays as it is, also when somebody else deploys at the same moment
or the broker has forgotten everything; a broker that restarts in between costs time and nothing else.
Leaves to others: every check. The agent trusts nothing that is sent from here.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from agent.bundle.archive import MANIFEST, read_index, read_member
from agent.bundle.manifest import Manifest
from agent.mqtt.message import Message
from agent.wire import topics
from builder.errors import FleetError, PackageError
from builder.fleet.broker import Broker
from builder.fleet.client import Client
from builder.fleet.desired import CONFLICT, DesiredState, parse_object
from builder.fleet.offer import Offer
from builder.fleet.presence import Presence, absent

# An agent that has just been installed may be on its way; a misspelt name never is.
ABSENT_LIMIT_S: Final = 10.0
# What a broker needs for a small message, with a lot to spare.
PUBLISH_LIMIT_S: Final = 10.0
# What the retained messages of one agent may take after the subscription was granted.
SETTLE_S: Final = 0.3
# An agent reports at once after its birth; one that never does is deployed to all the same.
REPORT_LIMIT_S: Final = 2.0
# How often to put the request back when somebody else's document replaced it in the same moment.
_MAX_MERGES: Final = 20
_FINAL: Final = frozenset({"SUCCEEDED", "FAILED", "TIMED_OUT", "REJECTED", "CANCELED", "SUPERSEDED"})


@dataclass(frozen=True, slots=True)
class DeployProgress:
    """How far a deployment is.

    Attributes
    ----------
    status, step
        The job's, in the agent's words; empty until it has said something.
    fraction
        Part of the download that is there, 0 to 1.
    """

    status: str = ""
    step: str = ""
    fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class DeployResult:
    """What became of a deployment.

    Attributes
    ----------
    status, result, code, message
        The job's, in the agent's words.
    sent_bytes
        What was sent from here, over MQTT; more than the bundle's size after lost blocks.
    duration_s
        From the request to the result.
    """

    agent: str
    model: str
    version: str
    digest: str
    job: str
    status: str
    result: str
    code: str
    message: str
    sent_bytes: int
    duration_s: float

    @property
    def ok(self) -> bool:
        """Whether the bundle is in service."""
        return self.status == "SUCCEEDED"


def deploy(
    bundle: str | Path,
    agent: str,
    broker: Broker,
    *,
    source: str | None = None,
    wait_s: float = 600.0,
    progress: Callable[[DeployProgress], None] | None = None,
) -> DeployResult:
    """Deploy a bundle to one agent, and wait for the result.

    Parameters
    ----------
    bundle
        The file; it is also what the digest is taken of when `source` says where the agent gets it.
    agent
        The device's name.
    source
        An https URL that the agent may download from; by default the bundle goes over MQTT, from here.
    wait_s
        How long to wait for the result.
    progress
        Called with every change.

    Raises
    ------
    FleetError
        If there is no such agent, or no result in time.
    PackageError
        If the file is no bundle.
    BrokerError
        If the broker cannot be reached, or refuses.
    """
    return asyncio.run(
        deploy_async(Path(bundle), agent, broker, source=source, wait_s=wait_s, progress=progress)
    )


async def deploy_async(
    bundle: Path,
    agent: str,
    broker: Broker,
    *,
    source: str | None = None,
    wait_s: float = 600.0,
    progress: Callable[[DeployProgress], None] | None = None,
) -> DeployResult:
    """Do what `deploy` does, in a running event loop."""
    if not topics.is_device_name(agent):
        raise FleetError(f"{agent!r:.80} cannot be the name of an agent")
    with Offer(bundle) as offer:
        manifest, digest = await asyncio.to_thread(_read, bundle)
        entry = {
            "digest": digest,
            "size": offer.size,
            "version": manifest.version,
            "job": f"deploy-{digest[7:19]}-{secrets.token_hex(4)}",
            "sources": [source or "mqtt"],
        }
        task = _Deployment(agent, manifest.name, entry, offer, progress or (lambda _progress: None))
        async with Client(broker, task.on_message, on_up=task.on_up) as client:
            result = await task.run(client, wait_s)
    if result is None:
        raise await absent(agent, broker)
    return result


class _Deployment:
    """One deployment, from this side."""

    def __init__(
        self,
        agent: str,
        model: str,
        entry: dict[str, Any],
        offer: Offer,
        progress: Callable[[DeployProgress], None],
    ) -> None:
        self._agent = agent
        self._model = model
        self._entry = entry
        self._hex: str = entry["digest"][7:]
        self._offer = offer
        self._tell = progress
        self._progress = DeployProgress()
        self._client: Client | None = None
        self._presence = Presence(agent)
        self._desired = DesiredState(model, entry)
        self._requested = False
        self._job: dict[str, Any] = {}
        self._merges = 0
        self._changed = asyncio.Event()

    async def run(self, client: Client, wait_s: float) -> DeployResult | None:
        """Request, offer, and wait; None when there is nobody to deploy to."""
        self._client = client
        began = time.monotonic()
        end = began + wait_s
        for topic in (
            topics.Reported(self._agent),
            topics.Desired(self._agent),
            topics.Job(self._agent, self._entry["job"]),
            topics.BlockWant(self._agent, self._hex),
            topics.State(self._agent),
        ):
            await client.subscribe(topics.format_topic(topic), 1)
        await asyncio.sleep(SETTLE_S)
        if not await self._presence.wait(min(wait_s, ABSENT_LIMIT_S)):
            return None
        await self._wait_for_report()
        await self._request()
        await self._wait(lambda: self._job.get("status") in _FINAL, end, lambda: self._unfinished(wait_s))
        job = self._job
        return DeployResult(
            agent=self._agent,
            model=self._model,
            version=self._entry["version"],
            digest=self._entry["digest"],
            job=self._entry["job"],
            status=job["status"],
            result=job.get("result") or "",
            code=job.get("code") or "",
            message=job.get("message") or "",
            sent_bytes=self._offer.sent,
            duration_s=time.monotonic() - began,
        )

    def on_message(self, topic: topics.Topic, message: Message) -> None:
        """Take what the agent, or another deployer, says."""
        # Each with its names: amqtt sends what is retained at other topics too.
        self._presence.on_message(topic, message)
        job: str = self._entry["job"]
        match topic:
            case topics.BlockWant(self._agent, self._hex):
                self._send_blocks(message.payload)
                return
            case topics.State(self._agent):
                pass
            case topics.Desired(self._agent):
                self._desired.on_desired(message.payload)
            case topics.Reported(self._agent):
                self._desired.on_reported(message.payload)
            case topics.Job(self._agent, name) if name == job:
                self._on_job(parse_object(message.payload))
            case _:
                return
        self._changed.set()

    def on_up(self) -> None:
        """Say it again to a broker that may have forgotten."""
        document = self._desired.published
        if document is not None and self._job.get("status") not in _FINAL:
            assert self._client is not None
            self._client.publish(topics.format_topic(topics.Desired(self._agent)), document, retain=True)

    def _on_job(self, job: dict[str, Any]) -> None:
        self._job = job
        fraction = job.get("progress")
        self._progress = replace(
            self._progress,
            status=str(job.get("status") or ""),
            step=str(job.get("step") or ""),
            fraction=float(fraction) if isinstance(fraction, int | float) else 0.0,
        )
        self._tell(self._progress)

    def _send_blocks(self, want: bytes) -> None:
        assert self._client is not None
        for offset, data in self._offer.answer(want):
            topic = topics.format_topic(topics.Block(self._agent, self._hex, offset))
            self._client.publish(topic, data, qos=0)

    async def _request(self) -> None:
        """Publish a desired document that has everything the last one had, and ours."""
        assert self._client is not None
        document = self._desired.write(online=self._presence.state == "online")
        await self._client.publish_surely(
            topics.format_topic(topics.Desired(self._agent)), document, retain=True, limit_s=PUBLISH_LIMIT_S
        )
        self._requested = True

    async def _wait(self, done: Callable[[], bool], end: float, give_up: Callable[[], FleetError]) -> None:
        while not done():
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise give_up()
            try:
                await asyncio.wait_for(self._changed.wait(), min(left_s, 1.0))
            except TimeoutError:
                continue
            self._changed.clear()
            await self._look()

    async def _wait_for_report(self) -> None:
        """Wait a moment for what an agent that has just started says behind its birth."""
        end = time.monotonic() + REPORT_LIMIT_S
        while self._presence.state == "online" and not self._desired.reported and time.monotonic() < end:
            await asyncio.sleep(0.02)

    async def _look(self) -> None:
        """React to what others did to the document that was published."""
        if not self._requested or self._job:
            return
        refusal = self._desired.refusal()
        if refusal is not None and refusal.code != CONFLICT:
            raise FleetError(
                f"{self._agent} refused what is desired: {refusal.message} ({refusal.code})",
                hint="is another tool writing the desired document?",
            )
        if self._desired.lost() and self._merges < _MAX_MERGES:
            self._merges += 1
            await asyncio.sleep(secrets.randbelow(200) / 1000)  # two that collided should not do it again
            await self._request()

    def _unfinished(self, wait_s: float) -> FleetError:
        if not self._job:
            state = self._presence.state or "unknown"
            return FleetError(
                f"{self._agent} ({state}) did not answer within {wait_s:g} s",
                hint="the request stays: it is taken up when the agent is back",
            )
        where = f"{self._progress.status} {self._progress.step}"
        return FleetError(
            f"{self._agent} had not finished after {wait_s:g} s: {where}",
            hint="deploy it again to go on where it was, or give it more time with --wait",
        )


def _read(path: Path) -> tuple[Manifest, str]:
    with path.open("rb") as file:
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        members = {member.name: member for member in read_index(file.fileno())}
        if MANIFEST not in members:
            raise PackageError(f"{path} has no {MANIFEST}")
        return Manifest.from_bytes(read_member(file.fileno(), members[MANIFEST])), digest
