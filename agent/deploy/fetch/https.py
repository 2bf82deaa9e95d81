"""Download a bundle over https, from the places that the configuration allows, going on after a cut.

Promises: no host, port or path outside the allow-list is ever contacted, redirects are not followed,
certificates and host names are checked, nothing beyond the announced size is written, and a server that
trickles is given up.
Leaves to others: whether the bytes are the right ones, and which source to try next.

Blocking calls of the standard library in one thread; the event loop watches how fast the bytes come, and
cuts the socket under a transfer that is too slow or no longer wanted. That floor covers the handshake and
the headers too.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.deploy.fetch.allow_list import AllowList, Location
from agent.deploy.store.part import Part, UrlVersion
from agent.errors import ConfigError, EndlessDataError, SourceError, StoreError

# A read of this size costs a Raspberry Pi about a millisecond, and keeps the syscalls few.
_CHUNK_BYTES: Final = 256 * 1024
# RFC 9110, 15.3.7 and 15.5.17.
_OK, _PARTIAL, _RANGE_NOT_SATISFIABLE = 200, 206, 416
# Worth another attempt at the same place: overloaded, restarting, behind a proxy that is.
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


@dataclass(frozen=True, slots=True)
class HttpsSettings:
    """What the configuration says about https sources.

    Attributes
    ----------
    allow
        Prefixes of URLs: `https://host[:port]/path/`. A host is matched exactly, a path at a `/`.
    ca_file
        The authorities that are trusted here; None means the system's.
    timeout_s
        How long connecting, or waiting for the next bytes, may take.
    floor_bytes_per_s, floor_window_s
        At least so many bytes a second have to come, looked at once a window.
    attempts, pause_s
        How often a source is tried without a byte of progress, and the pause before the second attempt; it
        doubles.
    """

    allow: tuple[str, ...] = ()
    ca_file: Path | None = None
    timeout_s: float = 30.0
    floor_bytes_per_s: int = 100
    floor_window_s: float = 60.0
    attempts: int = 5
    pause_s: float = 1.0


class HttpsSource:
    """Downloads from allowed places.

    Raises
    ------
    ConfigError
        If the authorities cannot be read, or an allowed place is not a URL.
    """

    def __init__(self, settings: HttpsSettings) -> None:
        self._settings = settings
        self.allowed = AllowList(settings.allow)
        self._tls: ssl.SSLContext | None = None

    async def download(self, url: str, part: Part, progress: Callable[[int], None]) -> None:
        """Append to `part` until it is whole, however often that takes.

        Parameters
        ----------
        progress
            Called in the event loop with the bytes that are there, about once a second.

        Raises
        ------
        SourceError
            If the place is not allowed, refused, could not be reached, or was too slow.
        EndlessDataError
            If it has more bytes than were announced.
        NoSpaceError, StoreError
            If the part could not be written.
        """
        location = self.allowed.check(url)
        tls = self._context()
        failures, pause_s = 0, self._settings.pause_s
        while part.written < part.size:
            before = part.written
            transfer = _Transfer(url, location, part, tls, self._settings)
            try:
                await self._watch(transfer, progress)
            except _PassingError as error:
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
                self._tls = ssl.create_default_context(
                    cafile=str(self._settings.ca_file) if self._settings.ca_file else None
                )
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"{self._settings.ca_file}: no authorities can be read: {error}") from error
            self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        return self._tls

    async def _watch(self, transfer: _Transfer, progress: Callable[[int], None]) -> None:
        """Run one request in a thread, and cut it when it is too slow or this task is cancelled."""
        thread = asyncio.ensure_future(asyncio.to_thread(transfer.run))
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
                with contextlib.suppress(_PassingError, SourceError, EndlessDataError, StoreError):
                    await asyncio.shield(thread)
        if too_slow:
            raise SourceError(f"too slow: under {floor} bytes a second for {window_s:g} s")
        thread.result()


class _PassingError(Exception):
    """The attempt failed in a way that may pass."""


class _Transfer:
    """One request, made in a thread: `run` blocks, `cut` makes it end soon."""

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
        """Bytes of the part so far."""
        return self._part.written

    def cut(self) -> None:
        """Make `run` end soon, from another thread."""
        self._cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # The base class's: SSLSocket.shutdown takes the TLS object away under the reading thread.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def run(self) -> None:
        """Make the request and append what comes."""
        connection = http.client.HTTPSConnection(
            self._location.host, self._location.port, timeout=self._timeout_s, context=self._tls
        )
        try:
            connection.sock = self._connect()
            if not self._cut:
                self._exchange(connection)
        except ssl.SSLCertVerificationError as error:
            raise SourceError(
                f"{self._location.host}: {error.verify_message or error.reason}",
                hint="is it the right server, and is its authority in ca_file?",
            ) from error
        except (http.client.HTTPException, OSError) as error:
            raise _PassingError(str(error) or type(error).__name__) from error
        finally:
            self._socket = None
            connection.close()

    def _connect(self) -> ssl.SSLSocket:
        """Connect in steps, so that the socket can be cut while a server drags the handshake out."""
        place = (self._location.host, self._location.port)
        connected = self._socket = socket.create_connection(place, self._timeout_s)
        secured = self._tls.wrap_socket(
            connected, server_hostname=self._location.host, do_handshake_on_connect=False
        )
        self._socket = secured
        try:
            secured.do_handshake()
        except BaseException:
            secured.close()
            raise
        return secured

    def _exchange(self, connection: http.client.HTTPSConnection) -> None:
        part = self._part
        headers = {"Accept-Encoding": "identity", "User-Agent": "edge-agent"}
        if part.written:
            headers["Range"] = f"bytes={part.written}-"
            origin = part.origin()
            if origin is not None and origin.url == self._url:
                # RFC 9110, 13.1.5: the whole file comes if it is another version by now.
                headers["If-Range"] = origin.etag
        connection.request("GET", self._location.target, headers=headers)
        answer = connection.getresponse()
        if (
            answer.status in (_OK, _PARTIAL)
            and answer.getheader("Content-Encoding", "identity") != "identity"
        ):
            raise SourceError(f"{self._location.host} sends the bundle encoded, which was not asked for")
        if answer.status == _OK:
            part.restart()
            self._note_origin(answer)
            self._expect_length(answer, part.size)
        elif answer.status == _PARTIAL and part.written:
            self._expect_range(answer)
        elif answer.status == _RANGE_NOT_SATISFIABLE and part.written:
            part.restart()
            raise _PassingError("what is there is no beginning of the file that is served now")
        elif answer.status in _PASSING:
            raise _PassingError(f"status {answer.status}")
        else:
            raise SourceError(f"{self._location.host}: expected status 200 or 206, got {answer.status}")
        self._receive(answer)

    def _note_origin(self, answer: http.client.HTTPResponse) -> None:
        etag = answer.getheader("ETag", "")
        # A weak tag (RFC 9110, 8.8.1) says that two versions mean the same, not that they are the same bytes.
        strong = etag.startswith('"') and etag.endswith('"') and len(etag) < 1024
        self._part.set_origin(UrlVersion(self._url, etag) if strong else None)

    def _expect_length(self, answer: http.client.HTTPResponse, expected: int) -> None:
        if answer.length is None:
            return  # chunked: the size is enforced while the bytes come
        if answer.length > expected:
            raise EndlessDataError(
                f"{self._location.host} would send {answer.length} bytes, {expected} were announced"
            )
        if answer.length < expected:
            raise SourceError(f"{self._location.host} has {answer.length} bytes, {expected} were announced")

    def _expect_range(self, answer: http.client.HTTPResponse) -> None:
        part = self._part
        field = answer.getheader("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(field)
        if match is None:
            raise SourceError(f"{self._location.host} answers a range with Content-Range {field[:80]!r}")
        first, last, total = (int(number) for number in match.groups())
        if total > part.size:
            raise EndlessDataError(f"{self._location.host} has {total} bytes, {part.size} were announced")
        if (first, last, total) != (part.written, part.size - 1, part.size):
            part.restart()
            raise _PassingError(f"bytes {part.written}-{part.size - 1} were asked for, {field} came")

    def _receive(self, answer: http.client.HTTPResponse) -> None:
        while not self._cut and (data := answer.read1(_CHUNK_BYTES)):
            self.received += len(data)
            self._part.append(data)
        if self._part.written < self._part.size:
            raise _PassingError(f"it ended after {self._part.written} of {self._part.size} bytes")
        self._part.sync()
