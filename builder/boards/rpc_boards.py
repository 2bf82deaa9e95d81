"""All boards that a tracker knows under one key.

Each board has a thread and a process that can be killed. A board that hangs, goes away or sends an invalid
answer is dropped for a time that doubles with each failure, and its candidate goes to another board. It is
used again once that time is over and the tracker offers it.
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

MAX_BOARDS: Final = 64  # each takes a thread and a process
ATTEMPTS: Final = 2  # boards that may fail on one candidate before the candidate is at fault
SESSION_S: Final = 120.0  # a server ends a session that hangs only at this limit, so sessions are renewed
IDLE_S: Final = 2.0  # a session without work is closed, so that others can use the board
POLL_S: Final = 1.0
QUARANTINE_S: Final = 5.0  # how long a board is dropped at its first failure
MAX_QUARANTINE_S: Final = 300.0
FIRST_BOARD_S: Final = 30.0  # how long to wait for the first board of a key
NO_BOARD_S: Final = 600.0  # how long to wait when no board answers any more


@dataclass
class _Job:
    index: int
    kernel: BuiltKernel
    results: queue.Queue[tuple[_Job, Measurement]]
    failures: int = 0
    spoilt: int = 0
    failed_on: set[str] = field(default_factory=set)


class RpcBoards:
    """All boards that a tracker knows under one key.

    Parameters
    ----------
    tracker, key
        The tracker that the boards register with, and the key they register under.
    options
        How candidates are timed.
    progress
        Called with a line when a board starts, is dropped, returns or throttles.

    Raises
    ------
    FleetError
        If the tracker does not answer, or no board of the key registers.
    """

    elsewhere = True

    def __init__(
        self,
        tracker: Tracker,
        key: str,
        options: RunnerOptions,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._tracker, self._key, self._options = tracker, key, options
        self._progress = progress or (lambda _: None)
        self._ledger = Ledger()
        self._jobs: queue.Queue[_Job] = queue.Queue()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._doing: dict[str, str] = {}
        self._dropped: dict[str, tuple[int, float]] = {}  # name -> number of failures, time of its return
        self._alive = time.monotonic()
        self._wait_for_first()
        self._slots: list[threading.Thread] = []
        self._monitor = threading.Thread(target=self._watch, daemon=True)
        self._monitor.start()

    def measure(
        self, kernels: Sequence[BuiltKernel], done: Callable[[int, Measurement], None] | None = None
    ) -> list[Measurement]:
        """Spread candidates over all boards; several threads may call this at once.

        Parameters
        ----------
        kernels
            The candidates.
        done
            Called with index and result as each candidate ends.

        Raises
        ------
        FleetError
            If no board has answered for ten minutes.
        """
        outcomes: dict[int, Measurement] = {}
        results: queue.Queue[tuple[_Job, Measurement]] = queue.Queue()
        self._alive = time.monotonic()
        for index, kernel in enumerate(kernels):
            self._jobs.put(_Job(index, kernel, results))
        while len(outcomes) < len(kernels):
            try:
                job, outcome = results.get(timeout=POLL_S)
            except queue.Empty:
                if time.monotonic() - self._alive > NO_BOARD_S:
                    raise FleetError(
                        f"no board of key {self._key!r} has answered for {NO_BOARD_S:.0f} s",
                        hint="all measurements are kept: run the same command again to continue",
                    ) from None
                continue
            outcomes[job.index] = outcome
            if done is not None:
                done(job.index, outcome)
        return [outcomes[i] for i in range(len(kernels))]

    @contextlib.contextmanager
    def session(self) -> Iterator[tuple[str, MeasuringProcess]]:
        """Reserve one board; yield its name, and a process with an open session."""
        process = MeasuringProcess()
        start = time.monotonic()
        name = ""
        try:
            while (name := self._open(process, NO_BOARD_S, SESSION_S * 4) or "") == "":
                if self._stop.is_set() or time.monotonic() - start > NO_BOARD_S:
                    raise FleetError(
                        f"no board of key {self._key!r} became free",
                        hint="wait until another run has ended, or start another `edgebundle rpc-server`",
                    )
            start = time.monotonic()
            yield name, process
        finally:
            if name:
                self._ledger.add(name, BoardTime(time.monotonic() - start))
                self._set(name, "idle")
            process.close()
            process.kill()

    def status(self) -> tuple[BoardStatus, ...]:
        """Return the state of every board seen so far."""
        times = self._ledger.times()
        with self._lock:
            names = sorted({*times, *self._doing})
            return tuple(BoardStatus(n, self._doing.get(n, "idle"), times.get(n, BoardTime())) for n in names)

    def take_times(self) -> dict[str, BoardTime]:
        """Return the work of each board since the last call, by the board's name."""
        return self._ledger.take()

    def close(self) -> None:
        """End all sessions and processes."""
        self._stop.set()
        for thread in [self._monitor, *self._slots]:
            thread.join(timeout=self._options.timeout_s + POLL_S)

    def _wait_for_first(self) -> None:
        deadline = time.monotonic() + FIRST_BOARD_S
        while not self._tracker.servers(self._key):
            if time.monotonic() > deadline:
                raise FleetError(
                    f"tracker {self._tracker}: no board of key {self._key!r} is registered",
                    hint="on the board: "
                    f"edgebundle rpc-server --tracker {self._tracker} --rpc-key {self._key}",
                )
            time.sleep(POLL_S)

    def _watch(self) -> None:
        """Start one slot for each registered board."""
        while not self._stop.is_set():
            with contextlib.suppress(FleetError):
                registered = len(self._tracker.servers(self._key))
                while len(self._slots) < min(registered, MAX_BOARDS):
                    slot = threading.Thread(target=self._serve, daemon=True)
                    self._slots.append(slot)
                    slot.start()
            self._stop.wait(POLL_S)

    def _serve(self) -> None:
        """Run one slot: while there is work, use one free board after another."""
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
        """Open a session with the next free board that is not dropped; return its name."""
        try:
            address = self._tracker.request(self._key, wait_s, session_s)
        except FleetError:
            self._stop.wait(POLL_S)
            return None
        if address is None:
            return None
        with self._lock:
            _, until = self._dropped.get(address.name, (0, 0.0))
        if time.monotonic() < until:
            # A board without a connection registers again in seconds; meanwhile, the tracker offers others.
            self._stop.wait(0.1)
            return None
        try:
            process.open(address, self._options.timeout_s)
        except BoardError as error:
            self._drop(address.name, str(error))
            return None
        with self._lock:
            known = address.name in self._doing
            returned = self._doing.get(address.name) == "dropped"
            self._doing[address.name] = "measuring"
        if returned or not known:
            self._progress(f"board {address.name} {'is back' if returned else 'is measuring'}")
        return address.name

    def _work(self, process: MeasuringProcess, name: str) -> None:
        opened = idle_since = time.monotonic()
        while not self._stop.is_set() and time.monotonic() - opened < SESSION_S * 0.75:
            try:
                job = self._jobs.get(timeout=0.05)
            except queue.Empty:
                if time.monotonic() - idle_since > IDLE_S:
                    break
                continue
            if name in job.failed_on and self._has_other(name):
                self._jobs.put(job)
                self._stop.wait(0.2)
                continue
            if not self._measure(process, name, job):
                return
            idle_since = time.monotonic()
        process.close()
        self._set(name, "idle")

    def _measure(self, process: MeasuringProcess, name: str, job: _Job) -> bool:
        """Measure one candidate; False if the board failed and was dropped."""
        start = time.monotonic()
        try:
            timing = process.measure(job.kernel, self._options)
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
            job.failed_on.add(name)
            if job.failures >= ATTEMPTS:
                text = f"{job.failures} boards failed on it: {error}"
                job.results.put((job, Measurement(None, text, name)))
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
        self._progress(f"board {name} throttles: its last measurement is discarded")
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
        self._progress(f"board {name} is dropped for {pause:.0f} s: {reason}")

    def _has_other(self, name: str) -> bool:
        with self._lock:
            return any(doing == "measuring" and other != name for other, doing in self._doing.items())

    def _set(self, name: str, doing: str) -> None:
        with self._lock:
            self._doing[name] = doing
