"""Watches the bundles on trial, and brings back the predecessor of one that fails.

Promises: a rollback that does not work is tried again after growing pauses, and meanwhile the trial goes on.
Leaves to others: the rules of a trial (`trial`), the switch itself (`installer`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from agent.deploy.installer import Installer
from agent.deploy.parts import Parts
from agent.deploy.store.active import ActiveModel, RolledBack
from agent.deploy.store.state_file import SAVE_LIMIT_S
from agent.deploy.trial import STEADY_S, Score, Trial, fault, over, slowness, slowness_is_explained
from agent.disk_thread import in_disk_thread
from agent.errors import EdgeError, SelfTestError, StoreError
from agent.wire.job import MAX_MESSAGE_CHARACTERS, Result, Status

INTERVAL_S: Final = 1.0

_log = logging.getLogger(__name__)


class TrialWatch:
    """The trials that are going on."""

    def __init__(self, parts: Parts, installer: Installer) -> None:
        self._parts = parts
        self._installer = installer
        # Since when each bundle on trial has been in service, on the event loop's clock.
        self._since_s: dict[str, float] = {}
        # Digests of bundles whose slowness was logged.
        self._slow: set[str] = set()

    async def run(self) -> None:
        """Once a second, look whether a bundle on trial has failed or passed."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            for model in tuple(self._parts.store.active().values()):
                if model.trial is not None and not self._installer.switching(model.name).locked():
                    await self._judge(model, model.trial)

    def forget(self, name: str) -> None:
        """Count the time in service of a model from now on: it runs another bundle."""
        self._since_s.pop(name, None)

    async def count_start(self, model: ActiveModel) -> ActiveModel | None:
        """Count a start of the agent in a model's trial, before the model is loaded.

        Return the record to load; None if the agent has ended so often that the predecessor runs now.
        """
        if model.trial is None:
            return model
        trial = model.trial.started()
        before, model = model, replace(model, trial=trial)
        await self._record(model, before)  # before it is loaded, which may end this process
        why = fault(trial, out_of_service=None, score=Score())
        return None if why is not None and await self._roll_back(model, why) else model

    async def end_cleanly(self, limit_s: float) -> None:
        """Record that this stop of the agent is no failure of a bundle on trial."""
        for model in tuple(self._parts.store.active().values()):
            if model.trial is not None and model.trial.starts:
                await self._record(replace(model, trial=model.trial.steady()), model, limit_s)

    async def _judge(self, model: ActiveModel, trial: Trial) -> None:
        condition = self._parts.models.condition(model.name)
        if self._installer.running.get(model.name) != model.digest or condition is None:
            self.forget(model.name)
            return
        now_s = asyncio.get_running_loop().time()
        served_s = now_s - self._since_s.setdefault(model.name, now_s)
        score = self._parts.models.score(model.name)
        out_of_service = condition.message if condition.failed else None
        why = fault(replace(trial, starts=0), out_of_service=out_of_service, score=score, served_s=served_s)
        self._note_slowness(model, trial, score)
        if why is not None:
            await self._roll_back(model, why)
        elif over(served_s, score):
            _log.info("%s %s has passed its trial", model.name, model.version)
            await self._record(replace(model, trial=None), model)
        elif served_s >= STEADY_S and trial.starts:
            await self._record(replace(model, trial=trial.steady()), model)

    def _note_slowness(self, model: ActiveModel, trial: Trial, score: Score) -> None:
        """Say once that a version is slower, if that is no reason to bring its predecessor back."""
        before = trial.baseline
        if before is None or model.digest in self._slow or not slowness_is_explained(before, score):
            return
        if (slower := slowness(before, score)) is not None:
            self._slow.add(model.digest)
            why = "the device is hot" if score.hot else "other models run than before"
            _log.warning("%s %s is slow, but %s: %s", model.name, model.version, why, slower)

    async def _record(self, model: ActiveModel, before: ActiveModel, limit_s: float = SAVE_LIMIT_S) -> None:
        """Record what has become of a trial, if the disk allows it."""
        try:
            async with asyncio.timeout(limit_s):
                await in_disk_thread(self._parts.store.record, model, instead_of=before)
        except (TimeoutError, StoreError) as error:
            _log.error("%s: its trial is not stored: %s", model.name, error or "the disk does not respond")

    async def _roll_back(self, model: ActiveModel, why: str) -> bool:
        """Return from a bundle that failed on trial to the one before it; return whether that worked."""
        key = f"{model.name} rollback"
        if not self._parts.attempts.due(key, asyncio.get_running_loop().time()):
            return False
        desired = self._parts.desired.document
        wanted = None if desired is None else desired.get(model.name)
        job = wanted.job if wanted is not None and wanted.digest == model.digest else model.job
        reason = why[:MAX_MESSAGE_CHARACTERS]
        try:
            async with self._installer.switching(model.name):
                if self._parts.store.active().get(model.name) != model:
                    return False  # a deployment was faster
                back = RolledBack(model.digest, model.version, job, reason)
                await self._installer.roll_back(model, back)
        except EdgeError as error:
            pause_s = self._parts.attempts.failed(key, asyncio.get_running_loop().time())
            _log.error("%s: cannot roll back, next attempt in %.0f s: %s", model.name, pause_s, error)
            return False
        self._parts.attempts.forget(key)
        self.forget(model.name)
        _log.error("%s: rolled back from %s: %s", model.name, model.version, why)
        known = self._parts.journal.get(job)
        if known is not None:
            await self._parts.history.record(
                known.now(
                    status=Status.FAILED,
                    step=None,
                    result=Result.FAILED_ROLLBACK_COMPLETE,
                    code=SelfTestError.code,
                    message=f"rolled back: {reason}",
                )
            )
        self._parts.report()
        return True
