"""Which bundle each model runs, and which it ran before: `active.json` of the state directory.

Promises: what is read are whole entries whose digests are digests. Leaves writing to `store`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from agent.bundle.names import hex_digest
from agent.deploy.store.state_file import peek
from agent.wire.reported import Origin

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActiveModel:
    """The bundle that a model runs.

    Attributes
    ----------
    digest, previous
        `sha256:<hex>` of the bundle, and of the one before it (None at first).
    job
        The deployment that brought it here.
    """

    name: str
    digest: str
    version: str
    origin: Origin
    job: str
    previous: str | None


def read_active(root: Path) -> dict[str, ActiveModel]:
    """Return what is active in the state directory `root`, and touch nothing there."""
    path = root / "active.json"
    return parse_active(peek(path) or peek(path.with_name(path.name + ".mirror")))


def parse_active(document: object) -> dict[str, ActiveModel]:
    """Read what `Store.switch` wrote; an entry that makes no sense is left out, and said so."""
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
            _log.error("active.json: %s is left out: %s", name, error)
        else:
            active[name] = model
    return active
