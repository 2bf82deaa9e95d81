"""Install a bundle from a file on this device: `edge-agent install FILE`.

Promises: the same checks as for a bundle that came over the network, made twice: here, so that a mistake is
told at once, and by the agent, who alone decides. Works while an agent runs and while none does.
Leaves to others: the installation itself; this side drops the file into the inbox (inbox.py) and waits.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Final, Protocol

from agent.bundle.admission import admit
from agent.bundle.keyring import Keyring
from agent.bundle.machine import Machine
from agent.bundle.names import hex_digest
from agent.bundle.verify import verify_only
from agent.deploy.inbox import Inbox
from agent.deploy.store.store import Store
from agent.durable import replacing, store_error
from agent.errors import StoreError
from agent.wire.job import Status

# An agent looks once a second; what is left is for hashing a large bundle twice on a small board.
WAIT_S: Final = 120.0
_POLL_S: Final = 0.1
_COPY_BYTES: Final = 1024 * 1024
EXIT_REFUSED: Final = 4


class Settings(Protocol):
    """What of the agent's configuration is needed."""

    @property
    def state_dir(self) -> Path:
        """Where bundles are kept."""

    @property
    def trust_dir(self) -> Path:
        """The folder with the keys that are trusted."""

    @property
    def compatible(self) -> tuple[str, ...]:
        """Further names of this machine."""


def install(config: Settings, path: Path, *, wait_s: float = WAIT_S) -> int:
    """Install a bundle, and say on standard output what became of it.

    Parameters
    ----------
    config
        The agent's configuration.
    path
        The bundle.
    wait_s
        How long a running agent may take.

    Returns
    -------
    int
        0 when it serves, or will as soon as an agent starts; 4 when the agent refused it.

    Raises
    ------
    EdgeError
        If it may not run here, or could not be handed over.
    """
    manifest, digest = verify_only(path, Keyring.from_dir(config.trust_dir))
    store = _open_store(config.state_dir)
    admit(
        manifest,
        Machine.detect(configured=config.compatible),
        deployed_as=manifest.name,
        committed_counter=store.committed_counter(manifest.name),
    )
    store.require_space(path.stat().st_size)
    inbox = Inbox(store.inbox)
    inbox.take_result(digest)  # of an earlier installation
    _drop(path, store.inbox / f"{hex_digest(digest)}.bundle")
    what = f"{manifest.name} {manifest.version}"
    if not store.in_use():
        _say(f"{what} is in the inbox: no agent runs now, it is installed when one starts")
        return 0
    _say(f"{what} is handed to the agent")
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        result = inbox.take_result(digest)
        if result is not None:
            if result.status is Status.SUCCEEDED:
                _say(f"{what} is in service")
                return 0
            _say(f"{what}: {result.status}: {result.message} ({result.code})")
            return EXIT_REFUSED
        time.sleep(_POLL_S)
    raise StoreError(
        f"the agent did not say within {wait_s:g} s what became of {what}", hint="look into the agent's log"
    )


def _drop(source: Path, target: Path) -> None:
    """Copy the bundle under its final name, whole and durable, readable for the agent whoever runs this."""
    try:
        with source.open("rb") as reading, replacing(target) as writing:
            os.fchmod(writing.fileno(), 0o644)
            shutil.copyfileobj(reading, writing, _COPY_BYTES)
    except OSError as error:
        raise store_error(f"copying {source} into the inbox", error) from error


def _open_store(state_dir: Path) -> Store:
    """Open the agent's directory; what root made in it before the agent did would not be the agent's."""
    try:
        foreign = state_dir.exists() and state_dir.stat().st_uid != os.geteuid()
        if foreign and not (state_dir / "inbox").is_dir():
            raise StoreError(f"no agent has used {state_dir} yet", hint="start the agent once")
    except OSError as error:
        raise store_error(f"looking at {state_dir}", error) from error
    return Store(state_dir)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
