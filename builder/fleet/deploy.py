"""Deploy a bundle to an agent: publish that it is desired, offer its bytes, and follow the job.

Promises: the agent's other models stay as they are, even if another tool deploys at the same moment or the
broker has forgotten everything. A broker that restarts in between costs only time.
Leaves to others: every check. The agent trusts nothing that is sent from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from agent.bundle.names import hex_digest
from agent.errors import BundleError, SelfTestError
from agent.mqtt.message import Message
from agent.wire import topics
from agent.wire.blocks import MIN_BLOCK_BYTES, Want, largest_block
from agent.wire.desired import MQTT_SOURCE, DesiredModel
from agent.wire.document import MAX_SAFE_INTEGER
from agent.wire.job import JobState, Status
from agent.wire.reported import CONFLICT, ServiceState
from builder.errors import FleetError
from builder.fleet.bundle_file import BundleFile
from builder.fleet.client import LARGER_PACKETS, Client
from builder.fleet.desired import DesiredState
from builder.fleet.hints import AGENT_NAME
from builder.fleet.offer import Offer
from builder.fleet.presence import ABSENT_LIMIT_S, PresenceWatch, unknown_agent
from edgebundle.broker import Broker

# A broker acknowledges a small message within milliseconds.
PUBLISH_LIMIT_S: Final = 10.0
# How long the retained messages of one agent may take to arrive after the subscription was granted.
SETTLE_S: Final = 0.3
# An agent reports as soon as it is online. If it does not, the deployment goes on without its report.
REPORT_LIMIT_S: Final = 2.0
# The report about a model follows the end of its job at once.
CONFIRM_LIMIT_S: Final = 1.0
_OUT_OF_SERVICE: Final = (ServiceState.FAILED, ServiceState.ROLLED_BACK)
# How often to write the document again after another tool's has replaced it.
_MAX_MERGES: Final = 20
# How many blocks the broker may be too small for: an agent of this version asks for smaller ones at once.
_MAX_CUT_SHORT: Final = 2
# Two tools whose documents collided wait for random times up to this before they write again.
_MAX_BACKOFF_MS: Final = 200


@dataclass(frozen=True, slots=True)
class DeployProgress:
    """The progress of a deployment.

    Attributes
    ----------
    status, step
        The job's status and step as in `agent.wire.job`; empty before the agent has published them.
    fraction
        The downloaded part of the bundle, 0 to 1.
    """

    status: str = ""
    step: str = ""
    fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class DeployResult:
    """The outcome of a deployment.

    Attributes
    ----------
    agent, model, version, digest, job
        What was deployed where: names, the manifest's version, `sha256:<hex>`, and the job's identifier.
    status, result, code, message
        The job's, as in `agent.wire.job`; empty strings instead of None.
    sent_bytes
        Bytes sent from here over MQTT; more than the bundle has if blocks were lost.
    duration_s
        Seconds from the request to the result.
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
        return self.status == Status.SUCCEEDED


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
        The file. With `source` only its digest, size and manifest are used.
    agent
        The device's name.
    source
        An https URL that the agent may download from; by default the bundle is sent from here over MQTT.
    wait_s
        How long to wait for the result, in seconds.
    progress
        Called with every change.

    Raises
    ------
    FleetError
        If there is no such agent, or no result in time.
    PackageError
        If the file is not a bundle.
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
        raise FleetError(f"expected the name of an agent, got {agent!r:.80}", hint=AGENT_NAME)
    with Offer(bundle) as offer:
        file = await asyncio.to_thread(BundleFile.read, bundle)
        wanted = DesiredModel(
            model=file.manifest.name,
            digest=file.digest,
            size=offer.size,
            version=file.manifest.version,
            job=f"deploy-{hex_digest(file.digest)[:12]}-{secrets.token_hex(4)}",
            sources=(source or MQTT_SOURCE,),
        )
        task = Deployment(agent, wanted, offer, progress or (lambda _progress: None))
        async with Client(broker, task.on_message, on_up=task.on_up) as client:
            return await task.run(client, wait_s, broker)


