"""Fetch a bundle from one of its sources.

Promises: the file that results has the requested digest. Free space is checked before the first byte. A
download that an earlier attempt began is resumed, and deleted only if its digest proves to be wrong.
Leaves to others: signatures. The downloaded bytes are only hashed here.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.bundle.names import format_digest, hex_digest
from agent.deploy.fetch.allow_list import AllowList, HttpsSettings
from agent.deploy.fetch.block_source import BlockSource
from agent.deploy.jobs import Request
from agent.deploy.store.part import Part
from agent.deploy.store.store import Store
from agent.disk_thread import in_disk_thread
from agent.durable import store_error
from agent.errors import BundleError, MixAndMatchError, NoSpaceError, SourceError
from agent.wire.desired import MQTT_SOURCE

if TYPE_CHECKING:
    from agent.deploy.fetch.https import HttpsSource

# How often a bundle is transferred from one source in one attempt before its bytes count as wrong.
_TRANSFERS: Final = 2

_log = logging.getLogger(__name__)


class Downloader:
    """Fetches bundles into a store, over MQTT or https.

    An allowed place that is not a URL raises ConfigError.
    """

    def __init__(self, store: Store, blocks: BlockSource, https: HttpsSettings) -> None:
        self._store = store
        self._blocks = blocks
        self._settings = https
        self._allowed = AllowList(https.allow)
        self._https: HttpsSource | None = None

    def check(self, request: Request) -> None:
        """Check that every source of `request` is allowed.

        Another host, another scheme (such as `file:`), or an ambiguous URL raises SourceError.
        """
        for source in request.sources:
            if source != MQTT_SOURCE:
                self._allowed.check(source)

    async def fetch(self, request: Request, in_use: Collection[str], progress: Callable[[int], None]) -> Path:
        """Fetch a bundle, and return the path of a file with the requested digest.

        Unfinished downloads are deleted to make space, but for those `in_use`; `progress` is called with the
        number of downloaded bytes. Raises NoSpaceError if the bundle does not fit, SourceError or
        TimeoutError if no source has it, and MixAndMatchError or EndlessDataError if the last source has
        another file.
        """
        self.check(request)
        if await in_disk_thread(self._is_stored, request.digest):
            return self._store.bundle_path(request.digest)
        if not request.sources:
            return await in_disk_thread(self._move_from_inbox, request)
        await in_disk_thread(self._make_space, request, in_use)
        part = await in_disk_thread(self._store.open_part, request.digest, request.size)
        try:
            await self._fill(request, part, progress)
        finally:
            part.close()
        return self._store.part_path(request.digest)

    def _is_stored(self, digest: str) -> bool:
        """Return whether the bundle is there as a whole; a damaged one is set aside. This blocks."""
        stored = self._store.bundle_path(digest)
        if not stored.exists():
            return False
        if _file_digest(stored) == digest:
            return True
        _log.error("%s is damaged; fetching it again", stored)
        self._store.set_aside(digest)
        return False

    def _make_space(self, request: Request, in_use: Collection[str]) -> None:
        """Delete what is not needed, if the bundle would not fit. This blocks: a card deletes slowly."""
        missing = max(request.size - self._store.part_bytes(request.digest), 0)
        try:
            self._store.require_space(missing)
        except NoSpaceError:
            self._store.collect(in_use)
            self._store.collect_parts(in_use)
            self._give_up_stopped(missing, in_use)
            self._store.require_space(missing)

    def _give_up_stopped(self, missing: int, in_use: Collection[str]) -> None:
        """Delete bundles of stopped models, the one that was stopped first at first, until there is space."""
        while not self._store.has_space(missing) and (digest := self._store.release_stopped()) is not None:
            _log.warning("%s of a stopped model is deleted to make space", digest)
            self._store.collect(in_use)

    async def _fill(self, request: Request, part: Part, progress: Callable[[int], None]) -> None:
        """Try one source after the other until the part has the requested digest."""
        for index, source in enumerate(request.sources):
            last = index == len(request.sources) - 1
            try:
                await self._fill_from(source, request, part, progress)
            except (SourceError, TimeoutError, BundleError) as error:
                if last:
                    raise
                _log.warning("job %s: %s; trying the next source", request.job, error)
            else:
                return

    async def _fill_from(
        self, source: str, request: Request, part: Part, progress: Callable[[int], None]
    ) -> None:
        # Start over: the resumed beginning may be from another source or damaged by a power cut, and a block
        # may have been damaged on its way.
        again = _TRANSFERS if part.written == 0 else _TRANSFERS + 1
        while True:
            if source == MQTT_SOURCE:
                await self._blocks.download(request.digest, part, progress)
            else:
                await self._https_source().download(source, part, progress)
            digest = await in_disk_thread(part.digest)
            if digest == request.digest:
                return
            await in_disk_thread(part.restart)
            again -= 1
            if not again:
                raise MixAndMatchError(f"expected a bundle with {request.digest}, got {digest}")
            _log.warning(
                "job %s: expected %s, got %s; fetching it again", request.job, request.digest, digest
            )

    def _https_source(self) -> HttpsSource:
        if self._https is None:
            # Imported late: an agent that gets its bundles over MQTT does without this memory.
            from agent.deploy.fetch.https import HttpsSource

            self._https = HttpsSource(self._settings)
        return self._https

    def _move_from_inbox(self, request: Request) -> Path:
        dropped = self._store.inbox / f"{hex_digest(request.digest)}.bundle"
        part = self._store.part_path(request.digest)
        try:
            if dropped.exists():
                dropped.replace(part)
            if not part.exists():
                raise SourceError(f"{dropped.name} is no longer in the inbox")
        except OSError as error:
            raise store_error(f"taking {dropped.name} from the inbox", error) from error
        digest = _file_digest(part)
        if digest != request.digest:
            raise MixAndMatchError(f"expected {request.digest} in the inbox, got {digest}")
        return part


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return format_digest(hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise store_error(f"reading {path.name}", error) from error
