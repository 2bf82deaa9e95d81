"""Connecting: open a socket, send CONNECT, and find the MQTT version that the broker speaks.

Every attempt begins with MQTT 5. It goes on with 3.1.1 only on one of two signs that the broker does not
speak 5. A broker that is merely silent, such as one that is starting, is asked in 5 again at the next
attempt.

- It refuses 5 explicitly: reason code 0x84, or return code 1 of MQTT 3.1.1. Some brokers do so only if
  CONNECT is as short as possible, because they take the properties of MQTT 5 for the client's name and wait
  for more bytes. So a broker that stays silent for a moment is also asked with such a CONNECT, on another
  connection.
- It has never spoken 5, and closes the connection twice without a reason: after CONNECT, and after the
  shortest one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Any, Final

from agent.disk_thread import in_disk_thread
from agent.errors import ConfigError, StoreError
from agent.mqtt.engine import MQTT_3_1_1, MQTT_5, Connack, Engine
from agent.mqtt.reason_codes import SILENCE, Action, Reason
from agent.mqtt.settings import BrokerSettings, read_secret
from agent.mqtt.transport import BrokerSocket

_log = logging.getLogger(__name__)

# Opens a connected socket to a broker: `transport.open_socket`, or a test's.
SocketOpener = Callable[[BrokerSettings], Awaitable[BrokerSocket]]

_FIRST_VERSIONS: Final = {"5": MQTT_5, "3.1.1": MQTT_3_1_1, "auto": MQTT_5}
# Longer than most brokers take to answer, short enough for a user who waits at a command line.
PROBE_AFTER_S: Final = 0.3
# For agents, because no person waits for them: a broker to which a whole fleet returns may take seconds, and
# must not get a second connection from each of them.
FLEET_PROBE_AFTER_S: Final = 3.0


class _Sign(Enum):
    """What the shortest CONNECT of MQTT 5 found out."""

    SPEAKS_5 = auto()
    REFUSES_5 = auto()
    HANGS_UP = auto()


class Negotiation:
    """Connects to a broker, and remembers between attempts whether it has spoken MQTT 5.

    `engine_of` returns the engine to connect with, given a version.
    """

    def __init__(
        self, settings: BrokerSettings, engine_of: Callable[[int], Engine], open_socket: SocketOpener
    ) -> None:
        self.epoch = 0
        self._settings = settings
        self._engine_of = engine_of
        self._open_socket = open_socket
        self._spoke_5 = False
        self._probe_after_s = FLEET_PROBE_AFTER_S if settings.reconnect_spread_s else PROBE_AFTER_S

    @property
    def first_version(self) -> int:
        """The version that is tried first."""
        return _FIRST_VERSIONS[self._settings.protocol]

    async def attempt(self, limit_s: float) -> Connack | Reason:
        """Try to connect; return the broker's CONNACK if it accepts, and otherwise why it does not.

        Each version may take `limit_s`. Raises OSError if the broker cannot be reached, and ConfigError or
        StoreError if a file with a secret or certificate cannot be used, or not be read now.
        """
        if self._settings.protocol != "auto":
            return await self._ask(self.first_version, limit_s)
        why, refused = await self._ask_in_5(limit_s)
        return await self._ask(MQTT_3_1_1, limit_s) if refused else why

    async def speaks_5(self, limit_s: float) -> bool:
        """Return whether the broker speaks MQTT 5; asked on another connection, which disturbs no session."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._probe() is _Sign.SPEAKS_5
        except OSError:  # TimeoutError is one
            return False

    async def _ask(self, version: int, limit_s: float) -> Connack | Reason:
        answer = await self._send(version)
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            return SILENCE
        finally:
            answer.cancel()

    async def _ask_in_5(self, limit_s: float) -> tuple[Connack | Reason, bool]:
        """Ask in MQTT 5; return the broker's answer, and whether it shows that it does not speak 5."""
        answer = await self._send(MQTT_5)
        probing: asyncio.Future[_Sign | None] | None = None
        try:
            async with asyncio.timeout(limit_s):
                if not self._spoke_5:
                    await asyncio.wait([answer], timeout=self._probe_after_s)
                    if not answer.done():
                        probing = asyncio.ensure_future(self._probe())
                        both: tuple[asyncio.Future[Any], ...] = (answer, probing)
                        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                        if not answer.done() and probing.result() is _Sign.REFUSES_5:
                            return SILENCE, True
                why = await answer
        except TimeoutError:
            return SILENCE, False
        finally:
            answer.cancel()
            if probing is not None:
                probing.cancel()
        if isinstance(why, Connack) or (why is SILENCE and self._spoke_5):
            return why, False
        if why is not SILENCE:
            return why, why.connecting is Action.FALL_BACK
        # It closed the connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                return why, await self._probe() in (_Sign.REFUSES_5, _Sign.HANGS_UP)
        return why, False

    async def _send(self, version: int) -> asyncio.Task[Connack | Reason]:
        """Send CONNECT; the task ends with the answer."""
        settings = self._settings
        password = settings.password
        if settings.password_file is not None:
            password = await in_disk_thread(read_secret, settings.password_file)
        sock = await self._open_socket(settings)
        engine = self._engine_of(version)
        self.epoch += 1
        return asyncio.create_task(self._answer(engine, sock, self.epoch, password))

    async def _answer(
        self, engine: Engine, sock: BrokerSocket, epoch: int, password: str | None
    ) -> Connack | Reason:
        answer = await engine.connect(sock, epoch, self._settings, password)
        if answer.reason is None and sock.tls_error is not None:
            raise sock.tls_error
        if answer.reason is None or answer.reason.failed:
            return answer.reason or SILENCE
        self._spoke_5 = self._spoke_5 or (engine.version == MQTT_5 and engine.connected)
        return answer

    async def _probe(self) -> _Sign | None:
        """Send the shortest possible CONNECT of MQTT 5; return what the answer shows, or None."""
        probe = Engine("", MQTT_5, bare=True)
        try:
            answer = await probe.connect(await self._open_socket(self._settings), 0, self._settings)
        except OSError:
            return None
        except (ConfigError, StoreError) as error:
            _log.warning("cannot ask %s whether it speaks MQTT 5: %s", self._settings.url, error)
            return None
        probe.disconnect()
        if answer.reason is None:
            return _Sign.HANGS_UP
        # Any other refusal, of a client without a name or password, is one in MQTT 5.
        return _Sign.REFUSES_5 if answer.reason.connecting is Action.FALL_BACK else _Sign.SPEAKS_5
