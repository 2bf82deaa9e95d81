"""The models that run here, by name: which there are, and what of the machine each has.

Promises: another model never waits for one that starts or stops. Leaves to others: a model's queue and
worker (`model`), which versions there are and whether they may run (deployment).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from agent.bundle.verify import VerifiedBundle
from agent.service.models.cores import Cores
from agent.service.models.model import Model, ModelStatus, QueueLimits
from agent.service.work import WorkerSettings

_log = logging.getLogger(__name__)

# How long the old version of a model, or an agent that is told to stop, may compute what was accepted.
DRAIN_LIMIT_S: Final = 30.0


class Models:
    """All models, by name.

    Parameters
    ----------
    settings
        Of workers.
    limits
        Of queues.
    on_change
        Called with a model's name when what `status` says about it has changed, or it is gone.
    cores
        What is shared out among them; None leaves every worker all processors.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        limits: QueueLimits,
        on_change: Callable[[str], None],
        cores: Cores | None = None,
    ) -> None:
        self._settings = settings
        self._cores = cores
        self._limits = limits
        self._on_change = on_change
        self._models: dict[str, Model] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Model]:
        return iter(tuple(self._models.values()))

    def get(self, name: str) -> Model | None:
        """Return a model that runs here."""
        return self._models.get(name)

    def status(self, name: str) -> ModelStatus | None:
        """Say how a model is; None for one that does not run here."""
        model = self._models.get(name)
        return None if model is None else model.status()

    async def activate(self, verified: VerifiedBundle) -> None:
        """Start a worker with the bundle, let it pass its samples, and give it the model's requests.

        What served them before serves them until then, and goes on if this raises. The bundle belongs to this
        object from the call on.

        Raises
        ------
        EdgeError
            If the new worker did not start, or its samples did not come out.
        """
        name = verified.manifest.name
        async with self._locks.setdefault(name, asyncio.Lock()):
            model = self._models.get(name)
            if model is None:
                model = Model(name, self._limits, lambda: self._on_change(name))
            started_s = time.monotonic()
            before = await model.replace(verified, self._settings_of(name))
            self._models[name] = model
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
        """Answer what was accepted, and end the model's worker."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            model = self._models.pop(name, None)
            if model is not None:
                self._on_change(name)
                await model.stop(DRAIN_LIMIT_S)
                self._share_out()
                _log.info("%s is taken out of service", name)

    async def close(self, limit_s: float) -> None:
        """Answer what was accepted, within a limit, and end all workers."""
        models, self._models = list(self._models.values()), {}
        await asyncio.gather(*(model.stop(limit_s) for model in models), *self._retiring)

    def _settings_of(self, name: str) -> WorkerSettings:
        """Return what a worker of that name is started with: the share it will have when it is in service."""
        if self._cores is None:
            return self._settings
        share = self._cores.share_out(list({**self._models, name: None}))[name]
        return replace(self._settings, cpus=share.cpus, threads=share.threads)

    def _share_out(self) -> None:
        if self._cores is not None:
            for name, share in self._cores.share_out(list(self._models)).items():
                self._models[name].share(share)
