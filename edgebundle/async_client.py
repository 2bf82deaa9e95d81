"""One kept connection to a broker, over which models are asked: for asyncio.

Promises: the connection is made once, kept, and made again when it is lost; requests that are under way are
then sent again. Every request ends: with its answer, or with an error. A late or a second answer is dropped.
What a stranger at the broker publishes is bounded, and ends no request. The client identifier is random and
appears in no message, because anybody who knows it can disconnect the client.

Leaves to others: one request (`exchange`), what agents have retained (`directory`), what is asked
(`async_model`), threads (`client`). Importing this loads little more than asyncio: the protocol is loaded
when a client is made.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Final, Unpack

from agent.errors import ConfigError, EdgeError
from edgebundle.errors import BrokerError, ClientError, ClosedError, NoAnswerError, UsageError

if TYPE_CHECKING:
    from agent.bundle.tensor_spec import TensorSpec
    from agent.mqtt.connection import Connection
    from agent.mqtt.message import Message
    from agent.mqtt.reason_codes import Reason
    from edgebundle.async_model import AsyncModel
    from edgebundle.broker import Broker, BrokerOptions
    from edgebundle.exchange import Exchange
    from edgebundle.request import Request
    from edgebundle.target import Target

# An answer has at most 64 MiB, and a broker drops a larger packet without a word.
_MAX_PACKET_BYTES: Final = 65 << 20
# How long to wait at the end for acknowledgements; a broker that is reachable needs a millisecond.
_DRAIN_S: Final = 2.0
_log = logging.getLogger(__name__)

_FILES: Final = "give cafile, certificate, key and password_file the paths of files that you may read"


class AsyncClient:
    """A client of the agents at one broker.

    Parameters
    ----------
    broker
        `mqtt://[user[:password]@]host[:port]`, `mqtts://...` for TLS, or a `Broker`.
    progress
        Called with one line when a request has to wait: the agent is away, the connection is lost. Also if
        the user's name cannot be in a topic, which is logged otherwise: the client then has no user there.
    options
        What a URL cannot say, by keyword: `cafile`, `certificate`, `key`, `password_file`, `mqtt_version`, as
        in `BrokerOptions`.

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
        progress: Callable[[str], None] | None = None,
        **options: Unpack[BrokerOptions],
    ) -> None:
        from agent.wire import topics
        from edgebundle.broker import Broker
        from edgebundle.directory import Directory

        if not isinstance(broker, Broker):
            broker = Broker.of(broker, **options)
        elif options:
            raise UsageError(
                f"expected a Broker or {', '.join(options)}, got both",
                hint="give the options to Broker.of, or no Broker",
            )
        self._settings = replace(broker.settings(), max_packet_bytes=_MAX_PACKET_BYTES)
        user = broker.user or ""
        # Both names are compared by the broker's access list; without a user, the answers' name is random.
        self._user = user if topics.is_user_name(user) else ""
        self._reply_name = (
            user if topics.is_reply_name(user) else f"{topics.ANONYMOUS}-{secrets.token_hex(6)}"
        )
        # Others at the broker cannot guess where this client listens.
        self._folder = secrets.token_hex(8)
        self._progress = progress or (lambda _line: None)
        if user != self._user:
            line = f"no user in a topic can be {user!a:.200}: this client asks without one"
            if progress is None:
                _log.warning("%s", line)
            else:
                progress(line)
        self._link: Connection | None = None  # from the first attempt on
        self._connection: Connection | None = None  # from the first success on
        self._connecting: asyncio.Task[Connection] | None = None
        self._closed = False
        self._connects = 0
        self._exchanges: dict[str, Exchange] = {}
        self._inquiries: dict[tuple[str, bool], asyncio.Task[None]] = {}
        # What the broker knows; `AsyncModel` asks it, too.
        self.directory = Directory(self._ready)

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
        from edgebundle.target import Target

        return AsyncModel(self, Target.of(agent, model, user=self._user))

    def group_model(self, group: str, model: str) -> AsyncModel:
        """Return a model on any agent of a group: the broker gives each request to one of them.

        Raises
        ------
        UsageError
            If no group or model can have these names.
        """
        from edgebundle.async_model import AsyncModel
        from edgebundle.target import Target

        return AsyncModel(self, Target.of(group, model, user=self._user, is_group=True))

    async def agents(self) -> tuple[str, ...]:
        """Return the names of the agents that the broker knows, online or not.

        Raises
        ------
        BrokerError
            If the broker cannot be reached, or refuses.
        """
        return await self.directory.agents()

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
            await asyncio.wait({connecting})
        for inquiry in tuple(self._inquiries.values()):
            inquiry.cancel()
        answered = not self._exchanges
        for exchange in tuple(self._exchanges.values()):
            exchange.fail(ClosedError("the client was closed while the request was under way"))
        self._exchanges.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            # An answer that no call waits for need not arrive.
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
        from agent.wire import topics
        from edgebundle.exchange import Exchange, message_maker

        connection = await self._ready()
        said: set[str] = set()

        def on_silence(exchange: Exchange) -> None:
            self._inquire(exchange)
            away = self.directory.away(target)
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
            message_maker(request, identifier, topics.format_topic(reply), end_s, trace, body),
            identifier=identifier,
            end_s=end_s,
            on_silence=on_silence,
            too_late=self._too_late,
        )
        self._exchanges[identifier] = exchange
        try:
            if not target.is_group:
                self.directory.watch(connection, target.presence_topic)
            exchange.start()
            return await exchange.done, exchange
        finally:
            self._exchanges.pop(identifier, None)
            exchange.close()

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
        from agent.mqtt.session import Owner
        from agent.wire import topics

        # As a library should: nothing goes to stderr unless the program has configured logging.
        log = logging.getLogger("agent.mqtt")
        if not log.handlers:
            log.addHandler(logging.NullHandler())
        connection = self._link = Connection(
            self._settings,
            Owner(self._received, on_up=self._up, on_down=self._down),
            client_id=f"edgebundle-{secrets.token_hex(8)}",
            name="edgebundle client",
        )
        try:
            await connection.connect()
            await connection.subscribe(topics.reply_filter(self._reply_name, f"+/{self._folder}"), 1)
        except BaseException as error:
            self._connecting = None
            await connection.close()
            if isinstance(error, ConfigError):
                raise UsageError(str(error), hint=error.hint or _FILES) from error
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

    def _received(self, message: Message) -> None:
        from agent.wire import topics

        topic = topics.parse_topic(message.topic)
        match topic:
            case topics.Reply():
                target, _, rest = topic.suffix.partition(f"/{self._folder}/")
                exchange = self._exchanges.get(rest)
                # A retained message is no answer: it would arrive with the subscription.
                if exchange is not None and exchange.target.name == target and not message.retain:
                    exchange.arrived(message)
            case None:
                pass
            case _:
                self.directory.received(topic, message)
        if self._link is not None:
            self._link.ack(message)

    # What to say when there is no answer.

    def _inquire(self, exchange: Exchange) -> None:
        """Find out whether the broker knows the agent or group, once, and end its requests if it does not."""
        target = exchange.target
        # A broker that restarted may have forgotten agents that are about to connect again.
        if self.directory.presence(target.name) is not None or self._connects > 1:
            return
        key = (target.name, target.is_group)
        if key not in self._inquiries:
            task = asyncio.get_running_loop().create_task(self._look_for(target, exchange))
            self._inquiries[key] = task
            task.add_done_callback(lambda _task: self._inquiries.pop(key, None))

    async def _look_for(self, target: Target, exchange: Exchange) -> None:
        from edgebundle.directory import absent

        try:
            names = await self.directory.known(target)
        except ClientError:
            return
        # An access list may hide the names; then only the broker's word that no client takes requests counts.
        if target.name in names or (not names and not exchange.no_subscriber):
            return
        error = absent(target, names)
        for each in tuple(self._exchanges.values()):
            if (each.target.name, each.target.is_group) == (target.name, target.is_group):
                each.fail(error)

    async def _inputs(self, target: Target, request: Request, end_s: float) -> tuple[TensorSpec, ...]:
        from agent.wire.content_types import JSON, RAW
        from edgebundle.directory import INFO_LIMIT_S

        if request.content_type in (JSON, RAW):
            return ()
        limit_s = max(0.0, min(INFO_LIMIT_S, end_s - time.monotonic()))
        return (await self.directory.info(target, limit_s)).inputs

    def _too_late(self, exchange: Exchange) -> ClientError:
        from agent.wire import topics
        from edgebundle.directory import AGENTS_HINT

        target = exchange.target
        waited_s = time.monotonic() - exchange.sent_s
        connection = self._connection
        hint = AGENTS_HINT
        presence = self.directory.presence(target.name)
        if connection is None or not connection.connected:
            why = f"there is no connection to {self._settings.url}"
            hint = "check whether the broker runs; the client connects again by itself"
        elif target.is_group:
            why = "no member of the group answered"
            if exchange.no_subscriber:
                why = f"no member of the group serves {target.model}"
        elif presence is None:
            why = "no agent of that name is known at the broker"
        elif away := self.directory.away(target):
            why = away
        else:
            why = "it is online"
            # MQTT has no error for an answer that the access list withholds, and 3.1.1 none for a request.
            hint = (
                "allow more time, or check that the broker's access list lets this user write "
                f"{target.topic} and read {topics.reply_filter(self._reply_name)}"
            )
        return NoAnswerError(f"no answer from {target.name} within {waited_s:.1f} s: {why}", hint=hint)
