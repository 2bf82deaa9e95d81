"""The models that run here, by name, and the processors that each has.

Promises: no model waits for another one that starts or stops.
Leaves to others: a model's queue and worker (`model`), which versions there are and whether they may run
(`agent.deploy`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from agent.bundle.verify import VerifiedBundle
from agent.config.settings import QueueLimits, WorkerSettings
from agent.deploy.interfaces import Condition
from agent.deploy.trial import Score
from agent.service.metrics.host import is_hot
from agent.service.models.confinement import weakest
from agent.service.models.cores import Cores
from agent.service.models.model import Model, ModelStatus
from agent.service.models.template import Template
from agent.service.models.worker_process import Spawn, WorkerProcess
from agent.wire.info import Sandbox
from agent.wire.model_state import ModelPhase
from agent.worker.frames import Share

_log = logging.getLogger(__name__)

# How long a version that is replaced or taken out of service may go on computing accepted requests.
DRAIN_LIMIT_S: Final = 30.0


class Models:
    """All models, by name, with the limits of each worker and each queue.

    `on_change` is called with a model's name when its `status` has changed, or it is gone. They share
    `cores`; None leaves all of them to every worker. `spawn` makes workers; None forks them from a template.
    `is_hot` returns whether the device is slowed down, and `revokes` whether the key with this id is revoked.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        limits: QueueLimits,
        on_change: Callable[[str], None],
        cores: Cores | None = None,
        spawn: Spawn | None = None,
        is_hot: Callable[[], bool] = is_hot,
        revokes: Callable[[str], bool] = lambda _key_id: False,
    ) -> None:
        self._is_hot = is_hot
        self._revokes = revokes
        self._settings = settings
        self._cores = cores
        self._limits = limits
        self._on_change = on_change
        self._template = Template()
        self._spawn = spawn or functools.partial(WorkerProcess, launch=self._template.fork)
        self._models: dict[str, Model] = {}
        self._held = False
        # Models that have not run yet, whose requests wait for the first worker.
        self._awaited: dict[str, Model] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Model]:
        return iter(tuple(self._models.values()))

    def get(self, name: str) -> Model | None:
        """Return the model of that name, or None if it does not run here."""
        return self._models.get(name)

    @property
    def awaited(self) -> Mapping[str, Model]:
        """Models that were announced by `expect` and do not run yet, by name; they take requests."""
        return self._awaited

    def names(self) -> list[str]:
        """Return the names of all models that take requests, running or awaited, sorted."""
        return sorted({*self._models, *self._awaited})

    def used(self) -> list[str]:
        """Return the names of the models that had a request, the most recently used first."""
        used = [model for model in self._models.values() if model.used_s]
        return [model.name for model in sorted(used, key=lambda model: -model.used_s)]

    def expect(self, names: Iterable[str]) -> None:
        """Announce models that will be activated; until then their requests wait."""
        for name in names:
            if name not in self._models and name not in self._awaited:
                self._awaited[name] = self._new(name)

    def give_up(self, name: str, why: str) -> None:
        """Let no request wait for a model that cannot be activated now."""
        model = self._awaited.get(name)
        if model is not None:
            model.give_up(why)
            self._on_change(name)

    def sandbox(self) -> Sandbox | None:
        """Return the sandbox that all workers have; None while there are none."""
        return weakest(model.sandbox for model in self if model.sandbox is not None)

    def status(self, name: str) -> ModelStatus | None:
        """Return a model's state; None if it does not run here."""
        model = self._models.get(name)
        return None if model is None else model.status()

    def condition(self, name: str) -> Condition | None:
        """Return what a model's worker is doing; None if the model does not run here."""
        status = self.status(name)
        if status is None:
            return None
        return Condition(
            status.phase is ModelPhase.FAILED, status.message, status.next_try_s, self.revoked(status)
        )

    def revoked(self, status: ModelStatus) -> bool:
        """Return whether the key that signed what a model runs is revoked."""
        return self._revokes(status.key_id)

    def score(self, name: str) -> Score:
        """Return how a model's bundle has done since it was put into service."""
        model = self._models.get(name)
        if model is None:
            return Score()
        others = sorted(f"{each.name} {each.version}" for each in self if each is not model)
        return model.score(tuple(others), hot=self._is_hot())

    async def activate(self, verified: VerifiedBundle) -> None:
        """Start a worker with the bundle, let it pass its samples, and give it the model's requests.

        The worker before it serves them until then, and goes on if this raises. The bundle belongs to this
        object from the call on.
        """
        name = verified.manifest.name
        async with self._locks.setdefault(name, asyncio.Lock()):
            model = self._models.get(name) or self._awaited.get(name) or self._new(name)
            started_s = time.monotonic()
            before = await model.replace(verified, self._settings, self._first_share(name))
            self._models[name] = model
            self._awaited.pop(name, None)
            self._share_out()
            self._on_change(name)
            _log.info(
                "%s %s is in service after %.2f s",
                name,
                verified.manifest.version,
                time.monotonic() - started_s,
            )
            if before is not None:
                task = asyncio.get_running_loop().create_task(model.retire(before, DRAIN_LIMIT_S))
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)

    async def deactivate(self, name: str) -> None:
        """Answer accepted requests, and end the model's worker."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            awaited = self._awaited.pop(name, None)
            if awaited is not None:
                await awaited.stop(0.0)
            model = self._models.pop(name, None)
            if model is not None:
                self._on_change(name)
                await model.stop(DRAIN_LIMIT_S)
                self._share_out()
                if not self._models:
                    self._template.close()
                _log.info("%s is taken out of service", name)

    async def suspend(self, name: str, why: str) -> None:
        """End the model's worker at once, and refuse its requests with the reason until it is activated."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            model = self._models.pop(name, None)
            if model is None:
                return
            successor = self._awaited[name] = self._new(name)
            successor.give_up(why)
            self._on_change(name)
            await model.stop(0.0)
            self._share_out()
            _log.error("%s is stopped: %s", name, why)

    async def close(self, limit_s: float) -> None:
        """Answer accepted requests within `limit_s`, and end all workers."""
        models = [*self._models.values(), *self._awaited.values()]
        self._models, self._awaited = {}, {}
        await asyncio.gather(*(model.stop(limit_s) for model in models), *self._retiring)
        self._template.close()

    def hold(self, *, held: bool) -> None:
        """Give the workers no more requests, or go on with those that wait."""
        self._held = held
        if not held:
            for model in self:
                model.pump()

    def _new(self, name: str) -> Model:
        return Model(name, self._limits, lambda: self._on_change(name), self._spawn, lambda: self._held)

    def _first_share(self, name: str) -> Share:
        """Return the share that a worker starts with: the one that it will have once it is in service."""
        if self._cores is None:
            return Share((), self._settings.threads)
        return self._cores.share_out(list({**self._models, name: None}))[name]

    def _share_out(self) -> None:
        if self._cores is not None:
            for name, share in self._cores.share_out(list(self._models)).items():
                self._models[name].share(share)
