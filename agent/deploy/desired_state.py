"""The desired document in force, and how another one comes into force.

Promises: a document is durable before it is acknowledged, the newest wins, and one that cannot be read or
contradicts what is known changes nothing. A document that the disk refused, or that came too soon after many
others, is tried again (`retry`), because the broker does not deliver it a second time.
Leaves to others: what follows from a document (`plan`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from agent.deploy.jobs import Journal
from agent.deploy.reconcile import Attempts
from agent.deploy.store.state_file import SAVE_LIMIT_S, StateFile
from agent.deploy.store.store import Store
from agent.disk_thread import in_disk_thread
from agent.errors import BusyError, ConflictError, DiskError, EdgeError, SourceError, StoreError
from agent.rate_limited_log import RateLimitedLog
from agent.wire.desired import Desired, newest_after
from agent.wire.job import MAX_MESSAGE_CHARACTERS
from agent.wire.reported import Rejection

# Key among the attempts of a document that could not be stored; no model has a space in its name.
_DOCUMENT: Final = "desired document"
_LOG_INTERVAL_S: Final = 10.0
# New documents: so many at once, then one in so long. Each may begin 64 jobs, whose steps are written to an
# SD card, which wears out.
_MOST_AT_ONCE: Final = 100
_EVERY_S: Final = 120.0

_log = logging.getLogger(__name__)


class DesiredState:
    """What should run, as the fleet says.

    `document` is in force, and `rejection` says why the last one was not accepted; it is kept in `store`. A
    new one forgets the failed `attempts` for the models that it changes. `unopened` returns why the state
    directory could not be opened, or None once it was. `on_accepted` is called with each document that is in
    force, also with the same one again.
    """

    def __init__(
        self,
        store: Store,
        journal: Journal,
        attempts: Attempts,
        *,
        unopened: Callable[[], StoreError | None],
        on_accepted: Callable[[Desired], None],
        on_rejected: Callable[[], None],
    ) -> None:
        self._store = store
        self._file = StateFile(store.root / "desired.json", mirrored=True, checkpoint=store.checkpoint)
        self._journal = journal
        self._attempts = attempts
        self._unopened = unopened
        self._on_accepted = on_accepted
        self._on_rejected = on_rejected
        self.document: Desired | None = None
        self.rejection: Rejection | None = None
        # The last document, if the disk refused it.
        self._not_stored: bytes | None = None
        self._taking: set[asyncio.Task[None]] = set()
        self._taking_turns = asyncio.Lock()
        self._log = RateLimitedLog(_log, _LOG_INTERVAL_S)
        # How many more may be taken, and when that was so.
        self._room, self._room_s = float(_MOST_AT_ONCE), 0.0

    @property
    def taking(self) -> bool:
        """Whether a document is being taken."""
        return bool(self._taking)

    def read(self) -> object | None:
        """Return what was stored, for `adopt`, or None. This blocks."""
        return self._file.load()

    def adopt(self, stored: object | None) -> None:
        """Use what was stored by an earlier run."""
        if stored is None:
            return
        try:
            self.document = Desired.from_document(stored)
        except EdgeError as error:
            _log.error("desired.json is ignored: %s", error)

    def take(self, payload: bytes) -> asyncio.Task[None]:
        """Take a document from the broker; the task ends when its message may be acknowledged."""
        taking = asyncio.get_running_loop().create_task(self._take(payload))
        self._taking.add(taking)
        taking.add_done_callback(self._taking.discard)
        return taking

    def refuse(self, error: EdgeError) -> None:
        """Take note of a document that cannot be taken."""
        self._refuse(b"", None, error)

    def retry(self) -> None:
        """Take a document again that could not be stored, if an attempt is due."""
        now_s = asyncio.get_running_loop().time()
        if self._not_stored is not None and not self._taking and self._attempts.due(_DOCUMENT, now_s):
            self.take(self._not_stored)

    def retry_soon(self) -> None:
        """Let the next `retry` take the document: the disk may be usable again."""
        self._attempts.forget(_DOCUMENT)

    async def _take(self, payload: bytes) -> None:
        """Put a document into force once it is durable; one document at a time."""
        if not payload:
            return  # removed by a person, or by a broker that lost its data: nothing is stopped
        async with self._taking_turns:
            version = None
            try:
                desired = Desired.from_bytes(payload)
                version = desired.version
                unopened = self._unopened()
                if unopened is not None:
                    raise DiskError(str(unopened), hint=unopened.hint)
                self._check_order(desired)
                self._check_jobs(desired)
                if self._is_newer(desired):
                    self._count()
                    await self._save(desired)
            except EdgeError as error:
                self._refuse(payload, version, error)
                return
            self._not_stored = None
            self._attempts.forget(_DOCUMENT)
            if self._is_newer(desired):
                known = self.document
                for model in desired.models:
                    if known is None or known.get(model.model) != model:
                        self._attempts.forget(model.model)
            self._attempts.hurry(asyncio.get_running_loop().time())
            self.document, self.rejection = desired, None
            self._on_accepted(desired)

    def _refuse(self, payload: bytes, version: int | None, error: EdgeError) -> None:
        if self._log.due(error.code):
            _log.warning("desired: %s", error)
        if isinstance(error, StoreError):
            self._not_stored = payload
            self._attempts.failed(_DOCUMENT, asyncio.get_running_loop().time())
            if not isinstance(error, BusyError):
                self._store.on_error()
        elif payload == self._not_stored:
            self._not_stored = None
        self.rejection = Rejection(error.code, str(error)[:MAX_MESSAGE_CHARACTERS], version)
        self._on_rejected()

    def _count(self) -> None:
        """Take note of one more new document; too many raise BusyError."""
        now_s = asyncio.get_running_loop().time()
        self._room = min(_MOST_AT_ONCE, self._room + (now_s - self._room_s) / _EVERY_S)
        self._room_s = now_s
        if self._room < 1:
            raise BusyError(
                f"expected at most {_MOST_AT_ONCE} new documents, and one in {_EVERY_S:.0f} s, got more",
                hint="wait: the latest one is taken by itself",
            )
        self._room -= 1

    def _is_newer(self, desired: Desired) -> bool:
        return self.document is None or desired.version > self.document.version

    async def _save(self, desired: Desired) -> None:
        try:
            async with asyncio.timeout(SAVE_LIMIT_S):
                await in_disk_thread(self._file.save, desired.to_document())
        except TimeoutError as error:
            raise DiskError(f"{self._store.root} does not respond") from error

    def _check_order(self, desired: Desired) -> None:
        """Check that a document is newer than the one in force, not too far, and based on it, or the same."""
        known = self.document
        newest = newest_after(None if known is None else known.version)
        if desired.version > newest:
            raise ConflictError(f"expected a desired version of at most {newest}, got {desired.version}")
        if known is None or (desired.version, desired.models) == (known.version, known.models):
            return
        if desired.version <= known.version:
            raise ConflictError(f"expected a desired version above {known.version}, got {desired.version}")
        if desired.base is not None and desired.base != known.digest:
            raise ConflictError(
                f"expected desired version {desired.version} to be based on {known.version}, got another base"
            )

    def _check_jobs(self, desired: Desired) -> None:
        for request in desired.models:
            known = self._journal.get(request.job)
            if known is not None and (known.request.model, known.request.digest) != (
                request.model,
                request.digest,
            ):
                raise SourceError(
                    f"expected a new job identifier, got {request.job}, which belongs to another deployment"
                )
