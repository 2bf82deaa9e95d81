"""Bundles of models that were stopped: `stopped.json` in the state directory.

A desired document is not signed. If one stops every model, by mistake or in bad faith, the next one must find
the bundles still there: the device may not be able to fetch them again.

Promises: the last `KEEP` bundles stay until their space is needed, or another bundle serves under the same
name. No clock is involved: that of a device without a battery may be wrong by decades.
Leaves to others: deleting files (`store`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Final

from agent.bundle.names import hex_digest
from agent.deploy.store.state_file import Checkpoint, StateFile, no_checkpoint
from agent.errors import StoreError

# More models than most devices run; older ones were probably stopped on purpose.
KEEP: Final = 8

_log = logging.getLogger(__name__)


class Stopped:
    """The stopped bundles, in the order in which they were stopped."""

    def __init__(self, path: Path, *, checkpoint: Checkpoint = no_checkpoint) -> None:
        self._file = StateFile(path, mirrored=False, checkpoint=checkpoint)
        self._digests: dict[str, str] = {}

    def load(self) -> None:
        """Read the file."""
        self._digests = _parse(self._file.load())

    def digests(self) -> Collection[str]:
        """Return the digests of the bundles to keep."""
        return tuple(self._digests.values())

    def keep(self, name: str, digest: str) -> None:
        """Keep the bundle of a model that is stopped now."""
        others = {other: kept for other, kept in self._digests.items() if other != name}
        self._save(dict([*others.items(), (name, digest)][-KEEP:]))

    def forget(self, name: str) -> None:
        """Keep no bundle for this model any more: another one serves."""
        if name in self._digests:
            self._save({other: kept for other, kept in self._digests.items() if other != name})

    def release(self) -> str | None:
        """Forget the bundle that was stopped first; return its digest, or None if there is none."""
        name = next(iter(self._digests), None)
        if name is None:
            return None
        digest = self._digests[name]
        self.forget(name)
        return digest

    def _save(self, digests: dict[str, str]) -> None:
        """Store the record; without it, the bundles are kept only until the agent is restarted."""
        self._digests = digests
        try:
            self._file.save([[name, digest] for name, digest in digests.items()])
        except StoreError as error:
            _log.warning("stopped.json is not up to date: %s", error)


def _parse(document: object) -> dict[str, str]:
    digests: dict[str, str] = {}
    for entry in document if isinstance(document, list) else ():
        try:
            name, digest = entry
            hex_digest(digest)
            digests[str(name)] = digest
        except (TypeError, ValueError) as error:
            _log.error("stopped.json: an entry is left out: %s", error)
    return digests
