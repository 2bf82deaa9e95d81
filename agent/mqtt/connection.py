"""One MQTT connection on the running event loop, kept up until it is closed.

Promises: a lost connection is made again with back-off, and its subscriptions with it; what was
published at QoS 1 is sent again until the broker acknowledges it, its expiry passes or the broker says
never; no more of it is under way than the server's Receive Maximum allows; a received message is
acknowledged when the owner says so. MQTT 5 first, 3.1.1 where the broker refuses 5.

Left to others: what messages mean, the order of acknowledgement, and keeping anything over a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from agent.errors import ConfigError, EdgeError
from agent.mqtt.backoff import Backoff
from agent.mqtt.engine import MQTT_3_1_1, MQTT_5, Callbacks, Engine, Greeting
from agent.mqtt.message import Message, Receipt, Will
from agent.mqtt.properties import EMPTY, Properties
from agent.mqtt.reason_codes import Action, Reason, reason
from agent.mqtt.sending import CLOSED, MAX_UNDER_WAY, NOT_CONNECTED, Outgoing, Sending
from agent.mqtt.settings import BrokerSettings, read_secret
from agent.mqtt.transport import open_socket

_log = logging.getLogger(__name__)

LOST: Final = Reason(0x104, "Connection lost", Action.RETRY, Action.RETRY)
SILENCE: Final = Reason(0x105, "Connection ended without an answer", Action.FALL_BACK, Action.RETRY)

_VERSIONS: Final = {"5": (MQTT_5,), "3.1.1": (MQTT_3_1_1,), "auto": (MQTT_5, MQTT_3_1_1)}
_KEEP_ALIVE_TICK_S: Final = 1.0
# Longer than most brokers take to greet, short enough for somebody who waits at a command line.
_PROBE_AFTER_S: Final = 0.3


class BrokerError(EdgeError):
    """The broker cannot be reached, or refused what was asked."""

    code = "ERR_BROKER"

    def __init__(self, message: str, why: Reason, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = why


class Connection:
    """One client of one broker.

    Parameters
    ----------
    settings
        The broker.
    client_id
        Unique at the broker; two with one name take each other's place.
    on_message
        Called in the event loop with each message; one received at QoS 1 must be given to `ack` once.
    will
        Left with the broker at each connect; it may be set until the first.
    persistent
        Keep the session at the broker while away: it then delivers again what was not acknowledged.
    on_up
        Called after each connect with whether the broker still had the session; subscriptions are under way.
    on_down
        Called with the reason when a connection that was up is gone.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        client_id: str,
        on_message: Callable[[Message], None],
        will: Will | None = None,
        persistent: bool = False,
        on_up: Callable[[bool], None] | None = None,
        on_down: Callable[[Reason], None] | None = None,
    ) -> None:
        self.settings = settings
        self.client_id = client_id
        self.connects = 0
        self._on_message = on_message
        self.will = will
        self._persistent = persistent
        self._on_up = on_up
        self._on_down = on_down
        self._versions: tuple[int, ...] = _VERSIONS[settings.protocol]
        self._spoke_5 = False
        self._epoch = 0
        self._engine: Engine | None = None
        self._sending = Sending(self._pump)
        self._up = asyncio.Event()
        self._up_s = 0.0
        self._down: asyncio.Future[Reason] | None = None
        self._filters: dict[str, int] = {}
        self._subscribing: dict[int, tuple[str, ...]] = {}
        self._granted: dict[str, asyncio.Future[Reason]] = {}
        self._first_subscribe: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether the broker has greeted us and the connection stands."""
        return self._up.is_set()

    @property
    def settled(self) -> bool:
        """Whether the connection stands and the broker has answered for its subscriptions."""
        return self.connected and self._first_subscribe is None

    @property
    def version(self) -> int:
        """What is spoken, or was last: 5, or 4 for 3.1.1."""
        return self._versions[0] if self._engine is None else self._engine.version

    @property
    def unacknowledged(self) -> int:
        """How many published messages of QoS 1 the broker has not acknowledged yet."""
        return len(self._sending)

    def start(self) -> None:
        """Connect and stay connected, in the background, until `close`."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._stay_connected(), name=self.client_id)

    async def connect(self, timeout_s: float | None = None) -> None:
        """Connect, and stay connected from then on.

        Raises
        ------
        BrokerError
            When the broker cannot be reached, or refuses, within `timeout_s` (the settings' by default).
        ConfigError
            When a file with a secret or certificate cannot be used.
        """
        limit_s = self.settings.connect_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                why = await self._attempt(limit_s)
        except OSError as error:  # TimeoutError is one
            raise BrokerError(
                f"cannot reach the broker at {self.settings.url}: {_describe(error)}",
                LOST,
                hint="check the address, and whether the broker runs there",
            ) from error
        if not self.connected:
            raise BrokerError(f"the broker at {self.settings.url} refused the connection: {why}", why)
        self.start()

    async def wait_connected(self) -> None:
        """Return when the connection stands."""
        await self._up.wait()

    async def close(self, drain_s: float = 0.0) -> None:
        """Wait up to `drain_s` for acknowledgements, say goodbye (so that there is no will), and end.

        What has not been acknowledged by then ends with the reason `CLOSED`.
        """
        end_s = time.monotonic() + drain_s
        while self.connected and self._sending and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._up.clear()
        if self._engine is not None:
            self._engine.disconnect()
        self._sending.close()
        for granted in self._granted.values():
            if not granted.done():
                granted.set_result(CLOSED)

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        qos: int = 1,
        retain: bool = False,
        properties: Properties = EMPTY,
    ) -> asyncio.Future[Reason]:
        """Send a message.

        Returns
        -------
        asyncio.Future[Reason]
            At QoS 1 the broker's verdict, over as many connections as it takes; at QoS 0 whether the message
            was handed to a connection. It never holds an exception: look at `Reason.failed`.

        Raises
        ------
        ValueError
            When topic or properties do not fit into MQTT.
        """
        done: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        if qos == 0:
            sent = None
            if self.connected and self._engine is not None:
                sent = self._engine.publish(topic, payload, qos=0, retain=retain, properties=properties)
            done.set_result(NOT_CONNECTED if sent is None else reason(0))
            return done
        deadline_s = None if properties.expiry_s is None else time.monotonic() + properties.expiry_s
        if self._closed:
            done.set_result(CLOSED)
        else:
            self._sending.add(Outgoing(topic, payload, retain, properties, done, deadline_s))
            self._pump()
        return done

    def ack(self, message: Message | Receipt) -> None:
        """Acknowledge a message; nothing happens for one of an earlier connection, which comes again."""
        receipt = message.receipt if isinstance(message, Message) else message
        if receipt is not None and self.connected and receipt.epoch == self._epoch:
            assert self._engine is not None
            self._engine.ack(receipt.packet_id)

    def want(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe now and after each reconnection, without waiting for the broker's word."""
        self._filters[topic_filter] = qos
        if self.connected:
            self._send_subscribe((topic_filter,))

    async def subscribe(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe now and after each reconnection; return when the broker has granted it.

        Raises
        ------
        BrokerError
            When it refused.
        """
        granted: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        self._granted[topic_filter] = granted
        self.want(topic_filter, qos)
        try:
            why = await granted
        finally:
            if self._granted.get(topic_filter) is granted:
                del self._granted[topic_filter]
        if why.failed:
            self._filters.pop(topic_filter, None)
            raise BrokerError(f"the broker refused the subscription to {topic_filter}: {why}", why)

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""
        self._filters.pop(topic_filter, None)
        if self.connected and self._engine is not None:
            self._engine.unsubscribe(topic_filter)

    async def _stay_connected(self) -> None:
        ticking = asyncio.get_running_loop().create_task(self._keep_alive())
        backoff = Backoff()
        try:
            while True:
                why, detail = LOST, ""
                if not self.connected:
                    try:
                        async with asyncio.timeout(self.settings.connect_timeout_s):
                            why = await self._attempt(self.settings.connect_timeout_s)
                    except (OSError, ConfigError) as error:
                        detail = _describe(error)
                if self.connected:
                    if backoff.failures:
                        _log.info("%s: connected to %s", self.client_id, self.settings.url)
                    why = await self._stand()
                    backoff.ended(time.monotonic() - self._up_s)
                else:
                    if backoff.failures == 0 or why.connecting is Action.LATER:
                        _log.warning(
                            "%s: no connection to %s (%.200s), trying again",
                            self.client_id,
                            self.settings.url,
                            detail or why,
                        )
                    backoff.failed()
                await asyncio.sleep(backoff.delay_s(why))
        finally:
            ticking.cancel()

    async def _stand(self) -> Reason:
        """Wait for the end of the connection, and return its reason."""
        assert self._down is not None
        why = await self._down
        _log.warning("%s: connection to %s ended: %s", self.client_id, self.settings.url, why)
        return why

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_KEEP_ALIVE_TICK_S)
            if self.connected and self._engine is not None:
                self._engine.keep_alive()

    async def _attempt(self, limit_s: float) -> Reason:
        """Try to connect with each version that may be tried, and return the broker's last word."""
        why = SILENCE
        for version in self._versions:
            password = self.settings.password
            if self.settings.password_file is not None:
                password = read_secret(self.settings.password_file)
            sock = await open_socket(self.settings)
            engine = self._engine
            if engine is None or engine.version != version or not self._persistent:
                # Without a session nothing is sent under its old identifier, but anew and after subscribing.
                engine = self._replace_engine(version)
            self._epoch += 1
            last = version == self._versions[-1]
            greeting = asyncio.ensure_future(engine.greet(sock, self._epoch, self.settings, password))
            try:
                async with asyncio.timeout(limit_s if last else limit_s / 2):
                    if not last and not self._spoke_5:
                        await asyncio.wait([greeting], timeout=_PROBE_AFTER_S)
                        if not greeting.done() and await self._refuses_5():
                            self._versions = (MQTT_3_1_1,)
                            continue
                    answer = await greeting
            except TimeoutError:
                why = SILENCE
            else:
                why = answer.reason or SILENCE
                if not why.failed:
                    return self._greeted(version, engine, answer)
            finally:
                greeting.cancel()
            if why.connecting is not Action.FALL_BACK or (why is SILENCE and self._spoke_5):
                return why
            if why is not SILENCE and not last:
                self._versions = (MQTT_3_1_1,)  # said in so many words: not asked again
        return why

    async def _refuses_5(self) -> bool:
        """Ask with the shortest CONNECT there is whether the broker refuses MQTT 5.

        One that knows only 3.1.1 takes MQTT 5's properties for the client's name, and waits for more.
        """
        probe = Engine("", MQTT_5, callbacks=Callbacks.ignore(), bare=True)
        greeting = await probe.greet(await open_socket(self.settings), 0, self.settings)
        probe.disconnect()
        return greeting.reason is not None and greeting.reason.connecting is Action.FALL_BACK

    def _replace_engine(self, version: int) -> Engine:
        callbacks = Callbacks(self._on_message, self._acknowledged, self._granted_by_broker, self._lost)
        self._sending.start_over()
        self._engine = engine = Engine(
            self.client_id, version, callbacks=callbacks, persistent=self._persistent, will=self.will
        )
        return engine

    def _greeted(self, version: int, engine: Engine, greeting: Greeting) -> Reason:
        if not engine.connected:  # greeted and dropped in one breath
            return LOST
        self._spoke_5 = self._spoke_5 or version == MQTT_5
        self._sending.limit = max(1, min(MAX_UNDER_WAY, greeting.receive_maximum))
        self._down = asyncio.get_running_loop().create_future()
        self._up.set()
        self._up_s = time.monotonic()
        self.connects += 1
        if self._filters:
            # Answers to what waits here may come at once: not every broker works through packets in order, so
            # nothing goes out before the subscriptions stand.
            self._first_subscribe = self._send_subscribe(tuple(self._filters))
        self._pump()
        if self._on_up is not None:
            self._on_up(greeting.session_present)
        return reason(0)

    def _lost(self, said: Reason | None) -> None:
        if not self._up.is_set():
            return
        why = LOST if said is None or not said.failed else said
        self._up.clear()
        self._subscribing.clear()
        self._first_subscribe = None
        if self._down is not None and not self._down.done():
            self._down.set_result(why)
        if self._on_down is not None:
            self._on_down(why)

    def _pump(self) -> None:
        if self.connected and self._engine is not None and self._first_subscribe is None:
            self._sending.pump(self._engine)

    def _acknowledged(self, packet_id: int, verdict: Reason) -> None:
        self._sending.acknowledged(packet_id, verdict)
        self._pump()

    def _send_subscribe(self, filters: tuple[str, ...]) -> int | None:
        assert self._engine is not None
        packet_id = self._engine.subscribe([(text, self._filters[text]) for text in filters])
        if packet_id is not None:
            self._subscribing[packet_id] = filters
        return packet_id

    def _granted_by_broker(self, packet_id: int, verdicts: Sequence[Reason]) -> None:
        if packet_id == self._first_subscribe:
            self._first_subscribe = None
            self._pump()
        for topic_filter, verdict in zip(self._subscribing.pop(packet_id, ()), verdicts, strict=False):
            waiting = self._granted.get(topic_filter)
            if waiting is not None and not waiting.done():
                waiting.set_result(verdict)
            elif verdict.failed:
                _log.error(
                    "%s: the broker refuses the subscription to %s: %s", self.client_id, topic_filter, verdict
                )


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not error.args:
        return "no answer in time"
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)  # asyncio puts its own words in place of these
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
