"""What the broker knows about agents and models: the messages that agents have retained there.

Promises: what untrusted clients publish is bounded, and at worst becomes a wrong hint. Only names and
documents that somebody asked for are kept.

Leaves to others: the connection (`async_client`), and when to ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from agent.errors import BundleError, EdgeError
from agent.wire import topics
from agent.wire.info import Info
from agent.wire.model_state import ModelState
from agent.wire.presence import UNKNOWN, AgentState, Presence
from edgebundle.errors import BrokerError, ClientError, UnknownAgentError, UnknownModelError
from edgebundle.model_info import ModelInfo
from edgebundle.quiet import wait_until_quiet
from edgebundle.target import Target

if TYPE_CHECKING:
    from agent.mqtt.connection import Connection
    from agent.mqtt.message import Message

# The retained messages of a subscription have all arrived when none has for this long.
_QUIET_S: Final = 0.15
_LIST_LIMIT_S: Final = 0.7
# How long to wait for a model's retained state document.
INFO_LIMIT_S: Final = 1.0
# Names that are read for a hint, and shown in it.
_MAX_NAMES: Final = 10_000
_MAX_SHOWN: Final = 8
NO_AGENT_HINT: Final = "check that edge-agent runs with this broker in its configuration"
AGENTS_HINT: Final = "list the agents and their models with `edgebundle agents`"


class Directory:
    """What agents have retained at one broker.

    Parameters
    ----------
    ready
        Returns the connection, once it is made.
    """

    def __init__(self, ready: Callable[[], Awaitable[Connection]]) -> None:
        self._ready = ready
        self._presences: dict[str, Presence] = {}
        self._watched: set[str] = set()
        self._states: dict[str, dict[str, ModelState]] = {}
        self._listing = asyncio.Lock()
        self._listeners: list[Callable[[topics.Topic, Message], None]] = []

    def watch(self, connection: Connection, topic_filter: str) -> None:
        """Subscribe to retained documents, and follow their changes from then on."""
        if topic_filter not in self._watched:
            self._watched.add(topic_filter)
            connection.want(topic_filter, 0)

    def received(self, topic: topics.Topic, message: Message) -> None:
        """Take a message that is not an answer."""
        match topic:
            case topics.State(device):
                if topics.format_topic(topic) in self._watched:
                    self._presences[device] = _presence(message.payload)
            case topics.ModelState(device, model):
                self._model_state(device, model, message.payload)
        for listener in self._listeners:
            listener(topic, message)

    def presence(self, name: str) -> Presence | None:
        """Return what a watched agent says about itself; None if it has said nothing."""
        return self._presences.get(name)

    def away(self, target: Target) -> str:
        """Return why an agent cannot take requests now; empty if it can, or if nothing is known."""
        presence = self._presences.get(target.name)
        if target.is_group or presence is None:
            return ""
        if presence.state != AgentState.ONLINE:
            return f"{target.name} is {presence.state:.40}"
        if presence.inference == AgentState.OFFLINE:
            return f"{target.name} is online, but its connection for requests is not"
        return ""

    async def agents(self) -> tuple[str, ...]:
        """Return the names of the agents that the broker knows, sorted.

        Raises
        ------
        BrokerError
            If the broker refuses.
        """
        return await self._names(topics.states_filter(), _agent_name)

    async def known(self, target: Target) -> tuple[str, ...]:
        """Return the names of all agents, or of all groups if the target is one.

        Raises
        ------
        BrokerError
            If the broker refuses.
        """
        if target.is_group:
            return await self._names(topics.infos_filter(), _groups)
        return await self.agents()

    async def info(self, target: Target, limit_s: float = INFO_LIMIT_S) -> ModelInfo:
        """Return what the agent has retained about a model, or any agent's for a group.

        Raises
        ------
        UnknownAgentError, UnknownModelError
            If the broker knows no such agent or model.
        """
        known = self._states.setdefault(target.state_filter, {})
        if not known:
            connection = await self._ready()
            arrived = asyncio.Event()

            def on_message(topic: topics.Topic, _message: Message) -> None:
                if isinstance(topic, topics.ModelState) and known:
                    arrived.set()

            self._listeners.append(on_message)
            try:
                self.watch(connection, target.state_filter)
                async with asyncio.timeout(limit_s):
                    await arrived.wait()
            except TimeoutError:
                raise await self._unknown(target) from None
            finally:
                self._listeners.remove(on_message)
        agent = next(iter(known))
        return ModelInfo.of(agent, known[agent])

    async def unknown_model(self, target: Target) -> str:
        """Return a hint with the models of an agent, for a request that was answered with 404."""
        if target.is_group:
            return AGENTS_HINT
        names = await self._names(topics.models_filter(target.name), _model_name)
        if not names:
            return f"no model is deployed to {target.name}: deploy one with `edgebundle deploy`"
        return f"use one of the models of {target.name}: {_listed(names)}"

    async def _unknown(self, target: Target) -> ClientError:
        names = await self.known(target)
        if target.name not in names:
            return absent(target, names)
        return UnknownModelError(
            f"{target.name} has no model {target.model!r}", hint=await self.unknown_model(target)
        )

    def _model_state(self, device: str, model: str, payload: bytes) -> None:
        own = topics.format_topic(topics.ModelState(device, model))
        for topic_filter in (own, topics.model_states_filter(model)):
            known = self._states.get(topic_filter)
            if known is None or (len(known) >= _MAX_NAMES and device not in known):
                continue
            try:
                known[device] = ModelState.from_bytes(payload)
            except BundleError:
                known.pop(device, None)  # cleared: the model was taken out of service

    async def _names(
        self, topic_filter: str, read: Callable[[topics.Topic, bytes], tuple[str, ...]]
    ) -> tuple[str, ...]:
        """Return the names in the retained messages of a filter, sorted."""
        connection = await self._ready()
        names: set[str] = set()
        arrived = asyncio.Event()

        def on_message(topic: topics.Topic, message: Message) -> None:
            if len(names) < _MAX_NAMES and message.payload:
                found = read(topic, message.payload)
                names.update(found)
                if found:
                    arrived.set()

        # One at a time: the broker sends what it has retained only with a new subscription.
        async with self._listing:
            self._listeners.append(on_message)
            try:
                async with asyncio.timeout(_LIST_LIMIT_S):
                    await connection.subscribe(topic_filter, 0)
                    await wait_until_quiet(arrived, _QUIET_S)
            except TimeoutError:
                pass
            except EdgeError as error:
                raise BrokerError(str(error), hint=error.hint) from error
            finally:
                self._listeners.remove(on_message)
                connection.unsubscribe(topic_filter)
        return tuple(sorted(names))


def absent(target: Target, names: tuple[str, ...]) -> UnknownAgentError:
    """Return the error for an agent or a group that the broker does not know, with the names that it does."""
    kind = "group" if target.is_group else "agent"
    hint = names_hint(kind, names)
    return UnknownAgentError(f"no {kind} called {target.name} is known at the broker", hint=hint)


def names_hint(kind: str, names: Sequence[str]) -> str:
    """Return what to do if an agent or a group is not among the names that the broker knows."""
    if not names:
        return f"the broker knows no {kind}: {NO_AGENT_HINT}"
    return f"use one of the {kind}s at this broker: {_listed(names)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"{', '.join(names[:_MAX_SHOWN])}{more}"


def _presence(payload: bytes) -> Presence:
    try:
        return Presence.from_bytes(payload)
    except BundleError:
        return Presence(UNKNOWN, 0, "")


def _agent_name(topic: topics.Topic, _payload: bytes) -> tuple[str, ...]:
    return (topic.device,) if isinstance(topic, topics.State) else ()


def _model_name(topic: topics.Topic, _payload: bytes) -> tuple[str, ...]:
    return (topic.model,) if isinstance(topic, topics.ModelState) else ()


def _groups(topic: topics.Topic, payload: bytes) -> tuple[str, ...]:
    if not isinstance(topic, topics.Info):
        return ()
    try:
        groups = Info.from_bytes(payload).capabilities.groups
    except BundleError:
        return ()
    return tuple(name for name in groups if topics.is_device_name(name))
