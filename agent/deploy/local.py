"""Install a bundle from a file on this device: `edge-agent install FILE`.

Promises: the same checks as for a bundle from the network, made twice: here, so that a mistake is reported
at once, and by the agent, whose decision counts. It works whether or not an agent is running.
Leaves to others: the installation. This side puts the file into the inbox and waits for the result.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Final, Protocol

from agent import clock
from agent.bundle.admission import admit
from agent.bundle.counter_time import highest_counter
from agent.bundle.keyring import Keyring
from agent.bundle.machine import Machine
from agent.bundle.names import hex_digest
from agent.bundle.verify import verify_only
from agent.deploy.inbox import Inbox
from agent.deploy.store.store import Store
from agent.durable import replacing, store_error
from agent.errors import BundleError, StoreError
from agent.terminal import say
from agent.wire.job import Status

# An agent checks its inbox once a second; a small board needs the rest to hash a large bundle twice.
WAIT_S: Final = 120.0
_POLL_S: Final = 0.1
_COPY_BYTES: Final = 1024 * 1024


class Settings(Protocol):
    """The part of the agent's configuration that `install` needs."""

    @property
    def state_dir(self) -> Path:
        """The agent's state directory."""

    @property
    def trust_dir(self) -> Path:
        """The folder with the trusted keys."""

    @property
    def compatible(self) -> tuple[str, ...]:
        """Further device types that this machine is compatible with."""


def install(config: Settings, path: Path, *, wait_s: float = WAIT_S) -> int:
    """Install a bundle, and print the outcome on standard output.

    Parameters
    ----------
    config
        The agent's configuration.
    path
        The bundle.
    wait_s
        How long to wait for a running agent, in seconds.

    Returns
    -------
    int
        0 if the bundle is in service, or will be when an agent starts; 4 if the agent refused it.

    Raises
    ------
    EdgeError
        If the bundle may not run here, or cannot be put into the inbox.
    """
    keyring = Keyring.from_dir(config.trust_dir)
    keyring.require_complete()
    manifest, digest = verify_only(path, keyring)
    store = _open_store(config.state_dir)
    admit(
        manifest,
        Machine.detect(configured=config.compatible),
        deployed_as=manifest.name,
        committed_counter=store.committed_counter(manifest.name),
        highest_counter=highest_counter(clock.now_s(), synchronised=clock.is_synchronised()),
    )
    store.require_space(path.stat().st_size)
    inbox = Inbox(store.inbox)
    inbox.take_result(digest)  # of an earlier installation
    _drop(path, store.inbox / f"{hex_digest(digest)}.bundle")
    what = f"{manifest.name} {manifest.version}"
    if not store.in_use():
        say(f"{what} is in the inbox: the agent installs it when it starts", flush=True)
        return 0
    say(f"{what} is in the inbox: the agent is installing it", flush=True)
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        result = inbox.take_result(digest)
        if result is not None:
            if result.status is Status.SUCCEEDED:
                say(f"{what} is in service", flush=True)
                return 0
            say(f"{what}: {result.status}: {result.message} ({result.code})", flush=True)
            return BundleError.exit_code
        time.sleep(_POLL_S)
    raise StoreError(
        f"expected a result for {what} within {wait_s:g} s, got none", hint="read the agent's log"
    )


def _drop(source: Path, target: Path) -> None:
    """Copy the bundle into the inbox durably, with a mode that lets the agent's user read it."""
    try:
        # The agent's user owns the folder and could replace it by a link, and this may run as root.
        with source.open("rb") as reading, replacing(target, follow=False) as writing:
            os.fchmod(writing.fileno(), 0o644)
            shutil.copyfileobj(reading, writing, _COPY_BYTES)
    except OSError as error:
        raise store_error(f"copying {source} into the inbox", error) from error


def _open_store(state_dir: Path) -> Store:
    """Open the state directory, unless the agent must create its folders first: root would own them."""
    try:
        foreign = state_dir.exists() and state_dir.stat().st_uid != os.geteuid()
        if foreign and not (state_dir / "inbox").is_dir():
            raise StoreError(f"no agent has used {state_dir} yet", hint="start the agent once")
    except OSError as error:
        raise store_error(f"looking at {state_dir}", error) from error
    return Store(state_dir)
