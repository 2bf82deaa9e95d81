"""The jobs that follow from what should run and what runs: new ones, further attempts, and which is next.

Promises: every model that does not run as it should has a job, or a reason why it is not tried again; a job
that is no longer wanted is dropped. No I/O, but for what `recover` looks for on the disk.
Leaves to others: the rules (`reconcile`), doing what is due (`deployment`), running the jobs (`installer`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from agent.bundle.names import hex_digest
from agent.deploy.jobs import REPAIR, Job, Request
from agent.deploy.parts import Parts
from agent.deploy.reconcile import Problem, wishes
from agent.deploy.store.active import ActiveModel
from agent.errors import SourceError
from agent.wire.desired import Desired, DesiredModel
from agent.wire.job import MAX_MESSAGE_CHARACTERS, Result, Status
from agent.wire.reported import Origin

# A job that was interrupted this often after its download probably crashes the agent.
MAX_ATTEMPTS: Final = 3
# How often a refused bundle is compared with the trusted keys, which a person may have changed.
KEYS_INTERVAL_S: Final = 60.0
# What a job's message says after its reason.
_REFUSED_NOTE: Final = "not tried again before the document, the trusted keys or the agent change"
_NOTE: Final = re.compile(rf"; (?:{_REFUSED_NOTE}|next attempt in \d+ s)$")
# A command sends a bundle once. What was wrong with it then is the reason, and not the silence afterwards.
_UNSENT: Final = "; since then, no one has sent the bundle again: deploy it again"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be done now.

    `queue` has jobs that are new, dropped or tried again, and `publish` those whose request was delivered
    again. `ending` says how the job that runs now is to end; None if it is to go on. `recovered` says whether
    a model runs again as it should, which is worth a report.
    """

    queue: Sequence[Job] = ()
    publish: Sequence[Job] = ()
    ending: Status | None = None
    recovered: bool = False


