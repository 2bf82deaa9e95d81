"""The job document: progress and result of one deployment, retained at `edge/v1/<device>/jobs/<job>`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from agent.wire import document

# A message is for a person, in one line; an error that a library raised can be long.
MAX_MESSAGE_CHARACTERS: Final = 500


class Status(StrEnum):
    """The status of a job; all but the first two are final."""

    QUEUED = "QUEUED"
    IN_PROGRESS = "IN_PROGRESS"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    TIMED_OUT = "TIMED_OUT"
    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    SUPERSEDED = "SUPERSEDED"

    @property
    def final(self) -> bool:
        """Whether the job has ended."""
        return self not in (Status.QUEUED, Status.IN_PROGRESS)


class Step(StrEnum):
    """What a job in progress is doing."""

    DOWNLOADING = "downloading"
    VERIFYING = "verifying"
    INSTALLING = "installing"
    TESTING = "testing"
    ACTIVATING = "activating"
    COMMITTING = "committing"
    ROLLING_BACK = "rolling_back"
    CLEANUP = "cleanup"


class Result(StrEnum):
    """In which state a finished job left the device."""

    SUCCESSFUL = "SUCCESSFUL"
    FAILED_NO_STATE_CHANGE = "FAILED_NO_STATE_CHANGE"
    FAILED_ROLLBACK_COMPLETE = "FAILED_ROLLBACK_COMPLETE"
    FAILED_UNABLE_TO_ROLLBACK = "FAILED_UNABLE_TO_ROLLBACK"
    REJECTED = "REJECTED"


def _fraction(value: object) -> float:
    return min(max(float(document.number(value) or 0.0), 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One job document.

    Attributes
    ----------
    id, model, digest
        The job's identifier, the model's name, and `sha256:<hex>` of the bundle.
    status, step, result
        The job's status; its step while it is in progress; its result when it has ended.
    progress
        The downloaded fraction of the bundle, 0 to 1.
    code, message
        Why the job did not succeed, as `ERR_...` and in words, or None.
    time_s
        When this state was recorded, in seconds since the epoch by the device's clock.
    """

    id: str
    model: str
    digest: str
    status: Status = field(metadata=document.choice(Status, "job status"))
    step: Step | None = field(default=None, metadata=document.choice(Step, "job step", optional=True))
    progress: float = field(default=0.0, metadata=document.form(_fraction, lambda done: round(done, 3)))
    result: Result | None = field(default=None, metadata=document.choice(Result, "job result", optional=True))
    code: str | None = None
    message: str | None = None
    time_s: float = field(
        default=0.0,
        metadata=document.form(
            lambda value: document.parse_time(value) or 0.0, document.format_time, key="time"
        ),
    )

    def to_bytes(self) -> bytes:
        """Write the document; the progress is rounded to 0.001 and the time to milliseconds."""
        return document.encode(document.write(self))

    @classmethod
    def from_bytes(cls, raw: bytes) -> JobState:
        """Read the document tolerantly: an unknown key is ignored.

        Raises
        ------
        EndlessDataError
            If it is too long.
        FormatError
            If it is not a JSON object, or has an unknown status, step or result.
        """
        return document.read(cls, document.parse_object(raw, "the job document"))
