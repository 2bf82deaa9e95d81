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
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Final

from agent.errors import BrokerError, ConfigError
from agent.mqtt.backoff import Backoff
from agent.mqtt.engine import Callbacks, Engine, Greeting
from agent.mqtt.message import Message, Receipt, Will
from agent.mqtt.negotiation import Negotiation
from agent.mqtt.properties import EMPTY, Properties
from agent.mqtt.reason_codes import CLOSED, LOST, NOT_CONNECTED, RENEWED, Action, Reason, reason
from agent.mqtt.sending import MAX_UNDER_WAY, Outgoing, Sending
from agent.mqtt.settings import BrokerSettings
from agent.mqtt.subscriptions import Subscriptions

_log = logging.getLogger(__name__)

_KEEP_ALIVE_TICK_S: Final = 1.0


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
        self._negotiation = Negotiation(settings, self._engine_of, self._greeted)
        self._engine: Engine | None = None
        self._sending = Sending(self._pump)
        self._up = asyncio.Event()
        self._up_s = 0.0
        self._down: asyncio.Future[Reason] | None = None
        self._subscriptions = Subscriptions(client_id, self._ask_for)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether the broker has greeted us and the connection stands."""
        return self._up.is_set()

    @property
    def settled(self) -> bool:
        """Whether the connection stands and the broker has answered for its subscriptions."""
        return self.connected and self._subscriptions.settled

    @property
    def version(self) -> int:
        """What is spoken, or was last: 5, or 4 for 3.1.1."""
        return self._negotiation.first_version if self._engine is None else self._engine.version

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
            If the broker cannot be reached, or refuses, within `timeout_s` (the settings' by default).
        ConfigError
            If a file with a secret or certificate cannot be used.
        """
        limit_s = self.settings.connect_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                why = await self._negotiation.attempt(limit_s)
        except ssl.SSLError as error:
            from agent.mqtt.failure import explain_error

            failure = explain_error(error, self.settings)
            raise BrokerError(failure.message, LOST.code, hint=failure.hint) from error
        except OSError as error:  # TimeoutError is one
            from agent.mqtt.failure import describe

            raise BrokerError(
                f"cannot reach the broker at {self.settings.url}: {describe(error, self.settings)}",
                LOST.code,
                hint="check the address, and whether the broker runs there",
            ) from error
        if not self.connected:
            raise BrokerError(f"the broker at {self.settings.url} refused the connection: {why}", why.code)
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
        self._subscriptions.close(CLOSED)

    def renew(self) -> None:
        """Say goodbye and connect again: with the certificates and the password that are there now.

        Nothing is lost by it: what is under way is sent again, and what the broker keeps it delivers again.
        """
        if self.connected and self._engine is not None:
            engine = self._engine
            self._lost(RENEWED)
            engine.disconnect()

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
            If topic or properties do not fit into MQTT.
        """
        done: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()

        def settle(verdict: Reason) -> None:
            if not done.done():
                done.set_result(verdict)

        self.send(topic, payload, settle, qos=qos, retain=retain, properties=properties)
        return done

    def send(
        self,
        topic: str,
        payload: bytes,
        settle: Callable[[Reason], None],
        *,
        qos: int = 1,
        retain: bool = False,
        properties: Properties = EMPTY,
    ) -> None:
        """Do what `publish` does, and call `settle` once with the verdict, perhaps before this returns.

        Raises
        ------
        ValueError
            If as in `publish`; `settle` is not called then.
        """
        if qos == 0:
            sent = None
            if self.connected and self._engine is not None:
                sent = self._engine.publish(topic, payload, qos=0, retain=retain, properties=properties)
            settle(NOT_CONNECTED if sent is None else reason(0))
        elif self._closed:
            settle(CLOSED)
        else:
            deadline_s = None if properties.expiry_s is None else time.monotonic() + properties.expiry_s
            self._sending.add(Outgoing(topic, payload, retain, properties, settle, deadline_s))
            self._pump()

    def ack(self, message: Message | Receipt) -> None:
        """Acknowledge a message; nothing happens for one of an earlier connection, which comes again."""
        receipt = message.receipt if isinstance(message, Message) else message
        if receipt is not None and self.connected and receipt.epoch == self._negotiation.epoch:
            assert self._engine is not None
            self._engine.ack(receipt.packet_id)

    def want(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe now and after each reconnection, without waiting for the broker's word."""
        self._subscriptions.add(topic_filter, qos, connected=self.connected)

    async def subscribe(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe now and after each reconnection; return when the broker has granted it.

        Raises
        ------
        BrokerError
            If it refused.
        """
        granted = self._subscriptions.wait_for(topic_filter)
        self.want(topic_filter, qos)
        try:
            why = await granted
        finally:
            self._subscriptions.stop_waiting(topic_filter, granted)
        if why.failed:
            self._subscriptions.remove(topic_filter)
            raise BrokerError(f"the broker refused the subscription to {topic_filter}: {why}", why.code)

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""
        self._subscriptions.remove(topic_filter)
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
                            why = await self._negotiation.attempt(self.settings.connect_timeout_s)
                    except (OSError, ConfigError) as error:
                        from agent.mqtt.failure import describe  # a connected agent does without this memory

                        detail = describe(error, self.settings)
                if self.connected:
                    if backoff.failures:
                        _log.info("%s: connected to %s", self.client_id, self.settings.url)
                    why = await self._stand()
                    backoff.ended(time.monotonic() - self._up_s)
                else:
                    if backoff.failures == 0 or why.connecting is Action.LATER:
                        _log.warning(
                            "%s: no connection to %s (%.400s), trying again",
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

    def _engine_of(self, version: int) -> Engine:
        engine = self._engine
        if engine is None or engine.version != version or not self._persistent:
            # Without a session nothing is sent under its old identifier, but anew and after subscribing.
            engine = self._replace_engine(version)
        return engine

    def _replace_engine(self, version: int) -> Engine:
        callbacks = Callbacks(self._on_message, self._acknowledged, self._granted_by_broker, self._lost)
        self._sending.start_over()
        self._engine = engine = Engine(
            self.client_id, version, callbacks=callbacks, persistent=self._persistent, will=self.will
        )
        return engine

    def _greeted(self, engine: Engine, greeting: Greeting) -> Reason:
        if not engine.connected:  # greeted and dropped in one breath
            return LOST
        self._sending.limit = max(1, min(MAX_UNDER_WAY, greeting.receive_maximum))
        self._down = asyncio.get_running_loop().create_future()
        self._up.set()
        self._up_s = time.monotonic()
        self.connects += 1
        # Answers to what waits here may come at once: not every broker works through packets in order, so
        # nothing goes out before the subscriptions stand.
        self._subscriptions.begin()
        self._pump()
        if self._on_up is not None:
            self._on_up(greeting.session_present)
        return reason(0)

    def _lost(self, said: Reason | None) -> None:
        if not self._up.is_set():
            return
        why = LOST if said is None or not said.failed else said
        self._up.clear()
        self._subscriptions.lost()
        if self._down is not None and not self._down.done():
            self._down.set_result(why)
        if self._on_down is not None:
            self._on_down(why)

    def _pump(self) -> None:
        if self.connected and self._engine is not None and self._subscriptions.settled:
            self._sending.pump(self._engine)

    def _acknowledged(self, packet_id: int, verdict: Reason) -> None:
        self._sending.acknowledged(packet_id, verdict)
        self._pump()

    def _ask_for(self, filters: list[tuple[str, int]]) -> int | None:
        assert self._engine is not None
        return self._engine.subscribe(filters)

    def _granted_by_broker(self, packet_id: int, verdicts: Sequence[Reason]) -> None:
        self._subscriptions.granted(packet_id, verdicts)
        self._pump()
