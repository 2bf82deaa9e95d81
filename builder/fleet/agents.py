"""Who is there, with what: read from what the agents have left with the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from agent.mqtt.message import Message
from agent.wire import topics
from builder.fleet.broker import Broker
from builder.fleet.client import Client
from builder.fleet.desired import parse_object

# Messages of a fleet are read for at least so long, and until none has come for a while.
QUIET_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model of an agent.

    Attributes
    ----------
    inputs
        What it takes, in words: `image FP32 [1,3,224,224]`.
    """

    name: str
    version: str
    ready: bool
    digest: str
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """One agent.

    Attributes
    ----------
    state
        `online`, `stopped` or `offline`; `unknown` where only other messages are left of it.
    version
        Of the agent.
    machine
        What it runs on, in words.
    """

    name: str
    state: str
    version: str
    machine: str
    models: tuple[ModelSummary, ...]


def agents(broker: Broker, *, wait_s: float = 2.0) -> tuple[AgentSummary, ...]:
    """List the agents that a broker knows, by name.

    Parameters
    ----------
    wait_s
        How long to listen at most. What is retained comes at once; the list is complete when it is quiet.

    Raises
    ------
    BrokerError
        If the broker cannot be reached, or refuses.
    """
    return asyncio.run(agents_async(broker, wait_s=wait_s))


async def agents_async(broker: Broker, *, wait_s: float = 2.0) -> tuple[AgentSummary, ...]:
    """Do what `agents` does, in a running event loop."""
    found = _Found()
    async with Client(broker, found.on_message) as client:
        for topic_filter in topics.fleet_filters():
            await client.subscribe(topic_filter, 0)
        await found.wait_until_quiet(wait_s)
    return found.summaries()


class _Found:
    """What has come so far."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, Any]] = {}
        self._infos: dict[str, dict[str, Any]] = {}
        self._models: dict[str, dict[str, dict[str, Any]]] = {}
        self._came = asyncio.Event()

    def on_message(self, topic: topics.Topic, message: Message) -> None:
        document = parse_object(message.payload)
        match topic:
            case topics.State(device):
                self._states[device] = document
            case topics.Info(device):
                self._infos[device] = document
            case topics.ModelState(device, model):
                self._models.setdefault(device, {})[model] = document
        self._came.set()

    async def wait_until_quiet(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    self._came.clear()
                    try:
                        await asyncio.wait_for(self._came.wait(), QUIET_S)
                    except TimeoutError:
                        if self._states:
                            return
        except TimeoutError:
            return

    def summaries(self) -> tuple[AgentSummary, ...]:
        names = sorted({*self._states, *self._infos, *self._models})
        return tuple(self._summary(name) for name in names if self._states.get(name) != {})

    def _summary(self, name: str) -> AgentSummary:
        state, info = self._states.get(name, {}), self._infos.get(name, {})
        models = tuple(
            ModelSummary(
                name=model,
                version=_text(document.get("version") or _first(document.get("versions"))),
                ready=document.get("ready") is True,
                digest=_text(document.get("digest")),
                inputs=tuple(_tensors(document.get("inputs"))),
            )
            for model, document in sorted(self._models.get(name, {}).items())
            if document
        )
        return AgentSummary(
            name=name,
            state=_text(state.get("state")) or "unknown",
            version=_text(state.get("version") or info.get("agent")),
            machine=_machine(info),
            models=models,
        )


def _machine(info: dict[str, Any]) -> str:
    """Return the board's name, or else the processor's and the architecture."""
    hardware = info.get("hardware")
    fields = hardware if isinstance(hardware, dict) else info
    words = [_text(fields.get("board") or fields.get("cpu")), _text(fields.get("arch"))]
    return ", ".join(word for word in words if word)


def _tensors(value: object) -> Iterator[str]:
    """Describe each tensor of an OIP list; what is none is left out."""
    for tensor in value if isinstance(value, list) else ():
        match tensor:
            case {"name": str(name), "datatype": str(datatype), "shape": list(shape)}:
                yield _text(f"{name} {datatype} [{','.join(map(str, shape))}]")


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else None


def _text(value: object) -> str:
    """Return a text that may be printed: what an agent says is not trusted with a terminal."""
    if not isinstance(value, str):
        return ""
    return "".join(character if character.isprintable() else "?" for character in value[:200])
