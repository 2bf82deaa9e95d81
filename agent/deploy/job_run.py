"""What the steps of one job hand on to each other, and why it fails if it does."""

from __future__ import annotations

from dataclasses import replace

from agent.bundle.verify import VerifiedBundle
from agent.deploy.jobs import Job, Result, Step
from agent.deploy.store.active import ActiveModel
from agent.deploy.transitions import Failure, classify
from agent.errors import EdgeError


class JobRun:
    """One execution of a job.

    Attributes
    ----------
    job
        How it stands.
    before
        What was active as the model when the execution began.
    verified
        The bundle, between verifying and testing; closed by `close` if it never gets there.
    version, counter
        Of the signed manifest, once it is verified.
    failure
        How the job will end, if it fails.
    """

    def __init__(self, job: Job, before: ActiveModel | None) -> None:
        self.job = job
        self.before = before
        self.verified: VerifiedBundle | None = None
        self.version: str | None = None
        self.counter: int | None = None
        self.failure: Failure | None = None

    def fail(self, step: Step, error: EdgeError | TimeoutError) -> None:
        """Note why the job fails; the first reason is the one that counts."""
        if step is Step.CLEANUP:
            return  # what is left over is collected after the next job
        if step is Step.ROLLING_BACK and self.failure is not None:
            self.failure = replace(
                self.failure,
                result=Result.FAILED_UNABLE_TO_ROLLBACK,
                message=f"{self.failure.message}; and then, rolling back: {error}",
            )
            return
        self.failure = classify(error)

    def close(self) -> None:
        """Let go of the verified files."""
        if self.verified is not None:
            self.verified.close()
            self.verified = None
