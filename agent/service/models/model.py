"""One model that runs here: a bounded queue, and the worker that empties it.

Promises: a full queue refuses at once a request of the client that has the most in it; a request whose
deadline passes is answered 408 immediately and is not computed any more; a new version takes over between two
requests, and the old one answers what it was given; every request that is accepted is finished exactly once.
Leaves to others: topics, acknowledgement and the text of answers (`inference`), processes (`supervisor`),
which models there are (`models`).

All times are readings of the event loop's clock, which on Linux is `time.monotonic`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from agent.bundle.columns import row_datatypes
from agent.bundle.manifest import Manifest
from agent.bundle.output_length import answered, shortest
from agent.bundle.quantisation import NO_QUANTISATION
from agent.bundle.state import requested
from agent.bundle.verify import VerifiedBundle
from agent.config.settings import QueueLimits, WorkerSettings
from agent.deploy.trial import Score
from agent.errors import DeadlineError, ExecutionError, OverloadedError, PayloadError, RequestError
from agent.service.models.life_cycle import OUT_OF_SERVICE, PHASES, State
from agent.service.models.supervisor import Supervisor
from agent.service.models.worker_process import Spawn
from agent.service.requests.fair_queue import FairQueue
from agent.service.requests.pending import Pending
from agent.service.requests.quarantine import MAX_DEATHS, Verdict
from agent.wire.info import Sandbox
from agent.wire.model_state import ModelPhase, ModelState, RowColumn
from agent.worker.channel import MAX_PAYLOAD_BYTES
from agent.worker.frames import Share

# A client that crashes the model with one request after another waits for others this long after each crash.
SET_BACK_S: Final = 60.0
_LATER: Final = "ask again later, or less often"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The state of a model, for its document and its metrics.

    `restarts` counts the deaths of its worker, `queued` the requests that wait or are computed, and
    `quarantined` those that were refused because equal ones had ended its worker. `sessions_evicted` counts
    those that ended early. `next_try_s` is in seconds since the epoch, and None unless the model is out of
    service.
    """

    name: str
    phase: ModelPhase
    message: str
    manifest: Manifest
    digest: str
    key_id: str
    restarts: int
    queued: int
    rss_bytes: int
    next_try_s: float | None = None
    quarantined: int = 0
    sessions: int = 0
    sessions_evicted: int = 0

    @property
    def ready(self) -> bool:
        """Whether it answers requests."""
        return self.phase is ModelPhase.READY

    def document(self) -> ModelState:
        """Return what is retained about the model."""
        manifest = self.manifest
        steps = () if manifest.postprocess is None else manifest.postprocess.steps
        lengths = manifest.lengths or ()
        kept = [state.output for state in manifest.states or ()]
        smallest = answered(requested(manifest.smallest_outputs, kept), lengths)
        return ModelState(
            name=self.name,
            version=manifest.version,
            inputs=requested(manifest.inputs, [state.input for state in manifest.states or ()]),
            outputs=answered(requested(manifest.outputs, kept), lengths),
            smallest_inputs=manifest.smallest_shapes(manifest.smallest_inputs),
            smallest_outputs=shortest(smallest, lengths) if lengths else manifest.smallest_shapes(smallest),
            ready=self.ready,
            state=self.phase,
            message=self.message,
            next_try_s=self.next_try_s,
            security_counter=manifest.security_counter,
            digest=self.digest,
            key_id=self.key_id,
            image_input=None if manifest.preprocess is None else manifest.preprocess.input,
            audio_input=None if manifest.audio is None else manifest.audio.input,
            audio_rate=None if manifest.audio is None else manifest.audio.rate,
            has_state=manifest.states is not None,
            quantisation=manifest.quantisation or NO_QUANTISATION,
            columns=tuple(
                RowColumn(name, datatype)
                for name, datatype in row_datatypes(
                    manifest.columns, manifest.inputs, manifest.quantised_inputs
                )
            ),
            postprocess=tuple(type(step).__name__.lower() for step in steps),
        )


