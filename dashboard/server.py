"""The dashboard's web server, from start to close: what it holds, and when pages are told what changed.

Promises: a connection that is silent or slow is given up, and so is one page too many; `close` takes at most
a second, whatever clients and broker do. Leaves to others: what each request is answered, and until when
(`handlers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from tornado import httpserver, netutil, websocket

from builder.errors import FleetError
from builder.loopback import is_loopback
from dashboard.actions import Action, Actions
from dashboard.broker_link import BrokerLink
from dashboard.fleet_state import FleetState
from dashboard.guard import Guard, new_token
from dashboard.handlers import Backend, application
from dashboard.page_session import PageSession
from edgebundle.async_client import AsyncClient
from edgebundle.broker import Broker

# Changes are gathered for this long: faster than anybody reads, slow enough for a thousand agents.
TICK_S: Final = 0.25
_SETTLE_S: Final = 0.05
_MAX_PAGES: Final = 32
# Of bodies that are read before the guard; the handlers of longer ones raise it for those that passed.
_MAX_BODY_BYTES: Final = 64 << 10
# From a request's first byte to its last, and between two requests of one connection.
_BODY_LIMIT_S: Final = 10.0
_IDLE_LIMIT_S: Final = 60.0
# How long `close` waits for connections to end.
_CLOSE_LIMIT_S: Final = 0.8


class Dashboard:
    """One dashboard, from `start` to `close`.

    Parameters
    ----------
    broker
        The broker and the credentials, which stay here.
    host, port
        Where to listen; port 0 for a free one.
    names
        Further names of this machine that browsers may use.

    Attributes
    ----------
    guard
        The checks of every request.
    port
        Where it listens, after `start`.
    fleet, actions
        What the broker tells, and what pages started.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        host: str = "127.0.0.1",
        port: int = 8700,
        names: frozenset[str] = frozenset(),
    ) -> None:
        own = frozenset() if is_loopback(host) else frozenset({socket.gethostname().lower()})
        self.guard = Guard(new_token(), host, names | own)
        self.port = port
        self.fleet = FleetState()
        self._awake = asyncio.Event()
        self._link = BrokerLink(broker, self.fleet, self._awake.set)  # checks the broker's settings
        self._client = AsyncClient(broker)
        self._host = host
        self._folder = tempfile.TemporaryDirectory(prefix="edgebundle-dashboard-")
        self.actions = Actions(broker, Path(self._folder.name), self._on_action)
        self._sessions: set[PageSession] = set()
        self._server: httpserver.HTTPServer | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The address to open; the token is in the fragment."""
        host = "localhost" if is_loopback(self._host) else self._host
        if self._host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not listened on
            host = socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/#{self.guard.token}"

    async def start(self) -> None:
        """Connect to the broker, and listen.

        Raises
        ------
        BrokerError
            If the broker cannot be reached, or refuses.
        FleetError
            If the address cannot be listened on.
        """
        try:
            sockets = netutil.bind_sockets(self.port, self._host)
        except (OSError, UnicodeError) as error:
            self._folder.cleanup()
            why = getattr(error, "strerror", None) or error
            raise FleetError(
                f"cannot listen on {self._host}, port {self.port}: {why}",
                hint="choose another one: --listen 127.0.0.1:8701",
            ) from error
        try:
            await self._link.start()
        except BaseException:
            for sock in sockets:
                sock.close()
            await self._link.close()
            self._folder.cleanup()
            raise
        self.port = sockets[0].getsockname()[1]
        self._server = httpserver.HTTPServer(
            application(
                Backend(self.guard, self.actions, self._client, self._open_session, self._sessions.discard)
            ),
            max_body_size=_MAX_BODY_BYTES,
            body_timeout=_BODY_LIMIT_S,
            idle_connection_timeout=_IDLE_LIMIT_S,
        )
        self._server.add_sockets(sockets)
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        """End all connections, and delete what pages uploaded."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        # All at once: none waits for another, and a broker that no longer answers takes its time only once.
        closing = [self.actions.close(), self._client.close(), self._link.close()]
        if self._server is not None:
            self._server.stop()
            closing.append(self._server.close_all_connections())
        # Requests that a client sent ahead are still answered, into nothing: they are not waited for.
        ended = asyncio.gather(*closing)
        await asyncio.wait([ended], timeout=_CLOSE_LIMIT_S)
        if ended.done():
            ended.result()
        self._folder.cleanup()

    def _open_session(self, send: Callable[[str], Awaitable[None]]) -> PageSession | None:
        """Return the session of a new page; None if there are too many."""
        if len(self._sessions) >= _MAX_PAGES:
            return None
        session = PageSession(self.fleet, send)
        for action in self.actions.known():
            session.on_action(action)
        self._sessions.add(session)
        self._awake.set()
        return session

    def _on_action(self, action: Action) -> None:
        for session in self._sessions:
            session.on_action(action)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        told_s = 0.0
        while True:
            begun_s = loop.time()
            looks_at: set[str] = set()
            for session in self._sessions:
                looks_at |= session.looks_at
            self.fleet.settle(looks_at)
            if self._awake.is_set() or begun_s - told_s >= TICK_S:
                self._awake.clear()
                told_s = begun_s
                self._tell(begun_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(begun_s + _SETTLE_S):
                    await self._awake.wait()

    def _tell(self, now_s: float) -> None:
        self.actions.forget_old()
        broker = self._link.state()
        for session in self._sessions:
            task = asyncio.get_running_loop().create_task(session.tick(broker, now_s))
            self._sending.add(task)
            task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        # A page that has gone is noticed by its own handler.
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, websocket.WebSocketClosedError):
            raise error
