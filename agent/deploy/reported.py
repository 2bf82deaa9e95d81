"""Makes the reported document from the store and the models that run."""

from __future__ import annotations

from collections.abc import Mapping

from agent.deploy.store.store import Store
from agent.errors import EdgeError
from agent.wire.desired import Desired
from agent.wire.job import MAX_MESSAGE_CHARACTERS
from agent.wire.reported import Rejection, Reported, ReportedModel, ServiceState


def reported(
    desired: Desired | None, rejection: Rejection | None, store: Store, *, running: Mapping[str, str]
) -> Reported:
    """Return the document.

    Parameters
    ----------
    desired
        The desired document in force, or None.
    rejection
        Why the last desired document was not accepted, or None.
    store
        Which bundle each model should run after a restart, and the committed counters.
    running
        The digest of the bundle that each model runs now.
    """
    models = tuple(
        ReportedModel(
            name=model.name,
            digest=running.get(model.name, model.digest),
            version=model.version,
            state=ServiceState.ACTIVE if model.name in running else ServiceState.FAILED,
            origin=model.origin,
            job=model.job,
            previous=model.previous,
            security_counter=store.committed_counter(model.name),
        )
        for model in store.active().values()
    )
    return Reported(desired, models, rejection)


def reject(error: EdgeError, version: int | None) -> Rejection:
    """Return why a desired document of this version (None if unreadable) was not accepted."""
    return Rejection(error.code, str(error)[:MAX_MESSAGE_CHARACTERS], version)
