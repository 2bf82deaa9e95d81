"""All boards that a tracker knows under one key, and what becomes of one that fails.

A thread and a killable process for each; a board that hangs, goes away or answers nonsense is dropped for a
while that doubles, what it was measuring goes to another, and it is taken back when the tracker offers it
again after that.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from builder.boards.interface import COOL_S, INVALID_ATTEMPTS, BoardStatus, Measurement
from builder.boards.ledger import Ledger
from builder.boards.measuring_process import BuiltKernel, MeasuringProcess, RunnerOptions
from builder.boards.tracker_client import Tracker
from builder.errors import BoardError, CandidateError, FleetError
from builder.records.meta_json import BoardTime

MAX_BOARDS: Final = 64  # a thread and a process each
ATTEMPTS: Final = 2  # boards that may fail under one candidate before the fault is the candidate's
SESSION_S: Final = (
    120.0  # after it, a session is renewed: a server ends one that hangs no sooner than its limit
)
IDLE_S: Final = 2.0  # a session without work is closed, for others may want the board
POLL_S: Final = 1.0
QUARANTINE_S: Final = 5.0
MAX_QUARANTINE_S: Final = 300.0
FIRST_BOARD_S: Final = 30.0  # how long to wait for the first board of a key
NO_BOARD_S: Final = 600.0  # how long a run waits when all boards have gone

Notes = Callable[[str], None]


@dataclass
class _Job:
    index: int
    code: BuiltKernel
    results: queue.Queue[tuple[_Job, Measurement]]
    failures: int = 0
    spoilt: int = 0
    shunned: set[str] = field(default_factory=set)


class RpcBoards:
    """All boards that a tracker knows under one key.

    Parameters
    ----------
    tracker, key
        Where they register, and as what.
    options
        How candidates are timed.
    notes
        Told of boards that come and go.

    Raises
    ------
    FleetError
        If the tracker does not answer, or no board of the key registers.
    """

    elsewhere = True

    def __init__(
        self, tracker: Tracker, key: str, options: RunnerOptions, notes: Notes | None = None
    ) -> None:
        self._tracker, self._key, self._options = tracker, key, options
        self._notes = notes or (lambda _: None)
        self._ledger = Ledger()
        self._jobs: queue.Queue[_Job] = queue.Queue()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._doing: dict[str, str] = {}
        self._dropped: dict[str, tuple[int, float]] = {}  # name -> how often, until when
        self._alive = time.monotonic()
        self._wait_for_first()
        self._slots: list[threading.Thread] = []
        self._monitor = threading.Thread(target=self._watch, daemon=True)
        self._monitor.start()

    def measure(
        self, codes: Sequence[BuiltKernel], done: Callable[[int, Measurement], None] | None = None
    ) -> list[Measurement]:
        """Spread candidates over the boards that are alive; several threads may ask at once.

        Raises
        ------
        FleetError
            If all boards have been gone for ten minutes.
        """
        outcomes: dict[int, Measurement] = {}
        results: queue.Queue[tuple[_Job, Measurement]] = queue.Queue()
        self._alive = time.monotonic()
        for index, code in enumerate(codes):
            self._jobs.put(_Job(index, code, results))
        while len(outcomes) < len(codes):
            try:
                job, outcome = results.get(timeout=POLL_S)
            except queue.Empty:
                if time.monotonic() - self._alive > NO_BOARD_S:
                    raise FleetError(
                        f"no board of key {self._key!r} has answered for {NO_BOARD_S:.0f} s",
                        hint="what was measured is kept: the same command goes on where this one stopped",
                    ) from None
                continue
            outcomes[job.index] = outcome
            if done is not None:
                done(job.index, outcome)
        return [outcomes[i] for i in range(len(codes))]

    @contextlib.contextmanager
    def session(self) -> Iterator[tuple[str, MeasuringProcess]]:
        """One board for oneself, and its name."""
        process = MeasuringProcess()
        start = time.monotonic()
        name = ""
        try:
            while (name := self._open(process, NO_BOARD_S, SESSION_S * 4) or "") == "":
                if self._stop.is_set() or time.monotonic() - start > NO_BOARD_S:
                    raise FleetError(f"no board of key {self._key!r} became free")
            start = time.monotonic()
            yield name, process
        finally:
            if name:
                self._ledger.add(name, BoardTime(time.monotonic() - start))
                self._set(name, "idle")
            process.close()
            process.kill()

    def status(self) -> tuple[BoardStatus, ...]:
        """Every board that was met."""
        times = self._ledger.times()
        with self._lock:
            names = sorted({*times, *self._doing})
            return tuple(BoardStatus(n, self._doing.get(n, "idle"), times.get(n, BoardTime())) for n in names)

    def take_times(self) -> dict[str, BoardTime]:
        """What each board did since this was last asked."""
        return self._ledger.take()

    def close(self) -> None:
        """Let the boards go."""
        self._stop.set()
        for thread in [self._monitor, *self._slots]:
            thread.join(timeout=self._options.timeout_s + POLL_S)

    def _wait_for_first(self) -> None:
        deadline = time.monotonic() + FIRST_BOARD_S
        while not self._tracker.servers(self._key):
            if time.monotonic() > deadline:
                raise FleetError(
                    f"tracker {self._tracker}: no board of key {self._key!r} is registered",
                    hint=f"on the board: edgebundle rpc-server --tracker {self._tracker} --key {self._key}",
                )
            time.sleep(POLL_S)

    def _watch(self) -> None:
        """A slot for each board that is registered, as they come."""
        while not self._stop.is_set():
            with contextlib.suppress(FleetError):
                there = len(self._tracker.servers(self._key))
                while len(self._slots) < min(there, MAX_BOARDS):
                    slot = threading.Thread(target=self._serve, daemon=True)
                    self._slots.append(slot)
                    slot.start()
            self._stop.wait(POLL_S)

    def _serve(self) -> None:
        """One slot: a board while there is work, then another or the same."""
        process = MeasuringProcess()
        try:
            while not self._stop.is_set():
                if self._jobs.empty():
                    self._stop.wait(0.05)
                    continue
                name = self._open(process, POLL_S, SESSION_S)
                if name is not None:
                    self._work(process, name)
        finally:
            process.kill()

    def _open(self, process: MeasuringProcess, wait_s: float, session_s: float) -> str | None:
        """Open a session on the next board that is free and not dropped."""
        try:
            place = self._tracker.request(self._key, wait_s, session_s)
        except FleetError:
            self._stop.wait(POLL_S)
            return None
        if place is None:
            return None
        with self._lock:
            _, until = self._dropped.get(place.name, (0, 0.0))
        if time.monotonic() < until:
            # Not connected to, it registers again in some seconds; the tracker offers others meanwhile.
            self._stop.wait(0.1)
            return None
        try:
            process.open(place, self._options.timeout_s)
        except BoardError as error:
            self._drop(place.name, str(error))
            return None
        with self._lock:
            known = place.name in self._doing
            returned = self._doing.get(place.name) == "dropped"
            self._doing[place.name] = "measuring"
        if returned or not known:
            self._notes(f"board {place.name} {'is back' if returned else 'measures'}")
        return place.name

    def _work(self, process: MeasuringProcess, name: str) -> None:
        opened = idle_since = time.monotonic()
        while not self._stop.is_set() and time.monotonic() - opened < SESSION_S * 0.75:
            try:
                job = self._jobs.get(timeout=0.05)
            except queue.Empty:
                if time.monotonic() - idle_since > IDLE_S:
                    break
                continue
            if name in job.shunned and self._has_other(name):
                self._jobs.put(job)
                self._stop.wait(0.2)
                continue
            if not self._measure(process, name, job):
                return
            idle_since = time.monotonic()
        process.close()
        self._set(name, "idle")

    def _measure(self, process: MeasuringProcess, name: str, job: _Job) -> bool:
        """Measure one candidate; False where the board was dropped for it."""
        start = time.monotonic()
        try:
            timing = process.measure(job.code, self._options)
        except CandidateError as error:
            self._alive = time.monotonic()
            self._ledger.add(name, BoardTime(time.monotonic() - start, failed=1))
            job.results.put((job, Measurement(None, str(error), name)))
            return True
        except BoardError as error:
            self._ledger.add(name, BoardTime(time.monotonic() - start, dropped=1))
            self._drop(name, str(error))
            process.kill()
            job.failures += 1
            job.shunned.add(name)
            if job.failures >= ATTEMPTS:
                job.results.put(
                    (job, Measurement(None, f"{job.failures} boards failed under it: {error}", name))
                )
            else:
                self._jobs.put(job)
            return False
        self._alive = time.monotonic()
        spent = self._alive - start
        with self._lock:
            self._dropped.pop(name, None)
        if self._ledger.is_valid(name, timing.state):
            self._ledger.add(name, BoardTime(spent, measured=1))
            job.results.put((job, Measurement(timing.seconds, None, name)))
            return True
        self._ledger.add(name, BoardTime(spent, invalid=1))
        self._notes(f"board {name} throttles: the measurement does not count")
        job.spoilt += 1
        if job.spoilt >= INVALID_ATTEMPTS:
            job.results.put((job, Measurement(None, "the boards throttled", name, spoilt=True)))
        else:
            self._jobs.put(job)
        self._stop.wait(COOL_S)
        return True

    def _drop(self, name: str, reason: str) -> None:
        with self._lock:
            times, _ = self._dropped.get(name, (0, 0.0))
            pause = min(QUARANTINE_S * 2**times, MAX_QUARANTINE_S)
            self._dropped[name] = (times + 1, time.monotonic() + pause)
            self._doing[name] = "dropped"
        self._notes(f"board {name} is dropped for {pause:.0f} s: {reason}")

    def _has_other(self, name: str) -> bool:
        with self._lock:
            return any(doing == "measuring" and other != name for other, doing in self._doing.items())

    def _set(self, name: str, doing: str) -> None:
        with self._lock:
            self._doing[name] = doing
