"""The sessions of one model's clients: who has one, which step comes next, and which one must go.

A client names its sessions, and owns them: two clients may use the same name. Each answered request is a
step, counted from 0. A request with a step number is computed only if it is the next step, so that a repeated
delivery never counts twice; step 0 begins again.

Promises: the number of sessions is bounded; unused sessions end after a time; when there are too many, the
client with the most sessions loses its least recently used one. A request for a session that has ended is
refused, with the reason if it is still known. No I/O and no numpy.
Leaves to others: what a session keeps (`agent.runtime.streaming`).
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from agent.errors import SessionGoneError, SessionStepError

# Ended sessions whose reason is remembered. A client that does not count its steps learns only from it that
# its session has begun again, so it is larger than the number of sessions that a device usually has, and a
# client that ends many sessions makes those of no other be forgotten.
MAX_GONE: Final = 1024
_SHOWN: Final = 80
# Entries of the order for each client, most of them no longer true: beyond that, it is sorted again.
_STALE: Final = 8

Kept = TypeVar("Kept")
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Visit(Generic[Kept]):
    """One request of a session.

    Attributes
    ----------
    key
        The client and the session's name.
    step
        The number of this request in its session.
    kept
        What the session keeps.
    """

    key: Key
    step: int
    kept: Kept


@dataclass(slots=True)
class _Session(Generic[Kept]):
    kept: Kept
    next_step: int
    used_s: float


class _Reasons:
    """Why sessions have ended: `MAX_GONE` at most, of which the client with the most loses its oldest."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[str, str]] = {}
        self._count = 0

    def get(self, key: Key) -> str:
        """Return the reason, or an empty text if it is not known."""
        of_client = self._of.get(key[0])
        return "" if of_client is None else of_client.get(key[1], "")

    def pop(self, key: Key) -> str:
        """Return the reason, and forget it."""
        why = self.get(key)
        if why:
            self._remove(key[0], key[1])
        return why

    def put(self, key: Key, why: str) -> None:
        """Remember a reason."""
        self.pop(key)
        self._of.setdefault(key[0], OrderedDict())[key[1]] = why
        self._count += 1
        if self._count > MAX_GONE:
            most = max(self._of, key=lambda client: len(self._of[client]))
            self._remove(most, next(iter(self._of[most])))

    def _remove(self, client: str, name: str) -> None:
        del self._of[client][name]
        self._count -= 1
        if not self._of[client]:
            del self._of[client]