class Deployment:
    """One deployment, until its job has ended.

    `wanted`: what should run.
    `offer`: the bundle's file; None for a bundle that the agent has.
    """

    def __init__(
        self,
        agent: str,
        wanted: DesiredModel,
        offer: Offer | None,
        progress: Callable[[DeployProgress], None],
    ) -> None:
        self._agent = agent
        self._wanted = wanted
        self._hex = hex_digest(wanted.digest)
        self._offer = offer
        self._progress = progress
        self._client: Client | None = None
        self._presence = PresenceWatch(agent)
        self._desired = DesiredState(wanted)
        self._requested = False
        self._job: JobState | None = None
        self._merges = 0
        self._cut_short = 0
        self._failure: FleetError | None = None
        self._changed = asyncio.Event()

    async def run(self, client: Client, wait_s: float, broker: Broker) -> DeployResult:
        """Publish, offer and wait for the end of the job.

        Raises `FleetError` if the broker does not know the agent, or no result arrives in time.
        """
        self._client = client
        began = time.monotonic()
        end = began + wait_s
        for topic in (
            topics.Reported(self._agent),
            topics.Desired(self._agent),
            topics.Job(self._agent, self._wanted.job),
            topics.BlockWant(self._agent, self._hex),
            topics.State(self._agent),
        ):
            await client.subscribe(topics.format_topic(topic), 1)
        if self._offer is not None and MQTT_SOURCE in self._wanted.sources and self._room() < MIN_BLOCK_BYTES:
            raise self._too_small()
        await asyncio.sleep(SETTLE_S)
        if not await self._presence.wait(min(wait_s, ABSENT_LIMIT_S)):
            raise await unknown_agent(self._agent, broker)
        await self._wait_for_report()
        await self._request()
        job = await self._checked(await self._wait_for_end(end, wait_s))
        return DeployResult(
            agent=self._agent,
            model=self._wanted.model,
            version=self._wanted.version,
            digest=self._wanted.digest,
            job=self._wanted.job,
            status=job.status,
            result=job.result or "",
            code=job.code or "",
            message=job.message or "",
            sent_bytes=0 if self._offer is None else self._offer.sent,
            duration_s=time.monotonic() - began,
        )

    def on_message(self, topic: topics.Topic, message: Message) -> None:
        """Take a document of the agent, or of another deployer."""
        self._presence.on_message(topic, message)
        # The names in each topic are checked: amqtt also sends messages that are retained at other topics.
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
            case topics.Job(self._agent, self._wanted.job):
                self._on_job(message.payload)
            case _:
                return
        self._changed.set()

    def on_up(self) -> None:
        """Publish the document again: the broker may have forgotten it."""
        document = self._desired.published
        if document is not None and not self._ended:
            assert self._client is not None
            self._client.publish(topics.format_topic(topics.Desired(self._agent)), document, retain=True)

    @property
    def _ended(self) -> bool:
        return self._job is not None and self._job.status.final

    def _on_job(self, payload: bytes) -> None:
        try:
            self._job = JobState.from_bytes(payload)
        except BundleError:
            return  # removed from the broker, or of an agent that this version does not understand
        self._progress(DeployProgress(self._job.status, self._job.step or "", self._job.progress))

    def _send_blocks(self, want: bytes) -> None:
        assert self._client is not None
        room = self._room()
        if self._offer is None or not self._is_sendable(want, room):
            return
        for offset, data in self._offer.blocks(want, room):
            topic = topics.format_topic(topics.Block(self._agent, self._hex, offset))
            self._client.publish(topic, data, qos=0)

    def _is_sendable(self, want: bytes, room: int) -> bool:
        """Return whether the broker takes blocks that are useful; `_wait_for_end` raises if not."""
        if room >= MIN_BLOCK_BYTES:
            with contextlib.suppress(BundleError):
                self._cut_short += Want.from_bytes(want).block_bytes > room
            if self._cut_short <= _MAX_CUT_SHORT:
                return True
        self._failure = self._too_small()
        self._changed.set()
        return False

    def _room(self) -> int:
        """Return how many bytes of a block the broker takes."""
        assert self._client is not None
        topic = topics.format_topic(topics.Block(self._agent, self._hex, MAX_SAFE_INTEGER))
        return largest_block(topic, self._client.max_packet_bytes)

    def _too_small(self) -> FleetError:
        assert self._client is not None
        return FleetError(
            f"expected a broker that takes the blocks that {self._agent} asks for, got one that takes "
            f"packets of at most {self._client.max_packet_bytes} bytes",
            hint=LARGER_PACKETS,
        )

    async def _request(self) -> None:
        """Publish a desired document with everything that the one in force has, and our model."""
        assert self._client is not None
        document = self._desired.write(online=self._presence.online)
        await self._client.publish_confirmed(
            topics.format_topic(topics.Desired(self._agent)), document, retain=True, limit_s=PUBLISH_LIMIT_S
        )
        self._requested = True

    async def _wait_for_end(self, end: float, wait_s: float) -> JobState:
        """Return the job when it has ended; restore the desired document if another replaces it first."""
        while self._job is None or not self._job.status.final:
            left_s = end - time.monotonic()
            if self._failure is not None:
                raise self._failure
            if left_s <= 0:
                raise self._unfinished(wait_s)
            try:
                async with asyncio.timeout(min(left_s, 1.0)):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()
            await self._restore_request()
        return self._job

    async def _checked(self, job: JobState) -> JobState:
        """Return the end of the job; a failure if the agent reports that the model is out of service."""
        end = time.monotonic() + CONFIRM_LIMIT_S
        while job.status is Status.SUCCEEDED and (model := self._desired.model()) is None:
            if time.monotonic() > end:
                return job
            await asyncio.sleep(0.02)
        if job.status is not Status.SUCCEEDED or model is None or model.state not in _OUT_OF_SERVICE:
            return job
        return replace(job, status=Status.FAILED, code=SelfTestError.code, message=model.message)

    async def _wait_for_report(self) -> None:
        """Wait up to `REPORT_LIMIT_S` for the report of an agent that has just come online."""
        end = time.monotonic() + REPORT_LIMIT_S
        while self._presence.online and not self._desired.reported and time.monotonic() < end:
            await asyncio.sleep(0.02)

    async def _restore_request(self) -> None:
        """Write the desired document again if another tool's has replaced ours, and no job has begun."""
        if not self._requested or self._job is not None:
            return
        rejection = self._desired.rejection()
        if rejection is not None and rejection.code != CONFLICT:
            raise FleetError(
                f"{self._agent} refused the desired document: {rejection.message} ({rejection.code})",
                hint="check whether another tool writes the desired document",
            )
        if self._desired.lost() and self._merges < _MAX_MERGES:
            self._merges += 1
            await asyncio.sleep(secrets.randbelow(_MAX_BACKOFF_MS) / 1000)
            await self._request()

    def _unfinished(self, wait_s: float) -> FleetError:
        if self._job is None:
            state = self._presence.state or "unknown"
            return FleetError(
                f"{self._agent} ({state}) did not answer within {wait_s:g} s",
                hint="the request stays: the agent takes it up when it is back; without --source, deploy it "
                "again then, because the bundle is sent from here",
            )
        return FleetError(
            f"{self._agent} had not finished after {wait_s:g} s: {self._job.status} {self._job.step or ''}",
            hint="the agent goes on if it has the bundle or a --source; otherwise deploy it again",
        )
