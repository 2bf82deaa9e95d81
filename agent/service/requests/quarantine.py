"""Requests that end a model's worker: which are suspected, and which are quarantined.

A worker computes one request at a time, so the request that it computed when it died is known. It may still
be innocent: the machine may have run out of memory, or an earlier request may have damaged the process. So it
is only a suspect, and is computed once more, before the other requests of its client. If that worker dies
too, the request is quarantined: it is answered 500 at once, instead of costing another worker.

Promises: no I/O and no clock; bounded in count and age. `sizes` says for which requests a digest is needed at
all.
Leaves to others: when a worker died (`supervisor`), and refusing requests (`model`). One object serves one
version of one model, so that a new version starts without a record.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import Enum
from typing import Final

from agent.worker.frames import Request

# How many workers a request ends before it is quarantined.
MAX_DEATHS: Final = 2
# Each takes about 200 bytes. To push one out, a client must end two workers for each of them.
MAX_ENTRIES: Final = 256
# After this long a request is tried again: what made it fail may have been the machine's fault.
MAX_AGE_S: Final = 3600.0
_LENGTH: Final = struct.Struct(">I")


class Verdict(Enum):
    """Whether a request that a dead worker was computing was the cause, if that is known yet."""

    OPEN = "open"
    CONVICTED = "convicted"
    ACQUITTED = "acquitted"


@dataclass(frozen=True, slots=True)
class Content:
    """What a model gets from a request: equal contents have equal results.

    `digest` is the SHA-256 over what describes the payload, each part after its length, and the payload's
    SHA-256.
    """

    nbytes: int
    digest: bytes

    @classmethod
    def of(cls, request: Request, nbytes: int, payload_digest: bytes) -> Content:
        """Return the content of a request's frame and payload, without what only names it."""
        described = (request.content_type, request.accept or "", *request.tensors)
        whole = hashlib.sha256()
        for text in described:
            raw = text.encode("utf-8", "surrogatepass")
            whole.update(_LENGTH.pack(len(raw)) + raw)
        whole.update(b"\1" if request.client_json else b"\0")
        whole.update(payload_digest)
        return cls(nbytes, whole.digest())

    def __str__(self) -> str:
        return f"sha256:{self.digest.hex()[:16]}"


@dataclass(slots=True)
class _Entry:
    deaths: int
    latest_s: float


class Quarantine:
    """The requests that ended workers of one version of a model.

    At most `max_entries` are remembered, each for `max_age_s` after its last death; the one whose last death
    is the longest ago is forgotten first. `sizes` are those of the payloads: a request of another size is not
    among them.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, max_age_s: float = MAX_AGE_S) -> None:
        self._max_entries = max_entries
        self._max_age_s = max_age_s
        # In the order of their last death.
        self._entries: dict[Content, _Entry] = {}
        self.sizes: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def died(self, content: Content, now_s: float) -> bool:
        """Note that a worker died while it computed this; return whether it is quarantined now."""
        self._forget_old(now_s)
        entry = self._entries.pop(content, None) or _Entry(0, now_s)
        entry.deaths += 1
        entry.latest_s = now_s
        self._entries[content] = entry
        while len(self._entries) > self._max_entries:
            del self._entries[next(iter(self._entries))]
        self.sizes = {each.nbytes for each in self._entries}
        return entry.deaths >= MAX_DEATHS

    def deaths(self, content: Content, now_s: float) -> int:
        """Return how many workers a request has ended."""
        self._forget_old(now_s)
        entry = self._entries.get(content)
        return 0 if entry is None else entry.deaths

    def acquit(self, content: Content) -> None:
        """Forget a suspect that was computed without harm."""
        if self._entries.pop(content, None) is not None:
            self.sizes = {each.nbytes for each in self._entries}

    def _forget_old(self, now_s: float) -> None:
        while self._entries:
            oldest = next(iter(self._entries))
            if now_s - self._entries[oldest].latest_s < self._max_age_s:
                return
            self.acquit(oldest)
