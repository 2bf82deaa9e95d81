"""The machine itself as a board: one candidate at a time, in a process that may be killed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from builder.boards.interface import COOL_S, INVALID_ATTEMPTS, BoardStatus, Measurement
from builder.boards.ledger import Ledger
from builder.boards.measuring_process import BoardAddress, BuiltKernel, MeasuringProcess, RunnerOptions
from builder.errors import MeasureFault
from builder.records.meta_json import BoardTime


class LocalBoard:
    """The machine itself: one candidate at a time, nothing else running for us meanwhile."""

    elsewhere = False

    def __init__(self, options: RunnerOptions, process: MeasuringProcess | None = None) -> None:
        self._options = options
        self._process = process or MeasuringProcess()
        self._ledger = Ledger()

    def measure(
        self, codes: Sequence[BuiltKernel], done: Callable[[int, Measurement], None] | None = None
    ) -> list[Measurement]:
        """Measure one after the other."""
        outcomes = []
        for index, code in enumerate(codes):
            outcomes.append(self._measure(code))
            if done is not None:
                done(index, outcomes[-1])
        return outcomes

    def _measure(self, code: BuiltKernel) -> Measurement:
        for _ in range(INVALID_ATTEMPTS):
            start = time.monotonic()
            try:
                if self._process.place is None:
                    self._process.open(BoardAddress(), self._options.timeout_s)
                timing = self._process.measure(code, self._options)
            except MeasureFault as error:
                # A candidate that hangs or crashes can be told from a board that does: this one is alive.
                self._ledger.add("local", BoardTime(time.monotonic() - start, failed=1))
                return Measurement(None, str(error), "local")
            valid = self._ledger.is_valid("local", timing.state)
            spent = time.monotonic() - start
            self._ledger.add("local", BoardTime(spent, measured=int(valid), invalid=int(not valid)))
            if valid:
                return Measurement(timing.seconds, None, "local")
            time.sleep(COOL_S)
        return Measurement(None, "the CPU was not at speed", "local", spoilt=True)

    @contextlib.contextmanager
    def session(self) -> Iterator[tuple[str, MeasuringProcess]]:
        """The machine for oneself."""
        start = time.monotonic()
        if self._process.place is None:
            self._process.open(BoardAddress(), self._options.timeout_s)
        try:
            yield "local", self._process
        finally:
            self._ledger.add("local", BoardTime(time.monotonic() - start))

    def status(self) -> tuple[BoardStatus, ...]:
        """One board, always there."""
        return (BoardStatus("local", "measuring", self._ledger.times().get("local", BoardTime())),)

    def take_times(self) -> dict[str, BoardTime]:
        """What this machine did since this was last asked."""
        return self._ledger.take()

    def close(self) -> None:
        """End the measuring process."""
        self._process.kill()