class Sessions(Generic[Kept]):
    """The sessions of one model.

    Parameters
    ----------
    most
        How many there may be.
    idle_s
        Seconds after which an unused session ends.
    begin
        Returns the initial content of a new session.
    clock
        Returns seconds; `time.monotonic` except in tests.

    Attributes
    ----------
    evicted
        How many sessions ended because there were too many, or because they were unused.
    """

    def __init__(
        self,
        most: int,
        idle_s: float,
        begin: Callable[[], Kept],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.evicted = 0
        self._most = most
        self._idle_s = idle_s
        self._begin = begin
        self._clock = clock
        # Least recently used first.
        self._sessions: OrderedDict[Key, _Session[Kept]] = OrderedDict()
        # The sessions of each client, least recently used first, each with the number of that use.
        self._owned: dict[str, OrderedDict[Key, int]] = {}
        self._uses = 0
        # Who must give way first: the client with the most sessions, of several the one that used its oldest
        # session least recently. An entry that is no longer true stays until it comes to the top.
        self._order: list[tuple[int, int, str]] = []
        self._gone = _Reasons()

    def __len__(self) -> int:
        return len(self._sessions)

    def enter(self, client: str, name: str, step: int | None) -> Visit[Kept]:
        """Begin a request; nothing changes before `leave`.

        Parameters
        ----------
        client, name
            Whose session, and which.
        step
            The request's number in its session; 0 begins again. None continues the session, or begins one.

        Raises
        ------
        SessionGoneError
            If the session has ended.
        SessionStepError
            If this is not its next step.
        """
        self._end_idle()
        key = (client, name)
        session = self._sessions.get(key)
        if step == 0 or (step is None and session is None and not self._gone.get(key)):
            return Visit(key, 0, self._begin())
        if session is None:
            why = self._gone.pop(key) if step is None else self._gone.get(key)
            why = why or "the model was restarted or replaced, or the session began elsewhere"
            raise SessionGoneError(
                f"session {name[:_SHOWN]!r} has ended: {why}", hint="begin again, with session_step 0"
            )
        if step is not None:
            _check_step(name, session.next_step, step)
        return Visit(key, session.next_step, session.kept)

    def leave(self, visit: Visit[Kept], *, end: bool = False) -> None:
        """Record that a request was answered; with `end`, its session ends."""
        self._gone.pop(visit.key)
        if end:
            self._drop(visit.key)
            return
        session = self._sessions.get(visit.key)
        if session is None:
            while len(self._sessions) >= self._most:
                self._evict(self._surplus(visit.key[0]), "it made room for others")
            session = self._sessions[visit.key] = _Session(visit.kept, 0, 0.0)
        self._use(visit.key)
        session.kept = visit.kept
        session.next_step, session.used_s = visit.step + 1, self._clock()
        self._sessions.move_to_end(visit.key)

    def end(self, client: str, name: str, step: int | None) -> None:
        """End a session, if there is one.

        Raises
        ------
        SessionStepError
            If this is not its next step: the session may have begun again since the client wanted to end it.
        """
        key = (client, name)
        session = self._sessions.get(key)
        if session is not None and step is not None:
            _check_step(name, session.next_step, step)
        self._gone.pop(key)
        self._drop(key)

    def _surplus(self, client: str) -> Key:
        """Return the session that must go when this client begins one."""
        while self._order[0] != self._rank(self._order[0][2]):
            heapq.heappop(self._order)
        most, _, other = self._order[0]
        own = self._owned.get(client)
        if own is None:
            return next(iter(self._owned[other]))
        # Compared as if it had the new session, too.
        ranks = [(most, self._oldest(other), other), (-len(own) - 1, self._oldest(client), client)]
        return next(iter(self._owned[min(ranks)[2]]))

    def _oldest(self, client: str) -> int:
        return next(iter(self._owned[client].values()))

    def _rank(self, client: str) -> tuple[int, int, str] | None:
        """Return the client's true entry in the order; None if it has no session."""
        owned = self._owned.get(client)
        return (-len(owned), self._oldest(client), client) if owned else None

    def _use(self, key: Key) -> None:
        owned = self._owned.setdefault(key[0], OrderedDict())
        self._uses += 1
        owned[key] = self._uses
        owned.move_to_end(key)
        self._note(key[0])

    def _note(self, client: str) -> None:
        """Enter a client that has changed; entries that are no longer true are limited."""
        rank = self._rank(client)
        if rank is not None:
            heapq.heappush(self._order, rank)
        if len(self._order) > _STALE * (len(self._owned) + 1):
            self._order = [rank for each in self._owned if (rank := self._rank(each)) is not None]
            heapq.heapify(self._order)

    def _end_idle(self) -> None:
        before_s = self._clock() - self._idle_s
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            if session.used_s > before_s:
                return
            self._evict(key, f"it was unused for {self._idle_s:g} s")

    def _evict(self, key: Key, why: str) -> None:
        self._drop(key)
        self.evicted += 1
        self._gone.put(key, why)

    def _drop(self, key: Key) -> None:
        if self._sessions.pop(key, None) is not None:
            owned = self._owned[key[0]]
            del owned[key]
            if not owned:
                del self._owned[key[0]]
            self._note(key[0])


def _check_step(name: str, expected: int, step: int) -> None:
    if step != expected:
        raise SessionStepError(
            f"session {name[:_SHOWN]!r}: expected step {expected}, got {step}",
            hint="send each step once, after the answer to the one before, or begin again with 0",
        )
