"""The reported document: which models run on a device, retained at `edge/v1/<device>/reported`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from agent.errors import ConflictError
from agent.wire import document
from agent.wire.desired import Desired

CONFLICT: Final = ConflictError.code


class Origin(StrEnum):
    """Who asked for a model. A desired document removes only models with the origin `desired`."""

    DESIRED = "desired"
    LOCAL = "local"


class ServiceState(StrEnum):
    """Whether a model that should run is running.

    Attributes
    ----------
    STARTING
        It is not loaded yet after a start of the agent.
    ACTIVE
        What should run answers requests.
    DEGRADED
        Another bundle than the one that should run answers requests.
    ROLLED_BACK
        The bundle that should run has failed on trial, and its predecessor answers requests.
    FAILED
        Nothing answers requests.
    """

    STARTING = "starting"
    ACTIVE = "active"
    DEGRADED = "degraded"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedModel:
    """One model of a reported document.

    Attributes
    ----------
    name
        The model's name.
    digest, version
        Of the bundle that runs or should run.
    state, origin
        Members of `ServiceState` and `Origin`; a later version of the agent may use other texts.
    job
        The deployment that installed it.
    previous
        Digest of the bundle before it, or None.
    security_counter
        The committed counter, or None.
    message
        Why it is not active, or None.
    next_try_s
        When that is tried again, in seconds since the epoch by the device's clock; None if it is not known.
    rolled_back
        Digest of the bundle that failed on trial, or None.
    """

    name: str = field(metadata=document.APART)
    digest: str
    version: str
    state: str
    origin: str
    job: str
    previous: str | None
    security_counter: int | None
    message: str | None = None
    next_try_s: float | None = field(
        default=None, metadata=document.form(document.parse_time, document.format_time, key="next_try")
    )
    rolled_back: str | None = None


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a desired document was not accepted.

    Attributes
    ----------
    code, message
        `ERR_...`, and the reason in words.
    version
        The document's version, or None if it could not be read.
    """

    code: str
    message: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Reported:
    """One reported document.

    Attributes
    ----------
    desired
        The desired document in force, or None. It lets the next deployment keep its models even if the broker
        has forgotten it.
    models
        What runs or should run.
    error
        Why the last desired document was not accepted, or None.
    """

    desired: Desired | None
    models: tuple[ReportedModel, ...] = ()
    error: Rejection | None = None

    def to_bytes(self) -> bytes:
        """Write the document."""
        desired, error = self.desired, self.error
        return document.encode(
            {
                "version": None if desired is None else desired.version,
                "models": {model.name: document.write(model) for model in self.models},
                "desired": None if desired is None else desired.to_document(),
                "error": None if error is None else document.write(error),
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Reported:
        """Read the document tolerantly, except for the desired document in it.

        That one is read strictly: a tool that overlooked one of its models would take it out of service.

        Raises
        ------
        EndlessDataError, FormatError
            If it is not a JSON object, too long, or has a desired document that cannot be read.
        """
        fields = document.parse_object(raw, "the reported document")
        desired, error = fields.get("desired"), document.members(fields.get("error"))
        models = document.members(fields.get("models"))
        return cls(
            desired=None if desired is None else Desired.from_document(desired),
            models=tuple(
                document.read(ReportedModel, entry, name=document.text(name))
                for name, entry in models.items()
            ),
            error=document.read(Rejection, error) if error else None,
        )
