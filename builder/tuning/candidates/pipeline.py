"""A pipeline that builds and measures batches of candidates, and returns one measurement at a time.

If the boards are other machines, the next batches are built while one is measured. On this machine, building
would disturb the measurement, so there is one batch at a time; while it is built, the next can be chosen.
"""

from __future__ import annotations

import contextlib
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

AHEAD: Final = 3  # batches in progress on boards that are elsewhere: one measured, one waiting, one built
POLL_S: Final = 0.2

Job = tuple[TaskRun, Point]


class _StoppedError(Exception):
    """The pipeline was stopped: the rest of a batch is not measured."""


@dataclass
class Batch:
    """Candidates that were proposed together.

    `jobs`: each candidate's task and point.
    `measurements`: index of a candidate -> its result, if that has arrived.
    """

    jobs: Sequence[Job]
    measurements: dict[int, Measurement] = field(default_factory=dict)
    kernels: dict[int, BuiltKernel] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all results have arrived."""
        return len(self.measurements) == len(self.jobs)


class Pipeline:
    """Builds and measures batches.

    `calm`: held while this machine measures: take it for work that would disturb the measurement.
    """

    def __init__(self, builder: CandidateBuilder, boards: Boards, interruption: Interruption) -> None:
        self._builder, self._boards, self._interruption = builder, boards, interruption
        self.calm = threading.Lock()
        self._capacity = AHEAD if boards.elsewhere else 1
        self._results: queue.Queue[tuple[Batch, int, Measurement] | BaseException] = queue.Queue()
        self._open: list[Batch] = []
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()

    @property
    def is_full(self) -> bool:
        """Whether the pipeline accepts no further batch."""
        return len(self._open) >= self._capacity

    @property
    def is_empty(self) -> bool:
        """Whether no batch is in progress."""
        return not self._open

    def put(self, jobs: Sequence[Job]) -> None:
        """Start to build and measure a batch."""
        batch = Batch(jobs)
        self._open.append(batch)
        building = self._builder.start([(run.task, point) for run, point in jobs])
        thread = threading.Thread(target=self._work, args=(batch, building), daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def take(self) -> tuple[Batch, int, Measurement]:
        """Wait for the next measurement; return its batch, its index in the batch, and the measurement.

        Raises `KeyboardInterrupt` if SIGINT has arrived; `drain` returns what was measured until then.
        Raises `FleetError` if no board answers any more.
        """
        while True:
            self._interruption.check()
            try:
                result = self._results.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            batch, index, measurement = result
            batch.measurements[index] = measurement
            if batch.is_done:
                self._open.remove(batch)
            return batch, index, measurement

    def drain(self, timeout_s: float) -> Iterator[tuple[Batch, int, Measurement]]:
        """Stop after the candidates that are being measured now, and yield all measurements until then."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_s)
        while not self._results.empty():
            result = self._results.get()
            if not isinstance(result, BaseException):
                yield result

    def _work(self, batch: Batch, building: Building) -> None:
        indices: list[int] = []  # of the candidates that compiled, in the batch
        kernels: list[BuiltKernel] = []
        try:
            for index, built in enumerate(building.results()):
                if self._stop.is_set():
                    return
                if isinstance(built, BuiltKernel):
                    indices.append(index)
                    kernels.append(built)
                    batch.kernels[index] = built
                else:
                    self._results.put((batch, index, Measurement(None, built, "")))

            with contextlib.nullcontext() if self._boards.elsewhere else self.calm:
                self._boards.measure(
                    kernels, lambda i, measurement: self._done(batch, indices[i], measurement)
                )
        except _StoppedError:
            return
        except BaseException as error:  # noqa: BLE001 - a thread's outermost call: `take` raises it
            self._results.put(error)

    def _done(self, batch: Batch, index: int, measurement: Measurement) -> None:
        self._results.put((batch, index, measurement))
        if self._stop.is_set():
            raise _StoppedError
