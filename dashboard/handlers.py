"""What the dashboard answers: the page's files, a page's questions and uploads, and its WebSocket.

Promises: every request passes `Guard` before anything else happens, and has one deadline, from its head to
the last byte of its answer. No answer contains the broker's credentials, or a device's text outside of JSON.
The page may load nothing from elsewhere and run no script but its own (Content-Security-Policy). Leaves to
others: what a page may start (`actions`), what it is told (`page_session`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from tornado import web, websocket
from tornado.http1connection import HTTP1Connection
from tornado.httputil import HTTPServerRequest

from agent import __version__
from agent.bundle.archive import MAX_BUNDLE_BYTES
from agent.errors import EdgeError
from agent.wire.content_types import JSON, WAV
from builder.errors import BuildError, FleetError
from dashboard import reading
from dashboard.actions import Actions
from dashboard.guard import Guard
from dashboard.page_files import INDEX, PageFile, read_page_files
from dashboard.page_session import MAX_MESSAGE_BYTES, PageSession
from dashboard.shown import as_json
from edgebundle.async_client import AsyncClient
from edgebundle.errors import ClientError, RefusedError
from edgebundle.request import MAX_REQUEST_BYTES, Request

_MAX_ASKING: Final = 16
_ASK_DEADLINE_S: Final = 15.0
# From a request's head to the last byte of its answer, however little a client sends or takes at a time.
REQUEST_LIMIT_S: Final = 60.0
_MAX_JSON_BYTES: Final = 4096
# The same for what a page uploads: the largest bundle over a slow tunnel.
UPLOAD_LIMIT_S: Final = 1800.0
# A page whose computer fell asleep is gone after this long.
_PING_S: Final = 20.0
_TOKEN_HEADER: Final = "X-Edgebundle-Token"  # noqa: S105 - its name, not a token
_PROTOCOL: Final = "edgebundle"
# Mistakes and failures that the page shows; all others are faults of the dashboard.
_EXPLAINED: Final = (BuildError, EdgeError, ClientError)
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
    "Server": "edgebundle",
}


@dataclass(frozen=True, slots=True)
class Backend:
    """What the handlers use.

    `open_session`, `close_session`: for a page whose messages the argument sends; None if there are too many.
    `asking`: what is asked at a time.
    """

    guard: Guard
    actions: Actions
    client: AsyncClient
    open_session: Callable[[Callable[[str], Awaitable[None]]], PageSession | None]
    close_session: Callable[[PageSession], None]
    asking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_ASKING))
    files: Mapping[str, PageFile] = field(default_factory=read_page_files)


def application(backend: Backend) -> web.Application:
    """Return the handlers of a dashboard's requests."""
    shared = {"backend": backend}
    return web.Application(
        [
            (r"/live", _Live, shared),
            (r"/api/session", _Session, shared),
            (r"/api/ask", _Ask, shared),
            (r"/api/bundles", _Bundles, shared),
            (r"/api/bundles/([0-9a-f]{16})", _Bundle, shared),
            (r"/api/deploy", _Deploy, shared),
            (r"/api/roll-back", _RollBack, shared),
            (r"/([a-z_]*(?:\.[a-z]+)?)", _Page, shared),
        ],
        default_handler_class=_Nothing,
        default_handler_args=shared,
        log_function=lambda _handler: None,
        websocket_max_message_size=MAX_MESSAGE_BYTES,
        websocket_ping_interval=_PING_S,
    )


