"""What decides, beside the document, whether a bundle is refused: the trusted keys, the machine, the agent.

Promises: the circumstances have the same name in each run of the agent as long as nothing in them changes.
Leaves to others: when to read the keys (`installer`, `plan`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Final

import agent
from agent.bundle.keyring import Keyring
from agent.bundle.machine import Machine
from agent.errors import EdgeError

# The amount of memory that a kernel reports differs a little from start to start.
_MEMORY_STEP_BYTES: Final = 64 << 20


class Circumstances:
    """The keys as they were last read, and what does not change while the agent runs.

    Parameters
    ----------
    keyring
        Reads the currently trusted keys; called in a thread.
    machine
        This machine, for the admission of bundles.
    https_allow
        The allowed https sources.
    serves_revoked
        Whether what is in service goes on serving after its key was revoked.
    """

    def __init__(
        self,
        keyring: Callable[[], Keyring],
        machine: Machine,
        https_allow: Collection[str] = (),
        *,
        serves_revoked: bool = False,
    ) -> None:
        self.machine = machine
        self.serves_revoked = serves_revoked
        self._keyring = keyring
        self._https_allow = https_allow
        self._keys: object = None

    def read_keys(self) -> Keyring:
        """Return the trusted keys; raises ConfigError if there is none. This blocks: call it in a thread."""
        try:
            trusted = self._keyring()
        except EdgeError as error:
            self._keys = [str(error)], []
            raise
        self._keys = sorted(trusted.keys), sorted(trusted.revoked)
        return trusted

    def name(self) -> str:
        """Return a digest of the circumstances, with the keys as they were last read."""
        told = {each.name: getattr(self.machine, each.name) for each in fields(self.machine)} | {
            # Sets have another order in each process.
            "features": sorted(self.machine.features),
            "compatible": sorted(self.machine.compatible),
            "memory_bytes": (self.machine.memory_bytes or 0) // _MEMORY_STEP_BYTES,
        }
        everything = repr((agent.__version__, self._keys, told, sorted(self._https_allow)))
        return hashlib.sha256(everything.encode()).hexdigest()[:16]
