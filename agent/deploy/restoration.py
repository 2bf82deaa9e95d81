"""Loads the active bundles after a start.

Promises: every bundle is verified again before it runs; if it cannot be used, its predecessor serves until it
can. The same holds for a bundle whose key is revoked while it runs. The most recently used models are loaded
first, and one that hangs does not hold up the others.
Leaves to others: trying again later (`plan`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from agent.deploy.installer import Installer
from agent.deploy.parts import Parts
from agent.deploy.reconcile import Problem
from agent.deploy.store.active import ActiveModel
from agent.deploy.store.last_use import LastUse
from agent.deploy.trial import AGENT_ENDED
from agent.deploy.trial_watch import TrialWatch
from agent.errors import EdgeError
from agent.wire.job import MAX_MESSAGE_CHARACTERS

# A small board loads the largest models in this time. What takes longer may hang on a dead disk: the next
# model is loaded beside it.
PATIENCE_S: Final = 60.0

_log = logging.getLogger(__name__)


class Restoration:
    """The models that were active before this start: `loading`, until all are `done`, as far as they can be.

    `on_loaded` is called after each model that was loaded, or could not be; `keys_read` is set by others.
    """

    def __init__(
        self,
        parts: Parts,
        installer: Installer,
        trials: TrialWatch,
        last_use: LastUse,
        on_loaded: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._installer = installer
        self._trials = trials
        self._last_use = last_use
        self._on_loaded = on_loaded
        self.done = False
        self.keys_read = asyncio.Event()
        self.loading: set[str] = set()

    def expect(self, names: Iterable[str]) -> None:
        """Let requests for these models wait until `run` has loaded them."""
        self.loading.update(names)
        self._parts.models.expect(self.loading)

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Load the models, one after the other unless one hangs; that one goes on in `group`."""
        active = self._parts.store.active()
        for model in [active[name] for name in self._last_use.order(active)]:
            restoring = group.create_task(self._restore(model))
            done, _ = await asyncio.wait({restoring}, timeout=PATIENCE_S)
            if not done:
                _log.error("%s is not loaded after %g s: loading the next model", model.name, PATIENCE_S)
            self._parts.report()
        self.done = True

    async def stop_revoked(self) -> None:
        """Whenever the keys were read, stop bundles whose key is revoked, and run what a start would."""
        while True:
            await self.keys_read.wait()
            self.keys_read.clear()
            revoked = []
            for model in tuple(self._parts.store.active().values()):
                async with self._installer.switching(model.name):
                    condition = self._parts.models.condition(model.name)
                    if condition is not None and condition.revoked:
                        await self._installer.suspend(model.name, "the key that signed its bundle is revoked")
                        revoked.append(model)
            for model in revoked:
                await self._load(model)
                self._parts.report()

    async def _restore(self, model: ActiveModel) -> None:
        counted = await self._trials.count_start(model)
        if counted is not None:
            await self._load(counted)
        self.loading.discard(model.name)
        self._on_loaded()

    async def _load(self, model: ActiveModel) -> None:
        """Run the active bundle, or else another one until the active one can run."""
        try:
            async with self._installer.switching(model.name):
                await self._installer.restore(model.name, model.digest, model.counter_floor)
        except EdgeError as error:
            _log.error("%s: %s cannot run: %s", model.name, model.digest, error)
            reason = str(error)[:MAX_MESSAGE_CHARACTERS]
            self._parts.attempts.explain(model.name, Problem(reason, None, error.code))
            other = _other(model)
            if other is not None:
                await self._load_meanwhile(model, other)
            if self._parts.models.condition(model.name) is None:
                self._parts.models.give_up(model.name, reason)

    async def _load_meanwhile(self, model: ActiveModel, digest: str) -> None:
        """Run another bundle than the active one; the record of what should run stays as it is."""
        floor = None if model.trial is None else model.trial.counter
        try:
            async with self._installer.switching(model.name):
                await self._installer.restore(model.name, digest, floor)
        except EdgeError as error:
            _log.error("%s: %s cannot run either: %s", model.name, digest, error)
        else:
            _log.warning("%s: %s serves meanwhile", model.name, digest)


def _other(active: ActiveModel) -> str | None:
    """Return the digest of what can serve while the active bundle cannot run; None if there is nothing.

    A bundle that was rolled back serves better than nothing, unless it ended the agent.
    """
    back = active.rolled_back
    if active.previous is not None or back is None or back.reason.startswith(AGENT_ENDED):
        return active.previous
    return back.digest
