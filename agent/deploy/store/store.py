"""The state directory: bundles by digest, which of them are active, and the committed security counters.

::

    <state_dir>/
      store/<hex digest>.bundle    complete and verified when it arrived; verified again before each use
      partial/<hex digest>.part    an unfinished download, which a later transfer resumes
      inbox/                       bundles dropped by `edge-agent install`, see `inbox`
      format                       the version of this layout, see `state_format`
      active.json                  which bundle each model runs, and which it ran before
      stopped.json                 bundles of models that were stopped, kept for a while
      counters.json                the committed security counter of each name; never lowered
      jobs.json, desired.json      see `jobs` and `deployment`

Promises: every change is complete and durable when the call returns, or has not happened. A counter is never
lowered, and survives the loss of every bundle. `collect` never deletes a bundle that is active, was active
just before, is being installed, or was stopped not long ago.
Leaves to others: verification (a file in the store proves nothing), and what to do with a damaged bundle.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Concatenate, Final, ParamSpec, TypeVar

from agent.bundle.names import hex_digest
from agent.deploy.store import state_format
from agent.deploy.store.active import ACTIVE_FILE, ActiveModel, parse_active
from agent.deploy.store.counters import Counters
from agent.deploy.store.lock import Lock
from agent.deploy.store.part import Part
from agent.deploy.store.state_file import Checkpoint, StateFile, no_checkpoint, set_aside
from agent.deploy.store.stopped import Stopped
from agent.durable import store_error, sync_folder
from agent.errors import NoSpaceError, StateDirectoryError, StoreError
from agent.wire.reported import Origin

# Kept free for the journal, logs and other programs: a device with a full disk is hard to repair.
SPACE_MARGIN_BYTES: Final = 16 * 1024 * 1024
# An unfinished download that was not resumed for this long is deleted.
PART_LIFETIME_S: Final = 7 * 24 * 3600

_log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _one_at_a_time(change: Callable[Concatenate[Store, _P], _T]) -> Callable[Concatenate[Store, _P], _T]:
    """Let only one thread change what is active."""

    @functools.wraps(change)
    def changing(store: Store, /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        with store._changing:
            return change(store, *arguments, **options)

    return changing


class Store:
    """The state directory of one agent.

    Parameters
    ----------
    root
        The state directory; created with its folders if its parent exists.
    checkpoint
        Called after each durable step, for fault injection.
    on_error
        Called when the directory refused to store something.
    opened
        Whether to open it at once. Otherwise nothing is read before `open`, which may hang on a dead disk.
    """

    def __init__(
        self,
        root: Path,
        *,
        checkpoint: Checkpoint = no_checkpoint,
        on_error: Callable[[], None] = lambda: None,
        opened: bool = True,
    ) -> None:
        self.root = root
        self._bundles = root / "store"
        self._parts = root / "partial"
        self.inbox = root / "inbox"
        self.checkpoint = checkpoint
        self.on_error = on_error
        self._lock = Lock(root)
        self._loaded = False
        self._active: dict[str, ActiveModel] = {}
        self._active_file = StateFile(root / ACTIVE_FILE, mirrored=True, checkpoint=checkpoint)
        # Whether `record` has something to store.
        self.pending = False
        # Bundles without a record of what runs: both copies of the record are damaged.
        self.lost_active = False
        self._stopped = Stopped(root / "stopped.json", checkpoint=checkpoint)
        # Changes are made in threads.
        self._changing = threading.RLock()
        self._counters = Counters(root / "counters.json", checkpoint=checkpoint)
        if opened:
            self.open()
            self.make_folders()

    def open(self) -> None:
        """Read which models are active, and the counters. Nothing needs to be written for that.

        Raises
        ------
        StoreError
            If a newer agent has written the directory, or it cannot be read.
        """
        state_format.check(self.root)
        try:
            if self.root.exists():
                next(self.root.iterdir(), None)  # a folder that cannot be read must not look empty
        except OSError as error:
            raise _unusable(self.root, error) from error
        documents = self._active_file.load_all()
        self._active = parse_active(documents[0] if documents else None)
        self.lost_active = not documents and self._has_bundles()
        self._stopped.load()
        self._counters.load()
        self._loaded = True

    def _has_bundles(self) -> bool:
        try:
            return any(self._bundles.glob("*.bundle"))
        except OSError as error:
            _log.error("%s cannot be read: %s", self._bundles, error.strerror)
            return True  # a bundle may be readable although its folder is not

    def make_folders(self) -> None:
        """Create the directory and its folders, where they are missing; raises StoreError if that fails."""
        try:
            for directory in (self.root, self._bundles, self._parts, self.inbox):
                if directory is not self.root and directory.exists() and not directory.is_dir():
                    set_aside(directory)
                directory.mkdir(mode=0o750, exist_ok=True)
        except OSError as error:
            raise _unusable(self.root, error) from error

    def lock(self) -> None:
        """Make this process the only agent that uses this directory, until it ends.

        A file system that cannot be written needs no lock: then it is only tried.

        Raises
        ------
        InUseError
            If another agent uses it.
        """
        if not self._lock.take():
            return
        try:
            state_format.mark(self.root)
        except StoreError as error:
            _log.error("%s", error)
        for directory in (self.root, self._parts):
            with contextlib.suppress(OSError):  # then they stay until the next start
                for path in directory.glob(".*.tmp"):  # of an interrupted write: no other process writes now
                    _remove(path)

    @_one_at_a_time
    def recover(self) -> None:
        """Make the directory complete again, when it can be written again after it could not.

        What is only in memory is written, and a folder that was replaced is locked.
        """
        state_format.check(self.root)
        self.make_folders()
        self.lock()
        if self._loaded:
            self._counters.load()
            self._counters.restore()
            if self._active and not self._active_file.exists:
                self._save_active(self._active)

    def in_use(self) -> bool:
        """Return whether an agent uses this directory, without creating anything in it."""
        return self._lock.taken_by_another()

    def unlock(self) -> None:
        """Unlock the directory for another agent."""
        self._lock.release()

    def bundle_path(self, digest: str) -> Path:
        """Return the path of the bundle with `digest`, whether or not it is there."""
        return self._bundles / f"{hex_digest(digest)}.bundle"

    def has(self, digest: str) -> bool:
        """Return whether the bundle with `digest` is in the store."""
        return os.path.isfile(self.bundle_path(digest))  # noqa: PTH113 - False if the disk fails, too

    def part_path(self, digest: str) -> Path:
        """Return the path of the download of the bundle with `digest`."""
        return self._parts / f"{hex_digest(digest)}.part"

    def part_bytes(self, digest: str) -> int:
        """Return how many bytes of the bundle with `digest` have been downloaded."""
        try:
            return self.part_path(digest).stat().st_size
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise store_error(f"looking at {digest}", error) from error

    def open_part(self, digest: str, size: int) -> Part:
        """Open the download of the bundle with `digest`, to begin or resume it."""
        return Part(self.part_path(digest), size)

    def discard_part(self, digest: str) -> None:
        """Delete the download of a bundle."""
        path = self.part_path(digest)
        try:
            path.with_name(path.name + ".origin").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        except OSError as error:
            raise store_error(f"removing {path.name}", error) from error

    def accept_part(self, digest: str) -> None:
        """Move a complete, verified download into the store."""
        source, target = self.part_path(digest), self.bundle_path(digest)
        try:
            source.replace(target)
            sync_folder(self._bundles)
            sync_folder(self._parts)
            source.with_name(source.name + ".origin").unlink(missing_ok=True)
        except OSError as error:
            raise store_error(f"moving {target.name} into the store", error) from error
        self.checkpoint("store:accepted")

    def set_aside(self, digest: str) -> None:
        """Rename a damaged bundle to make way for a new copy; `collect` deletes it later."""
        path = self.bundle_path(digest)
        try:
            path.replace(path.with_suffix(".corrupt"))
            sync_folder(self._bundles)
        except FileNotFoundError:
            return
        except OSError as error:
            raise store_error(f"moving {path.name} aside", error) from error

    def free_bytes(self) -> int:
        """Return the bytes that an unprivileged process may still write here."""
        try:
            status = os.statvfs(self.root)
        except OSError as error:
            raise store_error(f"looking at {self.root}", error) from error
        return status.f_bavail * status.f_frsize

    def require_space(self, missing_bytes: int, *, margin_bytes: int = SPACE_MARGIN_BYTES) -> None:
        """Check that `missing_bytes` fit here with `margin_bytes` to spare, or raise NoSpaceError."""
        free = self.free_bytes()
        if missing_bytes + margin_bytes > free:
            raise NoSpaceError(
                f"expected {missing_bytes + margin_bytes} free bytes ({margin_bytes} in reserve), got {free}",
                hint=f"free some space on the file system of {self.root}",
            )

    def has_space(self, missing_bytes: int) -> bool:
        """Return whether `missing_bytes` fit here with the usual margin."""
        try:
            self.require_space(missing_bytes)
        except NoSpaceError:
            return False
        return True

    def active(self) -> Mapping[str, ActiveModel]:
        """Return the active model of each name."""
        return MappingProxyType(self._active)

    @_one_at_a_time
    def switch(self, model: ActiveModel) -> None:
        """Make `model` the active one of its name; its bundle must be in the store."""
        if not self.has(model.digest):
            raise StoreError(f"{model.digest} is not in the store")
        if self.pending or self._active.get(model.name) != model:
            self._save_active({**self._active, model.name: model})
        self._stopped.forget(model.name)

    @_one_at_a_time
    def adopt(self, name: str, job: str, origin: Origin) -> None:
        """Record that `job` asked for the bundle that is already active as `name`."""
        model = self._active[name]
        if (model.origin, model.job) != (origin, job):
            wanted = replace(model, origin=origin, job=job, rolled_back=None)
            self._save_active({**self._active, name: wanted})

    @_one_at_a_time
    def record(self, model: ActiveModel, *, instead_of: ActiveModel | None = None) -> None:
        """Make `model` the active one of its name even if that cannot be stored now.

        For what has already happened: then the record is stored with the next change, or by `save_pending`.

        Parameters
        ----------
        model
            The new entry.
        instead_of
            Do nothing if the entry has been replaced meanwhile: a disk that hangs can delay this call until
            another bundle is active.
        """
        if instead_of is not None and self._active.get(model.name) != instead_of:
            return
        self._active = {**self._active, model.name: model}
        self.pending = True
        self.save_pending()

    @_one_at_a_time
    def save_pending(self) -> None:
        """Store what `record` could not store."""
        if not self.pending:
            return
        try:
            self._save_active(self._active)
        except StoreError as error:
            _log.warning("active.json is not up to date: %s", error)

    @_one_at_a_time
    def remove(self, name: str) -> None:
        """Record that no bundle is active as `name`; its counter stays, and its bundle for a while."""
        model = self._active.get(name)
        if model is not None:
            self._stopped.keep(name, model.digest)
        self._save_active({key: value for key, value in self._active.items() if key != name})

    def release_stopped(self) -> str | None:
        """Give up the bundle that was stopped first, and return its digest; None if there is none."""
        return self._stopped.release()

    def _save_active(self, active: dict[str, ActiveModel]) -> None:
        self._active_file.save({name: model.to_document() for name, model in active.items()})
        self._active, self.pending = active, False

    def committed_counter(self, name: str) -> int | None:
        """Return the committed security counter of `name`; None before the first installation."""
        return self._counters.get(name)

    def commit_counter(self, name: str, counter: int) -> None:
        """Raise the committed counter of `name` to `counter`; it is never lowered."""
        self._counters.commit(name, counter)

    def collect(self, in_use: Collection[str], *, now: float | None = None) -> int:
        """Delete unused bundles and old downloads; return the number of bytes freed.

        Parameters
        ----------
        in_use
            Digests of bundles and downloads that are needed. Active bundles, their predecessors and stopped
            bundles are kept anyway.
        now
            Seconds since the epoch, for the age of a download; None for the current time.
        """
        now = time.time() if now is None else now
        try:
            return self._collect(in_use, now)
        except OSError as error:
            raise store_error("removing unused bundles", error) from error

    def _collect(self, in_use: Collection[str], now: float) -> int:
        keep = {hex_digest(digest) for digest in (*in_use, *self._stopped.digests())}
        for model in self._active.values():
            keep.add(hex_digest(model.digest))
            if model.previous is not None:
                keep.add(hex_digest(model.previous))
        freed = 0
        for path in self._bundles.iterdir():
            if path.suffix != ".bundle" or path.stem not in keep:
                freed += _remove(path)
        for path in self._parts.iterdir():
            with contextlib.suppress(FileNotFoundError):
                old = now - path.stat().st_mtime > PART_LIFETIME_S
                whole = (self._bundles / f"{path.name.partition('.')[0]}.bundle").exists()
                if path.name.partition(".")[0] not in keep and (old or whole):
                    freed += _remove(path)
        self.checkpoint("store:collected")
        return freed

    def collect_parts(self, in_use: Collection[str]) -> int:
        """Delete all downloads but those `in_use`, to make space; return the number of bytes freed."""
        keep = {hex_digest(digest) for digest in in_use}
        try:
            parts = [path for path in self._parts.iterdir() if path.name.partition(".")[0] not in keep]
        except OSError as error:
            raise store_error("removing old downloads", error) from error
        return sum(_remove(path) for path in parts)


def _unusable(root: Path, error: OSError) -> StoreError:
    wrapped = store_error(f"creating {root}", error)
    if isinstance(wrapped, NoSpaceError):
        return wrapped
    return StateDirectoryError(
        f"cannot keep state in {root}: {error.strerror}",
        hint="pass --state-dir DIR with a folder that this user may create or write to",
    )


def _remove(path: Path) -> int:
    try:
        size = path.stat().st_size
        path.unlink()
    except OSError as error:
        _log.warning("cannot remove %s: %s", path, error)
        return 0
    return size
