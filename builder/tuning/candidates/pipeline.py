"""A pipeline: batches of candidates under way, from schedule to time, handed back one outcome at a time.

Where measuring happens elsewhere, the next batch is built while this one is measured; on this machine
building would disturb the measurement, so that there is one batch at a time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from builder.boards.interface import Boards, Measurement
from builder.boards.measuring_process import BuiltKernel
from builder.kernels.design_space import Point
from builder.tuning.candidates.candidate_builder import Building, CandidateBuilder
from builder.tuning.interruption import Interruption
from builder.tuning.tasks.task_run import TaskRun

AHEAD: Final = 3  # batches under way where boards are elsewhere: measured, waiting for a board, being built
POLL_S: Final = 0.2

Job = tuple[TaskRun, Point]


class _StoppedError(Exception):
    """Nobody wants the rest of a batch."""


@dataclass
class Batch:
    """Candidates that were thought of together, and what became of them so far."""

    jobs: Sequence[Job]
    outcomes: dict[int, Measurement] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether every outcome is there."""
        return len(self.outcomes) == len(self.jobs)


class Pipeline:
    """Builds and measures batches."""

    def __init__(self, builder: CandidateBuilder, boards: Boards, interruption: Interruption) -> None:
        self._builder, self._boards, self._interruption = builder, boards, interruption
        self._capacity = AHEAD if boards.elsewhere else 1
        self._results: queue.Queue[tuple[Batch, int, Measurement] | BaseException] = queue.Queue()
        self._open: list[Batch] = []
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()

    @property
    def is_full(self) -> bool:
        """Whether another batch would only wait."""
        return len(self._open) >= self._capacity

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        return not self._open

    def put(self, jobs: Sequence[Job]) -> None:
        """Start a batch."""
        batch = Batch(jobs)
        self._open.append(batch)
        building = self._builder.start([(run.task, point) for run, point in jobs])
        thread = threading.Thread(target=self._work, args=(batch, building), daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def take(self) -> tuple[Batch, int, Measurement]:
        """The next outcome, its batch and its place there.

        Raises
        ------
        KeyboardInterrupt
            If somebody pressed Ctrl-C; `drain` has what came in.
        FleetError
            If the boards are gone.
        """
        while True:
            self._interruption.check()
            try:
                result = self._results.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            batch, index, outcome = result
            batch.outcomes[index] = outcome
            if batch.is_done:
                self._open.remove(batch)
            return batch, index, outcome

    def drain(self, timeout_s: float) -> Iterator[tuple[Batch, int, Measurement]]:
        """Stop after the candidates that are being measured, and give what came in until then."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_s)
        while not self._results.empty():
            result = self._results.get()
            if not isinstance(result, BaseException):
                yield result

    def _work(self, batch: Batch, building: Building) -> None:
        places: list[int] = []
        codes: list[BuiltKernel] = []
        try:
            for place, code in enumerate(building.results()):
                if self._stop.is_set():
                    return
                if isinstance(code, BuiltKernel):
                    places.append(place)
                    codes.append(code)
                else:
                    self._results.put((batch, place, Measurement(None, code, "")))

            self._boards.measure(codes, lambda index, outcome: self._done(batch, places[index], outcome))
        except _StoppedError:
            return
        except BaseException as error:  # noqa: BLE001 - a thread's outermost call: `take` raises it
            self._results.put(error)

    def _done(self, batch: Batch, place: int, outcome: Measurement) -> None:
        self._results.put((batch, place, outcome))
        if self._stop.is_set():
            raise _StoppedError
