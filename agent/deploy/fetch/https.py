"""Download a bundle over https from an allowed place, and resume after an interruption.

Promises: only hosts, ports and paths of the allow list are contacted, and redirects are not followed.
Certificates and host names are checked. Nothing beyond the announced size is written. A server that is too
slow is given up.
Leaves to others: whether the bytes are the right ones, and which source to try next.

The standard library's blocking calls run in one thread. The event loop watches the transfer rate, and shuts
down the socket of a transfer that is too slow or no longer wanted. The minimum rate also covers the
handshake and the headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final

from agent.deploy.fetch.allow_list import AllowList, HttpsSettings, Location
from agent.deploy.store.part import Part, UrlVersion
from agent.disk_thread import in_disk_thread
from agent.errors import ConfigError, EndlessDataError, SourceError, StoreError
from agent.mqtt.tls import verifying_context

# A read of this size takes a Raspberry Pi about a millisecond, and keeps the number of system calls low.
_CHUNK_BYTES: Final = 256 * 1024
# RFC 9110, 15.3.7 and 15.5.17.
_OK, _PARTIAL, _RANGE_NOT_SATISFIABLE = 200, 206, 416
# Worth another attempt at the same place: the server, or a proxy before it, is overloaded or restarting.
_TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class HttpsSource:
    """Downloads from the allowed places.

    An allowed place that is not a URL, or a `ca_file` that cannot be read, raises ConfigError.
    """

    def __init__(self, settings: HttpsSettings) -> None:
        self._settings = settings
        self.allowed = AllowList(settings.allow)
        self._tls: ssl.SSLContext | None = None

    async def download(self, url: str, part: Part, progress: Callable[[int], None]) -> None:
        """Append to `part` until it is complete, in as many attempts as make progress.

        The length of `part` is where to resume. `progress` is called in the event loop with the number of
        downloaded bytes, about once a second. Raises SourceError if the place is not allowed, refused, could
        not be reached, or was too slow, and EndlessDataError if the server has more bytes than were
        announced.
        """
        location = self.allowed.check(url)
        tls = await in_disk_thread(self._context)
        failures, pause_s = 0, self._settings.pause_s
        while part.written < part.size:
            before = part.written
            transfer = _Transfer(url, location, part, tls, self._settings)
            try:
                await self._watch(transfer, progress)
            except _TransientError as error:
                failures = 1 if part.written > before else failures + 1
                if failures >= self._settings.attempts:
                    raise SourceError(f"{location.host}: {error}") from error
                if part.written > before:
                    pause_s = self._settings.pause_s
                await asyncio.sleep(pause_s)
                pause_s *= 2
        progress(part.written)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            try:
                self._tls = verifying_context(self._settings.ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"{self._settings.ca_file}: expected CA certificates in PEM: {error}"
                ) from error
        return self._tls

    async def _watch(self, transfer: _Transfer, progress: Callable[[int], None]) -> None:
        """Run one request in a thread; shut it down if it is too slow or this task is cancelled."""
        thread = asyncio.ensure_future(in_disk_thread(transfer.run))
        window_s, floor = self._settings.floor_window_s, self._settings.floor_bytes_per_s
        seen, since = transfer.received, time.monotonic()
        too_slow = False
        try:
            while not thread.done():
                await asyncio.wait({thread}, timeout=min(1.0, window_s))
                progress(transfer.position)
                now = time.monotonic()
                if not thread.done() and now - since >= window_s:
                    too_slow = transfer.received - seen < floor * window_s
                    seen, since = transfer.received, now
                    if too_slow:
                        break
        finally:
            if not thread.done():
                transfer.cut()
                with contextlib.suppress(_TransientError, SourceError, EndlessDataError, StoreError):
                    await asyncio.shield(thread)
        if too_slow:
            raise SourceError(f"too slow: expected at least {floor} bytes/s over {window_s:g} s")
        thread.result()


class _TransientError(Exception):
    """The attempt failed, and another may succeed."""


class _Transfer:
    """One request in a thread: `run` blocks, `cut` makes it end soon."""

    def __init__(
        self, url: str, location: Location, part: Part, tls: ssl.SSLContext, settings: HttpsSettings
    ) -> None:
        self._url = url
        self._location = location
        self._part = part
        self._tls = tls
        self._timeout_s = settings.timeout_s
        self._socket: socket.socket | None = None
        self._cut = False
        self.received = 0

    @property
    def position(self) -> int:
        """Number of downloaded bytes."""
        return self._part.written

    def cut(self) -> None:
        """Make `run` end soon, from another thread."""
        self._cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # The base class's: SSLSocket.shutdown removes the TLS object that the other thread uses.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def run(self) -> None:
        """Make the request and append the response to the part."""
        connection = http.client.HTTPSConnection(
            self._location.host, self._location.port, timeout=self._timeout_s, context=self._tls
        )
        try:
            connection.sock = self._connect()
            self._require_uncut()
            self._exchange(connection)
        except ssl.SSLCertVerificationError as error:
            raise SourceError(
                f"{self._location.host}: {error.verify_message or error.reason}",
                hint="check the host name, and that ca_file has the server's certificate authority",
            ) from error
        except (http.client.HTTPException, OSError) as error:
            raise _TransientError(str(error) or type(error).__name__) from error
        finally:
            self._socket = None
            connection.close()

    def _connect(self) -> ssl.SSLSocket:
        """Connect and shake hands in two steps, so that `cut` works during a slow handshake."""
        place = (self._location.host, self._location.port)
        connected = self._socket = socket.create_connection(place, self._timeout_s)
        secured = self._tls.wrap_socket(
            connected, server_hostname=self._location.host, do_handshake_on_connect=False
        )
        self._socket = secured
        try:
            self._require_uncut()  # `cut` may have found no socket to shut down
            secured.do_handshake()
        except BaseException:
            secured.close()
            raise
        return secured

    def _require_uncut(self) -> None:
        if self._cut:
            raise _TransientError("no longer wanted")

    def _exchange(self, connection: http.client.HTTPSConnection) -> None:
        part = self._part
        headers = {"Accept-Encoding": "identity", "User-Agent": "edge-agent"}
        if part.written:
            headers["Range"] = f"bytes={part.written}-"
            origin = part.origin()
            if origin is not None and origin.url == self._url:
                # RFC 9110, 13.1.5: the server sends the whole file if its version has changed.
                headers["If-Range"] = origin.etag
        connection.request("GET", self._location.target, headers=headers)
        answer = connection.getresponse()
        if (
            answer.status in (_OK, _PARTIAL)
            and answer.getheader("Content-Encoding", "identity") != "identity"
        ):
            encoding = answer.getheader("Content-Encoding")
            raise SourceError(f"{self._location.host}: expected no Content-Encoding, got {encoding!r:.80}")
        if answer.status == _OK:
            part.restart()
            self._note_origin(answer)
            self._expect_length(answer, part.size)
        elif answer.status == _PARTIAL and part.written:
            self._expect_range(answer)
        elif answer.status == _RANGE_NOT_SATISFIABLE and part.written:
            part.restart()
            raise _TransientError("the server's file has changed since the download began")
        elif answer.status in _TRANSIENT:
            raise _TransientError(f"status {answer.status}")
        else:
            raise SourceError(f"{self._location.host}: expected status 200 or 206, got {answer.status}")
        self._receive(answer)

    def _note_origin(self, answer: http.client.HTTPResponse) -> None:
        etag = answer.getheader("ETag", "")
        # A weak tag (RFC 9110, 8.8.1) does not promise that two versions have the same bytes.
        strong = etag.startswith('"') and etag.endswith('"') and len(etag) < 1024
        self._part.set_origin(UrlVersion(self._url, etag) if strong else None)

    def _expect_length(self, answer: http.client.HTTPResponse, expected: int) -> None:
        if answer.length is None:
            return  # chunked: `Part.append` enforces the size
        if answer.length > expected:
            raise EndlessDataError(f"{self._location.host}: expected {expected} bytes, got {answer.length}")
        if answer.length < expected:
            raise SourceError(f"{self._location.host}: expected {expected} bytes, got {answer.length}")

    def _expect_range(self, answer: http.client.HTTPResponse) -> None:
        part = self._part
        field = answer.getheader("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(field)
        if match is None:
            raise SourceError(f"{self._location.host}: expected a Content-Range, got {field[:80]!r}")
        first, last, total = (int(number) for number in match.groups())
        if total > part.size:
            raise EndlessDataError(f"{self._location.host}: expected {part.size} bytes, got {total}")
        if (first, last, total) != (part.written, part.size - 1, part.size):
            expected = f"bytes {part.written}-{part.size - 1}"
            part.restart()
            raise _TransientError(f"expected {expected}, got {field}")

    def _receive(self, answer: http.client.HTTPResponse) -> None:
        while not self._cut and (data := answer.read1(_CHUNK_BYTES)):
            self.received += len(data)
            self._part.append(data)
        if self._part.written < self._part.size:
            raise _TransientError(f"expected {self._part.size} bytes, got {self._part.written}")
        self._part.sync()
