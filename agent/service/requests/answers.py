"""Requests that were seen before get the answer they got, and do not run again; answers get to their broker.

A request is the same when topic, Response Topic, Correlation Data and the payload's SHA-256 are; another
client's with equal Correlation Data is another request. It is remembered until `GRACE_S` after its own
expiry: a delivery may have waited that long on its way, in a broker or on a busy machine. Refusals that cost
nothing (a full queue, an unknown model) are remembered apart, so that a storm of them pushes
out no answer that took work.

`AnswerStore` is the interface; `MemoryAnswers` forgets when the process ends, `durable_answers` does not.
What it may hold is bounded, and what it dropped early is counted.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Protocol

from agent.wire.answer import FinalAnswer

# At 16 requests a second these last the default minute; an entry without a payload takes about 1 KB.
MAX_ANSWERS: Final = 4096
MAX_ANSWER_BYTES: Final = 16 << 20
MAX_REFUSALS: Final = 4096
# How late a second delivery of a request may come and is still known.
GRACE_S: Final = 60.0
_LENGTH: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class RequestKey:
    """What makes two requests the same: a digest over its names, each behind its length, and its payload."""

    digest: bytes

    @classmethod
    def of(cls, topic: str, reply_to: str, correlation: bytes, payload: bytes) -> RequestKey:
        """Make the key of one request."""
        names = (topic.encode(), reply_to.encode(), correlation)
        whole = hashlib.sha256(b"".join(part for name in names for part in (_LENGTH.pack(len(name)), name)))
        whole.update(payload)
        return cls(whole.digest())


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """Where an answer goes, and what it takes along.

    Attributes
    ----------
    topic, correlation, qos
        Of the answer's message.
    deadline_s
        When it is of no use any more (`time.monotonic`, which is one clock for all processes since the boot).
    trace
        User properties of the request that the answer carries on.
    """

    topic: str
    correlation: bytes | None
    qos: int
    deadline_s: float
    trace: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """An answer, what it answers, and where it goes."""

    key: RequestKey
    reply: ReplyTo
    answer: FinalAnswer


class AnswerStore(Protocol):
    """Remembers answers until their requests are long expired, and which the broker does not have yet."""

    dropped: int

    def get(self, key: RequestKey) -> FinalAnswer | None:
        """Return the answer that this request got, if it is remembered."""

    def put(self, record: AnswerRecord, *, cheap: bool) -> None:
        """Remember an answer that is about to be published; a cheap one took no work."""

    def delivered(self, key: RequestKey) -> None:
        """Take note that the broker has the answer."""

    def undelivered(self) -> list[AnswerRecord]:
        """Return the answers that an earlier process has not delivered and that are still of use."""

    def close(self) -> None:
        """Let go of files and the like."""


class MemoryAnswers:
    """Remembers in memory, for the life of the process."""

    def __init__(self) -> None:
        self.dropped = 0
        self._answers = _Shelf(MAX_ANSWERS, MAX_ANSWER_BYTES)
        self._refusals = _Shelf(MAX_REFUSALS, MAX_ANSWER_BYTES)

    def get(self, key: RequestKey) -> FinalAnswer | None:
        """Return the answer that this request got, if it is remembered."""
        return self._answers.get(key) or self._refusals.get(key)

    def put(self, record: AnswerRecord, *, cheap: bool) -> None:
        """Remember an answer that is about to be published."""
        shelf = self._refusals if cheap else self._answers
        self.dropped += shelf.put(record.key, record.answer, record.reply.deadline_s)

    def delivered(self, key: RequestKey) -> None:
        """Nothing has to be remembered: without this process there is no undelivered answer."""

    def undelivered(self) -> list[AnswerRecord]:
        """Return nothing: an earlier process left nothing here."""
        return []

    def close(self) -> None:
        """Forget everything."""
        self._answers = _Shelf(MAX_ANSWERS, MAX_ANSWER_BYTES)
        self._refusals = _Shelf(MAX_REFUSALS, MAX_ANSWER_BYTES)


class _Shelf:
    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[RequestKey, tuple[FinalAnswer, float]] = OrderedDict()

    def get(self, key: RequestKey) -> FinalAnswer | None:
        entry = self._entries.get(key)
        if entry is None or entry[1] + GRACE_S < time.monotonic():
            return None
        return entry[0]

    def put(self, key: RequestKey, answer: FinalAnswer, deadline_s: float) -> int:
        """Remember, and return how many were dropped before their time."""
        now_s = time.monotonic()
        self._remove(key)
        if len(answer.payload) > self._max_bytes:
            return 1
        self._entries[key] = (answer, deadline_s)
        self._bytes += len(answer.payload)
        dropped = 0
        while self._entries:
            oldest, (_, until_s) = next(iter(self._entries.items()))
            full = len(self._entries) > self._max_entries or self._bytes > self._max_bytes
            if not full and until_s + GRACE_S >= now_s:
                break
            self._remove(oldest)
            dropped += until_s >= now_s
        return dropped

    def _remove(self, key: RequestKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= len(entry[0].payload)
