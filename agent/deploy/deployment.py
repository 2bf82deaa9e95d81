"""Keeps the models that run here in line with the desired document; owns everything in this package.

Promises: a desired document is durable before it is acknowledged, the newest wins, and one that cannot be
read changes nothing. Jobs run one after the other, in the order in which they arrived. After each connect
everything is published again, because the broker may have forgotten it. At each start every active bundle is
verified again before it runs, and if it cannot be used, its predecessor serves. The models that were used
last are loaded first, and one that hangs does not hold up the others.
Leaves to others: the steps of a job (`installer`), the connection, and running models.

Call `start()` before connecting, and run `run()` as a task while the agent lives: it never returns, and an
exception in it is a bug. It begins with loading the active models, which may take minutes. The connection
calls `on_message` and `on_connected`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from agent.bundle.keyring import Keyring
from agent.bundle.machine import Machine
from agent.bundle.names import hex_digest
from agent.deploy.fetch.block_source import SILENCE_LIMIT_S, BlockSource
from agent.deploy.fetch.https import HttpsSettings, HttpsSource
from agent.deploy.fetch.sources import Downloader
from agent.deploy.inbox import Inbox
from agent.deploy.installer import Installer
from agent.deploy.interfaces import Control, Models
from agent.deploy.jobs import Job, Journal, Request
from agent.deploy.reported import reject, reported
from agent.deploy.store.active import ActiveModel
from agent.deploy.store.disk_thread import in_disk_thread
from agent.deploy.store.last_use import LastUse
from agent.deploy.store.state_file import Checkpoint, StateFile, no_checkpoint
from agent.deploy.store.store import Store
from agent.errors import ConflictError, EdgeError, SourceError
from agent.wire import topics
from agent.wire.desired import Desired, DesiredModel
from agent.wire.job import Result, Status
from agent.wire.reported import Origin, Rejection

# How often the inbox is checked.
INBOX_INTERVAL_S: Final = 1.0
# A small board loads the largest models in this time. What takes longer may hang on a dead disk: the next
# model is loaded beside it.
RESTORE_PATIENCE_S: Final = 60.0
# Prefix of the jobs that the agent creates itself, to fetch a damaged bundle again.
_REPAIR: Final = "repair-"

_log = logging.getLogger(__name__)


class Deployment:
    """Installs what is desired, and removes what is not.

    Parameters
    ----------
    device
        The device's name in topics.
    store
        The state directory. It is locked by `start` and unlocked by `close`.
    keyring
        Returns the currently trusted keys.
    machine
        This machine, for the admission of bundles.
    models
        Runs the models.
    control
        The control connection.
    https
        The allowed https sources.
    silence_limit_s
        How long to wait for a block over MQTT while the broker is connected.
    checkpoint
        Called after each durable step, for fault injection.

    Attributes
    ----------
    restored
        Whether the active bundles were loaded, as far as they can be.

    Raises
    ------
    ConfigError
        If an allowed https source is not a URL.
    """

    def __init__(
        self,
        *,
        device: str,
        store: Store,
        keyring: Callable[[], Keyring],
        machine: Machine,
        models: Models,
        control: Control,
        https: HttpsSettings,
        silence_limit_s: float = SILENCE_LIMIT_S,
        checkpoint: Checkpoint = no_checkpoint,
    ) -> None:
        self._device = device
        self._store = store
        self._keyring = keyring
        self._control = control
        self._blocks = BlockSource(control, device, silence_limit_s=silence_limit_s)
        self._downloader = Downloader(store, self._blocks, HttpsSource(https))
        self._journal = Journal(store.root / "jobs.json", checkpoint=checkpoint)
        self._desired_file = StateFile(store.root / "desired.json", mirrored=True, checkpoint=checkpoint)
        self._desired: Desired | None = None
        self._rejection: Rejection | None = None
        self._inbox = Inbox(store.inbox)
        self._models = models
        self._last_use = LastUse(store.root)
        self._installer = Installer(
            store,
            self._downloader,
            models,
            keyring=keyring,
            machine=machine,
            record=self._record,
            in_use=self._in_use,
            checkpoint=checkpoint,
        )
        self._current: Request | None = None
        self._work = asyncio.Event()
        self._busy = False
        self.restored = False

    @property
    def idle(self) -> bool:
        """Whether all models are loaded, jobs ended and unwanted models removed; the inbox may have more."""
        return self.restored and not self._busy and not self._work.is_set()

    async def start(self) -> None:
        """Lock the state directory, plan what is desired, and subscribe.

        Raises
        ------
        StoreError
            If another agent uses the directory.
        """
        self._store.lock()
        document = self._desired_file.load()
        if document is not None:
            try:
                self._desired = Desired.from_document(document)
            except EdgeError as error:
                _log.error("desired.json is ignored: %s", error)
        self._last_use.load()
        self._models.expect(self._store.active())
        if self._desired is not None:
            self._plan(self._desired)  # a crash may have separated the document from its plan
        self._control.want(topics.format_topic(topics.Desired(self._device)))
        self._work.set()

    async def run(self) -> None:
        """Run the active bundles, and then jobs as they arrive, until cancelled."""
        async with asyncio.TaskGroup() as group:
            await self._restore_all(group)
            await self._run_jobs()

    async def _run_jobs(self) -> None:
        while True:
            try:
                # Not `wait_for`, which loses a cancellation if work arrives at the same time (Python 3.11).
                async with asyncio.timeout(INBOX_INTERVAL_S):
                    await self._work.wait()
            except TimeoutError:
                await self._check_inbox()
                continue
            self._work.clear()
            self._busy = True
            while (job := self._next_job()) is not None:
                self._current = job.request
                try:
                    done = await self._installer.run(job)
                finally:
                    self._current = None
                if done.request.origin is Origin.LOCAL:
                    self._inbox.answer(done)
                self._report()
            await self._remove_unwanted()
            self._busy = False

    def on_message(self, topic: topics.Topic, payload: bytes) -> None:
        """Take a desired document or a block; the message may be acknowledged when this returns."""
        match topic:
            case topics.Desired(self._device):
                self._on_desired(payload)
            case topics.Block(self._device, digest, offset):
                self._blocks.on_block(digest, offset, payload)
            case _:
                _log.debug("unexpected topic %s", topic)

    def on_connected(self) -> None:
        """Publish everything again: the broker may have forgotten it, or be another one."""
        self._blocks.on_connected()
        for job in self._journal:
            self._publish_job(job)
        self._report()

    def close(self) -> None:
        """Unlock the state directory."""
        self._store.unlock()

    async def _restore_all(self, group: asyncio.TaskGroup) -> None:
        """Run the active bundles, one after the other unless one hangs."""
        active = self._store.active()
        for model in [active[name] for name in self._last_use.order(active)]:
            restoring = group.create_task(self._restore(model))
            done, _ = await asyncio.wait({restoring}, timeout=RESTORE_PATIENCE_S)
            if not done:
                _log.error("%s is not loaded after %g s: the next one is", model.name, RESTORE_PATIENCE_S)
            self._report()
        self.restored = True

    async def _restore(self, model: ActiveModel) -> None:
        """Run the active bundle, or else the one that was active before it."""
        try:
            await self._installer.restore(model.name, model.digest)
        except EdgeError as error:
            _log.error("%s: %s cannot run: %s", model.name, model.digest, error)
        else:
            return
        if model.previous is not None:
            await self._fall_back(model, model.previous)
        self._repair(model)

    async def _fall_back(self, model: ActiveModel, digest: str) -> None:
        try:
            manifest = await self._installer.restore(model.name, digest)
            self._store.switch(replace(model, digest=digest, version=manifest.version, previous=None))
        except EdgeError as error:
            _log.error("%s: %s cannot run either: %s", model.name, digest, error)
        else:
            _log.warning("%s: %s serves instead", model.name, digest)

    def _repair(self, model: ActiveModel) -> None:
        """Fetch an active bundle again that cannot run but is still desired: its file may be damaged."""
        request = None if self._desired is None else self._desired.get(model.name)
        if request is None or request.digest != model.digest:
            return
        known = self._journal.get(request.job)
        if known is not None and known.status.final:
            job = f"{_REPAIR}{hex_digest(model.digest)[:12]}-{time.time_ns():x}"
            self._record(Job(replace(Request.from_desired(request), job=job)).now(), True)

    def _on_desired(self, payload: bytes) -> None:
        if not payload:
            return  # removed by a person, or by a broker that lost its data: nothing is stopped
        version = None
        try:
            desired = Desired.from_bytes(payload)
            version = desired.version
            self._check_order(desired)
            self._check_jobs(desired)
            if self._desired is None or version > self._desired.version:
                self._desired_file.save(desired.to_document())
        except EdgeError as error:
            _log.warning("desired: %s", error)
            self._rejection = reject(error, version)
            self._report()
            return
        self._desired, self._rejection = desired, None
        self._plan(desired)
        self._report()
        self._work.set()

    def _check_order(self, desired: Desired) -> None:
        """Check that a document is newer than the one in force and based on it, or is the same."""
        known = self._desired
        if known is None or (desired.version, desired.models) == (known.version, known.models):
            return
        if desired.version <= known.version:
            raise ConflictError(f"expected a desired version above {known.version}, got {desired.version}")
        if desired.base is not None and desired.base != known.digest:
            raise ConflictError(
                f"expected desired version {desired.version} to be based on {known.version}, got another base"
            )

    def _check_jobs(self, desired: Desired) -> None:
        for request in desired.models:
            known = self._journal.get(request.job)
            if known is not None and (known.request.model, known.request.digest) != (
                request.model,
                request.digest,
            ):
                raise SourceError(
                    f"expected a new job identifier, got {request.job}, which belongs to another deployment"
                )

    def _plan(self, desired: Desired) -> None:
        """Queue new jobs, and cancel those that are no longer wanted."""
        for job in self._journal:
            request, wanted = job.request, desired.get(job.request.model)
            if job.status.final or request.origin is Origin.LOCAL or _is_for(request, wanted):
                continue
            self._drop(job, Status.CANCELED if wanted is None else Status.SUPERSEDED)
        for model in desired.models:
            known = self._journal.get(model.job)
            if known is not None:
                self._publish_job(known)  # delivered again: the job is not repeated, but published again
                continue
            job = Job(Request.from_desired(model)).now()
            try:
                self._downloader.check(job.request)
            except SourceError as error:
                job = job.now(
                    status=Status.REJECTED, result=Result.REJECTED, code=error.code, message=str(error)
                )
            self._record(job, True)

    def _drop(self, job: Job, status: Status) -> None:
        if job.status is Status.QUEUED and job.request != self._current:
            self._record(
                job.now(status=status, result=Result.FAILED_NO_STATE_CHANGE, message="no longer wanted"), True
            )
        elif job.request == self._current:
            self._installer.abandon(status)

    def _next_job(self) -> Job | None:
        """Return the job that was interrupted, or else the oldest one."""
        waiting = [job for job in self._journal if not job.status.final]
        waiting.sort(key=lambda job: job.status is Status.QUEUED)
        return waiting[0] if waiting else None

    async def _remove_unwanted(self) -> None:
        if self._desired is None:
            return
        for model in tuple(self._store.active().values()):
            if model.origin is Origin.DESIRED and self._desired.get(model.name) is None:
                _log.info("%s is no longer desired", model.name)
                await self._installer.remove(model.name)
                self._store.collect(self._in_use())
                self._report()

    async def _check_inbox(self) -> None:
        for digest in tuple(self._inbox.dropped()):
            try:
                request = await in_disk_thread(self._inbox.request, digest, self._keyring())
            except EdgeError as error:
                _log.warning("inbox: %s: %s", digest, error)
                self._inbox.refuse(digest, error)
                continue
            self._record(Job(request).now(), True)
            self._work.set()

    def _in_use(self) -> set[str]:
        """Return the digests that unfinished jobs other than the current one need."""
        return {
            job.request.digest
            for job in self._journal
            if not job.status.final and job.request != self._current
        }

    def _record(self, job: Job, durable: bool) -> None:
        if durable:
            for forgotten in self._journal.put(job):
                topic = topics.format_topic(topics.Job(self._device, forgotten))
                self._control.publish(topic, b"", retain=True)
        self._publish_job(job)

    def _publish_job(self, job: Job) -> None:
        topic = topics.format_topic(topics.Job(self._device, job.request.job))
        self._control.publish(topic, job.state().to_bytes(), retain=True)

    def _report(self) -> None:
        document = reported(
            self._desired, self._rejection, self._store, running=self._installer.running
        ).to_bytes()
        self._control.publish(topics.format_topic(topics.Reported(self._device)), document, retain=True)


def _is_for(request: Request, wanted: DesiredModel | None) -> bool:
    """Return whether a job installs what is wanted now."""
    if wanted is None:
        return False
    repairs = request.job.startswith(_REPAIR) and request.digest == wanted.digest
    return request.job == wanted.job or repairs
