"""One deployment, step by step, from a request to a result.

Promises: the previous version runs until its successor has passed its own recorded samples, and again if
anything fails after that. Every step can be repeated, so an interrupted job resumes at the next start and
ends in a final state. Only verified and admitted bundles reach the store.
Leaves to others: which jobs there are and in which order (`plan`), fetching, verifying and admitting bundles
(`inspection`), and running models.

The order follows from what each step may trust: sizes and free space, the digest, the signature, the
manifest's requirements, the model's recorded samples. Only then comes the switch, and after it the security
counter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Final

from agent.bundle.manifest import Manifest
from agent.bundle.verify import VerifiedBundle
from agent.deploy.inspection import inspect
from agent.deploy.job_run import JobRun
from agent.deploy.jobs import Job, Request
from agent.deploy.parts import Parts
from agent.deploy.plan import MAX_ATTEMPTS, Plan
from agent.deploy.store.active import ActiveModel, RolledBack
from agent.deploy.transitions import TRANSITIONS, Failure, classify
from agent.deploy.trial import Trial
from agent.disk_thread import in_disk_thread
from agent.durable import store_error
from agent.errors import EdgeError, StoreError
from agent.wire.job import Result, Status, Step

# These steps change neither what runs nor the record of it.
_BEFORE_THE_SWITCH: Final = (Step.DOWNLOADING, Step.VERIFYING, Step.INSTALLING)
# Often enough for a person who watches, and rare enough for a metered link.
PROGRESS_INTERVAL_S: Final = 1.0

_log = logging.getLogger(__name__)


class Installer:
    """Executes jobs, one at a time.

    The plan says which bundles are in use, and when a job that has failed is tried again.
    """

    def __init__(self, parts: Parts, plan: Plan) -> None:
        self._parts = parts
        self._store = parts.store
        self._plan = plan
        self._switching: dict[str, asyncio.Lock] = {}
        self._running: dict[str, str] = {}
        self._download: asyncio.Task[None] | None = None
        self._abandoned: Status | None = None
        self._current: Request | None = None
        # From the beginning of a job to the end of its download.
        self._abandonable = False
        self._actions: Mapping[Step, Callable[[JobRun], Awaitable[None]]] = {
            Step.DOWNLOADING: self._do_download,
            Step.VERIFYING: self._do_verify,
            Step.INSTALLING: self._do_install,
            Step.TESTING: self._do_test,
            Step.ACTIVATING: self._do_activate,
            Step.COMMITTING: self._do_commit,
            Step.ROLLING_BACK: self._do_roll_back,
            Step.CLEANUP: self._do_clean_up,
        }

    @property
    def running(self) -> Mapping[str, str]:
        """The digest of the bundle that each model runs now."""
        return MappingProxyType(self._running)

    @property
    def current(self) -> Request | None:
        """The request of the job that runs now, or None."""
        return self._current

    @property
    def switched(self) -> set[str]:
        """The models of which what they run changes now."""
        return {name for name, lock in self._switching.items() if lock.locked()}

    def switching(self, name: str) -> asyncio.Lock:
        """Return the lock that is held while what a model runs changes; a download does not hold it."""
        return self._switching.setdefault(name, asyncio.Lock())

    async def run(self, job: Job) -> Job:
        """Run a job, or resume an interrupted one; return it in its final state."""
        self._current = job.request
        try:
            return await self._run(job)
        finally:
            self._current = None

    async def _run(self, job: Job) -> Job:
        request = job.request
        if job.step is None:
            with contextlib.suppress(EdgeError):  # its key may have been revoked a moment ago
                await in_disk_thread(self._parts.circumstances.read_keys)
        if job.step is None and self._is_installed(request):
            try:
                await in_disk_thread(self._store.adopt, request.model, request.job, request.origin)
            except StoreError as error:
                return await self._finish(job, classify(Step.ACTIVATING, error))
            return await self._finish(job.now(message="already installed"), None)
        run = JobRun(job, self._store.active().get(request.model))
        self._abandoned = None
        try:
            step: Step | None = self._first_step(run)
            self._abandonable = step is Step.DOWNLOADING
            while step in _BEFORE_THE_SWITCH:
                step = await self._run_step(run, step)
            async with self.switching(request.model):
                if run.job.step in _BEFORE_THE_SWITCH:
                    run.before = self._store.active().get(request.model)  # a rollback may have changed it
                while step is not None:
                    step = await self._run_step(run, step)
        finally:
            self._abandonable = False
            run.close()
        return await self._finish(run.job, run.failure)

    def abandon(self, status: Status) -> bool:
        """End the running job with `status` unless its download has ended; return whether it will end."""
        if not self._abandonable:
            return False
        self._abandoned = status
        if self._download is not None:
            self._download.cancel()
        return True

    async def restore(self, name: str, digest: str, counter_floor: int | None = None) -> Manifest:
        """Verify, admit and run a bundle that was active before; if it cannot run, nothing is changed.

        `counter_floor` is the security counter that it must meet; None for the committed one.
        """
        verified = await inspect(self._parts, name, digest, counter_floor)
        manifest = verified.manifest
        await self._activate(verified, digest)
        try:
            await in_disk_thread(self._store.commit_counter, name, manifest.security_counter)
        except StoreError as error:  # it was committed when the bundle was installed, or the file was lost
            _log.warning("%s: its security counter is not stored: %s", name, error)
        return manifest

    async def roll_back(self, active: ActiveModel, back: RolledBack) -> None:
        """Return from a bundle that failed on trial to the one before it; its lock must be held.

        The record is written after the predecessor runs. If a power cut comes between, the trial goes on. If
        the predecessor cannot run, nothing is changed.
        """
        before = _predecessor(active)
        assert before is not None, "a trial has a predecessor"
        manifest = await self.restore(active.name, before.digest, before.counter_floor)
        self._store.checkpoint("installer:predecessor runs")
        await in_disk_thread(self._store.record, replace(before, version=manifest.version, rolled_back=back))
        self._store.checkpoint("installer:rolled back")

    async def remove(self, name: str) -> None:
        """Take a model out of service; its bundle stays in the store until it is collected."""
        await in_disk_thread(self._store.remove, name)
        self._running.pop(name, None)
        await self._parts.models.deactivate(name)

    async def suspend(self, name: str, why: str) -> None:
        """Stop a model at once, and refuse its requests with the reason until it runs again."""
        self._running.pop(name, None)
        await self._parts.models.suspend(name, why)

    async def end_cleanly(self, limit_s: float) -> None:
        """Record that this stop of the agent is no failure of a bundle that it was about to switch to."""
        for job in self._parts.journal:
            if job.step is not None and TRANSITIONS[job.step].after_restart_if_switched is Step.DOWNLOADING:
                self._parts.journal.put(job.now(step=Step.DOWNLOADING))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._parts.journal.save()

    def _is_installed(self, request: Request) -> bool:
        active = self._store.active().get(request.model)
        condition = self._parts.models.condition(request.model)
        return (
            active is not None
            and active.digest == request.digest == self._running.get(request.model)
            and condition is not None
            and not condition.failed
            and (self._parts.circumstances.serves_revoked or not condition.revoked)
        )

    def _first_step(self, run: JobRun) -> Step:
        step = run.job.step
        if step is None:
            return Step.DOWNLOADING
        attempts = run.job.attempts + (step is not Step.DOWNLOADING)
        run.job = replace(run.job, attempts=attempts)
        switched = run.before is not None and run.before.digest == run.job.request.digest
        if run.job.ending is not None:
            result = run.job.result or Result.FAILED_NO_STATE_CHANGE
            run.failure = Failure(run.job.ending, result, run.job.code, run.job.message)
        if attempts > MAX_ATTEMPTS and step not in (Step.ROLLING_BACK, Step.CLEANUP):
            run.fail(step, StoreError(f"interrupted {MAX_ATTEMPTS} times, last while {step}"))
            return Step.ROLLING_BACK if switched else Step.CLEANUP
        transition = TRANSITIONS[step]
        return transition.after_restart_if_switched if switched else transition.after_restart

    async def _run_step(self, run: JobRun, step: Step) -> Step | None:
        """Run one step, and return the next."""
        await self._enter(run, step)
        try:
            await self._actions[step](run)
        except (EdgeError, TimeoutError) as error:
            return self._failed(run, step, error)
        except OSError as error:  # from a call that seldom fails: a dying disk must not end the agent
            return self._failed(run, step, store_error(str(step), error))
        except asyncio.CancelledError:
            if self._abandoned is None or _is_cancelled():
                raise
            run.failure = Failure(self._abandoned, Result.FAILED_NO_STATE_CHANGE, None, "no longer wanted")
            return TRANSITIONS[step].on_error
        return TRANSITIONS[step].then

    def _failed(self, run: JobRun, step: Step, error: EdgeError | TimeoutError) -> Step | None:
        _log.warning("job %s: %s: %s", run.job.request.job, step, error)
        run.fail(step, error)
        return TRANSITIONS[step].on_error

    async def _enter(self, run: JobRun, step: Step) -> None:
        why = {name: getattr(run.failure, name, None) for name in ("result", "code", "message")}
        ending = None if run.failure is None else run.failure.status
        run.job = run.job.now(status=Status.IN_PROGRESS, step=step, ending=ending, **why)
        await self._parts.history.record(run.job)
        self._store.checkpoint(f"installer:{step}")

    async def _finish(self, job: Job, failure: Failure | None) -> Job:
        if failure is None:
            done = job.now(status=Status.SUCCEEDED, step=None, result=Result.SUCCESSFUL, progress=1.0)
        else:
            done = self._plan.after_failure(job.now(step=None, **asdict(failure)))
        await self._parts.history.record(done)
        self._store.checkpoint("installer:finished")
        _log.info("job %s: %s %s", job.request.job, done.status, done.message or "")
        return done

    async def _do_download(self, run: JobRun) -> None:
        if self._abandoned is not None:
            raise asyncio.CancelledError
        self._download = asyncio.ensure_future(self._fetch(run))
        try:
            await self._download
        finally:
            self._abandonable = False
            self._download = None

    async def _fetch(self, run: JobRun) -> None:
        request = run.job.request
        last = time.monotonic()

        def progress(written: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= PROGRESS_INTERVAL_S:
                last = now
                run.job = run.job.now(progress=written / request.size)
                self._parts.history.publish(run.job)

        await self._parts.downloader.fetch(request, {request.digest, *self._plan.in_use(request)}, progress)
        run.job = run.job.now(progress=1.0)

    async def _do_verify(self, run: JobRun) -> None:
        request = run.job.request
        active = self._store.active().get(request.model)
        is_new = active is None or request.digest not in (active.digest, active.previous)
        if is_new:
            (await in_disk_thread(self._parts.circumstances.read_keys)).require_complete()
        is_active = active is not None and active.digest == request.digest
        floor = active.counter_floor if active is not None and is_active else None
        run.verified = await inspect(
            self._parts, request.model, request.digest, floor, is_new=is_new, deployed=not is_active
        )

    async def _do_install(self, run: JobRun) -> None:
        await in_disk_thread(self._accept_part, run.job.request.digest)

    def _accept_part(self, digest: str) -> None:
        if self._store.part_bytes(digest):
            self._store.accept_part(digest)

    async def _do_test(self, run: JobRun) -> None:
        verified, run.verified = run.verified, None
        assert verified is not None, "testing follows verifying"
        run.version = verified.manifest.version
        run.counter = verified.manifest.security_counter
        name = run.job.request.model
        condition = self._parts.models.condition(name)
        run.before_failed = run.before is not None and (
            self._running.get(name) != run.before.digest or condition is None or condition.failed
        )
        before = self._running.get(name, "")
        run.baseline = self._parts.records.whole(before, self._parts.models.score(name))
        await self._activate(verified, run.job.request.digest)
        self._parts.records.keep(before, run.baseline)  # for when it comes back

    async def _activate(self, verified: VerifiedBundle, digest: str) -> None:
        name = verified.manifest.name
        await self._parts.models.activate(verified)
        self._running[name] = digest

    async def _do_activate(self, run: JobRun) -> None:
        request, before = run.job.request, run.before
        assert run.version is not None, "activating follows testing"
        active = ActiveModel(
            name=request.model,
            digest=request.digest,
            version=run.version,
            origin=request.origin,
            job=request.job,
            previous=None,
        )
        if before is not None and before.digest == request.digest:
            # It ran before and is started again, so its trial goes on.
            active = before if request.repair else replace(before, origin=request.origin, job=request.job)
        elif before is not None:
            active = self._successor(run, before, active)
        await in_disk_thread(self._store.switch, active)

    def _successor(self, run: JobRun, before: ActiveModel, active: ActiveModel) -> ActiveModel:
        """Return the entry of a new bundle: on trial, with the bundle to return to."""
        back = before.rolled_back
        # A person who deploys a bundle again after it was rolled back wants it, even if it is slow.
        again = back is not None and back.digest == active.digest
        committed = self._store.committed_counter(active.name)
        previous, floor = before.digest, committed if before.counter_floor is None else before.counter_floor
        if before.previous is not None and run.before_failed:
            previous, floor = before.previous, committed if before.trial is None else before.trial.counter
        baseline = None if again or run.before_failed else run.baseline
        return replace(active, previous=previous, trial=Trial(baseline=baseline, counter=floor))

    async def _do_commit(self, run: JobRun) -> None:
        request = run.job.request
        if run.counter is None:  # after a restart: read the counter from the active bundle
            with await inspect(self._parts, request.model, request.digest) as verified:
                run.counter = verified.manifest.security_counter
        await in_disk_thread(self._store.commit_counter, request.model, run.counter)

    async def _do_roll_back(self, run: JobRun) -> None:
        request = run.job.request
        active = self._store.active().get(request.model)
        before = run.before
        if before is not None and before.digest == request.digest:
            before = _predecessor(before)  # after a restart its entry is no longer known
        if before is None:
            await self.remove(request.model)
        else:
            verified = await inspect(self._parts, request.model, before.digest, before.counter_floor)
            before = replace(before, version=verified.manifest.version)
            if self._running.get(request.model) == before.digest:
                verified.close()
            else:
                await self._activate(verified, before.digest)
            if active is not None and active.digest == request.digest:
                await in_disk_thread(self._store.switch, before)
        if run.failure is not None:
            run.failure = replace(run.failure, result=Result.FAILED_ROLLBACK_COMPLETE)

    async def _do_clean_up(self, run: JobRun) -> None:
        request = run.job.request
        if run.failure is None or run.failure.status is Status.REJECTED:
            await in_disk_thread(self._store.discard_part, request.digest)
        await in_disk_thread(self._store.collect, self._plan.in_use(request))


def _is_cancelled() -> bool:
    """Return whether the running task must end, and not only a task that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _predecessor(active: ActiveModel) -> ActiveModel | None:
    """Return the entry of the bundle that ran before; None if there was none."""
    if active.previous is None:
        return None
    floor = active.counter_floor if active.trial is None else active.trial.counter
    return replace(active, digest=active.previous, previous=None, counter_floor=floor, trial=None)
