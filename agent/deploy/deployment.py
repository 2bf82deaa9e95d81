"""Keeps the models that run here in line with the desired document; owns everything in this package.

Promises: a desired document is durable before it is acknowledged, the newest wins, and one that cannot be
read changes nothing. What runs is compared with what should run as long as the agent runs (`reconcile`). Jobs
run one after the other, new ones first. After each connect everything is published again, because the broker
may have forgotten it. At each start every active bundle is verified again before it runs; if it cannot be
used, its predecessor serves until it can. A bundle that fails on trial is replaced by its predecessor
(`trial`). The most recently used models are loaded first, and one that hangs does not hold up the others.
Leaves to others: the steps of a job (`installer`), the connection, and running models.

Call `start()` before connecting, and run `run()` as a task while the agent lives: it never returns, and an
exception in it is a bug. It begins with loading the active models, which may take minutes. The connection
calls `on_message` and `on_connected`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import agent
from agent.bundle.keyring import Keyring
from agent.bundle.machine import Machine
from agent.bundle.names import hex_digest
from agent.deploy.fetch.block_source import SILENCE_LIMIT_S, BlockSource
from agent.deploy.fetch.https import HttpsSettings, HttpsSource
from agent.deploy.fetch.sources import Downloader
from agent.deploy.history import History
from agent.deploy.inbox import Inbox
from agent.deploy.installer import MAX_ATTEMPTS, Installer
from agent.deploy.interfaces import Control, Models
from agent.deploy.jobs import REPAIR, Job, Journal, Request
from agent.deploy.reconcile import Attempts, Problem, wishes
from agent.deploy.reported import Serving, reject, reported
from agent.deploy.store.active import ActiveModel, RolledBack
from agent.deploy.store.disk_thread import in_disk_thread
from agent.deploy.store.last_use import LastUse
from agent.deploy.store.state_file import Checkpoint, StateFile, no_checkpoint
from agent.deploy.store.store import Store
from agent.deploy.trial import AGENT_ENDED, STEADY_S, Score, Trial, fault, over
from agent.errors import (
    ConflictError,
    DiskError,
    EdgeError,
    InUseError,
    SelfTestError,
    SourceError,
    StoreError,
)
from agent.wire import topics
from agent.wire.desired import Desired, DesiredModel, newest_after
from agent.wire.job import MAX_MESSAGE_CHARACTERS, Result, Status
from agent.wire.reported import Origin, Rejection, Reported, ServiceState

# How often the inbox is checked.
INBOX_INTERVAL_S: Final = 1.0
# How often bundles on trial are looked at.
TRIAL_INTERVAL_S: Final = 1.0
# A small board loads the largest models in this time. What takes longer may hang on a dead disk: the next
# model is loaded beside it.
RESTORE_PATIENCE_S: Final = 60.0
# How often a refused bundle is compared with the trusted keys, which a person may have changed.
KEYS_INTERVAL_S: Final = 60.0
# Reading the state takes milliseconds, and seconds on a card that collects its garbage.
OPEN_LIMIT_S: Final = 10.0
SAVE_LIMIT_S: Final = 20.0
# How often a state directory is tried that could not be opened.
OPEN_INTERVAL_S: Final = 10.0

# Key in `_attempts` of a document that could not be stored; no model has a space in its name.
_DOCUMENT: Final = "desired document"

_log = logging.getLogger(__name__)


class Deployment:
    """Installs what is desired, and removes what is not.

    Parameters
    ----------
    device
        The device's name in topics.
    store
        The state directory. It is opened and locked by `start` and unlocked by `close`.
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
    on_disk_error
        Called when the state directory refused to store something.
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
        on_disk_error: Callable[[], None] = lambda: None,
        silence_limit_s: float = SILENCE_LIMIT_S,
        checkpoint: Checkpoint = no_checkpoint,
    ) -> None:
        self._device = device
        self._store = store
        self._keyring = keyring
        self._control = control
        self._blocks = BlockSource(control, device, silence_limit_s=silence_limit_s)
        self._downloader = Downloader(store, self._blocks, HttpsSource(https))
        self._on_disk_error = on_disk_error
        self._journal = Journal(store.root / "jobs.json", checkpoint=checkpoint, on_error=on_disk_error)
        self._history = History(device, control, lambda: self._journal)
        self._desired_file = StateFile(store.root / "desired.json", mirrored=True, checkpoint=checkpoint)
        self._desired: Desired | None = None
        self._rejection: Rejection | None = None
        self._not_stored: bytes | None = None
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
            show=self._publish_job,
            in_use=self._in_use,
            after_failure=self._after_failure,
            checkpoint=checkpoint,
        )
        self._https = https
        self._machine = machine
        self._attempts = Attempts()
        self._recovered: tuple[Request, ...] = ()
        self._loading: set[str] = set()
        # Since when each bundle on trial has been in service, on the event loop's clock.
        self._on_trial_since_s: dict[str, float] = {}
        self._current: Request | None = None
        self._work = asyncio.Event()
        self._busy = False
        self.restored = False
        # Why the state directory could not be opened, or None once it was.
        self._unopened: StoreError | None = DiskError(f"{store.root} does not respond")
        self._opening: asyncio.Future[object | None] | None = None
        self._disk_changed = asyncio.Event()
        self._taking: set[asyncio.Task[None]] = set()
        self._taking_turns = asyncio.Lock()

    @property
    def idle(self) -> bool:
        """Whether all models are loaded, jobs ended and unwanted models removed; the inbox may have more."""
        busy = self._busy or self._taking or self._work.is_set() or self._disk_changed.is_set()
        return self.restored and not busy and not self._journal.saving

    def _is_open(self) -> bool:
        return self._unopened is None

    async def start(self) -> None:
        """Open and lock the state directory, plan what is desired, and subscribe.

        A directory that cannot be opened, or does not respond, is tried again by `run`.

        Raises
        ------
        InUseError
            If another agent uses the directory.
        """
        self._control.want(topics.format_topic(topics.Desired(self._device)))
        self._opening = asyncio.ensure_future(in_disk_thread(self._read_state))
        done, _ = await asyncio.wait({self._opening}, timeout=OPEN_LIMIT_S)
        if done:
            await self._adopt_state()
        else:
            _log.error("%s: serving without it", self._unopened)

    def _read_state(self) -> object | None:
        """Open the state directory, and return the desired document in it. This blocks."""
        self._store.open()
        try:
            self._store.make_folders()
        except StoreError as error:
            _log.error("%s", error)
        self._store.lock()
        self._journal.load()
        self._last_use.load()
        return self._desired_file.load()

    async def _adopt_state(self) -> None:
        """Wait for `_read_state`, and use what it found."""
        opening, self._opening = self._opening, None
        assert opening is not None
        try:
            document = await opening
        except InUseError:
            raise
        except StoreError as error:
            self._unopened = error
            _log.error("%s: serving without it; %s", error, error.hint or "it is tried again")
            return
        self._unopened = None
        if document is not None:
            try:
                self._desired = Desired.from_document(document)
            except EdgeError as error:
                _log.error("desired.json is ignored: %s", error)
        if self._store.lost_active:
            self._recovered = self._recover()
        self._loading.update(self._store.active())
        self._models.expect(self._store.active())
        if self._desired is not None:
            self._plan(self._desired)  # a crash may have separated the document from its plan
        self._work.set()

    async def run(self) -> None:
        """Run the active bundles, and then jobs as they arrive, until cancelled."""
        async with asyncio.TaskGroup() as group:
            await self._open_late()
            await self._restore_all(group)
            group.create_task(self._watch_trials())
            await self._run_jobs()

    def disk_changed(self) -> None:
        """Try again what the state directory refused: it may be usable again."""
        self._disk_changed.set()
        self._work.set()

    def record_use(self, used: Sequence[str]) -> None:
        """Store which models were used last, the last one first. This blocks: call it in a thread."""
        if not used or not self._is_open():
            return
        others = self._last_use.order(set(self._store.active()) - set(used))
        try:
            self._last_use.record([*used, *others])
        except StoreError as error:
            _log.warning("the order of the models is not stored: %s", error)

    async def _open_late(self) -> None:
        """Return when the state directory is open."""
        if self._is_open():
            return
        while not self._is_open():
            if self._opening is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(OPEN_INTERVAL_S):
                        await self._disk_changed.wait()
                self._disk_changed.clear()
                self._opening = asyncio.ensure_future(in_disk_thread(self._read_state))
            await self._adopt_state()
        self._disk_changed.set()

    async def _resume_storing(self) -> None:
        """Store what the disk refused before."""
        self._disk_changed.clear()
        try:
            await in_disk_thread(self._store.recover)
        except StoreError as error:
            _log.error("%s", error)
        self._inbox.try_again()
        self._attempts.forget(_DOCUMENT)

    async def _run_jobs(self) -> None:
        while True:
            try:
                # Not `wait_for`, which loses a cancellation if work arrives at the same time (Python 3.11).
                async with asyncio.timeout(INBOX_INTERVAL_S):
                    await self._work.wait()
            except TimeoutError:
                await self._save_pending()
                await self._check_inbox()
                self._reconcile()
                continue
            self._work.clear()
            self._busy = True
            if self._disk_changed.is_set():
                await self._resume_storing()
            self._reconcile()
            await self._journal.save()
            while (job := self._next_job()) is not None:
                await self._run_job(job)
            await self._remove_unwanted()
            self._busy = False

    async def _save_pending(self) -> None:
        if self._store.pending:
            with contextlib.suppress(StoreError):  # no thread; the next time, then
                await in_disk_thread(self._store.save_pending)

    async def _run_job(self, job: Job) -> None:
        self._current = job.request
        try:
            done = await self._installer.run(job)
        finally:
            self._current = None
        name = done.request.model
        if done.status is Status.SUCCEEDED:
            self._attempts.forget(name)
            self._on_trial_since_s.pop(name, None)
        if done.request.origin is Origin.LOCAL and not done.request.repair:
            with contextlib.suppress(StoreError):  # no thread
                await in_disk_thread(self._inbox.answer, done)
        self._report()

    def on_message(self, topic: topics.Topic, payload: bytes) -> asyncio.Task[None] | None:
        """Take a desired document or a block.

        Returns
        -------
        asyncio.Task[None] | None
            Ends when the message may be acknowledged; None if that is now.
        """
        match topic:
            case topics.Desired(self._device):
                return self._take(payload)
            case topics.Block(self._device, digest, offset):
                self._blocks.on_block(digest, offset, payload)
            case _:
                _log.debug("unexpected topic %s", topic)
        return None

    def on_connected(self) -> None:
        """Publish everything again that the broker may have forgotten: it may be another one."""
        self._blocks.on_connected()
        self._attempts.hurry(_now_s())
        self._history.on_connected()
        if self._unopened is None:
            self._report()

    def on_retained_job(self, topic: topics.Job, payload: bytes) -> None:
        """Take the document of a job that the broker has retained."""
        self._history.on_retained(topic, payload)

    def close(self) -> None:
        """Unlock the state directory, after a clean stop."""
        for model in tuple(self._store.active().values()):
            if model.trial is not None and model.trial.starts:
                self._store.record(replace(model, trial=model.trial.steady()))
        self._history.close()
        self._store.unlock()

    async def _restore_all(self, group: asyncio.TaskGroup) -> None:
        """Run the active bundles, one after the other unless one hangs."""
        active = self._store.active()
        for model in [active[name] for name in self._last_use.order(active)]:
            restoring = group.create_task(self._restore(model))
            done, _ = await asyncio.wait({restoring}, timeout=RESTORE_PATIENCE_S)
            if not done:
                _log.error(
                    "%s is not loaded after %g s: loading the next model", model.name, RESTORE_PATIENCE_S
                )
            self._report()
        self.restored = True

    async def _restore(self, model: ActiveModel) -> None:
        """Run the active bundle, or else another one until the active one can run."""
        if model.trial is not None:
            model = replace(model, trial=model.trial.started())
            await self._note(model)  # before it is loaded, which may end this process
            assert model.trial is not None
            why = fault(model.trial, out_of_service=None, score=Score())
            if why is not None and await self._roll_back(model, why):
                self._loading.discard(model.name)
                return
        try:
            async with self._installer.switching(model.name):
                await self._installer.restore(model.name, model.digest, model.counter_floor)
        except EdgeError as error:
            _log.error("%s: %s cannot run: %s", model.name, model.digest, error)
            self._attempts.explain(model.name, Problem(str(error)[:MAX_MESSAGE_CHARACTERS], None))
            other = _other(model)
            if other is not None:
                await self._run_meanwhile(model, other)
            if self._models.condition(model.name) is None:
                self._models.give_up(model.name, str(error)[:MAX_MESSAGE_CHARACTERS])
        self._loading.discard(model.name)
        self._work.set()

    async def _run_meanwhile(self, model: ActiveModel, digest: str) -> None:
        """Run another bundle than the active one; the record of what should run stays as it is."""
        floor = None if model.trial is None else model.trial.counter
        try:
            async with self._installer.switching(model.name):
                await self._installer.restore(model.name, digest, floor)
        except EdgeError as error:
            _log.error("%s: %s cannot run either: %s", model.name, digest, error)
        else:
            _log.warning("%s: %s serves meanwhile", model.name, digest)

    def _recover(self) -> tuple[Request, ...]:
        """Return what a person installed here, after both copies of the record were lost."""
        installed = {
            job.request.model: replace(job.request, sources=())
            for job in self._journal
            if job.request.origin is Origin.LOCAL and job.status is Status.SUCCEEDED
        }
        _log.error("active.json is lost: restoring it from desired.json and the bundles on disk")
        return tuple(request for request in installed.values() if self._store.has(request.digest))

    def _wishes(self) -> dict[str, Request]:
        return wishes(self._desired, self._store.active(), self._recovered)

    def _reconcile(self) -> None:
        """Queue another attempt for each model that does not run as it should, if one is due."""
        now_s = _now_s()
        if self._not_stored is not None and not self._taking and self._attempts.due(_DOCUMENT, now_s):
            self._take(self._not_stored)
        for name, wish in self._wishes().items():
            active = self._store.active().get(name)
            if active is not None and _is_rolled_back(active, wish):
                wish = _of_active(active)  # noqa: PLW2901 - what should run now
            if self._installer.running.get(name) == wish.digest:
                if name in self._attempts.problems:
                    self._attempts.forget(name)
                    self._report()
                continue
            if self._installer.switching(name).locked():
                continue  # it is being rolled back
            if active is not None and name in self._loading:
                continue  # it is being loaded
            job = self._attempt_of(wish)
            if not job.status.final or not self._attempts.due(name, now_s):
                continue
            if job.refused_under is not None and job.refused_under == self._circumstances():
                self._attempts.postpone(name, now_s + KEYS_INTERVAL_S)
                continue
            self._queue(job.again())
            self._work.set()

    def _attempt_of(self, request: Request) -> Job:
        """Return the job that the next attempt belongs to; a new one, already ended, if there is none."""
        job = self._journal.get(request.job)
        if job is None or (job.request.model, job.request.digest) != (request.model, request.digest):
            job = Job(request, status=Status.FAILED)
        if job.status is not Status.SUCCEEDED and request.sources:
            return replace(job, request=request)  # its sources may be others now
        # It was in service before: its file may be damaged, or its worker did not start.
        repair = next(
            (
                known
                for known in self._journal
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

    def _after_failure(self, job: Job) -> Job:
        """Say in a job that has failed when it is tried again."""
        request = job.request
        active = self._store.active().get(request.model)
        # The predecessor of a bundle that was rolled back should run, although nothing asks for it.
        returns = active is not None and active.rolled_back is not None and active.digest == request.digest
        if self._wishes().get(request.model, request).digest != request.digest and not returns:
            return job
        if request.origin is Origin.LOCAL and not request.repair:
            return job  # a person waits for the result, and decides
        if job.status in (Status.CANCELED, Status.SUPERSEDED):
            return job
        message, next_try_s, refused_under = job.message or str(job.status), None, None
        if job.status is Status.REJECTED or job.attempts > MAX_ATTEMPTS:
            refused_under = self._circumstances()
            note = "not tried again before the document, the trusted keys or the agent change"
        else:
            pause_s = self._attempts.failed(request.model, _now_s())
            next_try_s = time.time() + pause_s
            note = f"next attempt in {pause_s:.0f} s"
        room = MAX_MESSAGE_CHARACTERS - len(note) - len("; ")
        self._attempts.explain(request.model, Problem(message[:room], next_try_s))
        return job.now(message=f"{message[:room]}; {note}", refused_under=refused_under)

    def _circumstances(self) -> str:
        """Return a digest of what decides, beside the document, whether a bundle is refused."""
        try:
            keyring = self._keyring()
            keys = sorted(keyring.keys), sorted(keyring.revoked)
        except EdgeError as error:
            keys = [str(error)], []
        told = repr((agent.__version__, keys, self._machine, self._https.allow))
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    async def _watch_trials(self) -> None:
        """Once a second, look whether a bundle on trial has failed or passed."""
        while True:
            await asyncio.sleep(TRIAL_INTERVAL_S)
            for model in tuple(self._store.active().values()):
                if model.trial is not None and not self._installer.switching(model.name).locked():
                    await self._judge(model, model.trial)

    async def _judge(self, model: ActiveModel, trial: Trial) -> None:
        condition = self._models.condition(model.name)
        if self._installer.running.get(model.name) != model.digest or condition is None:
            self._on_trial_since_s.pop(model.name, None)
            return
        served_s = _now_s() - self._on_trial_since_s.setdefault(model.name, _now_s())
        score = self._models.score(model.name)
        out_of_service = condition.message if condition.failed else None
        why = fault(replace(trial, starts=0), out_of_service=out_of_service, score=score)
        if why is not None:
            await self._roll_back(model, why)
        elif over(served_s, score):
            _log.info("%s %s has passed its trial", model.name, model.version)
            await self._note(replace(model, trial=None))
        elif served_s >= STEADY_S and trial.starts:
            await self._note(replace(model, trial=trial.steady()))

    async def _note(self, model: ActiveModel) -> None:
        """Record what has become of a trial, if the disk allows it."""
        try:
            async with asyncio.timeout(SAVE_LIMIT_S):
                await in_disk_thread(self._store.record, model)
        except (TimeoutError, StoreError) as error:
            _log.error("%s: its trial is not stored: %s", model.name, error or "the disk does not respond")

    async def _roll_back(self, model: ActiveModel, why: str) -> bool:
        """Return from a bundle that failed on trial to the one before it; return whether that worked."""
        key = f"{model.name} rollback"
        if not self._attempts.due(key, _now_s()):
            return False
        wanted = None if self._desired is None else self._desired.get(model.name)
        job = wanted.job if wanted is not None and wanted.digest == model.digest else model.job
        reason = why[:MAX_MESSAGE_CHARACTERS]
        try:
            async with self._installer.switching(model.name):
                if self._store.active().get(model.name) != model:
                    return False  # a deployment was faster
                back = RolledBack(model.digest, model.version, job, reason)
                await self._installer.roll_back(model, back)
        except EdgeError as error:
            pause_s = self._attempts.failed(key, _now_s())
            _log.error("%s: cannot roll back, next attempt in %.0f s: %s", model.name, pause_s, error)
            return False
        self._attempts.forget(key)
        self._on_trial_since_s.pop(model.name, None)
        _log.error("%s: rolled back from %s: %s", model.name, model.version, why)
        known = self._journal.get(job)
        if known is not None:
            await self._record(
                known.now(
                    status=Status.FAILED,
                    step=None,
                    result=Result.FAILED_ROLLBACK_COMPLETE,
                    code=SelfTestError.code,
                    message=f"rolled back: {reason}",
                )
            )
        self._report()
        return True

    def _take(self, payload: bytes) -> asyncio.Task[None]:
        taking = asyncio.get_running_loop().create_task(self._take_desired(payload))
        self._taking.add(taking)
        taking.add_done_callback(self._taking.discard)
        return taking

    async def _take_desired(self, payload: bytes) -> None:
        """Plan what a desired document asks for, once it is durable; one document at a time."""
        if not payload:
            return  # removed by a person, or by a broker that lost its data: nothing is stopped
        async with self._taking_turns:
            version = None
            try:
                desired = Desired.from_bytes(payload)
                version = desired.version
                if self._unopened is not None:
                    raise DiskError(str(self._unopened), hint=self._unopened.hint)
                self._check_order(desired)
                self._check_jobs(desired)
                if self._desired is None or version > self._desired.version:
                    await self._save_desired(desired)
            except EdgeError as error:
                _log.warning("desired: %s", error)
                if isinstance(error, StoreError):  # the broker does not deliver it again by itself
                    self._not_stored = payload
                    self._attempts.failed(_DOCUMENT, _now_s())
                    self._on_disk_error()
                elif payload == self._not_stored:
                    self._not_stored = None
                self._rejection = reject(error, version)
                self._report()
                return
            self._not_stored = None
            self._attempts.forget(_DOCUMENT)
            for model in desired.models:
                if self._desired is None or desired.version > self._desired.version:
                    self._attempts.forget(model.model)
            self._attempts.hurry(_now_s())
            self._desired, self._rejection = desired, None
            self._recovered = tuple(kept for kept in self._recovered if desired.get(kept.model) is None)
            self._plan(desired)
            self._report()
            self._work.set()

    async def _save_desired(self, desired: Desired) -> None:
        try:
            async with asyncio.timeout(SAVE_LIMIT_S):
                await in_disk_thread(self._desired_file.save, desired.to_document())
        except TimeoutError as error:
            raise DiskError(f"{self._store.root} does not respond") from error

    def _check_order(self, desired: Desired) -> None:
        """Check that a document is newer than the one in force, not too far, and based on it, or the same."""
        known = self._desired
        newest = newest_after(None if known is None else known.version)
        if desired.version > newest:
            raise ConflictError(f"expected a desired version of at most {newest}, got {desired.version}")
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
                self._publish_job(known)  # delivered again: published again
                continue
            active = self._store.active().get(model.model)
            if active is not None and _is_rolled_back(active, Request.from_desired(model)):
                continue  # the journal has forgotten it
            job = Job(Request.from_desired(model)).now()
            try:
                self._downloader.check(job.request)
            except SourceError as error:
                job = self._after_failure(
                    job.now(
                        status=Status.REJECTED, result=Result.REJECTED, code=error.code, message=str(error)
                    )
                )
            self._queue(job)

    def _drop(self, job: Job, status: Status) -> None:
        if job.status is Status.QUEUED and job.request != self._current:
            self._queue(
                job.now(status=status, result=Result.FAILED_NO_STATE_CHANGE, message="no longer wanted")
            )
        elif job.request == self._current:
            self._installer.abandon(status)

    def _next_job(self) -> Job | None:
        """Return the interrupted job, or else the oldest new one, or else the oldest further attempt."""
        waiting = [job for job in self._journal if not job.status.final]
        waiting.sort(key=lambda job: (job.status is Status.QUEUED, job.message is not None))
        return waiting[0] if waiting else None

    async def _remove_unwanted(self) -> None:
        try:
            await self._remove_undesired()
        except StoreError as error:
            _log.error("a model that is no longer desired runs on: %s", error)
            self._on_disk_error()

    async def _remove_undesired(self) -> None:
        if self._desired is None:
            return
        for model in tuple(self._store.active().values()):
            if model.origin is Origin.DESIRED and self._desired.get(model.name) is None:
                _log.info("%s is no longer desired", model.name)
                async with self._installer.switching(model.name):
                    await self._installer.remove(model.name)
                self._attempts.forget(model.name)
                self._report()

    async def _check_inbox(self) -> None:
        try:
            dropped = await in_disk_thread(self._inbox.dropped)
        except StoreError as error:
            _log.warning("inbox: %s", error)
            return
        for digest in dropped:
            try:
                request = await in_disk_thread(self._inbox.request, digest, self._keyring())
            except EdgeError as error:
                _log.warning("inbox: %s: %s", digest, error)
                with contextlib.suppress(StoreError):
                    await in_disk_thread(self._inbox.refuse, digest, error)
                continue
            await self._record(Job(request).now())
            self._work.set()

    def _in_use(self) -> set[str]:
        """Return the digests of what should run, and those that unfinished jobs need."""
        return {request.digest for request in self._wishes().values()} | {
            job.request.digest
            for job in self._journal
            if not job.status.final and job.request != self._current
        }

    async def _record(self, job: Job) -> None:
        """Store the state of a job durably, and then publish it."""
        forgotten = self._journal.put(job)
        await self._journal.save()
        self._forget_jobs(forgotten)
        self._publish_job(job)

    def _queue(self, job: Job) -> None:
        """Publish a job that is new or dropped; `run` makes it durable before anything is done for it."""
        self._forget_jobs(self._journal.put(job))
        self._publish_job(job)

    def _forget_jobs(self, forgotten: Iterable[str]) -> None:
        for job in forgotten:
            self._control.publish(topics.format_topic(topics.Job(self._device, job)), b"", retain=True)

    def _publish_job(self, job: Job) -> None:
        self._history.publish(job)

    def states(self) -> dict[str, ServiceState]:
        """Return the state of each model that the reported document has."""
        return {model.name: ServiceState(model.state) for model in self._reported().models}

    def _report(self) -> None:
        document = self._reported().to_bytes()
        self._control.publish(topics.format_topic(topics.Reported(self._device)), document, retain=True)

    def _reported(self) -> Reported:
        active = self._store.active()
        serving = Serving(
            running=self._installer.running,
            conditions={name: self._models.condition(name) for name in active},
            wishes=self._wishes(),
            problems=self._attempts.problems,
            loading=self._loading,
        )
        return reported(self._desired, self._rejection, self._store, serving)

    def on_model_changed(self, _name: str) -> None:
        """Report what a model's worker is doing now."""
        if self.restored:
            self._report()


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _is_rolled_back(active: ActiveModel, request: Request) -> bool:
    """Return whether the bundle that a job asks for has failed on trial."""
    back = active.rolled_back
    return back is not None and (back.digest, back.job) == (request.digest, request.job)


def _other(active: ActiveModel) -> str | None:
    """Return the digest of what can serve while the active bundle cannot run; None if there is nothing.

    A bundle that was rolled back serves better than nothing, unless it ended the agent.
    """
    back = active.rolled_back
    if active.previous is not None or back is None or back.reason.startswith(AGENT_ENDED):
        return active.previous
    return back.digest


def _of_active(active: ActiveModel) -> Request:
    """Return the request for a bundle that is on disk."""
    return wishes(None, {active.name: active})[active.name]


def _is_for(request: Request, wanted: DesiredModel | None) -> bool:
    """Return whether a job installs what is wanted now."""
    if wanted is None:
        return False
    repairs = request.repair and request.digest == wanted.digest
    return request.job == wanted.job or repairs