class _Handler(web.RequestHandler):
    """What all handlers share: headers, the check of `Host`, the deadline, errors as JSON."""

    def initialize(self, backend: Backend) -> None:
        self.backend = backend
        self._deadline: asyncio.TimerHandle | None = None
        self.end_after(REQUEST_LIMIT_S)

    def end_after(self, limit_s: float) -> None:
        """Cut the connection when the request is so old and its answer has not been taken."""
        if self._deadline is not None:
            self._deadline.cancel()
        cut = cast(HTTP1Connection, self.request.connection).close
        left_s = limit_s - self.request.request_time()
        self._deadline = asyncio.get_running_loop().call_later(left_s, cut)

    def finish(self, chunk: str | bytes | dict[str, Any] | None = None) -> asyncio.Future[None]:
        written = super().finish(chunk)
        deadline = self._deadline
        if deadline is not None:
            written.add_done_callback(lambda _written: deadline.cancel())
        return written

    def on_connection_close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def set_default_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.set_header(name, value)

    def prepare(self) -> None:
        if not self.backend.guard.is_host(self.request.headers.get("Host")):
            raise _Refusal(403, "expected a Host that names this machine", "open the printed address")

    def write_error(self, status_code: int, **kwargs: Any) -> None:  # noqa: ANN401 - tornado's own signature
        error = (kwargs.get("exc_info") or (None, None, None))[1]
        text, hint = "the request cannot be answered", ""
        if isinstance(error, _EXPLAINED):
            error = _refusal(error, 502 if isinstance(error, RefusedError) else 422)
            self.set_status(error.status_code)
        if isinstance(error, _Refusal):
            text, hint = error.text, error.hint
        elif status_code in (400, 404, 405, 413):
            text = {404: "there is nothing here", 405: "expected another method"}.get(
                status_code, "expected another request"
            )
        self.set_header("Content-Type", JSON)
        self.finish(as_json({"error": text, "hint": hint}))

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:  # noqa: ANN401 - tornado's own signature
        if not isinstance(value, (web.HTTPError, *_EXPLAINED)):
            super().log_exception(typ, value, tb)


class _Refusal(web.HTTPError):
    """An error that the page shows."""

    def __init__(self, status: int, text: str, hint: str = "") -> None:
        super().__init__(status)
        self.text, self.hint = text, hint


def _refusal(error: Exception, status: int) -> _Refusal:
    """Return a mistake or a failure as the page shows it."""
    text = getattr(error, "message", None) or str(error)
    return _Refusal(status, " ".join(str(text).split())[:1000], getattr(error, "hint", None) or "")


class _Guarded(_Handler):
    """A handler for pages that know the token."""

    def prepare(self) -> None:
        super().prepare()
        _require(self.backend.guard, self.request, self.request.headers.get(_TOKEN_HEADER))

    def answer(self, document: Mapping[str, Any]) -> None:
        """Answer with JSON, which a browser must not take for a page."""
        self.set_header("Content-Type", JSON)
        self.finish(as_json(document))

    def take_body(self, most_bytes: int) -> None:
        """Let a page that has passed the guard send a long body."""
        connection = cast(HTTP1Connection, self.request.connection)
        connection.set_max_body_size(most_bytes)
        connection.set_body_timeout(UPLOAD_LIMIT_S)
        self.end_after(UPLOAD_LIMIT_S)

    def fields(self, *names: str) -> list[str]:
        """Return texts from a JSON object in the body."""
        try:
            body = json.loads(self.request.body) if len(self.request.body) <= _MAX_JSON_BYTES else None
            found = [body[name] for name in names] if isinstance(body, dict) else []
        except (ValueError, KeyError, RecursionError):
            found = []
        if len(found) != len(names) or not all(isinstance(value, str) for value in found):
            raise _Refusal(400, f"expected a JSON object with {' and '.join(names)}")
        return found


def _require(guard: Guard, request: HTTPServerRequest, token: str | None) -> None:
    """Check token and origin; a GET from the page itself has no `Origin`."""
    origin = request.headers.get("Origin")
    needs_origin = request.method != "GET" or origin is not None or "Upgrade" in request.headers
    if needs_origin and not guard.is_origin(origin, request.headers.get("Host")):
        raise _Refusal(403, "expected a request from the page itself, got one from another site")
    if not guard.is_token(token):
        raise _Refusal(403, "expected the current token", "open the address that the command printed")


class _Nothing(_Handler):
    def prepare(self) -> None:
        super().prepare()
        raise web.HTTPError(404)


class _Page(_Handler):
    def get(self, name: str) -> None:
        file = self.backend.files.get(name or INDEX)
        if file is None:
            raise web.HTTPError(404)
        self.set_header("Content-Type", file.media_type)
        self.finish(file.content)


