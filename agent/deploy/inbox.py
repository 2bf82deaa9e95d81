"""Bundles that a user of this device dropped into a folder, and the result of installing them.

`edge-agent install FILE` writes `inbox/<hex digest>.bundle` durably. The agent checks the folder once a
second, runs a job as for any other bundle, and leaves `inbox/<hex digest>.result` with the job's final
state. A folder needs no second protocol and no signal, its permissions decide who may use it, and a bundle
that is dropped while no agent runs is found when one starts.

Promises: a file is read only under its final name, and verified before its name is trusted.
Leaves to others: the job.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agent.bundle.archive import MAX_BUNDLE_BYTES
from agent.bundle.keyring import Keyring
from agent.bundle.names import SHA256, format_digest, hex_digest
from agent.bundle.verify import verify_only
from agent.deploy.jobs import Job, Request
from agent.durable import write_durably
from agent.errors import BundleError, EdgeError, EndlessDataError, FormatError, StoreError
from agent.rate_limited_log import RateLimitedLog
from agent.wire.job import JobState, Result, Status
from agent.wire.reported import Origin

# A result that was not fetched, and a file that was not finished, are deleted after this long.
LIFETIME_S: Final = 24 * 3600
# But not before they have been there unchanged for this long: the clock of a device without a battery jumps.
SEEN_S: Final = 3600.0
_LOG_INTERVAL_S: Final = 60.0
_DROPPED: Final = re.compile(rf"({SHA256.pattern})\.bundle")

_log = logging.getLogger(__name__)


class Inbox:
    """The folder that `edge-agent install` drops bundles into."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        # Name of a result or an unfinished file -> when it was changed, and since when we have seen it so.
        self._seen: dict[str, tuple[float, float]] = {}
        self._rate_limited_log = RateLimitedLog(_log, _LOG_INTERVAL_S)
        # Bundles whose result could not be written: they stay in the inbox, and are not installed repeatedly.
        self._stuck: set[str] = set()

    def dropped(self) -> list[str]:
        """Return the digests of the dropped bundles, and delete old results; none if the folder is gone."""
        found = []
        try:
            paths = sorted(self._directory.iterdir())
        except OSError as error:
            self._rate_limited_log.error("the inbox cannot be read: %s", error)
            return []
        for path in paths:
            match = _DROPPED.fullmatch(path.name)
            if match is not None:
                digest = format_digest(match[1])
                if digest not in self._stuck:
                    found.append(digest)
            elif path.suffix in (".result", ".tmp"):
                try:
                    if self._is_forgotten(path):
                        path.unlink()
                except OSError as error:
                    _log.warning("inbox: %s: %s", path.name, error)
        self._seen = {path.name: self._seen[path.name] for path in paths if path.name in self._seen}
        return found

    def requests(self, read_keys: Callable[[], Keyring]) -> list[Request]:
        """Return the requests to install what was dropped, and refuse what cannot be used. This blocks."""
        found = []
        for digest in self.dropped():
            try:
                found.append(self.request(digest, read_keys()))
            except EdgeError as error:
                _log.warning("inbox: %s: %s", digest, error)
                self.refuse(digest, error)
        return found

    def _is_forgotten(self, path: Path) -> bool:
        changed_s, now_s = path.stat().st_mtime, self._clock()
        before = self._seen.get(path.name)
        if before is None or before[0] != changed_s:
            self._seen[path.name] = changed_s, now_s
            return False
        return time.time() - changed_s > LIFETIME_S and now_s - before[1] > SEEN_S

    def request(self, digest: str, keyring: Keyring) -> Request:
        """Verify a dropped bundle and return the request to install it. This blocks: call it in a thread."""
        path = self._path(digest, "bundle")
        try:
            size = path.lstat().st_size
            regular = path.is_file() and not path.is_symlink()
        except OSError as error:
            raise StoreError(f"reading {path.name}: {error.strerror}") from error
        if not regular:
            raise FormatError(f"{path.name}: expected a regular file, got a link or a special file")
        if size > MAX_BUNDLE_BYTES:
            raise EndlessDataError(f"expected a bundle of at most {MAX_BUNDLE_BYTES} bytes, got {size}")
        manifest, _ = verify_only(path, keyring)
        return Request(
            job=f"local-{hex_digest(digest)[:12]}-{time.time_ns():x}",
            model=manifest.name,
            digest=digest,
            size=size,
            version=manifest.version,
            sources=(),
            origin=Origin.LOCAL,
        )

    def refuse(self, digest: str, error: EdgeError) -> None:
        """Remove a dropped bundle, and leave the reason as its result."""
        request = Request(
            job=f"local-{hex_digest(digest)[:12]}",
            model="",
            digest=digest,
            size=0,
            version="",
            sources=(),
            origin=Origin.LOCAL,
        )
        rejected = isinstance(error, BundleError)
        self.answer(
            Job(request).now(
                status=Status.REJECTED if rejected else Status.FAILED,
                result=Result.REJECTED if rejected else Result.FAILED_NO_STATE_CHANGE,
                code=error.code,
                message=str(error),
            )
        )

    def answer(self, job: Job) -> None:
        """Leave the final state of a job for `edge-agent install`, and remove the bundle."""
        digest = job.request.digest
        try:
            write_durably(self._path(digest, "result"), job.state().to_bytes(), mode=0o644)
            self._path(digest, "bundle").unlink(missing_ok=True)
        except (StoreError, OSError) as error:
            self._stuck.add(digest)
            _log.warning("inbox: %s", error)

    def try_again(self) -> None:
        """Take bundles again whose result could not be written: the disk may be back."""
        self._stuck.clear()

    def take_result(self, digest: str) -> JobState | None:
        """Return and remove the final state of the job for `digest`; None if there is none yet."""
        path = self._path(digest, "result")
        try:
            state = JobState.from_bytes(path.read_bytes())
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            return None
        except (OSError, BundleError) as error:
            raise StoreError(f"reading {path.name}: {error}") from error
        return state

    def _path(self, digest: str, suffix: str) -> Path:
        return self._directory / f"{hex_digest(digest)}.{suffix}"
