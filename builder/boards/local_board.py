"""The machine itself as a board: one candidate at a time, in a process that may be killed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from builder.boards.boards import COOL_S, INVALID_ATTEMPTS, BoardStatus, Outcome
from builder.boards.ledger import Ledger
from builder.boards.measuring import Code, MeasureFault, MeasureProcess, Place, RunnerOptions
from builder.records.meta import BoardTime


class LocalBoard:
    """The machine itself: one candidate at a time, nothing else running for us meanwhile."""

    elsewhere = False

    def __init__(self, options: RunnerOptions, process: MeasureProcess | None = None) -> None:
        self._options = options
        self._process = process or MeasureProcess()
        self._ledger = Ledger()

    def measure(
        self, codes: Sequence[Code], done: Callable[[int, Outcome], None] | None = None
    ) -> list[Outcome]:
        """Measure one after the other."""
        outcomes = []
        for index, code in enumerate(codes):
            outcomes.append(self._measure(code))
            if done is not None:
                done(index, outcomes[-1])
        return outcomes

    def _measure(self, code: Code) -> Outcome:
        for _ in range(INVALID_ATTEMPTS):
            start = time.monotonic()
            try:
                if self._process.place is None:
                    self._process.open(Place(), self._options.timeout_s)
                timing = self._process.measure(code, self._options)
            except MeasureFault as error:
                # A candidate that hangs or crashes can be told from a board that does: this one is alive.
                self._ledger.add("local", BoardTime(time.monotonic() - start, failed=1))
                return Outcome(None, str(error), "local")
            valid = self._ledger.is_valid("local", timing.state)
            spent = time.monotonic() - start
            self._ledger.add("local", BoardTime(spent, measured=int(valid), invalid=int(not valid)))
            if valid:
                return Outcome(timing.seconds, None, "local")
            time.sleep(COOL_S)
        return Outcome(None, "the CPU was not at speed", "local", spoilt=True)

    @contextlib.contextmanager
    def session(self) -> Iterator[tuple[str, MeasureProcess]]:
        """The machine for oneself."""
        start = time.monotonic()
        if self._process.place is None:
            self._process.open(Place(), self._options.timeout_s)
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
