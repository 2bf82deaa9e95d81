"""The upkeep of a session: connect, stay connected, and connect again.

Promises: a lost connection is re-established with back-off, and a silent loss is noticed. MQTT 5 first, 3.1.1
if the broker refuses 5; meanwhile it is probed every few minutes for MQTT 5.

Leaves to others: which version the broker speaks (`negotiation`), and what goes on over the next connection
(`session`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from agent.errors import ConfigError, StoreError
from agent.mqtt.backoff import Backoff
from agent.mqtt.engine import MQTT_5, Engine
from agent.mqtt.message import Will
from agent.mqtt.negotiation import Negotiation, SocketOpener
from agent.mqtt.reason_codes import LOST, Action, Reason
from agent.mqtt.session import Session
from agent.mqtt.settings import BrokerSettings

_log = logging.getLogger(__name__)

_KEEP_ALIVE_TICK_S: Final = 1.0
# A longer pause is logged, for a person who wonders why nothing happens.
_WORTH_SAYING_S: Final = 1.0
# While on MQTT 3.1.1, how often to probe whether the broker supports MQTT 5: it may only have been starting,
# or was replaced since. If it says that it speaks 5 and then does not, it is asked half as often.
LOOK_FOR_5_S: Final = 300.0
_LOOK_FOR_5_AT_MOST_S: Final = 6 * 3600.0
# Ours, and the broker's own in PUBACK or DISCONNECT.
_RETAIN_NOT_SUPPORTED: Final = 0x9A
_QOS_NOT_SUPPORTED: Final = 0x9B


class Upkeep:
    """Keeps one session connected; `will` is sent with each CONNECT."""

    def __init__(
        self,
        settings: BrokerSettings,
        session: Session,
        client_id: str,
        will: Will | None,
        *,
        persistent: bool,
        open_socket: SocketOpener,
    ) -> None:
        self.will = will
        self._settings = settings
        self._session = session
        self._name = session.name
        self._client_id = client_id
        self._persistent = persistent
        self._negotiation = Negotiation(settings, self._engine_of, open_socket)
        self._look_for_5_s = LOOK_FOR_5_S
        self._said: set[str] = set()

    @property
    def version(self) -> int:
        """The MQTT version in use, or last used, or that is tried first."""
        return self._session.version or self._negotiation.first_version

    async def run(self) -> None:
        """Connect, and connect again after each loss, until cancelled."""
        ticking = asyncio.get_running_loop().create_task(self._keep_alive())
        backoff = Backoff(self._settings.reconnect_spread_s)
        try:
            while True:
                why, detail = LOST, ""
                if not self._session.up.is_set():
                    try:
                        async with asyncio.timeout(self._settings.connect_timeout_s):
                            why = await self.attempt(self._settings.connect_timeout_s)
                    except (OSError, ConfigError, StoreError) as error:
                        # Imported late: a connected agent does without this memory.
                        from agent.mqtt.diagnosis import describe

                        detail = describe(error, self._settings)
                    except Exception:  # noqa: BLE001 - the outermost loop: nothing else connects again
                        _log.exception("%s: internal error while connecting", self._name)
                        self._session.drop()
                if self._session.up.is_set():
                    if backoff.failures:
                        _log.info("%s: connected to %s", self._name, self._settings.url)
                    why = await self._wait_for_loss()
                    backoff.ended(_now_s() - self._session.up_s)
                elif self._lower_will(why):
                    continue
                else:
                    if backoff.failures == 0 or why.connecting is Action.LATER:
                        _log.warning(
                            "%s: no connection to %s (%.400s), trying again",
                            self._name,
                            self._settings.url,
                            detail or why,
                        )
                    backoff.failed()
                delay_s = backoff.delay_s(why, _now_s())
                if delay_s >= _WORTH_SAYING_S and backoff.failures <= 1:
                    _log.info("%s: next attempt in %.0f s", self._name, delay_s)
                await asyncio.sleep(delay_s)
        finally:
            ticking.cancel()

    async def attempt(self, limit_s: float) -> Reason:
        """Try to connect; return the reason if that failed."""
        answer = await self._negotiation.attempt(limit_s)
        if isinstance(answer, Reason):
            return answer
        missing = answer.limits.missing()
        if self._is_behind:
            missing = ("refuses MQTT 5, using 3.1.1: requests need reply_to in their JSON", *missing)
        else:
            self._look_for_5_s = LOOK_FOR_5_S
        for line in missing:
            if line not in self._said:
                self._said.add(line)
                _log.warning("%s: the broker %s", self._name, line)
        return self._session.begin(answer)

    async def _wait_for_loss(self) -> Reason:
        """Return the reason for the end of the connection, once it has ended."""
        looking = asyncio.ensure_future(self._look_for_5()) if self._is_behind else None
        try:
            why = await self._session.ended
        finally:
            if looking is not None:
                looking.cancel()
        _log.warning("%s: connection to %s ended: %s", self._name, self._settings.url, why)
        return why

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_KEEP_ALIVE_TICK_S)
            if (engine := self._session.engine) is not None:
                try:
                    engine.keep_alive()
                except Exception:  # noqa: BLE001 - the outermost loop: without pings, a silent loss stays unnoticed
                    _log.exception("%s: internal error while the connection is kept alive", self._name)

    @property
    def _is_behind(self) -> bool:
        """Whether the broker, asked in MQTT 5, accepted only 3.1.1."""
        return self.version != MQTT_5 and self._settings.protocol == "auto"

    async def _look_for_5(self) -> None:
        """Ask now and then, on another connection, whether the broker speaks MQTT 5; then connect again."""
        while True:
            await asyncio.sleep(self._look_for_5_s)
            while self._session.sending:
                await asyncio.sleep(_KEEP_ALIVE_TICK_S)
            if (
                await self._negotiation.speaks_5(self._settings.connect_timeout_s)
                and not self._session.sending
            ):
                self._look_for_5_s = min(2 * self._look_for_5_s, _LOOK_FOR_5_AT_MOST_S)
                _log.info("%s: the broker speaks MQTT 5 now, connecting again", self._name)
                self._session.renew()

    def _engine_of(self, version: int) -> Engine:
        engine = Engine(
            self._client_id,
            version,
            listener=self._session,
            persistent=self._persistent,
            will=self.will,
            next_id=self._session.sending.next_id,
        )
        self._session.use(engine)
        return engine

    def _lower_will(self, why: Reason) -> bool:
        """Return whether a broker that refused the will may accept it now (MQTT 5.0, 3.2.2.3.4 and 5)."""
        if (will := self.will) is None:
            return False
        retain = will.retain and why.code != _RETAIN_NOT_SUPPORTED
        qos = 0 if why.code == _QOS_NOT_SUPPORTED else will.qos
        self.will = replace(will, retain=retain, qos=qos)
        return self.will != will


def _now_s() -> float:
    return asyncio.get_running_loop().time()
