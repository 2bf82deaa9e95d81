"""The keys of trusted signers as they are now: read for each deployment, and looked at while the agent runs.

Promises: what cannot be used in their folder is logged once, when it changes, and counted in `faults`.
Leaves to others: what a key file looks like and which keys are in force (`agent.bundle.keyring`).
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Final

from agent.bundle.keyring import Keyring
from agent.errors import ConfigError

_log = logging.getLogger(__name__)

# A folder of wrong files must not fill the log.
_MAX_LOGGED_FAULTS: Final = 8


class TrustedKeys:
    """The folder of trusted keys, with the list of revoked ones.

    `faults` are what could not be used when it was last read, one line for each file or line. `keyring` is
    None before the first time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.faults: tuple[str, ...] = ()
        self.keyring: Keyring | None = None

    def read(self) -> Keyring:
        """Return the trusted keys; raises ConfigError without a usable one."""
        try:
            keyring = Keyring.from_dir(self._folder)
        except ConfigError as error:
            self._note((str(error),))
            raise
        self._note(keyring.faults)
        self.keyring = keyring
        return keyring

    def revokes(self, key_id: str) -> bool:
        """Return whether the key that signed what runs was revoked when the folder was last read."""
        return self.keyring is not None and self.keyring.revokes_id(key_id)

    def check(self) -> None:
        """Note what cannot be used now: without any key, the agent can still be reached."""
        with contextlib.suppress(ConfigError):
            self.read()

    def _note(self, faults: tuple[str, ...]) -> None:
        if faults != self.faults:
            self.faults = faults
            for fault in faults[:_MAX_LOGGED_FAULTS]:
                _log.error("keyring: %s", fault)
            if not faults:
                _log.warning("keyring: all files can be used again")
