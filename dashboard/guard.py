"""Who may use the dashboard: the checks of each request before anything else happens.

A page of another site that the user has open in the same browser must not reach the dashboard. So `Host` must
name this machine; otherwise a name that was rebound to it (DNS rebinding) would count as the same origin. And
`Origin`, which a browser sends with each WebSocket and each POST, must be that host. Another user of this
machine must not reach it, either. So everything but the page's own files needs the token of this start. The
printed address has the token in its fragment, which no browser sends to a server.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from builder.loopback import is_loopback

# 192 bits cannot be guessed.
_TOKEN_BYTES: Final = 24


def new_token() -> str:
    """Return a token: letters, digits, `-` and `_`, as a WebSocket's subprotocol may have them."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class Guard:
    """The checks.

    `token`: what a page must know.
    `listen`: the host that the server listens on.
    `names`: further names of it that a browser may use.
    """

    token: str = field(repr=False)
    listen: str
    names: frozenset[str] = frozenset()

    def is_host(self, host_header: str | None) -> bool:
        """Return whether a `Host` header names this server; the port may be that of a tunnel.

        An address cannot be rebound, so one is enough where the server listens on more than this machine.
        """
        host = _host(f"//{host_header}") if host_header else None
        if host is None:
            return False
        if is_loopback(host) or host in self.names or host == self.listen:
            return True
        if is_loopback(self.listen):
            return False
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def is_origin(self, origin: str | None, host_header: str | None) -> bool:
        """Return whether an `Origin` header is the page that this server sent."""
        if not origin or not host_header:
            return False
        try:
            parts = urlsplit(origin)
        except ValueError:  # such as a bracket without an address
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host_header.lower()

    def is_token(self, token: str | None) -> bool:
        """Return whether a token is that of this start."""
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())


def _host(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises for one that is not a number
    except ValueError:
        return None
    return parts.hostname if not parts.username and not parts.path and not parts.query else None
