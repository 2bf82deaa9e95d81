"""Deployment jobs and their journal on disk.

Promises: a job that succeeded is not repeated, however often its request is delivered. The outcome of the
last jobs is kept across restarts, so that it can be published again.
Leaves to others: running them (`installer`), publishing them and trying again (`deployment`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from agent.deploy.store.state_file import Checkpoint, StateFile, no_checkpoint
from agent.disk_thread import in_disk_thread
from agent.errors import StoreError
from agent.wire.desired import DesiredModel
from agent.wire.job import MAX_MESSAGE_CHARACTERS, JobState, Result, Status, Step
from agent.wire.reported import Origin

# Prefix of the jobs that the agent creates itself, for a bundle that was in service before.
REPAIR: Final = "repair-"
# A fleet tool needs the last one or two; the others show a person what happened last week.
KEEP_JOBS: Final = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """One model that should run, by the deployment `job`.

    `version` is what the requester expects; the one in the signed manifest counts. `sources` are where the
    bundle may be fetched, best first: `mqtt` or https URLs; none for a bundle in the inbox.
    """

    job: str
    model: str
    digest: str
    size: int
    version: str
    sources: tuple[str, ...]
    origin: Origin

    @property
    def repair(self) -> bool:
        """Whether the agent itself asked for a bundle that was in service before."""
        return self.job.startswith(REPAIR)

    @classmethod
    def from_desired(cls, model: DesiredModel) -> Request:
        """Make the request for an entry of a desired document."""
        return cls(**asdict(model), origin=Origin.DESIRED)


@dataclass(frozen=True, slots=True)
class Job:
    """A request and its current state, as in `agent.wire.job.JobState`.

    `attempts` counts how often it was interrupted after its download and begun again. `ending` is the final
    status of a job that has failed and is still being rolled back or cleaned up. `refused_under` names, for a
    job that will not be tried again, the keys, the agent and the machine that refused it.
    """

    request: Request
    status: Status = Status.QUEUED
    step: Step | None = None
    progress: float = 0.0
    result: Result | None = None
    code: str | None = None
    message: str | None = None
    attempts: int = 0
    ending: Status | None = None
    time_s: float = 0.0
    refused_under: str | None = None

    def again(self) -> Job:
        """Return the job before another attempt."""
        return replace(Job(self.request), message=self.message).now()

    def now(self, **changes: object) -> Job:
        """Return the job with `changes` and the current time."""
        job: Job = replace(self, **changes, time_s=time.time())  # type: ignore[arg-type]  # changes are fields
        if job.message is not None and len(job.message) > MAX_MESSAGE_CHARACTERS:
            job = replace(job, message=job.message[: MAX_MESSAGE_CHARACTERS - 3] + "...")
        return job

    def state(self) -> JobState:
        """Return the job's document."""
        return JobState(
            id=self.request.job,
            model=self.request.model,
            digest=self.request.digest,
            status=self.status,
            step=self.step,
            progress=self.progress,
            result=self.result,
            code=self.code,
            message=self.message,
            time_s=self.time_s,
        )


class Journal:
    """The last jobs, kept in `jobs.json`.

    A journal that cannot be written does not stop a job: every step can be repeated, so a lost entry costs at
    most some repeated work after a crash. `on_error` is called then.
    """

    def __init__(
        self,
        path: Path,
        *,
        checkpoint: Checkpoint = no_checkpoint,
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._file = StateFile(path, mirrored=False, checkpoint=checkpoint)
        self._on_error = on_error
        self._jobs: dict[str, Job] = {}
        self._unsaved = False
        self._saving = asyncio.Lock()

    def load(self) -> None:
        """Read the file; jobs that are known already stay as they are, and have changed last."""
        read = (job for job in _parse(self._file.load()) if job.request.job not in self._jobs)
        self._jobs = {job.request.job: job for job in read} | self._jobs

    def __iter__(self) -> Iterator[Job]:
        """Iterate over the jobs in the order in which they last changed; clocks jump, and do not count."""
        return iter(tuple(self._jobs.values()))

    def get(self, job: str) -> Job | None:
        """Return the job with that identifier, or None."""
        return self._jobs.get(job)

    def put(self, job: Job) -> tuple[str, ...]:
        """Keep the state of a job; return the identifiers of the jobs that are forgotten to make room.

        The last job of each model is forgotten last: it says why the model does not run. `save` makes it
        durable.
        """
        self._jobs.pop(job.request.job, None)
        self._jobs[job.request.job] = job
        over = len(self._jobs) - KEEP_JOBS
        last = {old.request.model: key for key, old in self._jobs.items()}
        ended = [key for key, old in self._jobs.items() if old.status.final]
        ended.sort(key=lambda key: last[self._jobs[key].request.model] == key)
        forgotten = ended[: max(over, 0)]
        for key in forgotten:
            del self._jobs[key]
        self._unsaved = True
        return tuple(forgotten)

    @property
    def saving(self) -> bool:
        """Whether the file is being written."""
        return self._saving.locked()

    async def save(self) -> None:
        """Write what `put` was given, if anything."""
        async with self._saving:
            if not self._unsaved:
                return
            self._unsaved = False
            try:
                await in_disk_thread(self._file.save, [asdict(kept) for kept in self._jobs.values()])
            except StoreError as error:
                self._unsaved = True
                _log.warning("cannot write the job journal: %s", error)
                self._on_error()


def _parse(document: object) -> Iterator[Job]:
    """Read what `Journal.put` wrote; a malformed record is logged and left out."""
    if not isinstance(document, list):
        return
    for record in document:
        try:
            yield _parse_job(record)
        except (KeyError, TypeError, ValueError) as error:
            _log.error("jobs.json: a record is left out: %s", error)


def _parse_job(record: object) -> Job:
    if not isinstance(record, dict):
        raise TypeError(f"expected an object, got {type(record).__name__}")
    fields: dict[str, Any] = dict(record)
    request: dict[str, Any] = dict(fields.pop("request"))
    request["sources"] = tuple(request["sources"])
    request["origin"] = Origin(request["origin"])
    fields["status"] = Status(fields["status"])
    fields["ending"] = None if fields["ending"] is None else Status(fields["ending"])
    fields["step"] = None if fields["step"] is None else Step(fields["step"])
    fields["result"] = None if fields["result"] is None else Result(fields["result"])
    return Job(request=Request(**request), **fields)
