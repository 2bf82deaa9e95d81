"""Keeps one worker alive for one bundle: starts it, starts it again, and gives up loudly.

Promises: a worker that dies costs the request it was computing and no other: those sent ahead go to its
successor; one that computes for longer than its limit is ended, and its request answered 408; after a few
deaths in a short while the bundle is out of service and says so. Leaves to others: queues, deadlines, and
who its successor is in a swap (`models`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from agent.bundle.manifest import Manifest
from agent.bundle.verify import VerifiedBundle
from agent.errors import (
    DeadlineError,
    EdgeError,
    ExecutionError,
    IncompatibleError,
    MixAndMatchError,
    NoSpaceError,
    RequestError,
    SelfTestError,
)
from agent.service.models.worker_process import WorkerProcess
from agent.service.work import Outcome, Sent, WorkerSettings
from agent.wire.model_state import ModelPhase
from agent.worker.channel import Answer, Buffer, Failed, Frame, Load, Ready, Request, Share

_log = logging.getLogger(__name__)

# One computes while the next waits in its socket: no turn of our loop stands between two kernels.
_SENT_AHEAD: Final = 2
# Before each new start; a worker is back within two seconds, and a loop of deaths is no loop of forks.
_RESTART_DELAYS_S: Final = (0.05, 0.25, 1.0)
# Weights are in the bundle's file, which is mapped, in the executor's memory, and packed: Winograd's
# transform makes four of one.
_WEIGHT_COPIES: Final = 6
# Import, load and self-test; a large model on a slow card takes its time.
START_LIMIT_S: Final = 120.0


class Supervisor:
    """One bundle and the process that serves it.

    Parameters
    ----------
    verified
        The bundle; this object owns it and closes it in the end.
    settings
        Limits.
    on_room
        Called whenever it can take a request again.
    on_state
        Called after each change of `state`.
    """

    def __init__(
        self,
        verified: VerifiedBundle,
        settings: WorkerSettings,
        *,
        on_room: Callable[[], None],
        on_state: Callable[[], None],
    ) -> None:
        self.verified = verified
        self.state = ModelPhase.STARTING
        self.message = ""
        self.ready: Ready | None = None
        self.crashes = 0
        self._settings = settings
        self._on_room = on_room
        self._on_state = on_state
        self._process: WorkerProcess | None = None
        self._started: asyncio.Future[Ready] | None = None
        self._sent: deque[Sent] = deque()
        self._seq = 0
        self._limit: asyncio.TimerHandle | None = None
        self._computing_s = 0.0
        self._over_limit = False
        self._stopping = False
        self._deaths: deque[float] = deque(maxlen=settings.crash_limit)
        self._restarting: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def has_room(self) -> bool:
        """Whether a request may be sent now."""
        return self.state is ModelPhase.READY and len(self._sent) < _SENT_AHEAD

    @property
    def busy(self) -> int:
        """How many requests it has."""
        return len(self._sent)

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return None if self._process is None else self._process.pid

    def rss_bytes(self) -> int:
        """Return its resident memory."""
        return 0 if self._process is None else self._process.rss_bytes()

    async def start(self) -> None:
        """Start the worker for the first time, and let it pass its samples.

        Raises
        ------
        EdgeError
            If it does not; the process is gone then, and the bundle closed.
        """
        try:
            self.ready = await self._launch()
        except BaseException:
            self._set(ModelPhase.STOPPED)
            await self._end_process(0)
            self.verified.close()
            raise
        self._set(ModelPhase.READY)

    def send(self, sent: Sent) -> None:
        """Hand a request over; `has_room` must hold."""
        assert self._process is not None
        self._seq += 1
        sent.seq = self._seq
        self._sent.append(sent)
        self._idle.clear()
        if len(self._sent) == 1:
            self._watch()
        request = sent.request
        self._process.send(
            Request(
                seq=sent.seq,
                content_type=request.content_type,
                tensors=request.tensors,
                accept=request.accept,
                id=request.id,
                received_s=request.received_s,
                deadline_s=request.reply.deadline_s,
                client_json=request.client_json,
            ),
            sent.payload,
        )

    def share(self, share: Share) -> None:
        """Have it run on other processors from the next request on."""
        if (self._settings.cpus, self._settings.threads) != (share.cpus, share.threads):
            self._settings = replace(self._settings, cpus=share.cpus, threads=share.threads)
            if self.state is ModelPhase.READY and self._process is not None:
                self._process.send(share)

    async def stop(self, limit_s: float) -> list[Sent]:
        """Let it answer what it has, end it, and close the bundle.

        Returns
        -------
        list[Sent]
            What was not answered within `limit_s`.
        """
        self._stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
        if self.state is ModelPhase.READY:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._idle.wait()
        self._set(ModelPhase.STOPPED)
        await self._end_process(1.0)
        left = list(self._sent)
        self._sent.clear()
        self.verified.close()
        return left

    def take_back(self) -> list[Sent]:
        """Return the requests that were sent ahead and are not being computed, while there is no worker."""
        if self.state in (ModelPhase.READY, ModelPhase.STARTING):
            return []
        left = list(self._sent)
        self._sent.clear()
        return left

    async def _launch(self) -> Ready:
        manifest = self.verified.manifest
        names = tuple(self.verified.files)
        settings = self._settings
        load = Load(
            files=names,
            threads=settings.threads,
            cpus=settings.cpus,
            memory_bytes=_memory_bytes(settings, manifest),
            cpu_s=_cpu_s(settings),
            require_sandbox=settings.require_sandbox,
        )
        self._started = started = asyncio.get_running_loop().create_future()
        self._process = WorkerProcess(
            manifest.name, command=settings.command, on_frame=self._frame, on_end=self._ended
        )
        try:
            descriptors = [self.verified.files[name] for name in names]
            await self._process.start(load, manifest.to_bytes(), descriptors)
            async with asyncio.timeout(START_LIMIT_S):
                ready: Ready = await started
        except OSError as error:  # TimeoutError is one
            self._process.kill()
            what = f"not ready within {START_LIMIT_S:g} s" if isinstance(error, TimeoutError) else str(error)
            raise SelfTestError(f"{manifest.name}: its worker does not start: {what}") from error
        if self._process.pid is None:
            raise SelfTestError(f"{manifest.name}: its worker died as soon as it was ready")
        if (self._settings.cpus, self._settings.threads) != (load.cpus, load.threads):
            self._process.send(Share(self._settings.cpus, self._settings.threads))
        return ready

    def _frame(self, frame: Frame) -> None:
        match frame.header:
            case Answer() as answer:
                self._answered(answer, frame.payload)
            case Ready() as ready if self._started is not None and not self._started.done():
                self._started.set_result(ready)
            case Failed() as failed if self._started is not None and not self._started.done():
                self._started.set_exception(_error_of(failed))
            case _:
                kind = type(frame.header).__name__
                _log.error("%s: its worker sent %s out of turn", self.verified.manifest.name, kind)
                self._kill()

    def _answered(self, answer: Answer, payload: Buffer) -> None:
        if not self._sent or self._sent[0].seq != answer.seq:
            _log.error("%s: its worker answered what was not asked", self.verified.manifest.name)
            self._kill()
            return
        sent = self._sent.popleft()
        self._watch()
        sent.finish(Outcome(answer=answer, payload=payload, version=self.verified.manifest.version))
        if self.has_room:
            self._on_room()
        if not self._sent:
            self._idle.set()

    def _watch(self) -> None:
        """Take note that the request at the head is computed from now on."""
        self._computing_s = time.monotonic()
        if self._limit is None:
            self._wait(self._settings.compute_limit_s)

    def _wait(self, left_s: float) -> None:
        self._limit = asyncio.get_running_loop().call_later(left_s, self._look)

    def _look(self) -> None:
        """End the worker if it is over the limit; one timer serves all requests, each moves the start."""
        self._limit = None
        if not self._sent:
            return
        limit_s = self._settings.compute_limit_s
        left_s = self._computing_s + limit_s - time.monotonic()
        if left_s > 0:
            self._wait(left_s)
            return
        self._over_limit = True
        name = self.verified.manifest.name
        _log.error("%s: its worker computes for more than %g s and is ended", name, limit_s)
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _ended(self, how: str) -> None:
        """Take note that the process is gone."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        over_limit, self._over_limit = self._over_limit, False
        if self._started is not None and not self._started.done():
            name = self.verified.manifest.name
            self._started.set_exception(SelfTestError(f"{name}: its worker {how} before it was ready"))
            return
        if self.state is not ModelPhase.READY:
            return
        self.crashes += 1
        self._deaths.append(time.monotonic())
        name = self.verified.manifest.name
        if self._stopping:
            self._set(ModelPhase.STOPPED)
        elif self._out_of_patience():
            count, window_s = len(self._deaths), self._settings.crash_window_s
            self.message = f"{count} workers died within {window_s:g} s, the last one {how}"
            self._set(ModelPhase.FAILED)
            _log.critical("%s is out of service: %s", name, self.message)
        else:
            self.message = f"worker {how}"
            self._set(ModelPhase.RESTARTING)
            _log.error("%s: its worker %s, starting another", name, how)
            self._restarting = asyncio.get_running_loop().create_task(self._restart())
        if self._sent:
            guilty = self._sent.popleft()
            limit_s = self._settings.compute_limit_s
            error: RequestError = (
                DeadlineError(f"{name} computed for more than {limit_s:g} s")
                if over_limit
                else ExecutionError(f"{name}: its worker {how}")
            )
            guilty.finish(Outcome(error=error))
        self._on_room()
        if not self._sent:
            self._idle.set()

    def _out_of_patience(self) -> bool:
        full = len(self._deaths) == self._settings.crash_limit
        return full and self._deaths[-1] - self._deaths[0] <= self._settings.crash_window_s

    async def _restart(self) -> None:
        name = self.verified.manifest.name
        for attempt in range(self._settings.crash_limit):
            await asyncio.sleep(_RESTART_DELAYS_S[min(attempt, len(_RESTART_DELAYS_S) - 1)])
            try:
                self.ready = await self._launch()
            except EdgeError as error:
                self.message = str(error)
                _log.error("%s: no new worker: %s", name, error)
            else:
                self.message = ""
                self._set(ModelPhase.READY)
                self._on_room()
                return
        self._set(ModelPhase.FAILED)
        _log.critical("%s is out of service: %s", name, self.message)
        self._on_room()

    async def _end_process(self, limit_s: float) -> None:
        if self._process is not None and self._process.pid is not None:
            await self._process.stop(limit_s)

    def _set(self, state: ModelPhase) -> None:
        self.state = state
        self._on_state()


def _memory_bytes(settings: WorkerSettings, manifest: Manifest) -> int:
    """Return what a worker may take: weights mapped, read and packed, tensors, and the rest; 0: no limit."""
    if not settings.memory_bytes:
        return 0
    resources = manifest.resources
    return settings.memory_bytes + _WEIGHT_COPIES * resources.params_bytes + resources.arena_bytes


def _cpu_s(settings: WorkerSettings) -> int:
    """Return what a request may burn on all its threads: the kernel sees to it where this process cannot."""
    return math.ceil(settings.compute_limit_s * (settings.threads or os.cpu_count() or 1))


def _error_of(failed: Failed) -> EdgeError:
    """Make the error that a worker reported; a code it does not have the right to is a self-test's."""
    kinds: Sequence[type[EdgeError]] = (IncompatibleError, MixAndMatchError, NoSpaceError)
    kind = next((kind for kind in kinds if kind.code == failed.code), SelfTestError)
    return kind(failed.message[:500], hint=failed.hint)
