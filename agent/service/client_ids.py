"""The client identifiers of the agent's connections: secret, and the same after a restart.

A broker ends a connection when another client connects with the same identifier, and mosquitto cannot bind
identifiers to user names. Any user of the broker could disconnect a device whose identifiers are its name.
Therefore a part of the identifiers is random; it is kept in the state directory, so that
the broker's session is continued after a restart.

Promises: without a usable state directory the agent still gets identifiers; then its sessions end with it.
"""

from __future__ import annotations

import logging
import re
import secrets
from pathlib import Path
from typing import Final

from agent.durable import write_durably
from agent.errors import StoreError

_log = logging.getLogger(__name__)

CLIENT_ID_FILE: Final = "client_id"
# 64 bits: far too many to try over a network.
_SECRET_BYTES: Final = 8
_SECRET: Final = re.compile(rb"[0-9a-f]{16}")
_MAX_FILE_BYTES: Final = 64


class ClientIds:
    """The identifiers of one agent, `<device>-<secret>-<connection>`.

    The secret is kept in `state_dir`; it is made if it is missing or damaged. If that is None because the
    disk does not respond, it is not stored.
    """

    def __init__(self, device: str, state_dir: Path | None) -> None:
        secret = (
            secrets.token_hex(_SECRET_BYTES) if state_dir is None else _read(state_dir) or _make(state_dir)
        )
        self._prefix = f"{device}-{secret or secrets.token_hex(_SECRET_BYTES)}"

    def of(self, connection: str) -> str:
        """Return the identifier of a connection, such as `control`."""
        return f"{self._prefix}-{connection}"


def _read(state_dir: Path) -> str | None:
    path = state_dir / CLIENT_ID_FILE
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("cannot read %s: %s", path, error.strerror)
        return None
    if _SECRET.fullmatch(raw) is None:
        _log.warning("expected 16 hex digits in %s, got something else: making new ones", path)
        return None
    return raw.decode()


def _make(state_dir: Path) -> str:
    secret = secrets.token_hex(_SECRET_BYTES)
    try:
        write_durably(state_dir / CLIENT_ID_FILE, secret.encode(), mode=0o600)
    except StoreError as error:
        _log.warning("requests that arrive while the agent restarts will be lost: %s", error)
    return secret
