"""One kept connection to a broker, over which models are asked: for asyncio.

Promises: the connection is made once, kept, and made again when it is lost; requests that are under way are
then sent again. Every request ends: with its answer, or with an error. A late or a second answer is dropped.
What a stranger at the broker publishes is bounded, and ends no request. The client identifier is random and
appears in no message, because anybody who knows it can disconnect the client.

Leaves to others: one request (`exchange`), what is asked (`async_model`), threads (`client`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from agent.bundle.tensor_spec import TensorSpec
from agent.errors import BundleError, ConfigError, EdgeError
from agent.wire import topics
from agent.wire.info import Info
from agent.wire.model_state import ModelState
from agent.wire.presence import UNKNOWN, AgentState, Presence
from edgebundle.broker import Broker
from edgebundle.errors import (
    BrokerError,
    ClientError,
    ClosedError,
    NoAnswerError,
    UnknownAgentError,
    UsageError,
)
from edgebundle.exchange import Exchange
from edgebundle.model_info import ModelInfo
from edgebundle.request import Request
from edgebundle.target import Target

if TYPE_CHECKING:
    from agent.mqtt.connection import Connection
    from agent.mqtt.message import Message
    from agent.mqtt.reason_codes import Reason
    from edgebundle.async_model import AsyncModel

# An answer has at most 64 MiB, and a broker drops a larger packet without a word.
_MAX_PACKET_BYTES: Final = 65 << 20
# How long to wait at the end for acknowledgements; a broker that is reachable needs a millisecond.
_DRAIN_S: Final = 2.0
# The retained messages of a subscription have all arrived when none has for this long.
_QUIET_S: Final = 0.15
_LIST_LIMIT_S: Final = 0.7
# How long to wait for a model's retained state document.
_INFO_LIMIT_S: Final = 1.0
# Names that are read for a hint, and shown in it.
_MAX_NAMES: Final = 10_000
_MAX_SHOWN: Final = 8
AGENTS_HINT: Final = "list the agents and their models with `edgebundle agents`"


class AsyncClient:
    """A client of the agents at one broker.

    Parameters
    ----------
    broker
        `mqtt://[user[:password]@]host[:port]`, `mqtts://...` for TLS, or a `Broker`.
    cafile
        Certificate authorities for the broker's certificate; None for the system's.
    certificate, key
        This client's own, for a broker that asks for one.
    password_file
        A file with the user's password on its first line.
    mqtt_version
        `auto` (5, or 3.1.1 if the broker refuses it), `5` or `3.1.1`.
    progress
        Called with one line when a request has to wait: the agent is away, the connection is lost.

    Raises
    ------
    UsageError
        If these do not describe a broker.

    Examples
    --------
    ::

        async with AsyncClient("mqtts://broker") as client:
            answer = await client.model("kitchen", "faces")(image="cat.jpg")
    """

    def __init__(
        self,
        broker: str | Broker,
        *,
        cafile: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        password_file: str | Path | None = None,
        mqtt_version: str = "auto",
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if not isinstance(broker, Broker):
            broker = Broker(
                broker, _path(cafile), _path(certificate), _path(key), _path(password_file), mqtt_version
            )
        self._settings = replace(broker.settings(), max_packet_bytes=_MAX_PACKET_BYTES)
        user = broker.user
        # Compared by the broker's access list; a random name for an anonymous client.
        self._reply_name = (
            user if user is not None and topics.is_reply_name(user) else f"anonymous-{secrets.token_hex(6)}"
        )
        # Others at the broker cannot guess where this client listens.
        self._folder = secrets.token_hex(8)
        self._progress = progress or (lambda _line: None)
        self._link: Connection | None = None  # from the first attempt on
        self._connection: Connection | None = None  # from the first success on
        self._connecting: asyncio.Task[Connection] | None = None
        self._closed = False
        self._connects = 0
        self._exchanges: dict[str, Exchange] = {}
        self._presences: dict[str, Presence] = {}
        self._watched: set[str] = set()
        self._states: dict[str, dict[str, ModelState]] = {}
        self._inquiries: dict[tuple[str, bool], asyncio.Task[None]] = {}
        self._listing = asyncio.Lock()
        self._listeners: list[Callable[[topics.Topic, Message], None]] = []

    async def __aenter__(self) -> AsyncClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def model(self, agent: str, model: str) -> AsyncModel:
        """Return a model on one agent; nothing is sent yet.

        Raises
        ------
        UsageError
            If no agent or model can have these names.
        """
        from edgebundle.async_model import AsyncModel

        return AsyncModel(self, Target.of(agent, model))

    def group_model(self, group: str, model: str) -> AsyncModel:
        """Return a model on any agent of a group: the broker gives each request to one of them.

        Raises
        ------
        UsageError
            If no group or model can have these names.
        """
        from edgebundle.async_model import AsyncModel

        return AsyncModel(self, Target.of(group, model, is_group=True))

    async def agents(self) -> tuple[str, ...]:
        """Return the names of the agents that the broker knows, online or not.

        Raises
        ------
        BrokerError
            If the broker cannot be reached, or refuses.
        """
        return await self._names(topics.states_filter(), _agent_name)

    async def connect(self) -> None:
        """Connect, if this client is not connected yet; a request does it too.

        Raises
        ------
        BrokerError
            If the broker cannot be reached, or refuses.
        ClosedError
            If the client was closed.
        """
        await self._ready()

    async def close(self) -> None:
        """End the connection; requests that are under way end with `ClosedError`."""
        self._closed = True
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError, ClientError):
                await connecting
        for inquiry in tuple(self._inquiries.values()):
            inquiry.cancel()
        answered = not self._exchanges
        for exchange in tuple(self._exchanges.values()):
            exchange.fail(ClosedError("the client was closed while the request was under way"))
        self._exchanges.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            # What nobody waits for need not arrive.
            await connection.close(drain_s=_DRAIN_S if answered else 0.0)

    async def ask(
        self,
        target: Target,
        request: Request,
        *,
        end_s: float,
        trace: tuple[tuple[str, str], ...] = (),
        progress: Callable[[str], None] | None = None,
    ) -> tuple[Message, Exchange]:
        """Send a request under one identifier until its answer arrives; `AsyncModel` reads it.

        Raises
        ------
        ClientError
            If there is no answer; `errors` says which.
        """
        connection = await self._ready()
        said: set[str] = set()

        def on_silence(exchange: Exchange) -> None:
            self._inquire(exchange)
            away = self._away(target)
            if away and away not in said:
                said.add(away)
                left_s = end_s - time.monotonic()
                (progress or self._progress)(f"{away}; waiting for up to {left_s:.0f} s")

        identifier = secrets.token_hex(8)
        reply = topics.Reply(self._reply_name, f"{target.name}/{self._folder}/{identifier}")
        body = None
        if connection.version != 5:
            body = request.to_json(await self._inputs(target, request, end_s))
        exchange = Exchange(
            connection,
            target,
            request,
            identifier=identifier,
            reply_to=topics.format_topic(reply),
            end_s=end_s,
            trace=trace,
            body=body,
            on_silence=on_silence,
            too_late=self._too_late,
        )
        self._exchanges[identifier] = exchange
        try:
            if not target.is_group:
                self._watch(connection, topics.format_topic(topics.State(target.name)))
            exchange.start()
            return await exchange.done, exchange
        finally:
            self._exchanges.pop(identifier, None)
            exchange.close()

    async def info(self, target: Target, limit_s: float = _INFO_LIMIT_S) -> ModelInfo:
        """Return what the agent has retained about a model, or any agent's for a group.

        Raises
        ------
        UnknownAgentError, UnknownModelError
            If the broker knows no such agent or model.
        """
        connection = await self._ready()
        known = self._states.setdefault(target.state_filter, {})
        if not known:
            arrived = asyncio.Event()

            def on_message(topic: topics.Topic, _message: Message) -> None:
                if isinstance(topic, topics.ModelState) and known:
                    arrived.set()

            self._listeners.append(on_message)
            try:
                self._watch(connection, target.state_filter)
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

    # The connection.

    async def _ready(self) -> Connection:
        if self._closed:
            raise ClosedError("the client is closed")
        if self._connection is not None:
            return self._connection
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        # One caller that gives up does not take the connection from the others.
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> Connection:
        # Imported late: paho and ssl take longer to load than everything else here.
        from agent.mqtt.connection import Connection

        # As a library should: nothing goes to stderr unless the program has configured logging.
        log = logging.getLogger("agent.mqtt")
        if not log.handlers:
            log.addHandler(logging.NullHandler())
        connection = self._link = Connection(
            self._settings,
            client_id=f"edgebundle-{secrets.token_hex(8)}",
            on_message=self._received,
            on_up=self._up,
            on_down=self._down,
            name="edgebundle client",
        )
        try:
            await connection.connect()
            await connection.subscribe(topics.reply_filter(self._reply_name, f"+/{self._folder}"), 1)
        except BaseException as error:
            self._connecting = None
            await connection.close()
            if isinstance(error, ConfigError):
                raise UsageError(str(error), hint=error.hint) from error
            if isinstance(error, EdgeError):
                raise BrokerError(str(error), hint=error.hint) from error
            raise
        self._connection, self._connecting = connection, None
        return connection

    def _up(self, _session_present: bool) -> None:
        self._connects += 1
        for exchange in tuple(self._exchanges.values()):
            exchange.reconnected()

    def _down(self, why: Reason) -> None:
        if self._exchanges and not self._closed:
            self._progress(f"the connection to {self._settings.url} was lost ({why}); connecting again")

    def _watch(self, connection: Connection, topic_filter: str) -> None:
        if topic_filter not in self._watched:
            self._watched.add(topic_filter)
            connection.want(topic_filter, 0)

    def _received(self, message: Message) -> None:
        topic = topics.parse_topic(message.topic)
        match topic:
            case topics.Reply():
                target, _, rest = topic.suffix.partition(f"/{self._folder}/")
                exchange = self._exchanges.get(rest)
                # A retained message is no answer: it would arrive with the subscription.
                if exchange is not None and exchange.target.name == target and not message.retain:
                    exchange.arrived(message)
            case topics.State(device):
                if topics.format_topic(topic) in self._watched:
                    self._presences[device] = _presence(message.payload)
            case topics.ModelState(device, model):
                self._model_state(device, model, message.payload)
        if topic is not None:
            for listener in self._listeners:
                listener(topic, message)
        if self._link is not None:
            self._link.ack(message)

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

    # What to say when there is no answer.

    def _away(self, target: Target) -> str:
        presence = self._presences.get(target.name)
        if target.is_group or presence is None:
            return ""
        if presence.state != AgentState.ONLINE:
            return f"{target.name} is {presence.state:.40}"
        if presence.inference == AgentState.OFFLINE:
            return f"{target.name} is online, but its connection for requests is not"
        return ""

    def _inquire(self, exchange: Exchange) -> None:
        """Find out whether the broker knows the agent or group, once, and end its requests if it does not."""
        target = exchange.target
        # A broker that restarted may have forgotten agents that are about to connect again.
        if target.name in self._presences or self._connects > 1:
            return
        key = (target.name, target.is_group)
        if key not in self._inquiries:
            task = asyncio.get_running_loop().create_task(self._look_for(target, exchange))
            self._inquiries[key] = task
            task.add_done_callback(lambda _task: self._inquiries.pop(key, None))

    async def _look_for(self, target: Target, exchange: Exchange) -> None:
        try:
            names = await self._known(target)
        except ClientError:
            return
        # An access list may hide the names; then only the broker's word that nobody takes requests counts.
        if target.name in names or (not names and not exchange.no_subscriber):
            return
        error = _absent(target, names)
        for each in tuple(self._exchanges.values()):
            if (each.target.name, each.target.is_group) == (target.name, target.is_group):
                each.fail(error)

    async def _known(self, target: Target) -> tuple[str, ...]:
        if target.is_group:
            return await self._names(topics.infos_filter(), _groups)
        return await self._names(topics.states_filter(), _agent_name)

    async def _unknown(self, target: Target) -> ClientError:
        from edgebundle.errors import UnknownModelError

        names = await self._known(target)
        if target.name not in names:
            return _absent(target, names)
        return UnknownModelError(
            f"{target.name} has no model {target.model!r}", hint=await self.unknown_model(target)
        )

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
                    while True:
                        arrived.clear()
                        await asyncio.wait_for(arrived.wait(), _QUIET_S)
            except TimeoutError:
                pass
            except EdgeError as error:
                raise BrokerError(str(error), hint=error.hint) from error
            finally:
                self._listeners.remove(on_message)
                connection.unsubscribe(topic_filter)
        return tuple(sorted(names))

    async def _inputs(self, target: Target, request: Request, end_s: float) -> tuple[TensorSpec, ...]:
        from agent.wire.content_types import JSON, RAW

        if request.content_type in (JSON, RAW):
            return ()
        info = await self.info(target, max(0.0, min(_INFO_LIMIT_S, end_s - time.monotonic())))
        return info.inputs

    def _too_late(self, exchange: Exchange) -> ClientError:
        target = exchange.target
        waited_s = time.monotonic() - exchange.sent_s
        connection = self._connection
        hint = AGENTS_HINT
        presence = self._presences.get(target.name)
        if connection is None or not connection.connected:
            why = f"there is no connection to {self._settings.url}"
            hint = "check whether the broker runs; the client connects again by itself"
        elif target.is_group:
            why = "no member of the group answered"
            if exchange.no_subscriber:
                why = f"no member of the group serves {target.model}"
        elif presence is None:
            why = "no agent of that name is known at the broker"
        elif self._away(target):
            why = self._away(target)
        else:
            why = "it is online"
            # MQTT has no error for an answer that the access list withholds.
            hint = (
                "allow more time, or check that the broker's access list lets this user read "
                f"{topics.reply_filter(self._reply_name)}"
            )
        return NoAnswerError(f"no answer from {target.name} within {waited_s:.1f} s: {why}", hint=hint)


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


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


def _absent(target: Target, names: tuple[str, ...]) -> UnknownAgentError:
    kind = "group" if target.is_group else "agent"
    hint = f"use one of the {kind}s at this broker: {_listed(names)}"
    if not names:
        hint = f"the broker knows no {kind}: check that edge-agent runs with this broker in its configuration"
    return UnknownAgentError(f"no {kind} called {target.name} is known at the broker", hint=hint)


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"{', '.join(names[:_MAX_SHOWN])}{more}"
