"""Which bundle each model runs, and which it ran before: `active.json` in the state directory.

Promises: only complete entries with valid digests are returned. Leaves writing to `store`.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from agent.bundle.names import hex_digest
from agent.deploy.store.state_file import mirror_of, peek
from agent.deploy.trial import Trial
from agent.wire.reported import Origin

ACTIVE_FILE: Final = "active.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A bundle that failed on trial, and why; another deployment than `job` may try it again."""

    digest: str
    version: str
    job: str
    reason: str


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
    counter_floor
        The security counter that this bundle must meet, if it came back after its successor had failed on
        trial; None for the committed one.
    trial
        The bundle's trial, or None after it, and for a bundle without a predecessor.
    rolled_back
        The successor that failed on trial, or None.
    """

    name: str
    digest: str
    version: str
    origin: Origin
    job: str
    previous: str | None
    counter_floor: int | None = None
    trial: Trial | None = None
    rolled_back: RolledBack | None = None

    def to_document(self) -> dict[str, object]:
        """Return the entry as a JSON object."""
        members = asdict(self)
        del members["name"]
        return members


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
                # Absent in the file of an agent that knew no trials.
                counter_floor=entry.get("counter_floor"),
                trial=None if entry.get("trial") is None else Trial.from_document(entry["trial"]),
                rolled_back=None if entry.get("rolled_back") is None else RolledBack(**entry["rolled_back"]),
            )
            for digest in (model.digest, model.previous):
                if digest is not None:
                    hex_digest(digest)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            _log.error("active.json: ignoring %s: %s", name, error)
        else:
            active[name] = model
    return active
