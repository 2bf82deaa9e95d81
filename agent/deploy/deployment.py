"""Keeps the models that run here in line with the desired document; owns everything in this package.

Promises: what runs is compared with what should run as long as the agent runs. Jobs run one after the other,
new ones first. After each connect everything is published again, because the broker may have forgotten it. A
state directory that cannot be opened is tried again, and meanwhile nothing is installed.
Leaves to others: taking a desired document (`desired_state`), the jobs that follow (`plan`) and their steps
(`installer`), loading what was active (`restoration`), trials (`trial_watch`), what is reported (`reported`),
the connection, and running models.

Call `start()` before connecting, and run `run()` as a task while the agent lives: it never returns, and an
exception in it is a bug. It begins with loading the active models, which may take minutes. The connection
calls `on_message` and `on_connected`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from agent.deploy.circumstances import Circumstances
from agent.deploy.desired_state import DesiredState
from agent.deploy.fetch.allow_list import HttpsSettings
from agent.deploy.fetch.block_source import SILENCE_LIMIT_S, BlockSource
from agent.deploy.fetch.sources import Downloader
from agent.deploy.history import History
from agent.deploy.inbox import Inbox
from agent.deploy.installer import Installer
from agent.deploy.interfaces import Control, Models
from agent.deploy.jobs import Job, Journal
from agent.deploy.parts import Parts
from agent.deploy.plan import Due, Plan
from agent.deploy.reconcile import Attempts
from agent.deploy.reported import Report
from agent.deploy.restoration import Restoration
from agent.deploy.store.last_use import LastUse
from agent.deploy.store.records import Records
from agent.deploy.store.state_file import SAVE_LIMIT_S
from agent.deploy.store.store import Store
from agent.deploy.trial_watch import TrialWatch
from agent.disk_thread import in_disk_thread
from agent.errors import DiskError, EdgeError, InUseError, StoreError
from agent.wire import topics
from agent.wire.desired import Desired
from agent.wire.job import Status
from agent.wire.reported import Origin

# How often the inbox is checked.
INBOX_INTERVAL_S: Final = 1.0
# Reading the state takes milliseconds, and seconds on a card that collects its garbage.
OPEN_LIMIT_S: Final = 10.0
# How often a state directory is tried that could not be opened.
OPEN_INTERVAL_S: Final = 10.0

_log = logging.getLogger(__name__)


class Deployment:
    """Installs what is desired, and removes what is not.

    Parameters
    ----------
    device
        The device's name in topics.
    store
        The state directory. It is opened and locked by `start` and unlocked by `close`.
    circumstances
        The trusted keys, and this machine.
    models
        Runs the models.
    control
        The control connection.
    https
        The allowed https sources.
    silence_limit_s
        How long to wait for a block over MQTT while the broker is connected.

    Attributes
    ----------
    reported
        What is known about the models here.

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
        circumstances: Circumstances,
        models: Models,
        control: Control,
        https: HttpsSettings,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self._device = device
        self._store = store
        self._control = control
        self._blocks = BlockSource(control, device, silence_limit_s=silence_limit_s)
        self._inbox = Inbox(store.inbox)
        self._last_use = LastUse(store.root)
        self._attempts = Attempts()
        self._journal = Journal(
            store.root / "jobs.json", checkpoint=store.checkpoint, on_error=store.on_error
        )
        self._desired = DesiredState(
            store,
            self._journal,
            self._attempts,
            unopened=lambda: self._unopened,
            on_accepted=self._follow,
            on_rejected=self._report,
        )
        self._parts = parts = Parts(
            store=store,
            records=Records(store.root),
            downloader=Downloader(store, self._blocks, https),
            models=models,
            desired=self._desired,
            journal=self._journal,
            history=History(device, control, self._journal),
            attempts=self._attempts,
            circumstances=circumstances,
            report=self._report,
        )
        self._plan = Plan(parts)
        self._installer = Installer(parts, self._plan)
        self._trials = TrialWatch(parts, self._installer)
        self._work = asyncio.Event()
        self._restoration = Restoration(
            parts, self._installer, self._trials, self._last_use, on_loaded=self._work.set
        )
        self.reported = Report(parts, self._plan, self._installer, self._restoration.loading)
        self._busy = False
        # Why the state directory could not be opened, or None once it was.
        self._unopened: StoreError | None = DiskError(f"{store.root} does not respond")
        self._opening: asyncio.Future[object | None] | None = None
        self._disk_changed = asyncio.Event()
        self._last_report = b""

    @property
    def restored(self) -> bool:
        """Whether the active bundles were loaded, as far as they can be."""
        return self._restoration.done

    @property
    def idle(self) -> bool:
        """Whether all models are loaded, jobs ended and unwanted models removed; the inbox may have more."""
        busy = self._busy or self._desired.taking or self._work.is_set() or self._disk_changed.is_set()
        return self.restored and not busy and not self._journal.saving

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
        self._parts.records.load()
        if self._store.lost_active:
            self._plan.recover()
        return self._desired.read()

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
        self._desired.adopt(document)
        self._restoration.expect(self._store.active())
        if self._desired.document is not None:
            # A crash may have separated the document from its plan.
            self._carry_out(self._plan.follow(self._desired.document, running=None))
        self._work.set()

    async def run(self) -> None:
        """Run the active bundles, and then jobs as they arrive, until cancelled."""
        async with asyncio.TaskGroup() as group:
            await self._open_late()
            await self._restoration.run(group)
            group.create_task(self._trials.run())
            group.create_task(self._restoration.stop_revoked())
            await self._run_jobs()

    def disk_changed(self) -> None:
        """Try again what the state directory refused: it may be usable again."""
        self._disk_changed.set()
        self._work.set()

    def on_keys_read(self) -> None:
        """Report whose keys are revoked now, and stop these models unless they are to serve."""
        if self.restored and self.reported.document().to_bytes() != self._last_report:
            self._report()
        if not self._parts.circumstances.serves_revoked:
            self._restoration.keys_read.set()

    def records(self) -> dict[str, object]:
        """Return how the bundles have done, for `record_use`."""
        scores = {digest: self._parts.models.score(name) for name, digest in self._installer.running.items()}
        active = self._store.active().values()
        return self._parts.records.document(
            scores, {each for model in active for each in (model.digest, model.previous)}
        )

    def record_use(self, used: Sequence[str], records: dict[str, object]) -> None:
        """Store which models were used last, the last one first, and how they did; call it in a thread."""
        if not used or self._unopened is not None:
            return
        others = self._last_use.order(set(self._store.active()) - set(used))
        try:
            self._last_use.record([*used, *others])
            self._parts.records.save(records)
        except StoreError as error:
            _log.warning("the order and the records of the models are not stored: %s", error)

    async def _open_late(self) -> None:
        """Return when the state directory is open."""
        opens_late = self._unopened is not None
        while self._unopened is not None:
            if self._opening is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(OPEN_INTERVAL_S):
                        await self._disk_changed.wait()
                self._disk_changed.clear()
                self._opening = asyncio.ensure_future(in_disk_thread(self._read_state))
            await self._adopt_state()
        if opens_late:
            self._disk_changed.set()

    async def _resume_storing(self) -> None:
        """Store what the disk refused before."""
        self._disk_changed.clear()
        try:
            await in_disk_thread(self._store.recover)
        except StoreError as error:
            _log.error("%s", error)
        self._inbox.try_again()
        self._desired.retry_soon()

    async def _run_jobs(self) -> None:
        while True:
            try:
                async with asyncio.timeout(INBOX_INTERVAL_S):
                    await self._work.wait()
            except TimeoutError:
                if self._store.pending:
                    with contextlib.suppress(StoreError):  # no thread; the next time, then
                        await in_disk_thread(self._store.save_pending)
                await self._check_inbox()
                await self._reconcile()
                continue
            self._work.clear()
            self._busy = True
            if self._disk_changed.is_set():
                await self._resume_storing()
            await self._reconcile()
            await self._journal.save()
            while (job := self._plan.next_job()) is not None:
                await self._run_job(job)
            await self._remove_unwanted()
            self._busy = False

    async def _run_job(self, job: Job) -> None:
        done = await self._installer.run(job)
        name = done.request.model
        if done.status is Status.SUCCEEDED:
            self._attempts.forget(name)
            self._trials.forget(name)
        self._report()  # first: who waits for the inbox may ask for the report next
        if done.request.origin is Origin.LOCAL and not done.request.repair:
            with contextlib.suppress(StoreError):  # no thread
                await in_disk_thread(self._inbox.answer, done)

    def on_message(self, topic: topics.Topic, payload: bytes) -> asyncio.Task[None] | None:
        """Take a desired document or a block.

        Returns
        -------
        asyncio.Task[None] | None
            Ends when the message may be acknowledged; None if that is now.
        """
        match topic:
            case topics.Desired(self._device):
                return self._desired.take(payload)
            case topics.Block(self._device, digest, offset):
                self._blocks.on_block(digest, offset, payload)
            case _:
                _log.debug("unexpected topic %s", topic)
        return None

    def refuse_desired(self, error: EdgeError) -> None:
        """Report why a desired document of which only the beginning has arrived is not taken."""
        self._desired.refuse(error)

    def on_connected(self) -> None:
        """Publish everything again that the broker may have forgotten: it may be another one."""
        self._blocks.on_connected()
        self._attempts.hurry(asyncio.get_running_loop().time())
        self._parts.history.on_connected()
        if self._unopened is None:
            self._report()

    def on_retained_job(self, topic: topics.Job, payload: bytes) -> None:
        """Take the document of a job that the broker has retained."""
        self._parts.history.on_retained(topic, payload)

    async def close(self, limit_s: float = SAVE_LIMIT_S) -> None:
        """Unlock the state directory, after a clean stop, which is recorded if the disk responds in time."""
        await self._trials.end_cleanly(limit_s)
        await self._installer.end_cleanly(limit_s)
        self._parts.history.close()
        self._store.unlock()

    def _follow(self, desired: Desired) -> None:
        """Begin with what follows from a document that has come into force."""
        self._carry_out(self._plan.follow(desired, self._installer.current))
        self._report()
        self._work.set()

    def _carry_out(self, due: Due) -> None:
        for job in due.queue:
            self._parts.history.queue(job)
        for job in due.publish:
            self._parts.history.publish(job)
        if due.ending is not None:
            self._installer.abandon(due.ending)
        if due.recovered:
            self._report()

    async def _reconcile(self) -> None:
        self._desired.retry()
        if self._plan.compares_keys(self._installer.running):
            with contextlib.suppress(EdgeError):
                await in_disk_thread(self._parts.circumstances.read_keys)
        installer = self._installer
        self._carry_out(
            self._plan.reconcile(installer.running, installer.switched, self._restoration.loading)
        )
        if self._plan.next_job() is not None:
            self._work.set()

    async def _remove_unwanted(self) -> None:
        try:
            for name in self._plan.unwanted():
                _log.info("%s is no longer desired", name)
                async with self._installer.switching(name):
                    await self._installer.remove(name)
                self._attempts.forget(name)
                self._report()
        except StoreError as error:
            _log.error("a model that is no longer desired runs on: %s", error)
            self._store.on_error()

    async def _check_inbox(self) -> None:
        try:
            requests = await in_disk_thread(self._inbox.requests, self._parts.circumstances.read_keys)
        except StoreError as error:
            _log.warning("inbox: %s", error)
            return
        for request in requests:
            await self._parts.history.record(Job(request).now())
            self._work.set()

    def _report(self) -> None:
        document = self._last_report = self.reported.document().to_bytes()
        self._control.publish(topics.format_topic(topics.Reported(self._device)), document, retain=True)

    def on_model_changed(self, _name: str) -> None:
        """Report what a model's worker is doing now."""
        if self.restored:
            self._report()