class _Session(_Guarded):
    def get(self) -> None:
        self.answer({"version": __version__})


@web.stream_request_body
class _Ask(_Guarded):
    """A picture, a recording or a JSON request for a model, answered with what the page draws."""

    def prepare(self) -> None:
        self._body: bytearray | None = None
        super().prepare()
        self.take_body(MAX_REQUEST_BYTES)
        self._body = bytearray()

    def data_received(self, chunk: bytes) -> None:
        if self._body is not None:
            self._body += chunk

    async def post(self) -> None:
        agent, model = self.get_query_argument("agent"), self.get_query_argument("model")
        body = bytes(self._body or b"")
        request = _request(self.request.headers.get("Content-Type", ""), body)
        async with self.backend.asking:
            answer = await self.backend.client.model(agent, model)(request, deadline_s=_ASK_DEADLINE_S)
        self.answer(await asyncio.to_thread(reading.read, answer))


def _request(content_type: str, body: bytes) -> Request:
    if content_type == JSON:
        return Request(JSON, body)
    return Request.sound(body) if content_type == WAV else Request.image(body)


@web.stream_request_body
class _Bundles(_Guarded):
    """The upload of a bundle, straight to a file."""

    def prepare(self) -> None:
        self._path: Path | None = None
        super().prepare()
        self.take_body(MAX_BUNDLE_BYTES)
        try:
            self._path = self.backend.actions.new_file()
        except BuildError as error:
            raise _refusal(error, 429) from error
        self._file = self._path.open("wb")

    def data_received(self, chunk: bytes) -> None:
        if self._path is not None:
            self._file.write(chunk)

    async def post(self) -> None:
        assert self._path is not None
        self._file.close()
        path, self._path = self._path, None
        upload = await self.backend.actions.keep(path, self.get_query_argument("name", ""))
        self.answer(upload.to_json())

    def on_connection_close(self) -> None:
        super().on_connection_close()
        self._drop()

    def on_finish(self) -> None:
        self._drop()

    def _drop(self) -> None:
        """Delete an upload that did not arrive completely."""
        if self._path is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)
            self._path = None


class _Bundle(_Guarded):
    def delete(self, upload_id: str) -> None:
        self.backend.actions.discard(upload_id)
        self.set_status(204)


class _Deploy(_Guarded):
    def post(self) -> None:
        bundle, agent = self.fields("bundle", "agent")
        self.answer(asdict(self.backend.actions.deploy(bundle, agent)))


class _RollBack(_Guarded):
    def post(self) -> None:
        agent, model = self.fields("agent", "model")
        self.answer(asdict(self.backend.actions.roll_back(agent, model)))


class _Live(websocket.WebSocketHandler, _Handler):
    """One page's connection; its second subprotocol is the token, because browsers send no other header."""

    def prepare(self) -> None:
        self._session: PageSession | None = None
        _Handler.prepare(self)
        offered = [each.strip() for each in self.request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        _require(self.backend.guard, self.request, offered[1] if len(offered) == 2 else None)

    def check_origin(self, origin: str) -> bool:
        return self.backend.guard.is_origin(origin, self.request.headers.get("Host"))

    def select_subprotocol(self, subprotocols: list[str]) -> str | None:
        return _PROTOCOL if _PROTOCOL in subprotocols else None

    def open(self, *_args: str, **_kwargs: str) -> None:
        _Handler.on_connection_close(self)  # no deadline: it is a page, and pings tell whether it is there
        self._session = self.backend.open_session(self._write)
        if self._session is None:
            self.close(1013, "too many pages are open")

    def on_message(self, message: str | bytes) -> None:
        if self._session is None:
            return
        try:
            self._session.on_message(message if isinstance(message, str) else "")
        except FleetError as error:
            self.close(1008, str(error)[:100])

    def on_close(self) -> None:
        if self._session is not None:
            self.backend.close_session(self._session)

    async def _write(self, text: str) -> None:
        await self.write_message(text)
