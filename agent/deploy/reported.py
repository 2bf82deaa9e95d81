"""The reported document: what runs, compared with what should run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from agent.deploy.installer import Installer
from agent.deploy.jobs import Request
from agent.deploy.parts import Parts
from agent.deploy.plan import Plan
from agent.deploy.reconcile import Problem
from agent.deploy.store.active import ActiveModel
from agent.errors import KeyRevokedError
from agent.wire.job import MAX_MESSAGE_CHARACTERS
from agent.wire.reported import Reported, ReportedModel, ServiceState

# Of a model that goes on answering.
KEY_REVOKED: Final = "key revoked: deploy a bundle that another key has signed"


class Report:
    """What is known about the models here; `loading` has those that are not loaded yet after the start."""

    def __init__(self, parts: Parts, plan: Plan, installer: Installer, loading: Collection[str]) -> None:
        self._parts = parts
        self._store = parts.store
        self._plan = plan
        self._running = installer.running
        self._loading = loading

    def document(self) -> Reported:
        """Return the document about what was installed, what runs and what should run."""
        problems, wishes, active = self._plan.problems(), self._plan.wishes(), self._store.active()
        installed = tuple(
            self._installed(model, problems.get(model.name), wishes.get(model.name))
            for model in active.values()
        )
        missing = tuple(
            self._missing(request, problems[name])
            for name, request in wishes.items()
            if name not in active and name in problems
        )
        desired = self._parts.desired
        return Reported(desired.document, installed + missing, desired.rejection)

    def states(self) -> dict[str, ServiceState]:
        """Return the state of each model that the document has."""
        return {model.name: ServiceState(model.state) for model in self.document().models}

    def stopped_by_revocation(self) -> set[str]:
        """Return the models that do not run as they should because their bundles' keys are revoked."""
        problems = self._plan.problems()
        return {
            name
            for name, model in self._store.active().items()
            if (problem := problems.get(name)) is not None
            and problem.code == KeyRevokedError.code
            and self._running.get(name) != model.digest
        }

    def _installed(
        self, model: ActiveModel, problem: Problem | None, wanted: Request | None
    ) -> ReportedModel:
        running, back = self._running.get(model.name), model.rolled_back
        state, why = self._state(model, problem, wanted)
        return ReportedModel(
            name=model.name,
            digest=model.digest if running is None else running,
            version=model.version,
            state=state,
            origin=model.origin,
            job=model.job,
            previous=model.previous,
            security_counter=self._store.committed_counter(model.name),
            message=None if why is None else why.message[:MAX_MESSAGE_CHARACTERS],
            next_try_s=None if why is None else why.next_try_s,
            rolled_back=None if back is None else back.digest,
        )

    def _state(
        self, model: ActiveModel, problem: Problem | None, wanted: Request | None
    ) -> tuple[ServiceState, Problem | None]:
        running, back = self._running.get(model.name), model.rolled_back
        condition = self._parts.models.condition(model.name)
        if running is None and model.name in self._loading:
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

    def _missing(self, request: Request, problem: Problem) -> ReportedModel:
        """Return the entry of a model that was never in service."""
        return ReportedModel(
            name=request.model,
            digest=request.digest,
            version=request.version,
            state=ServiceState.FAILED,
            origin=request.origin,
            job=request.job,
            previous=None,
            security_counter=self._store.committed_counter(request.model),
            message=problem.message[:MAX_MESSAGE_CHARACTERS],
            next_try_s=problem.next_try_s,
        )