class Model:
    """One model's queue and its worker.

    `on_state` is called when its worker's state changes. `is_held` returns whether its worker may get no
    request now; when that has changed, `pump` goes on. `used_s` is when its last request arrived; 0 before
    the first.
    """

    def __init__(
        self,
        name: str,
        limits: QueueLimits,
        on_state: Callable[[], None],
        spawn: Spawn,
        is_held: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.used_s = 0.0
        self._limits = limits
        self._on_state = on_state
        self._spawn = spawn
        self._is_held = is_held
        self._queue: FairQueue[Pending] = FairQueue(limits.requests, limits.payload_bytes)
        # While the model is stopped: set when no request waits any more.
        self._emptied: asyncio.Event | None = None
        self._supervisor: Supervisor | None = None
        # Why there is no worker; None before the first one, for which requests wait.
        self._absent: str | None = None
        self._quarantined = 0
        # Clients that are set back. Each cost a worker within the last minute, which bounds their number.
        self._restoring: dict[str, asyncio.TimerHandle] = {}
        self._convicted: set[str] = set()

    @property
    def version(self) -> str:
        """The version that runs; empty before the first one."""
        return "" if self._supervisor is None else self._supervisor.verified.manifest.version

    @property
    def ready(self) -> bool:
        """Whether its worker answers requests."""
        return self._supervisor is not None and self._supervisor.state is State.READY

    @property
    def full(self) -> bool:
        """Whether a new request would be refused, or cost another one its place."""
        return self._out_of_service() is not None or self._queue.full

    @property
    def busy(self) -> int:
        """How many requests its worker has."""
        return 0 if self._supervisor is None else self._supervisor.busy

    @property
    def nbytes(self) -> int:
        """The bytes of all requests that wait or are computed."""
        return self._queue.nbytes + (0 if self._supervisor is None else self._supervisor.nbytes)

    def nbytes_of(self, client: str) -> int:
        """Return the bytes of the requests of a client that wait or are computed."""
        sent = 0 if self._supervisor is None else self._supervisor.nbytes_of(client)
        return self._queue.nbytes_of(client) + sent

    @property
    def sandbox(self) -> Sandbox | None:
        """Its worker's sandbox; None before the first worker is ready."""
        return None if self._supervisor is None else self._supervisor.sandbox

    @property
    def worker_pid(self) -> int | None:
        """Its worker's process id, while there is a process."""
        return None if self._supervisor is None else self._supervisor.pid

    def submit(self, pending: Pending) -> None:
        """Accept a request; it may be finished before this returns.

        It is not accepted if the queue is full or the model out of service (OverloadedError), if the payload
        is longer than a worker accepts (PayloadError), or if equal requests ended the worker before
        (ExecutionError).
        """
        if len(pending.payload) > MAX_PAYLOAD_BYTES:
            # A worker would end itself: MQTT 3.1.1 has no limit for packets, and MQTT 5's is configured.
            raise PayloadError(
                f"{self.name}: expected a payload of at most {MAX_PAYLOAD_BYTES} bytes, "
                f"got {len(pending.payload)}"
            )
        supervisor = self._supervisor
        why = self._out_of_service()
        if why is not None:
            raise OverloadedError(
                f"{self.name} is out of service: {why}", hint="ask again later: the model is tried again"
            )
        if supervisor is not None and pending.nbytes in supervisor.quarantine.sizes:
            self._inspect(supervisor, pending)
        self.used_s = pending.frame.received_s
        worker = supervisor if supervisor is not None and supervisor.has_room else None
        if worker is None or self._queue.count or self._is_held():
            self._enqueue(pending)
            worker = None
        pending.deadline = asyncio.get_running_loop().call_at(pending.expires_s, self._expire, pending)
        if worker is not None:
            worker.send(pending)

    def _out_of_service(self) -> str | None:
        supervisor = self._supervisor
        if supervisor is None:
            return self._absent
        return supervisor.message if supervisor.state in OUT_OF_SERVICE else None

    @property
    def message(self) -> str:
        """Why it has no worker; empty while its first one is awaited, or there is one."""
        return self._absent or ""

    def give_up(self, why: str) -> None:
        """Refuse the requests that wait for the first worker, and those to come until there is one."""
        self._absent = why
        self._refuse_all(OverloadedError(f"{self.name} is out of service: {why}"))

    def _enqueue(self, pending: Pending) -> None:
        """Queue a request, in place of another one if need be, or raise `OverloadedError`."""
        waiting = f"{self.name} has {self._queue.count} requests waiting"
        for other in self._queue.offer(pending):
            # A variable with the error that is raised would be a cycle, which keeps the payload for a while.
            if other is pending:
                raise OverloadedError(waiting, hint=_LATER)
            other.refuse(OverloadedError(waiting, hint=_LATER))

    def _inspect(self, supervisor: Supervisor, pending: Pending) -> None:
        """Refuse a quarantined request, and mark a suspected one."""
        content = pending.content()
        deaths = supervisor.quarantine.deaths(content, pending.frame.received_s)
        if deaths >= MAX_DEATHS:
            self._quarantined += 1
            supervisor.record.failed(pending.client)
            raise ExecutionError(
                f"{self.name}: this request crashed the model and is not computed again",
                hint="send other inputs, or deploy another version",
            )
        if deaths:
            pending.suspect = content

    def pump(self) -> None:
        """Hand queued requests to the worker while it has room."""
        supervisor = self._supervisor
        if supervisor is None:
            return
        left = supervisor.take_back()
        if left:
            self._put_back(left)
        if supervisor.state is State.FAILED:
            self._refuse_all(OverloadedError(f"{self.name} is out of service: {supervisor.message}"))
        while self._queue.count and supervisor.has_room and not self._is_held():
            pending = self._queue.pop()
            if pending.finished:
                continue
            try:
                if pending.nbytes in supervisor.quarantine.sizes:
                    self._inspect(supervisor, pending)
            except ExecutionError as error:  # an equal one ended the worker while this one waited
                pending.refuse(error)
            else:
                supervisor.send(pending)
        self._note_if_empty()

    def status(self) -> ModelStatus | None:
        """Return its state; None before its first worker is ready."""
        supervisor = self._supervisor
        if supervisor is None:
            return None
        return ModelStatus(
            name=self.name,
            phase=PHASES[supervisor.state],
            message=supervisor.message,
            manifest=supervisor.verified.manifest,
            digest=supervisor.verified.digest,
            key_id=supervisor.verified.key_id,
            restarts=supervisor.crashes,
            queued=self._queue.count + supervisor.busy,
            rss_bytes=supervisor.rss_bytes(),
            next_try_s=supervisor.next_try_s,
            quarantined=self._quarantined,
            sessions=supervisor.sessions.count,
            sessions_evicted=supervisor.sessions.evicted,
        )

    def score(self, others: tuple[str, ...], *, hot: bool) -> Score:
        """Return how its bundle has done since it was put into service, beside these models."""
        return Score() if self._supervisor is None else self._supervisor.record.score(others, hot=hot)

    async def replace(
        self, verified: VerifiedBundle, settings: WorkerSettings, share: Share
    ) -> Supervisor | None:
        """Start a worker for a bundle, give it the queue, and return its predecessor.

        If it does not start, nothing has changed.
        """
        supervisor = Supervisor(
            verified,
            settings,
            share,
            spawn=self._spawn,
            on_room=self.pump,
            on_state=self._on_state,
            on_suspect=self._on_suspect,
        )
        await supervisor.start()
        before, self._supervisor = self._supervisor, supervisor
        self._absent = "stopped"
        if before is not None:
            self._put_back(before.take_back())
        self._on_state()
        self.pump()
        return before

    def share(self, share: Share) -> None:
        """Move its worker to other processors."""
        if self._supervisor is not None:
            self._supervisor.share(share)

    async def retire(self, supervisor: Supervisor, limit_s: float) -> None:
        """End a worker that has been replaced; its successor gets what it does not answer in time."""
        self._put_back(await supervisor.stop(limit_s))
        self.pump()

    async def stop(self, limit_s: float) -> None:
        """Answer accepted requests within `limit_s`, end the worker, and refuse the rest."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        error = OverloadedError(f"{self.name} is being stopped")
        supervisor = self._supervisor
        if supervisor is not None and self._queue.count:
            self._emptied = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end_s):
                    await self._emptied.wait()
        self._supervisor, self._absent = None, "stopped"
        if supervisor is not None:
            for pending in await supervisor.stop(max(0.0, end_s - loop.time())):
                pending.refuse(error)
        self._refuse_all(error)

    def _on_suspect(self, suspect: Pending, verdict: Verdict) -> None:
        """Let a client whose request ended a worker wait for all others, for a while.

        Each of its further requests may cost another worker, and time in which no client is served. If the
        request turns out to be harmless, the client has its turns again at once.
        """
        client = suspect.client
        if verdict is Verdict.ACQUITTED and client in self._convicted:
            return
        if client in self._restoring:
            self._restoring.pop(client).cancel()
        if verdict is Verdict.ACQUITTED:
            self._queue.restore(client)
            return
        if verdict is Verdict.CONVICTED:
            self._convicted.add(client)
        self._queue.set_back(client)
        self._restoring[client] = asyncio.get_running_loop().call_later(SET_BACK_S, self._restore, client)

    def _restore(self, client: str) -> None:
        del self._restoring[client]
        self._convicted.discard(client)
        self._queue.restore(client)

    def _refuse_all(self, error: RequestError) -> None:
        for pending in self._queue.clear():
            pending.refuse(error)
        self._note_if_empty()

    def _put_back(self, left: list[Pending]) -> None:
        """Take back what a worker does not compute, without what was finished in the meantime."""
        self._queue.put_back(pending for pending in left if not pending.finished)

    def _note_if_empty(self) -> None:
        if self._emptied is not None and not self._queue.count:
            self._emptied.set()

    def _expire(self, pending: Pending) -> None:
        waited_s = asyncio.get_running_loop().time() - pending.frame.received_s
        longest = ", the longest on this device," if pending.expires_s < pending.reply.deadline_s else ""
        passed = f"{self.name}: the deadline of {waited_s:.3g} s{longest} passed"
        if self._queue.remove(pending):
            self._note_if_empty()
            pending.refuse(DeadlineError(f"{passed} while it waited"))
        else:
            pending.expire(DeadlineError(f"{passed} while it was computed"))
