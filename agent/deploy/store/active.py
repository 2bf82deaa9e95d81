"""Which bundle each model runs, and which it ran before: `active.json` in the state directory.

Promises: only complete entries with valid digests are returned. Leaves writing to `store`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.bundle.names import hex_digest
from agent.deploy.store.state_file import mirror_of, peek
from agent.wire.reported import Origin

ACTIVE_FILE: Final = "active.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActiveModel:
    """The bundle that a model runs.

    Attributes
    ----------
    name, version
        The manifest's.
    digest, previous
        `sha256:<hex>` of the bundle, and of the one before it or None.
    origin, job
        Who asked for it, and the deployment that installed it.
    """

    name: str
    digest: str
    version: str
    origin: Origin
    job: str
    previous: str | None


def read_active(root: Path) -> dict[str, ActiveModel]:
    """Return the active models of the state directory `root` without changing anything there."""
    path = root / ACTIVE_FILE
    return parse_active(peek(path) or peek(mirror_of(path)))


def parse_active(document: object) -> dict[str, ActiveModel]:
    """Read what `Store.switch` wrote; a malformed entry is logged and left out."""
    active: dict[str, ActiveModel] = {}
    if not isinstance(document, dict):
        return active
    for name, entry in document.items():
        try:
            model = ActiveModel(
                name=name,
                digest=entry["digest"],
                version=entry["version"],
                origin=Origin(entry["origin"]),
                job=entry["job"],
                previous=entry["previous"],
            )
            for digest in (model.digest, model.previous):
                if digest is not None:
                    hex_digest(digest)
        except (KeyError, TypeError, ValueError) as error:
            _log.error("active.json: ignoring %s: %s", name, error)
        else:
            active[name] = model
    return active
