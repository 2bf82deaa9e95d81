"""Keeps a worker alive for one bundle: starts it, restarts it when it dies, and slows down if that fails.

Promises: no request is lost when a worker dies: its successor computes those that it had, the one that it was
computing as the first of its client. If that one ends a second worker, it is answered with 500 and
quarantined; one that computes for longer than its limit is answered with 408. After a few deaths of the
worker's own in a short time the bundle is out of service, says so, and is tried again after growing pauses.
`life_cycle` holds the states and the rules, `quarantine` the requests that end workers; this file does what
they ask for.
Leaves to others: queues, deadlines, and which worker succeeds which (`model`).

Times are readings of the event loop's clock, which on Linux is `time.monotonic`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, cast

from agent.bundle.manifest import Manifest
from agent.bundle.verify import VerifiedBundle
from agent.config.settings import WorkerSettings
from agent.errors import (
    ChannelError,
    DeadlineError,
    EdgeError,
    ExecutionError,
    IncompatibleError,
    InputError,
    MixAndMatchError,
    NoSpaceError,
    RequestError,
    SelfTestError,
)
from agent.service.models import worker_limits
from agent.service.models.answer_check import fault_of
from agent.service.models.compute_limit import ComputeLimit
from agent.service.models.confinement import sandbox_of
from agent.service.models.life_cycle import (
    COMPUTING,
    OUT_OF_SERVICE,
    RETRY_LONGEST_S,
    Cause,
    CrashWindow,
    Event,
    State,
    next_state,
    retry_delay_s,
)
from agent.service.models.session_counts import SessionCounts
from agent.service.models.track_record import TrackRecord
from agent.service.models.worker_process import Spawn, WorkerProcess
from agent.service.requests.pending import Pending
from agent.service.requests.quarantine import Quarantine, Verdict
from agent.wire.answer_head import OK, one_line
from agent.wire.info import Sandbox
from agent.worker.frames import Answer, Failed, Frame, Load, Ready, Share

_log = logging.getLogger(__name__)

# One request is computed while the next waits in the socket: the worker need not wait for our event loop.
_SENT_AHEAD: Final = 2
# Import, load and self-test; a large model on a slow SD card takes its time.
START_LIMIT_S: Final = 120.0
# More than one picture or recording, and little to wait for: beyond that, the payloads of the requests that a
# worker has are in memory twice, as what was accepted and as what its socket does not take yet.
_MOST_SENT_BYTES: Final = 4 << 20
# What a worker says about itself is shortened in the log.
_SHOWN_CHARACTERS: Final = 200
# For a worker that has nothing left to answer.
_END_LIMIT_S: Final = 1.0
# Of a batch: requests that were sent have lost their place in the fair queue.
_MOST_SENT_AHEAD: Final = 32


def _sent_ahead(manifest: Manifest, settings: WorkerSettings) -> int:
    """Return how many requests a worker has at most: two, or a batch that is computed and one that waits."""
    buckets = manifest.buckets
    if not settings.batch or buckets is None or buckets.batch is None:
        return _SENT_AHEAD
    high = next(dimension.high for dimension in buckets.dimensions if dimension.name == buckets.batch)
    return max(_SENT_AHEAD, min(2 * high, _MOST_SENT_AHEAD))


class Supervisor:
    """One bundle, which the supervisor closes in the end, and the process that serves it.

    It starts with the processors and threads of `share`. `on_room` is called whenever it can take a request
    again or has requests to take back, `on_state` after each change of `state`, and `on_suspect` with the
    request that a process was computing when it died, and again when that request is convicted or acquitted.

    `message` says why it is not ready. `next_try_s` is when a bundle that is out of service is tried again,
    in seconds since the epoch by the device's clock; None while it is in service or being tried.
    """

    def __init__(
        self,
        verified: VerifiedBundle,
        settings: WorkerSettings,
        share: Share,
        *,
        spawn: Spawn,
        on_room: Callable[[], None],
        on_state: Callable[[], None],
        on_suspect: Callable[[Pending, Verdict], None] = lambda _pending, _verdict: None,
    ) -> None:
        self.verified = verified
        self.state = State.STARTING
        self.message = ""
        self.next_try_s: float | None = None
        self.record = TrackRecord()
        self.ready: Ready | None = None
        self._settings = settings
        self._sent_ahead = _sent_ahead(verified.manifest, settings)
        self._share = share
        self._spawn = spawn
        self._on_room = on_room
        self._on_state = on_state
        self._on_suspect = on_suspect
        self._process: WorkerProcess | None = None
        self._loading: asyncio.Future[Ready] | None = None
        self._sent: deque[Pending] = deque()
        self._limit = ComputeLimit(settings.compute_limit_s, lambda: bool(self._sent), self._over_limit)
        # What the process did wrong; its later frames are ignored.
        self._fault = ""
        self.deaths = CrashWindow(settings.crash_limit, settings.crash_window_s)
        self.quarantine = Quarantine()
        self.sessions = SessionCounts()
        self._restarting: asyncio.Task[None] | None = None
        self._retries = 0
        self._ready_since_s = self._ready_for_s = 0.0
        self._drained = asyncio.Event()
        self._drained.set()

    @property
    def has_room(self) -> bool:
        """Whether a request may be sent now."""
        if self.state is not State.READY or len(self._sent) >= self._sent_ahead:
            return False
        return self.nbytes < _MOST_SENT_BYTES

    @property
    def busy(self) -> int:
        """How many requests it has."""
        return len(self._sent)

    @property
    def nbytes(self) -> int:
        """The bytes of the requests that it has."""
        return sum(pending.nbytes for pending in self._sent)

    def nbytes_of(self, client: str) -> int:
        """Return the bytes of the requests of a client that it has."""
        return sum(pending.nbytes for pending in self._sent if pending.client == client)

    @property
    def crashes(self) -> int:
        """How many of its processes died."""
        return self.deaths.total

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox of its last process that was ready; None before the first one."""
        return None if self.ready is None else sandbox_of(self.ready)

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        return None if self._process is None else self._process.pid

    def rss_bytes(self) -> int:
        """Return the resident memory of its process; 0 while there is none."""
        return 0 if self._process is None else self._process.rss_bytes()

    async def start(self) -> None:
        """Start the first process and wait until it has passed its samples.

        Raises
        ------
        EdgeError
            If it does not; the process is gone then, and the bundle closed.
        """
        try:
            self.ready = await self._launch()
        except BaseException:
            self._enter(Event.NOT_LOADED)
            await self._end_process(0)
            self.verified.close()
            raise
        self._enter(Event.LOADED)

    def send(self, pending: Pending) -> None:
        """Hand a request over; `has_room` must hold.

        One that does not fit a frame is refused: the worker never gets it.
        """
        assert self._process is not None
        try:
            self._process.send(pending.frame, pending.payload)
        except ChannelError as error:
            pending.refuse(InputError(f"{self.verified.manifest.name}: {error}"))
            return
        self._sent.append(pending)
        self._drained.clear()
        if len(self._sent) == 1:
            self._limit.begin()

    def share(self, share: Share) -> None:
        """Move it to other processors from the next request on."""
        if self._share != share:
            self._share = share
            if self.state is State.READY and self._process is not None:
                self._process.send(share)

    async def stop(self, limit_s: float) -> list[Pending]:
        """Let it answer what it has, end it, and close the bundle.

        Returns
        -------
        list[Pending]
            The requests that were not answered within `limit_s`.
        """
        if self._restarting is not None:
            self._restarting.cancel()
        self._enter(Event.STOP)
        if self.state is State.STOPPING:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._drained.wait()
        if self.state is State.STOPPING:
            self._enter(Event.DRAINED)
        await self._end_process(_END_LIMIT_S)
        self.verified.close()
        return self._let_go()

    def take_back(self) -> list[Pending]:
        """Return the requests that were sent and will not be computed; none while a process has them."""
        return [] if self.state in COMPUTING else self._let_go()

    def _let_go(self) -> list[Pending]:
        left = list(self._sent)
        self._sent.clear()
        self._drained.set()
        return left

    async def _launch(self) -> Ready:
        """Start a process and wait until it is ready."""
        manifest = self.verified.manifest
        names = tuple(self.verified.files)
        share = self._share
        load = Load(
            files=names,
            threads=share.threads,
            cpus=share.cpus,
            memory_bytes=worker_limits.memory_bytes(self._settings, manifest, self._share),
            cpu_s=worker_limits.cpu_s(self._settings, share),
            require_sandbox=self._settings.require_sandbox,
            sessions=self._settings.sessions,
            session_idle_s=self._settings.session_idle_s,
            session_bytes=self._settings.session_bytes,
            compute_limit_s=self._settings.compute_limit_s,
            batch=self._settings.batch,
            batch_delay_s=self._settings.batch_delay_s,
        )
        loading: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._loading = loading
        # A process that was given up may take long to end: what it says then is not its successor's.
        self._process = process = self._spawn(
            manifest.name,
            on_frame=lambda frame: self._on_frame(frame) if process is self._process else None,
            on_end=lambda how: self._on_end(how) if process is self._process else None,
        )
        try:
            descriptors = [self.verified.files[name] for name in names]
            await process.start(load, manifest.to_bytes(), descriptors)
            async with asyncio.timeout(START_LIMIT_S):
                ready = await loading
        except EdgeError:
            process.kill()  # it should end by itself, but runs code that is not trusted
            raise
        except OSError as error:  # TimeoutError is one
            process.kill()
            what = f"not ready within {START_LIMIT_S:g} s" if isinstance(error, TimeoutError) else str(error)
            raise SelfTestError(f"{manifest.name}: its worker does not start: {what}") from error
        finally:
            self._loading = None
        if process.pid is None:
            raise SelfTestError(f"{manifest.name}: its worker died as soon as it was ready")
        if self._share != share:
            process.send(self._share)
        missing = sandbox_of(ready).missing
        if missing:
            text = ascii(ready.sandbox[:_SHOWN_CHARACTERS])
            _log.warning("%s: its worker's sandbox lacks %s: %s", manifest.name, ", ".join(missing), text)
        return ready

    def _on_frame(self, frame: Frame) -> None:
        """Take a frame from the process."""
        if self._fault:
            return
        loading = self._loading if self._loading is not None and not self._loading.done() else None
        match frame.header:
            case Answer() as answer:
                # The bytearray into which it was read serves as bytes, since nothing changes it any more. A
                # copy would double the memory for a large answer.
                payload = frame.payload
                self._answered(
                    answer, cast(bytes, bytes(payload) if isinstance(payload, memoryview) else payload)
                )
            case Ready() as ready if loading is not None:
                loading.set_result(replace(ready, sandbox=one_line(ready.sandbox)))
            case Failed() as failed if loading is not None:
                loading.set_exception(_error_of(failed))
            case _:
                self._end_faulty(f"sent the frame {type(frame.header).__name__.lower()} out of turn")

    def _answered(self, answer: Answer, payload: bytes) -> None:
        if not self._sent or self._sent[0].frame.seq != answer.seq:
            self._end_faulty("answered a request that it does not have")
            return
        fault = fault_of(answer, payload)
        if fault is not None:
            # Its request stays at the head: the death that follows is attributed to it.
            self._end_faulty(f"sent an invalid answer: {fault}")
            return
        pending = self._sent.popleft()
        self._limit.begin()
        if pending.suspect is not None:
            self.quarantine.acquit(pending.suspect)
            self._on_suspect(pending, Verdict.ACQUITTED)
        self.record.answered(answer, pending.client, self._share.threads)
        if answer.status == OK:
            self.sessions.note(answer)
        pending.answer(answer, payload, self.verified.manifest.version)
        if self.has_room:
            self._on_room()
        if not self._sent:
            self._drained.set()

    def _over_limit(self) -> None:
        name, limit_s = self.verified.manifest.name, self._settings.compute_limit_s
        _log.error("%s: its worker computed for more than %g s and is ended", name, limit_s)
        self._kill()

    def _end_faulty(self, fault: str) -> None:
        """End a process that sent something invalid."""
        self._fault = fault
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _on_end(self, how: str) -> None:
        """Take note that the process is gone, and how it ended."""
        self.sessions.process_ended()
        over_limit = self._limit.end()
        if self._fault:
            how, self._fault = self._fault, ""
        name = self.verified.manifest.name
        if self._loading is not None and not self._loading.done():
            self._loading.set_exception(SelfTestError(f"{name}: its worker {how} before it was ready"))
        if self.state not in COMPUTING:
            return
        computed = self._sent[0] if self._sent else None
        if batched := self._has_batch():
            # Any of them may have ended the process: each is computed by itself next time.
            for pending in self._sent:
                pending.frame = replace(pending.frame, by_itself=True)
        content = None if computed is None else computed.content()
        event = self.deaths.died(_now_s(), Cause.ITSELF if computed is None else Cause.REQUEST)
        following = next_state(self.state, event)
        if following is State.FAILED:
            count, window_s = self._settings.crash_limit, self._settings.crash_window_s
            self.message = f"{count} workers died within {window_s:g} s, the last one {how}"
        elif following is State.RESTARTING:
            self.message = f"worker {how}"
            what = "" if content is None else f" while it computed the request of content {content}"
            _log.error("%s: its worker %s%s, starting another", name, how, what)
        # Before the owner takes the requests back, which `_enter` may lead to.
        suspect = None if batched else computed
        refusal = None if suspect is None else self._judge(suspect, how, over_limit=over_limit)
        if computed is not None and refusal is not None:
            self.record.failed(computed.client)
            self._sent.popleft()
            self._on_suspect(computed, Verdict.CONVICTED)
        elif suspect is not None:
            self._on_suspect(suspect, Verdict.OPEN)
        self._enter(event)
        if computed is not None and refusal is not None:
            computed.refuse(refusal)
        self._on_room()
        self._drained.set()

    def _has_batch(self) -> bool:
        """Whether the process may compute several requests at once now."""
        return self._sent_ahead > _SENT_AHEAD and len(self._sent) > 1 and not self._sent[0].frame.by_itself

    def _judge(self, computed: Pending, how: str, *, over_limit: bool) -> RequestError | None:
        """Return why the request that a dead process computed is refused; None if it gets another try."""
        name = self.verified.manifest.name
        content = computed.content()
        quarantined = self.quarantine.died(content, _now_s())
        if over_limit:
            return DeadlineError(f"{name} computed for more than {self._settings.compute_limit_s:g} s")
        if quarantined:
            return ExecutionError(f"{name}: this request crashed the model: its worker {how}")
        computed.suspect = content
        return None

    async def _restart(self) -> None:
        name = self.verified.manifest.name
        for attempt in itertools.count(1):
            await asyncio.sleep(self.deaths.restart_delay_s(attempt - 1, _now_s()))
            try:
                self.ready = await self._launch()
            except EdgeError as error:
                self.message = str(error)
                _log.error("%s: no new worker: %s", name, error)
                if attempt < self._settings.crash_limit:
                    self._enter(Event.NOT_LOADED)
                    continue
                self._enter(Event.GAVE_UP)
            else:
                self.message = ""
                self._enter(Event.LOADED)
            self._on_room()
            return

    def _plan_retry(self) -> float:
        """Begin to wait for the next attempt to start a bundle that is out of service; return the seconds."""
        if self._ready_for_s > RETRY_LONGEST_S:
            self._retries, self._ready_for_s = 0, 0.0
        pause_s = retry_delay_s(self._retries, random.random())  # noqa: S311 - jitter, not a secret
        self._retries += 1
        self.next_try_s = time.time() + pause_s
        self._restarting = asyncio.get_running_loop().create_task(self._retry(pause_s))
        return pause_s

    async def _retry(self, pause_s: float) -> None:
        """Start another process after a pause, and put the bundle into service again if it loads."""
        await asyncio.sleep(pause_s)
        self.next_try_s = None
        self._enter(Event.RETRY)
        try:
            self.ready = await self._launch()
        except EdgeError as error:
            self.message = str(error)
            self._enter(Event.NOT_LOADED)
            return
        self.message = ""
        self._enter(Event.LOADED)
        self._on_room()

    async def _end_process(self, limit_s: float) -> None:
        if self._process is not None and self._process.pid is not None:
            await self._process.stop(limit_s)

    def _enter(self, event: Event) -> None:
        """Go to the state that follows an event, and begin what it requires."""
        before, self.state = self.state, next_state(self.state, event)
        if self.state is before:
            return
        name = self.verified.manifest.name
        if before is State.READY:
            self._ready_for_s = _now_s() - self._ready_since_s
        elif self.state is State.READY:
            self._ready_since_s = _now_s()
            if before in OUT_OF_SERVICE:
                _log.warning("%s is in service again", name)
        if self.state is State.FAILED:
            _log.critical(
                "%s is out of service: %s; next attempt in %.0f s", name, self.message, self._plan_retry()
            )
        self._on_state()
        if self.state is State.RESTARTING:
            self._restarting = asyncio.get_running_loop().create_task(self._restart())


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _error_of(failed: Failed) -> EdgeError:
    """Make the error that a worker reported; a code that a worker must not use becomes a failed self-test."""
    kinds: Sequence[type[EdgeError]] = (IncompatibleError, MixAndMatchError, NoSpaceError)
    kind = next((kind for kind in kinds if kind.code == failed.code), SelfTestError)
    hint = None if failed.hint is None else one_line(failed.hint)
    return kind(one_line(failed.message), hint=hint)
