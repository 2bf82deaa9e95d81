"""The https sources that the configuration allows, and how they are asked.

Promises: a URL is accepted only if it is https, is written so that every parser splits it alike, and lies
below an allowed prefix: host and port match exactly, the path up to a `/`.
Leaves to others: contacting the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from agent.errors import ConfigError, SourceError
from agent.wire.desired import MAX_SOURCE_CHARACTERS

_DEFAULT_PORT: Final = 443
# A path: unreserved characters, sub-delimiters, and escapes of anything but dots and separators. Two
# parsers could disagree about everything else, "//" and dot segments included.
_PATH: Final = re.compile(r"(/([A-Za-z0-9._~!$&'()*+,;=:@-]|%(?!2[eEfF]|5[cC]|00)[0-9A-Fa-f]{2})*)+")


@dataclass(frozen=True, slots=True)
class HttpsSettings:
    """The configuration of https sources.

    Attributes
    ----------
    allow
        Prefixes of URLs: `https://host[:port]/path/`. A host is matched exactly, a path up to a `/`.
    ca_file
        Trusted certificate authorities; None for the system's.
    timeout_s
        How long connecting, or waiting for the next bytes, may take.
    floor_bytes_per_s, floor_window_s
        The minimum transfer rate, and the period over which it is measured.
    attempts, pause_s
        How many attempts without any progress a source gets, and the pause before the second; it doubles.
    """

    allow: tuple[str, ...] = ()
    ca_file: Path | None = None
    timeout_s: float = 30.0
    floor_bytes_per_s: int = 100
    floor_window_s: float = 60.0
    attempts: int = 5
    pause_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Location:
    """The parts of an accepted URL."""

    host: str
    port: int
    path: str
    query: str

    @property
    def target(self) -> str:
        """The request target."""
        return f"{self.path}?{self.query}" if self.query else self.path


def parse_url(url: str) -> Location:
    """Split an https URL.

    Raises SourceError if it has another scheme, or if another parser could split it differently.
    """
    shown = url[:120]
    if len(url) > MAX_SOURCE_CHARACTERS:
        raise SourceError(f"expected a URL of at most {MAX_SOURCE_CHARACTERS} characters, got {len(url)}")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise SourceError(f"{shown!a}: expected printable ASCII characters without spaces and backslashes")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise SourceError(f"{shown}: {error}") from error
    if parts.scheme != "https":
        raise SourceError(f"{shown}: expected an https source, got {parts.scheme or 'no scheme'}")
    if parts.username is not None or parts.password is not None or "#" in url or not parts.hostname:
        raise SourceError(f"{shown}: expected https://host[:port]/path, without a user or a fragment")
    segments = parts.path.split("/")
    if not _PATH.fullmatch(parts.path) or "." in segments or ".." in segments or "" in segments[1:-1]:
        raise SourceError(
            f"{shown}: expected a path without dot segments, empty segments and escaped separators"
        )
    return Location(parts.hostname, port or _DEFAULT_PORT, parts.path, parts.query)


class AllowList:
    """The https sources that are allowed: prefixes of the form `https://host[:port]/path/`.

    One that is not a URL, or has a query, raises ConfigError.
    """

    def __init__(self, prefixes: Iterable[str]) -> None:
        self._places: list[Location] = []
        for prefix in prefixes:
            try:
                place = parse_url(prefix)
            except SourceError as error:
                raise ConfigError(
                    f"allowed source {error}", hint="write it as https://host[:port]/path/"
                ) from error
            if place.query:
                raise ConfigError(f"allowed source {prefix}: expected no query")
            self._places.append(place)

    def check(self, url: str) -> Location:
        """Return the parts of `url` if it is allowed; raises SourceError if not."""
        location = parse_url(url)
        for place in self._places:
            below = place.path if place.path.endswith("/") else place.path + "/"
            if (location.host, location.port) == (place.host, place.port) and (
                location.path == place.path or location.path.startswith(below)
            ):
                return location
        raise SourceError(
            f"https://{location.host}:{location.port}{location.path[:120]} is not an allowed source",
            hint="add its prefix to sources.https in the agent's configuration",
        )
