"""Which models should run here, and what is done about it: the owner of everything in this package.

Promises: a desired document is durable before it is acknowledged, the newest wins, and one that cannot be
read changes nothing; jobs run one after the other, in the order they came; whatever the broker forgot is
told again after each connect; at each start every active bundle is verified again before it runs, and where
one cannot be used its predecessor serves.
Leaves to others: the steps of a job (installer.py), the connection, and running models.

How it is used: `start()` before the connection is made, `run()` as a task for as long as the agent
lives (it never returns, and an exception in it is a fault of ours), `on_message` and `on_connected`
from the connection.
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
from agent.deploy.fetch.block_source import PATIENCE_S, BlockSource
from agent.deploy.fetch.https import HttpsSettings, HttpsSource
from agent.deploy.fetch.sources import Downloader
from agent.deploy.inbox import Inbox
from agent.deploy.installer import Installer
from agent.deploy.interfaces import Control, Models
from agent.deploy.jobs import Job, Journal, Request
from agent.deploy.reported import reject, reported
from agent.deploy.store.active import ActiveModel
from agent.deploy.store.state_file import Checkpoint, StateFile, no_checkpoint
from agent.deploy.store.store import Store
from agent.errors import ConflictError, EdgeError, SourceError
from agent.wire import topics
from agent.wire.desired import Desired, DesiredModel
from agent.wire.job import Result, Status
from agent.wire.reported import Origin, Rejection

# How soon a bundle that was dropped into the inbox is noticed.
INBOX_INTERVAL_S: Final = 1.0
# How the identifiers begin of jobs that the agent gives itself, for a bundle that is desired and damaged.
_REPAIR: Final = "repair-"

_log = logging.getLogger(__name__)


class Deployment:
    """Brings what should run, and what runs, together.

    Parameters
    ----------
    device
        This device's name in topics.
    store
        The state directory. It is locked by `start` and unlocked by `close`.
    keyring
        Returns the keys that are trusted now.
    machine
        What this device is.
    models
        What runs bundles.
    control
        The control connection.
    https
        Where https bundles may come from.
    patience_s
        How long to wait for somebody to offer a bundle over MQTT.
    checkpoint
        Called at each durable step, for fault injection.

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
        patience_s: float = PATIENCE_S,
        checkpoint: Checkpoint = no_checkpoint,
    ) -> None:
        self._device = device
        self._store = store
        self._keyring = keyring
        self._control = control
        self._blocks = BlockSource(control, device, patience_s=patience_s)
        self._downloader = Downloader(store, self._blocks, HttpsSource(https))
        self._journal = Journal(store.root / "jobs.json", checkpoint=checkpoint)
        self._desired_file = StateFile(store.root / "desired.json", mirrored=True, checkpoint=checkpoint)
        self._desired: Desired | None = None
        self._rejection: Rejection | None = None
        self._inbox = Inbox(store.inbox)
        self._installer = Installer(
            store,
            self._downloader,
            models,
            keyring=keyring,
            machine=machine,
            note=self._note,
            in_use=self._in_use,
            checkpoint=checkpoint,
        )
        self._current: Request | None = None
        self._work = asyncio.Event()

    async def start(self) -> None:
        """Take the state directory, run what was active, and subscribe.

        Raises
        ------
        StoreError
            If another agent has the directory.
        """
        self._store.lock()
        document = self._desired_file.load()
        if document is not None:
            try:
                self._desired = Desired.from_document(document)
            except EdgeError as error:
                _log.error("desired.json is left out: %s", error)
        for model in tuple(self._store.active().values()):
            await self._restore(model)
        if self._desired is not None:
            self._plan(self._desired)  # a crash may have come between the document and its plan
        self._control.want(topics.format_topic(topics.Desired(self._device)))
        self._work.set()

    async def run(self) -> None:
        """Execute jobs as they come, until cancelled."""
        while True:
            try:
                await asyncio.wait_for(self._work.wait(), INBOX_INTERVAL_S)
            except TimeoutError:
                await self._look_into_inbox()
                continue
            self._work.clear()
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

    def on_message(self, topic: topics.Topic, payload: bytes) -> None:
        """Take a desired document or a block; it may be acknowledged when this returns."""
        match topic:
            case topics.Desired(self._device):
                self._on_desired(payload)
            case topics.Block(self._device, digest, offset):
                self._blocks.on_block(digest, offset, payload)
            case _:
                _log.debug("deployment has no use for %s", topic)

    def on_connected(self) -> None:
        """Tell the broker everything again: it may be another one, or have forgotten."""
        self._blocks.on_connected()
        for job in self._journal:
            self._publish_job(job)
        self._report()

    def close(self) -> None:
        """Let another agent have the state directory."""
        self._store.unlock()

    async def _restore(self, model: ActiveModel) -> None:
        """Run what was active, or else what was active before it."""
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
            _log.error("%s: nor can %s: %s", model.name, digest, error)
        else:
            _log.warning("%s: %s serves instead", model.name, digest)

    def _repair(self, model: ActiveModel) -> None:
        """Fetch a bundle again that is desired, was active, and cannot run: its file may be damaged."""
        request = None if self._desired is None else self._desired.get(model.name)
        if request is None or request.digest != model.digest:
            return
        known = self._journal.get(request.job)
        if known is not None and known.status.final:
            job = f"{_REPAIR}{model.digest[7:19]}-{time.time_ns():x}"
            self._note(Job(replace(Request.from_desired(request), job=job)).now(), True)

    def _on_desired(self, payload: bytes) -> None:
        if not payload:
            return  # cleared by a person, or a broker that starts afresh: no reason to stop anything
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
        """Check that a document is newer than the one in force and was written from it, or is that one."""
        known = self._desired
        if known is None or (desired.version, desired.models) == (known.version, known.models):
            return
        if desired.version <= known.version:
            raise ConflictError(f"desired version {desired.version} is not newer than {known.version}")
        if desired.base is not None and desired.base != known.digest:
            raise ConflictError(f"desired version {desired.version} was not written from {known.version}")

    def _check_jobs(self, desired: Desired) -> None:
        for request in desired.models:
            known = self._journal.get(request.job)
            if known is not None and (known.request.model, known.request.digest) != (
                request.model,
                request.digest,
            ):
                raise SourceError(f"job {request.job} was another deployment; an identifier is used once")

    def _plan(self, desired: Desired) -> None:
        """Queue what is new, and let go of what is no longer wanted."""
        for job in self._journal:
            request, wanted = job.request, desired.get(job.request.model)
            if job.status.final or request.origin is Origin.LOCAL or _is_for(request, wanted):
                continue
            self._drop(job, Status.CANCELED if wanted is None else Status.SUPERSEDED)
        for model in desired.models:
            known = self._journal.get(model.job)
            if known is not None:
                self._publish_job(known)  # delivered again: not done again, but said again
                continue
            job = Job(Request.from_desired(model)).now()
            try:
                self._downloader.check(job.request)
            except SourceError as error:
                job = job.now(
                    status=Status.REJECTED, result=Result.REJECTED, code=error.code, message=str(error)
                )
            self._note(job, True)

    def _drop(self, job: Job, status: Status) -> None:
        if job.status is Status.QUEUED and job.request != self._current:
            self._note(
                job.now(status=status, result=Result.FAILED_NO_STATE_CHANGE, message="no longer wanted"), True
            )
        elif job.request == self._current:
            self._installer.abandon(status)

    def _next_job(self) -> Job | None:
        """Return what was interrupted, or else what has waited longest."""
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

    async def _look_into_inbox(self) -> None:
        for digest in tuple(self._inbox.dropped()):
            try:
                request = await asyncio.to_thread(self._inbox.request, digest, self._keyring())
            except EdgeError as error:
                _log.warning("inbox: %s: %s", digest, error)
                self._inbox.refuse(digest, error)
                continue
            self._note(Job(request).now(), True)
            self._work.set()

    def _in_use(self) -> set[str]:
        """Return the digests that jobs other than the current one are waiting for."""
        return {
            job.request.digest
            for job in self._journal
            if not job.status.final and job.request != self._current
        }

    def _note(self, job: Job, durable: bool) -> None:
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
    """Whether a job does what is wanted now."""
    if wanted is None:
        return False
    repairs = request.job.startswith(_REPAIR) and request.digest == wanted.digest
    return request.job == wanted.job or repairs
