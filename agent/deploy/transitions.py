"""The steps of a deployment as a table: what follows each step, its failure, and a crash during it.

Promises: every step leads to the end of the job, whatever fails and wherever it is interrupted. Only this
table says how; `tests/agent/deploy/test_transitions.py` walks it.
Leaves to others: doing the steps (`installer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from agent.errors import BundleError, EdgeError, SelfTestError, SourceError
from agent.wire.job import Result, Status, Step


@dataclass(frozen=True, slots=True)
class Transition:
    """What follows a step: the step `then`, and the one `on_error`; None ends the job.

    A job that was interrupted in the step resumes with `after_restart`, or with `after_restart_if_switched`
    if the switch to the new bundle is already durable. What earlier steps left on disk is found and not
    repeated; what they left in memory (a verified bundle) is made again.
    """

    then: Step | None
    on_error: Step | None
    after_restart: Step
    after_restart_if_switched: Step


_S: Final = Step
TRANSITIONS: Final[Mapping[Step, Transition]] = MappingProxyType(
    {
        _S.DOWNLOADING: Transition(_S.VERIFYING, _S.CLEANUP, _S.DOWNLOADING, _S.DOWNLOADING),
        _S.VERIFYING: Transition(_S.INSTALLING, _S.CLEANUP, _S.DOWNLOADING, _S.DOWNLOADING),
        _S.INSTALLING: Transition(_S.TESTING, _S.CLEANUP, _S.DOWNLOADING, _S.DOWNLOADING),
        _S.TESTING: Transition(_S.ACTIVATING, _S.CLEANUP, _S.DOWNLOADING, _S.DOWNLOADING),
        _S.ACTIVATING: Transition(_S.COMMITTING, _S.ROLLING_BACK, _S.DOWNLOADING, _S.COMMITTING),
        _S.COMMITTING: Transition(_S.CLEANUP, _S.ROLLING_BACK, _S.DOWNLOADING, _S.COMMITTING),
        _S.ROLLING_BACK: Transition(_S.CLEANUP, _S.CLEANUP, _S.ROLLING_BACK, _S.ROLLING_BACK),
        _S.CLEANUP: Transition(None, None, _S.CLEANUP, _S.CLEANUP),
    }
)


@dataclass(frozen=True, slots=True)
class Failure:
    """How a job that does not succeed will end."""

    status: Status
    result: Result
    code: str | None
    message: str | None


def classify(step: Step, error: EdgeError | TimeoutError) -> Failure:
    """Return how a job ends after an error in a step: refused, or failed and worth another attempt.

    Wrong bytes that were downloaded are a fault of the transfer. What the right bytes say is final.
    """
    if isinstance(error, TimeoutError):
        return Failure(Status.TIMED_OUT, Result.FAILED_NO_STATE_CHANGE, SourceError.code, str(error))
    transient = isinstance(error, SelfTestError) or step is Step.DOWNLOADING
    if isinstance(error, BundleError) and not transient:
        return Failure(Status.REJECTED, Result.REJECTED, error.code, str(error))
    return Failure(Status.FAILED, Result.FAILED_NO_STATE_CHANGE, error.code, str(error))
