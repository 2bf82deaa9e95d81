"""The agents at a broker and their models, from the documents that they have retained there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent.bundle.tensor_spec import TensorSpec
from agent.errors import BrokerError, BundleError
from agent.mqtt.message import Message
from agent.wire import topics
from agent.wire.info import Info
from agent.wire.model_state import ModelState
from agent.wire.presence import UNKNOWN, AgentState, Presence
from agent.wire.reported import Reported, ReportedModel, ServiceState
from builder.fleet.client import Client
from builder.fleet.printable import printable
from edgebundle.broker import Broker
from edgebundle.quiet import wait_until_quiet

# The list is complete when no message has arrived for this long.
_QUIET_S: Final = 0.3
# An agent names three parts of its sandbox at most; a stranger at the broker could name more.
_MAX_SHOWN_PARTS: Final = 8


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model of an agent.

    `name`, `version`, `digest`: the model's name, its version, and `sha256:<hex>` of its bundle.
    `ready`: whether it answers requests.
    `inputs`: each as name, datatype and shape: `image FP32 [1,3,224,224]`.
    `service`, `reason`: what the agent reports: `active`, `degraded`, `rolled_back`, `failed` or `starting`,
        and why. Both are empty if it has reported nothing, or this user may not read it.
    """

    name: str
    version: str
    ready: bool
    digest: str
    inputs: tuple[str, ...] = ()
    service: str = ""
    reason: str = ""

    @property
    def condition(self) -> str:
        """Its state in words for people."""
        words = ["ready" if self.ready else "not ready"]
        if self.service not in ("", ServiceState.ACTIVE, ServiceState.STARTING):
            words.append(self.service.replace("_", " "))
        return ", ".join(words) + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """One agent.

    Attributes
    ----------
    name
        The device's name.
    state
        `online`, `stopped` or `offline`; `unknown` if only other documents of it are at the broker.
    version
        The agent's version.
    machine
        The board or processor and the architecture, for people.
    models
        By name.
    sandbox_missing
        Parts that the sandbox of its models lacks; empty for a complete sandbox, None if it is unknown.
    inference, groups
        Whether requests to it, and to its groups, can arrive: `online` or `offline`; empty if not known.
    name_conflict
        Whether two agents are online under this name.
    """

    name: str
    state: str
    version: str
    machine: str
    models: tuple[ModelSummary, ...]
    sandbox_missing: tuple[str, ...] | None = None
    inference: str = ""
    groups: str = ""
    name_conflict: bool = False

    @property
    def condition(self) -> str:
        """The state in words for people: also which of its other connections are down."""
        parts = (("requests", self.inference), ("groups", self.groups))
        down = [name for name, state in parts if state == AgentState.OFFLINE]
        if not down or self.state != AgentState.ONLINE:
            return self.state
        return f"{self.state} ({' and '.join(down)} {AgentState.OFFLINE})"


def agents(broker: Broker, *, wait_s: float = 2.0) -> tuple[AgentSummary, ...]:
    """List the agents that a broker knows, by name.

    Parameters
    ----------
    wait_s
        How long to listen at most. Retained messages arrive at once; the list is complete when no more come.

    Raises
    ------
    BrokerError
        If the broker cannot be reached, or refuses.
    """
    return asyncio.run(agents_async(broker, wait_s=wait_s))


async def agents_async(broker: Broker, *, wait_s: float = 2.0) -> tuple[AgentSummary, ...]:
    """Do what `agents` does, in a running event loop."""
    listing = _Listing()
    async with Client(broker, listing.on_message) as client:
        with contextlib.suppress(BrokerError):  # not everybody who may ask may read this one
            await client.subscribe(topics.reports_filter(), 0)
        for topic_filter in topics.fleet_filters():
            await client.subscribe(topic_filter, 0)
        await listing.wait_until_quiet(wait_s)
    return listing.summaries()


class _Listing:
    """The documents that have arrived so far; None for one that cannot be read."""

    def __init__(self) -> None:
        self._presences: dict[str, Presence | None] = {}
        self._infos: dict[str, Info] = {}
        self._models: dict[str, dict[str, ModelState]] = {}
        self._reports: dict[str, Mapping[str, ReportedModel]] = {}
        self._arrived = asyncio.Event()

    def on_message(self, topic: topics.Topic, message: Message) -> None:
        with contextlib.suppress(BundleError):
            match topic:
                case topics.State(device):
                    self._presences[device] = None
                    self._presences[device] = Presence.from_bytes(message.payload)
                case topics.Info(device):
                    self._infos[device] = Info.from_bytes(message.payload)
                case topics.Reported(device):
                    self._reports.pop(device, None)
                    report = Reported.from_bytes(message.payload)
                    self._reports[device] = {model.name: model for model in report.models}
                case topics.ModelState(device, model):
                    models = self._models.setdefault(device, {})
                    models.pop(model, None)
                    models[model] = ModelState.from_bytes(message.payload)
        self._arrived.set()

    async def wait_until_quiet(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await wait_until_quiet(self._arrived, _QUIET_S)
                while not self._presences:
                    await wait_until_quiet(self._arrived, _QUIET_S)

    def summaries(self) -> tuple[AgentSummary, ...]:
        names = sorted({*self._presences, *self._infos, *self._models})
        # An agent whose state document is empty or unreadable was removed from the broker.
        removed = {name for name, presence in self._presences.items() if presence is None}
        return tuple(self._summary(name) for name in names if name not in removed)

    def _summary(self, name: str) -> AgentSummary:
        presence, info = self._presences.get(name), self._infos.get(name)
        states, reports = self._models.get(name, {}), self._reports.get(name, {})
        models = tuple(
            _model(model, states.get(model), reports.get(model)) for model in sorted({*states, *reports})
        )
        return AgentSummary(
            name=name,
            state=UNKNOWN if presence is None else printable(presence.state),
            version=printable((presence.version if presence else "") or (info.agent if info else "")),
            machine="" if info is None else _machine(info),
            models=models,
            sandbox_missing=None
            if info is None or info.sandbox is None
            else tuple(printable(part) for part in info.sandbox.missing[:_MAX_SHOWN_PARTS]),
            inference="" if presence is None else printable(presence.inference),
            groups="" if presence is None else printable(presence.groups),
            name_conflict=presence is not None and presence.name_conflict,
        )


def _model(name: str, state: ModelState | None, report: ReportedModel | None) -> ModelSummary:
    """Return what a model's state document and the agent's report say; one of them may be missing."""
    version = state.version if state is not None else "" if report is None else report.version
    digest = state.digest if state is not None else "" if report is None else report.digest
    return ModelSummary(
        name=printable(name),
        version=printable(version),
        ready=state is not None and state.ready,
        digest=printable(digest),
        inputs=() if state is None else tuple(_describe(spec) for spec in state.inputs),
        service="" if report is None else printable(report.state),
        reason="" if report is None else printable(report.message or ""),
    )


def _machine(info: Info) -> str:
    """Return the name of the board, or else the processor, and the architecture."""
    hardware = info.hardware
    words = (printable(hardware.board or hardware.cpu or ""), printable(hardware.arch))
    return ", ".join(word for word in words if word)


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.datatype} [{','.join(map(str, spec.shape))}]"
