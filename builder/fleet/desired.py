"""The desired document of one agent, as one deployer sees it: merged, published, perhaps replaced.

Promises: no I/O. Other models stay desired: a document written here has everything that the one in force
has and names it as its base, so the agent refuses it if another tool was faster.
"""

from __future__ import annotations

from dataclasses import replace

from agent.errors import BundleError
from agent.wire.desired import Desired, DesiredModel, find_version, newest_after
from agent.wire.reported import CONFLICT, Rejection, Reported, ReportedModel
from builder.errors import FleetError


class DesiredState:
    """One model that should run, among others.

    `model`: its entry in the desired document.
    """

    def __init__(self, model: DesiredModel) -> None:
        self._model = model
        self._at_broker: Desired | None = None
        self._version_at_broker = 0
        self._reported: Reported | None = None
        self._unreadable: BundleError | None = None
        self._written: Desired | None = None

    @property
    def reported(self) -> bool:
        """Whether the agent has reported what it runs."""
        return self._reported is not None or self._unreadable is not None

    @property
    def published(self) -> bytes | None:
        """The document that was last written here, as long as no other has replaced it at the broker."""
        if self._written is None:
            return None
        replaced = self._version_at_broker > 0 and self._at_broker != self._written
        return None if replaced else self._written.to_bytes()

    def on_desired(self, payload: bytes) -> None:
        """Take the document that is at the broker."""
        self._version_at_broker = find_version(payload)
        try:
            self._at_broker = Desired.from_bytes(payload)
        except BundleError:
            self._at_broker = None  # the agent refuses it too

    def on_reported(self, payload: bytes) -> None:
        """Take what the agent reports; an empty payload is a report that was removed from the broker."""
        self._reported = self._unreadable = None
        if not payload:
            return
        try:
            self._reported = Reported.from_bytes(payload)
        except BundleError as error:
            self._unreadable = error

    def write(self, *, online: bool) -> bytes:
        """Write a document with everything that the one in force has, and our model.

        `online`: whether the agent is online. An agent that is not will see only the last of several
            documents, so it cannot check the `base` of each.
        Raises `FleetError` if the agent's report cannot be read: its other models would be taken out of
            service.
        """
        if self._unreadable is not None:
            raise FleetError(
                f"the agent's report cannot be read: {self._unreadable}",
                hint="use an edgebundle at least as new as the agent",
            )
        base = in_force = self._in_force()
        # The document in force counts; a later one at the broker only if the agent has not seen it yet.
        in_force_version = 0 if in_force is None else in_force.version
        # The agent refuses a version that is too high: such a document is not in force, and never will be.
        newest = newest_after(None if in_force is None else in_force.version)
        at_broker = self._at_broker
        if (
            at_broker is not None
            and at_broker.version > in_force_version
            and at_broker.version != self._rejected_version()
            and at_broker.version < newest
        ):
            base = at_broker
        others = () if base is None else tuple(m for m in base.models if m.model != self._model.model)
        at_broker_version = self._version_at_broker if self._version_at_broker < newest else 0
        self._written = Desired(
            version=max(in_force_version, at_broker_version) + 1,
            models=(*others, self._model),
            base=base.digest if base is not None and online else None,
        )
        if self._reported is not None:
            self._reported = replace(self._reported, error=None)  # it was about an earlier document
        return self._written.to_bytes()

    def rejection(self) -> Rejection | None:
        """Return why the agent did not accept the last written document; None if it has not said so."""
        if self._written is None or self._rejected_version() != self._written.version:
            return None
        return None if self._reported is None else self._reported.error

    def model(self) -> ReportedModel | None:
        """Return what the agent reports about our deployment; None if it has not said anything about it."""
        models = () if self._reported is None else self._reported.models
        return next((model for model in models if model.job == self._model.job), None)

    def lost(self) -> bool:
        """Return whether a document without our model is in force instead of ours."""
        if self._written is None:
            return False
        rejection, in_force = self.rejection(), self._in_force()
        if rejection is not None:
            return rejection.code == CONFLICT
        if in_force is None or in_force.version < self._written.version:
            return False
        return in_force.get(self._model.model) != self._model

    def _in_force(self) -> Desired | None:
        return None if self._reported is None else self._reported.desired

    def _rejected_version(self) -> int | None:
        error = None if self._reported is None else self._reported.error
        return None if error is None else error.version
