"""What a page may start: deployments and rollbacks. Each is followed until its end, for all pages.

Promises: an action takes the same path as the command line's: `builder.fleet.deploy`. Uploaded bundles and
running actions are bounded, and uploads are deleted after use or an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from agent.errors import BundleError, EdgeError
from builder.errors import BuildError, FleetError, PackageError
from builder.fleet.bundle_file import BundleFile
from builder.fleet.deploy import DeployProgress, DeployResult, deploy_async
from builder.fleet.hints import deployment_hint
from builder.fleet.rollback import rollback_async
from dashboard.shown import shown
from edgebundle.broker import Broker

# Each action has a connection and sends a bundle: more at a time would only be slower.
MAX_RUNNING: Final = 8
MAX_UPLOADS: Final = 8
_UPLOAD_LIFE_S: Final = 3600.0
# Ended ones that a page which opens later can still read.
_MAX_KEPT: Final = 20
_NOT_A_BUNDLE: Final = "expected the .bundle that `edgebundle compile` wrote, whole and unchanged"


@dataclass(frozen=True, slots=True)
class Action:
    """One deployment or rollback.

    `id`, `kind`: a random name, and `deploy` or `roll back`.
    `step`: what the agent does, in words.
    `fraction`: the downloaded part, 0 to 1.
    `outcome`: empty while it runs; then `ok` or `failed`.
    `message`, `hint`: why it failed and what to do; a note for a success.
    """

    id: str
    kind: str
    agent: str
    model: str
    version: str
    step: str = "waiting for the agent"
    fraction: float = 0.0
    outcome: str = ""
    message: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Upload:
    """A bundle that a page has sent.

    `id`, `name`: a random name, and that of the file on the user's disk.
    `file`: what the bundle says about itself.
    `at_s`: when it came, by the monotonic clock.
    """

    id: str
    name: str
    path: Path
    file: BundleFile
    at_s: float = field(default_factory=time.monotonic)

    def to_json(self) -> dict[str, Any]:
        """Return what a page asks the user to confirm."""
        manifest = self.file.manifest
        return {
            "id": self.id,
            "file": shown(self.name, 120),
            "name": manifest.name,
            "version": manifest.version,
            "digest": self.file.digest,
            "size": self.file.size,
            "target": shown(f"{manifest.target.triple} {manifest.target.cpu}", 120),
        }


class Actions:
    """The uploads and actions of one dashboard.

    `folder`: for uploads; the caller deletes it.
    `on_change`: called with each action whenever it changes.
    """

    def __init__(self, broker: Broker, folder: Path, on_change: Callable[[Action], None]) -> None:
        self._broker = broker
        self._folder = folder
        self._on_change = on_change
        self._uploads: dict[str, Upload] = {}
        self._actions: dict[str, Action] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def known(self) -> list[Action]:
        """Return the running and the latest ended actions."""
        return list(self._actions.values())

    def new_file(self) -> Path:
        """Return where an upload may be written.

        Raises `PackageError` if there are too many already.
        """
        self.forget_old()
        if len(list(self._folder.iterdir())) >= MAX_UPLOADS:
            raise PackageError(
                f"expected at most {MAX_UPLOADS} bundles at a time",
                hint="wait until the others are deployed",
            )
        path = self._folder / f"{secrets.token_hex(8)}.bundle"
        path.touch(0o600)
        return path

    async def keep(self, path: Path, name: str) -> Upload:
        """Read an uploaded bundle, and keep it until it is deployed.

        Raises `PackageError` if it is not a signed bundle; the file is deleted then.
        """
        label = shown(name, 120) or "the file"
        try:
            try:
                file = await asyncio.to_thread(BundleFile.read, path)
            except BundleError as error:
                raise PackageError(f"{label}: {error} ({error.code})", hint=_NOT_A_BUNDLE) from error
            except PackageError as error:
                raise PackageError(
                    f"{label}: expected a bundle with a manifest", hint=_NOT_A_BUNDLE
                ) from error
            file.require_signature(label)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        upload = Upload(path.stem, name, path, file)
        self._uploads[upload.id] = upload
        return upload

    def discard(self, upload_id: str) -> None:
        """Delete an upload that the user did not confirm."""
        upload = self._uploads.pop(upload_id, None)
        if upload is not None:
            upload.path.unlink(missing_ok=True)

    def forget_old(self) -> None:
        """Delete uploads that were not confirmed within an hour."""
        now_s = time.monotonic()
        for upload in list(self._uploads.values()):
            if now_s - upload.at_s > _UPLOAD_LIFE_S:
                with contextlib.suppress(OSError):
                    self.discard(upload.id)

    def deploy(self, upload_id: str, agent: str) -> Action:
        """Begin to deploy an upload.

        Raises `FleetError` if there is no such upload, or too much runs.
        """
        self._require_room()
        upload = self._uploads.pop(upload_id, None)
        if upload is None:
            raise FleetError("the uploaded bundle is gone", hint="choose the file again")
        manifest = upload.file.manifest

        async def work(progress: Callable[[DeployProgress], None]) -> DeployResult:
            try:
                return await deploy_async(upload.path, agent, self._broker, progress=progress)
            finally:
                upload.path.unlink(missing_ok=True)

        return self._begin("deploy", agent, manifest.name, manifest.version, work)

    def roll_back(self, agent: str, model: str) -> Action:
        """Start a rollback of a model to its previous version.

        Raises `FleetError` if too much runs.
        """
        self._require_room()

        async def work(progress: Callable[[DeployProgress], None]) -> DeployResult:
            return await rollback_async(agent, model, self._broker, progress=progress)

        return self._begin("roll back", agent, model, "", work)

    async def close(self) -> None:
        """Cancel the running actions; an agent that already has its bundle continues."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(
        self,
        kind: str,
        agent: str,
        model: str,
        version: str,
        work: Callable[[Callable[[DeployProgress], None]], Awaitable[DeployResult]],
    ) -> Action:
        action = Action(secrets.token_hex(8), kind, shown(agent, 64), shown(model, 64), version)
        self._set(action)
        self._tasks[action.id] = asyncio.get_running_loop().create_task(self._run(action, work))
        return action

    async def _run(
        self, action: Action, work: Callable[[Callable[[DeployProgress], None]], Awaitable[DeployResult]]
    ) -> None:
        def progress(now: DeployProgress) -> None:
            step = (now.step or now.status or action.step).replace("_", " ").lower()
            self._set(replace(self._actions[action.id], step=step, fraction=now.fraction))

        try:
            result = await work(progress)
        except (BuildError, EdgeError, OSError) as error:
            hint = getattr(error, "hint", None) or ""
            self._end(action.id, "failed", " ".join(str(error).split()), hint)
        else:
            if result.ok:
                self._end(action.id, "ok", result.message, "")
            else:
                code = f" ({result.code})" if result.code else ""
                hint = deployment_hint(result.code) or "the version that ran before is still in service"
                self._end(action.id, "failed", f"{result.status.lower()}: {result.message}{code}", hint)
        finally:
            self._tasks.pop(action.id, None)

    def _end(self, action_id: str, outcome: str, message: str, hint: str) -> None:
        action = self._actions[action_id]
        step = "done" if outcome == "ok" else "failed"
        self._set(
            replace(
                action, step=step, fraction=1.0, outcome=outcome, message=shown(message), hint=shown(hint)
            )
        )

    def _set(self, action: Action) -> None:
        self._actions[action.id] = action
        ended = [each for each in self._actions.values() if each.outcome]
        for old in ended[: max(0, len(ended) - _MAX_KEPT)]:
            del self._actions[old.id]
        self._on_change(action)

    def _require_room(self) -> None:
        if len(self._tasks) >= MAX_RUNNING:
            raise FleetError(
                f"expected at most {MAX_RUNNING} deployments at a time", hint="wait until one has ended"
            )
