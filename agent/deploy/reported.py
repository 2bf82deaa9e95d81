"""What runs here, as the document that is retained at `reported`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from agent.deploy.desired import Desired
from agent.deploy.jobs import MAX_MESSAGE_CHARACTERS
from agent.deploy.store.store import Store
from agent.errors import EdgeError


@dataclass(frozen=True, slots=True)
class Refused:
    """A desired document that was not taken.

    Attributes
    ----------
    error
        Why.
    version
        Its version, if that could be read.
    """

    error: EdgeError
    version: int | None


def format_report(
    desired: Desired | None, refused: Refused | None, store: Store, *, running: Mapping[str, str]
) -> bytes:
    """Write the document.

    Parameters
    ----------
    desired
        The document in force.
    refused
        The last one, if it was not taken.
    store
        Which bundle each model should run after a restart, and the committed counters.
    running
        The digest that each model runs now.
    """
    document = {
        "version": None if desired is None else desired.version,
        "models": {
            model.name: {
                "digest": running.get(model.name, model.digest),
                "version": model.version,
                "state": "active" if model.name in running else "failed",
                "origin": model.origin,
                "job": model.job,
                "previous": model.previous,
                "security_counter": store.committed_counter(model.name),
            }
            for model in store.active().values()
        },
        # For whoever deploys next, when the broker has forgotten what was desired.
        "desired": None if desired is None else desired.to_document(),
        "error": None
        if refused is None
        else {
            "code": refused.error.code,
            "message": str(refused.error)[:MAX_MESSAGE_CHARACTERS],
            "version": refused.version,
        },
    }
    return json.dumps(document, separators=(",", ":")).encode()
