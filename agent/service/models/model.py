"""One model that runs here: a bounded queue, and the worker that empties it.

Promises: a queue that is full refuses at once; a request whose deadline passes is answered 408 then and there
and not computed any more; a new version takes over between two requests, and what the old one was given it
answers; every request that is accepted is finished exactly once. Leaves to others: topics, acknowledgement
and wording of answers (`inference`), processes (`workers`), which models there are (`models`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from agent.bundle.manifest import Manifest
from agent.bundle.verify import VerifiedBundle
from agent.errors import DeadlineError, OverloadedError, RequestError
from agent.service.models.supervisor import Supervisor
from agent.service.requests.requests import InferRequest
from agent.service.work import Outcome, Sent, WorkerSettings
from agent.wire.model_state import ModelPhase
from agent.worker.channel import Share

_log = logging.getLogger(__name__)

# How long the old version of a model, or an agent that is told to stop, may compute what was accepted.
DRAIN_LIMIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait for one model.

    Attributes
    ----------
    requests
        How many; at a tenth of a second each, 64 are waited for longer than most deadlines last.
    payload_bytes
        Their payloads together.
    """

    requests: int = 64
    payload_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What is to be said about a model.

    Attributes
    ----------
    name, state, message
        Which, how it is, and why, when it is not well.
    manifest, digest, key_id
        What it runs.
    restarts
        How often its worker died.
    queued, rss_bytes
        Requests that wait or are computed, and its worker's resident memory.
    """

    name: str
    state: ModelPhase
    message: str
    manifest: Manifest
    digest: str
    key_id: str
    restarts: int
    queued: int
    rss_bytes: int

    @property
    def ready(self) -> bool:
        """Whether it answers."""
        return self.state is ModelPhase.READY


def _finished(_outcome: Outcome) -> None:
    """Take an answer that nobody waits for any more."""


class _Waiting(Sent):
    """A request in a queue or in a worker."""

    __slots__ = ("finished", "timer")

    def __init__(self, request: InferRequest, payload: bytes) -> None:
        super().__init__(request, payload, lambda _outcome: None)
        self.finished = False
        self.timer: asyncio.TimerHandle | None = None


class Model:
    """One model's queue and its worker.

    Parameters
    ----------
    name
        As in topics.
    limits
        Of the queue.
    on_state
        Called when its worker's state changes.
    """

    def __init__(self, name: str, limits: QueueLimits, on_state: Callable[[], None]) -> None:
        self.name = name
        self._limits = limits
        self._on_state = on_state
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._supervisor: Supervisor | None = None

    @property
    def version(self) -> str:
        """The version that runs."""
        return "" if self._supervisor is None else self._supervisor.verified.manifest.version

    @property
    def busy(self) -> int:
        """How many requests its worker has."""
        return 0 if self._supervisor is None else self._supervisor.busy

    @property
    def worker_pid(self) -> int | None:
        """Its worker's process id while it runs."""
        return None if self._supervisor is None else self._supervisor.pid

    def submit(self, request: InferRequest, payload: bytes, finish: Callable[[Outcome], None]) -> None:
        """Accept a request; `finish` is called exactly once, perhaps before this returns.

        Raises
        ------
        OverloadedError
            If the queue is full or the model out of service; `finish` is not called then.
        """
        supervisor = self._supervisor
        if supervisor is None or supervisor.state in (ModelPhase.FAILED, ModelPhase.STOPPED):
            why = "stopped" if supervisor is None else supervisor.message
            raise OverloadedError(
                f"{self.name} is out of service: {why}", hint="deploy it again, or ask later"
            )
        if not (supervisor.has_room and not self._queue) and (
            len(self._queue) >= self._limits.requests
            or self._queued_bytes + len(payload) > self._limits.payload_bytes
        ):
            raise OverloadedError(
                f"{self.name} has {len(self._queue)} requests waiting", hint="ask again later, or less often"
            )
        waiting = _Waiting(request, payload)
        waiting.finish = lambda outcome: self._finish(waiting, finish, outcome)
        left_s = request.reply.deadline_s - time.monotonic()
        waiting.timer = asyncio.get_running_loop().call_later(left_s, self._expire, waiting)
        self._queue.append(waiting)
        self._queued_bytes += len(payload)
        self.pump()

    def pump(self) -> None:
        """Hand what waits to the worker, as far as it has room."""
        supervisor = self._supervisor
        if supervisor is None:
            return
        for sent in reversed(supervisor.take_back()):
            assert isinstance(sent, _Waiting)
            self._put_back(sent)
        if supervisor.state is ModelPhase.FAILED:
            self._refuse_all(OverloadedError(f"{self.name} is out of service: {supervisor.message}"))
        while self._queue and supervisor.has_room:
            waiting = self._queue.popleft()
            self._queued_bytes -= len(waiting.payload)
            supervisor.send(waiting)

    def status(self) -> ModelStatus | None:
        """Say how it is."""
        supervisor = self._supervisor
        if supervisor is None:
            return None
        return ModelStatus(
            name=self.name,
            state=supervisor.state,
            message=supervisor.message,
            manifest=supervisor.verified.manifest,
            digest=supervisor.verified.digest,
            key_id=supervisor.verified.key_id,
            restarts=supervisor.crashes,
            queued=len(self._queue) + supervisor.busy,
            rss_bytes=supervisor.rss_bytes(),
        )

    async def replace(self, verified: VerifiedBundle, settings: WorkerSettings) -> Supervisor | None:
        """Start a worker for a bundle and give it the queue; return the one before it.

        Raises
        ------
        EdgeError
            If it does not start; nothing has changed then.
        """
        supervisor = Supervisor(verified, settings, on_room=self.pump, on_state=self._on_state)
        await supervisor.start()
        before, self._supervisor = self._supervisor, supervisor
        if before is not None:
            for sent in reversed(before.take_back()):
                assert isinstance(sent, _Waiting)
                self._put_back(sent)
        self._on_state()
        self.pump()
        return before

    def share(self, share: Share) -> None:
        """Have its worker run on other processors."""
        if self._supervisor is not None:
            self._supervisor.share(share)

    async def retire(self, supervisor: Supervisor, limit_s: float) -> None:
        """End a worker that has been replaced; what it does not answer in time its successor gets."""
        for sent in reversed(await supervisor.stop(limit_s)):
            assert isinstance(sent, _Waiting)
            self._put_back(sent)
        self.pump()

    async def stop(self, limit_s: float) -> None:
        """Answer what was accepted, within a limit, and end the worker; the rest is refused."""
        end_s = time.monotonic() + limit_s
        supervisor = self._supervisor
        while self._queue and supervisor is not None and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        self._supervisor = None
        if supervisor is not None:
            for sent in await supervisor.stop(max(0.0, end_s - time.monotonic())):
                sent.finish(Outcome(error=OverloadedError(f"{self.name} is being stopped")))
        self._refuse_all(OverloadedError(f"{self.name} is being stopped"))

    def _put_back(self, waiting: _Waiting) -> None:
        if not waiting.finished:
            self._queue.appendleft(waiting)
            self._queued_bytes += len(waiting.payload)

    def _refuse_all(self, error: RequestError) -> None:
        left = list(self._queue)
        self._queue.clear()
        self._queued_bytes = 0
        for waiting in left:
            waiting.finish(Outcome(error=error))

    def _expire(self, waiting: _Waiting) -> None:
        where = "while it waited"
        if waiting in self._queue:
            self._queue.remove(waiting)
            self._queued_bytes -= len(waiting.payload)
        else:
            where = "while it was computed"
        waited_s = time.monotonic() - waiting.request.received_s
        waiting.finish(
            Outcome(error=DeadlineError(f"{self.name}: the deadline of {waited_s:.3g} s passed {where}"))
        )

    @staticmethod
    def _finish(waiting: _Waiting, finish: Callable[[Outcome], None], outcome: Outcome) -> None:
        if waiting.finished:  # an answer that comes after the deadline is none any more
            return
        waiting.finished = True
        if waiting.timer is not None:
            waiting.timer.cancel()
        # What is waited for and what waits know each other: let go of both, and of the payload, now, and not
        # whenever garbage is collected next.
        waiting.timer = None
        waiting.finish = _finished
        waiting.payload = b""
        finish(outcome)