class Plan:
    """What is to be done so that everything that should run does."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._store = parts.store
        # What a person installed here, if the record of it was lost.
        self._recovered: tuple[Request, ...] = ()

    def recover(self) -> None:
        """Run what was installed locally, after both copies of the record were lost. This blocks."""
        installed = {
            job.request.model: replace(job.request, sources=())
            for job in self._parts.journal
            if job.request.origin is Origin.LOCAL and job.status is Status.SUCCEEDED
        }
        _log.error("active.json is lost: restoring it from desired.json and the bundles on disk")
        self._recovered = tuple(request for request in installed.values() if self._store.has(request.digest))

    def wishes(self) -> dict[str, Request]:
        """Return what should run, by model."""
        return wishes(self._parts.desired.document, self._store.active(), self._recovered)

    def unwanted(self) -> list[str]:
        """Return the models that run because a document wanted them, and no longer does."""
        desired, active = self._parts.desired.document, self._store.active().values()
        if desired is None:
            return []
        return [m.name for m in active if m.origin is Origin.DESIRED and desired.get(m.name) is None]

    def problems(self) -> dict[str, Problem]:
        """Return why each model that should run does not, as far as an attempt has failed.

        An attempt of an earlier run of the agent counts, too: the journal has its reason.
        """
        told = {name: self._told_by_journal(wish) for name, wish in self.wishes().items()}
        return {name: problem for name, problem in told.items() if problem is not None} | {
            **self._parts.attempts.problems
        }

    def in_use(self, request: Request) -> set[str]:
        """Return the digests of what should run, and those that unfinished jobs other than this one need."""
        return {wish.digest for wish in self.wishes().values()} | {
            job.request.digest
            for job in self._parts.journal
            if not job.status.final and job.request != request
        }

    def next_job(self) -> Job | None:
        """Return the interrupted job, or else the oldest new one, or else the oldest further attempt."""
        waiting = [job for job in self._parts.journal if not job.status.final]
        waiting.sort(key=lambda job: (job.status is Status.QUEUED, job.message is not None))
        return waiting[0] if waiting else None

    def follow(self, desired: Desired, running: Request | None) -> Due:
        """Return the new jobs of a document, and those that are no longer wanted; `running` runs now."""
        ending = None
        queue: list[Job] = []
        publish: list[Job] = []
        self._recovered = tuple(kept for kept in self._recovered if desired.get(kept.model) is None)
        for job in self._parts.journal:
            request, wanted = job.request, desired.get(job.request.model)
            if job.status.final or request.origin is Origin.LOCAL or _is_for(request, wanted):
                continue
            status = Status.CANCELED if wanted is None else Status.SUPERSEDED
            if request == running:
                ending = status
            elif job.status is Status.QUEUED:
                queue.append(
                    job.now(status=status, result=Result.FAILED_NO_STATE_CHANGE, message="no longer wanted")
                )
        for model in desired.models:
            known = self._parts.journal.get(model.job)
            if known is not None:
                publish.append(known)
                continue
            active = self._store.active().get(model.model)
            if active is not None and _is_rolled_back(active, Request.from_desired(model)):
                continue  # the journal has forgotten it
            queue.append(self._checked(Job(Request.from_desired(model)).now()))
        return Due(queue, publish, ending)

    def _checked(self, job: Job) -> Job:
        """Return the job; refused, if it names a source that is not allowed."""
        try:
            self._parts.downloader.check(job.request)
        except SourceError as error:
            why = {"code": error.code, "message": str(error)}
            return self.after_failure(job.now(status=Status.REJECTED, result=Result.REJECTED, **why))
        return job

    def compares_keys(self, running: Mapping[str, str]) -> bool:
        """Return whether `reconcile` will compare what was refused with the trusted keys as they are now."""
        now_s = asyncio.get_running_loop().time()
        refused = {
            (job.request.model, job.request.digest)
            for job in self._parts.journal
            if job.status.final and job.refused_under is not None
        }
        return bool(refused) and any(
            (name, self._due(wish).digest) in refused
            and running.get(name) != self._due(wish).digest
            and self._parts.attempts.due(name, now_s)
            for name, wish in self.wishes().items()
        )

    def _due(self, wish: Request) -> Request:
        """Return what should run now: the predecessor of a bundle that was rolled back."""
        active = self._store.active().get(wish.model)
        return _of_active(active) if active is not None and _is_rolled_back(active, wish) else wish

    def reconcile(
        self, running: Mapping[str, str], switching: Collection[str], loading: Collection[str]
    ) -> Due:
        """Return another attempt for each model that does not run as it should, if one is due.

        `running` has the digest of the bundle that each model runs. Models that are being switched, or are
        still being loaded after the start, are left as they are.
        """
        now_s = asyncio.get_running_loop().time()
        recovered = False
        queue = []
        for name, wish in self.wishes().items():
            active = self._store.active().get(name)
            wish = self._due(wish)  # noqa: PLW2901 - what should run now
            if running.get(name) == wish.digest:
                if name in self._parts.attempts.problems:
                    self._parts.attempts.forget(name)
                    recovered = True
                continue
            if name in switching or (active is not None and name in loading):
                continue
            job = self._attempt_of(wish)
            if not job.status.final or not self._parts.attempts.due(name, now_s):
                continue
            if job.refused_under is not None and job.refused_under == self._parts.circumstances.name():
                self._parts.attempts.postpone(name, now_s + KEYS_INTERVAL_S)
                continue
            if (
                name not in self._parts.attempts.problems
                and (known := self._told_by_journal(wish)) is not None
            ):
                self._parts.attempts.explain(name, known)  # the journal keeps only what this attempt will say
            queue.append(self._checked(job.again()))
        return Due(queue, recovered=recovered)

    def after_failure(self, job: Job) -> Job:
        """Return a job that has failed, with the time at which it is tried again."""
        request = job.request
        active = self._store.active().get(request.model)
        # The predecessor of a bundle that was rolled back should run, although nothing asks for it.
        returns = active is not None and active.rolled_back is not None and active.digest == request.digest
        if self.wishes().get(request.model, request).digest != request.digest and not returns:
            return job
        if request.origin is Origin.LOCAL and not request.repair:
            return job  # a person waits for the result, and decides
        if job.status in (Status.CANCELED, Status.SUPERSEDED):
            return job
        message, next_try_s, refused_under = self._reason(job), None, None
        if job.status is Status.REJECTED or job.attempts > MAX_ATTEMPTS:
            refused_under = self._parts.circumstances.name()
            note = _REFUSED_NOTE
        else:
            pause_s = self._parts.attempts.failed(request.model, asyncio.get_running_loop().time())
            next_try_s = time.time() + pause_s
            note = f"next attempt in {pause_s:.0f} s"
        room = MAX_MESSAGE_CHARACTERS - len(note) - len("; ")
        self._parts.attempts.explain(request.model, Problem(message[:room], next_try_s, job.code))
        return job.now(message=f"{message[:room]}; {note}", refused_under=refused_under)

    def _reason(self, job: Job) -> str:
        """Return why a job has failed; if its bundle did not arrive again, why it was not taken before."""
        reason = job.message or str(job.status)
        known = self._parts.attempts.problems.get(job.request.model)
        if job.status is not Status.TIMED_OUT or known is None or known.message == reason:
            return reason
        room = MAX_MESSAGE_CHARACTERS // 2
        return known.message if known.message.endswith(_UNSENT) else f"{known.message[:room]}{_UNSENT}"

    def _told_by_journal(self, wish: Request) -> Problem | None:
        job = self._parts.journal.get(wish.job)
        if job is None or job.request.digest != wish.digest or job.message is None:
            return None
        if job.status in (Status.SUCCEEDED, Status.CANCELED, Status.SUPERSEDED):
            return None
        return Problem(_NOTE.sub("", job.message), None, job.code)

    def _attempt_of(self, request: Request) -> Job:
        """Return the job that the next attempt belongs to; a new one, already ended, if there is none."""
        job = self._parts.journal.get(request.job)
        if job is None or (job.request.model, job.request.digest) != (request.model, request.digest):
            job = Job(request, status=Status.FAILED)
        if job.status is not Status.SUCCEEDED and request.sources:
            return replace(job, request=request)  # its sources may be others now
        # It was in service before: its file may be damaged, or its worker did not start.
        repair = next(
            (
                known
                for known in self._parts.journal
                if known.request.repair
                and (known.request.model, known.request.digest) == (request.model, request.digest)
                and known.status is not Status.SUCCEEDED
            ),
            None,
        )
        if repair is not None:
            return replace(repair, request=replace(request, job=repair.request.job))
        name = f"{REPAIR}{hex_digest(request.digest)[:12]}-{time.time_ns():x}"
        return Job(replace(request, job=name), status=Status.FAILED)


def _is_rolled_back(active: ActiveModel, request: Request) -> bool:
    """Return whether the bundle that a job asks for has failed on trial."""
    back = active.rolled_back
    return back is not None and (back.digest, back.job) == (request.digest, request.job)


def _of_active(active: ActiveModel) -> Request:
    """Return the request for a bundle that is on disk."""
    return wishes(None, {active.name: active})[active.name]


def _is_for(request: Request, wanted: DesiredModel | None) -> bool:
    """Return whether a job installs what is wanted now."""
    if wanted is None:
        return False
    repairs = request.repair and request.digest == wanted.digest
    return request.job == wanted.job or repairs
