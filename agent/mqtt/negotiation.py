"""Connecting: open a socket, send CONNECT, and find the MQTT version that the broker speaks.

MQTT 5 first. A broker that refuses it explicitly is asked in 3.1.1 and never in 5 again. A broker that stays
silent is probed, because some take the properties of MQTT 5 for the client's name and wait for more bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from agent.mqtt.engine import MQTT_3_1_1, MQTT_5, Callbacks, Connack, Engine
from agent.mqtt.reason_codes import SILENCE, Action, Reason
from agent.mqtt.settings import BrokerSettings, read_secret
from agent.mqtt.transport import BrokerSocket

# Opens a connected socket to a broker: `transport.open_socket`, or a test's.
SocketOpener = Callable[[BrokerSettings], Awaitable[BrokerSocket]]

_VERSIONS: Final = {"5": (MQTT_5,), "3.1.1": (MQTT_3_1_1,), "auto": (MQTT_5, MQTT_3_1_1)}
# Longer than most brokers take to answer, short enough for a user who waits at a command line.
PROBE_AFTER_S: Final = 0.3


class Negotiation:
    """Connects to a broker, and remembers between attempts which versions it speaks.

    Parameters
    ----------
    settings
        The broker.
    engine_of
        Returns the session to connect with, given a version.
    accepted
        Called with session and CONNACK when the broker has accepted; its result is the attempt's result.
    open_socket
        Opens a socket to the broker.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        engine_of: Callable[[int], Engine],
        accepted: Callable[[Engine, Connack], Reason],
        open_socket: SocketOpener,
    ) -> None:
        self.epoch = 0
        self._settings = settings
        self._engine_of = engine_of
        self._accepted = accepted
        self._open_socket = open_socket
        self._versions: tuple[int, ...] = _VERSIONS[settings.protocol]
        self._spoke_5 = False

    @property
    def first_version(self) -> int:
        """The version that is tried first."""
        return self._versions[0]

    async def attempt(self, limit_s: float) -> Reason:
        """Try to connect with each version that may be tried, and return the broker's last answer.

        Raises
        ------
        OSError
            If the broker cannot be reached.
        ConfigError
            If a file with a secret or certificate cannot be used.
        """
        settings = self._settings
        why = SILENCE
        for version in self._versions:
            password = settings.password
            if settings.password_file is not None:
                password = read_secret(settings.password_file)
            sock = await self._open_socket(settings)
            engine = self._engine_of(version)
            self.epoch += 1
            last = version == self._versions[-1]
            answering = asyncio.ensure_future(engine.connect(sock, self.epoch, settings, password))
            try:
                async with asyncio.timeout(limit_s if last else limit_s / 2):
                    if not last and not self._spoke_5:
                        await asyncio.wait([answering], timeout=PROBE_AFTER_S)
                        if not answering.done() and await self._refuses_5():
                            self._versions = (MQTT_3_1_1,)
                            continue
                    answer = await answering
                if answer.reason is None and sock.tls_error is not None:
                    raise sock.tls_error
            except TimeoutError:
                why = SILENCE
            else:
                why = answer.reason or SILENCE
                if not why.failed:
                    self._spoke_5 = self._spoke_5 or (version == MQTT_5 and engine.connected)
                    return self._accepted(engine, answer)
            finally:
                answering.cancel()
            if why.connecting is not Action.FALL_BACK or (why is SILENCE and self._spoke_5):
                return why
            if why is not SILENCE and not last:
                self._versions = (MQTT_3_1_1,)  # refused explicitly: not asked again
        return why

    async def _refuses_5(self) -> bool:
        """Ask with the shortest possible CONNECT whether the broker refuses MQTT 5."""
        probe = Engine("", MQTT_5, callbacks=Callbacks.ignore(), bare=True)
        answer = await probe.connect(await self._open_socket(self._settings), 0, self._settings)
        probe.disconnect()
        return answer.reason is not None and answer.reason.connecting is Action.FALL_BACK
