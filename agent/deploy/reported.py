"""Makes the reported document: what runs, compared with what should run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from agent.deploy.interfaces import Condition
from agent.deploy.jobs import Request
from agent.deploy.reconcile import Problem
from agent.deploy.store.active import ActiveModel
from agent.deploy.store.store import Store
from agent.errors import EdgeError
from agent.wire.desired import Desired
from agent.wire.job import MAX_MESSAGE_CHARACTERS
from agent.wire.reported import Rejection, Reported, ReportedModel, ServiceState

# Of a model that goes on answering.
KEY_REVOKED: Final = "key revoked: deploy a bundle that another key has signed"


@dataclass(frozen=True, slots=True)
class Serving:
    """What is known about the models at this moment.

    `running` has the digests of what runs, `wishes` what should, `problems` why the last attempt failed, and
    `loading` those that are not loaded yet after the start.
    """

    running: Mapping[str, str]
    conditions: Mapping[str, Condition | None]
    wishes: Mapping[str, Request]
    problems: Mapping[str, Problem]
    loading: Collection[str]


def reported(
    desired: Desired | None, rejection: Rejection | None, store: Store, serving: Serving
) -> Reported:
    """Return the document about what was installed, what runs and what should run."""
    installed = tuple(_installed(model, store, serving) for model in store.active().values())
    missing = tuple(
        _missing(request, store, serving.problems[name])
        for name, request in serving.wishes.items()
        if name not in store.active() and name in serving.problems
    )
    return Reported(desired, installed + missing, rejection)


def reject(error: EdgeError, version: int | None) -> Rejection:
    """Return why a desired document of this version (None if unreadable) was not accepted."""
    return Rejection(error.code, str(error)[:MAX_MESSAGE_CHARACTERS], version)


def _installed(model: ActiveModel, store: Store, serving: Serving) -> ReportedModel:
    name = model.name
    running = serving.running.get(name)
    state, why = _state(model, running, serving)
    back = model.rolled_back
    return ReportedModel(
        name=name,
        digest=model.digest if running is None else running,
        version=model.version,
        state=state,
        origin=model.origin,
        job=model.job,
        previous=model.previous,
        security_counter=store.committed_counter(name),
        message=None if why is None else why.message[:MAX_MESSAGE_CHARACTERS],
        next_try_s=None if why is None else why.next_try_s,
        rolled_back=None if back is None else back.digest,
    )


def _state(model: ActiveModel, running: str | None, serving: Serving) -> tuple[ServiceState, Problem | None]:
    problem, condition = serving.problems.get(model.name), serving.conditions.get(model.name)
    wanted, back = serving.wishes.get(model.name), model.rolled_back
    if running is None and model.name in serving.loading:
        return ServiceState.STARTING, None
    if running is None or condition is None:
        return ServiceState.FAILED, problem
    if condition.failed:
        return ServiceState.FAILED, Problem(condition.message, condition.next_try_s)
    if back is not None and running == model.digest:
        return ServiceState.ROLLED_BACK, Problem(back.reason, None)
    if problem is not None and (wanted is None or wanted.digest != running or back is not None):
        return ServiceState.DEGRADED, problem
    return ServiceState.ACTIVE, Problem(KEY_REVOKED, None) if condition.revoked else None


def _missing(request: Request, store: Store, problem: Problem) -> ReportedModel:
    """Return the entry of a model that was never in service."""
    return ReportedModel(
        name=request.model,
        digest=request.digest,
        version=request.version,
        state=ServiceState.FAILED,
        origin=request.origin,
        job=request.job,
        previous=None,
        security_counter=store.committed_counter(request.model),
        message=problem.message[:MAX_MESSAGE_CHARACTERS],
        next_try_s=problem.next_try_s,
    )
