"""One execution of a job: what is known so far, and how the job will end if it fails.

Promises: the first reason of a failure stays; only a rollback that fails as well adds to it.
Leaves to others: the steps (`installer`).
"""

from __future__ import annotations

from dataclasses import replace

from agent.bundle.verify import VerifiedBundle
from agent.deploy.jobs import Job
from agent.deploy.store.active import ActiveModel
from agent.deploy.transitions import Failure, classify
from agent.deploy.trial import Score
from agent.errors import EdgeError
from agent.wire.job import Result, Step


class JobRun:
    """One execution of a job.

    `before` is the bundle that was active when it began, and `verified` the new one between verifying and
    testing; `close` closes it if testing is never reached. `version` and `counter` are those of the signed
    manifest. `baseline` is the predecessor's score just before the switch, and `before_failed` whether it was
    failing. `failure` is how the job will end if it fails.
    """

    def __init__(self, job: Job, before: ActiveModel | None) -> None:
        self.job = job
        self.before = before
        self.verified: VerifiedBundle | None = None
        self.version: str | None = None
        self.counter: int | None = None
        self.baseline: Score | None = None
        self.before_failed = False
        self.failure: Failure | None = None

    def fail(self, step: Step, error: EdgeError | TimeoutError) -> None:
        """Record why the job fails; only a failing rollback changes an earlier reason."""
        if step is Step.CLEANUP:
            return  # leftovers are deleted after the next job
        if step is Step.ROLLING_BACK and self.failure is not None:
            self.failure = replace(
                self.failure,
                result=Result.FAILED_UNABLE_TO_ROLLBACK,
                message=f"{self.failure.message}; then the rollback failed: {error}",
            )
            return
        self.failure = classify(step, error)

    def close(self) -> None:
        """Close the verified bundle."""
        if self.verified is not None:
            self.verified.close()
            self.verified = None
