"""The local machine as a board: one candidate at a time, in a process that can be killed."""

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
    """The local machine: it measures one candidate at a time, and nothing is built meanwhile.

    Parameters
    ----------
    options
        How candidates are timed.
    process
        The measuring process; None for one that measures time.
    sleep
        Waits for a number of seconds, for the machine to cool down.
    """

    elsewhere = False

    def __init__(
        self,
        options: RunnerOptions,
        process: MeasuringProcess | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options, self._sleep = options, sleep
        self._process = process or MeasuringProcess()
        self._ledger = Ledger()

    def measure(
        self, kernels: Sequence[BuiltKernel], done: Callable[[int, Measurement], None] | None = None
    ) -> list[Measurement]:
        """Measure candidates in turn; `done` is called with index and result as each one ends."""
        outcomes = []
        for index, kernel in enumerate(kernels):
            outcomes.append(self._measure(kernel))
            if done is not None:
                done(index, outcomes[-1])
        return outcomes

    def _measure(self, kernel: BuiltKernel) -> Measurement:
        for _ in range(INVALID_ATTEMPTS):
            start = time.monotonic()
            try:
                if self._process.address is None:
                    self._process.open(BoardAddress(), self._options.timeout_s)
                timing = self._process.measure(kernel, self._options)
            except MeasureFault as error:
                # This board is certainly alive, so a hang or a crash is the candidate's fault.
                self._ledger.add("local", BoardTime(time.monotonic() - start, failed=1))
                return Measurement(None, str(error), "local")
            valid = self._ledger.is_valid("local", timing.state)
            spent = time.monotonic() - start
            self._ledger.add("local", BoardTime(spent, measured=int(valid), invalid=int(not valid)))
            if valid:
                return Measurement(timing.seconds, None, "local")
            self._sleep(COOL_S)
        return Measurement(None, "the CPU did not run at full speed", "local", spoilt=True)

    @contextlib.contextmanager
    def session(self) -> Iterator[tuple[str, MeasuringProcess]]:
        """Reserve this machine; yield its name, and a process with an open session."""
        start = time.monotonic()
        if self._process.address is None:
            self._process.open(BoardAddress(), self._options.timeout_s)
        try:
            yield "local", self._process
        finally:
            self._ledger.add("local", BoardTime(time.monotonic() - start))

    def status(self) -> tuple[BoardStatus, ...]:
        """Return the state of this machine."""
        return (BoardStatus("local", "measuring", self._ledger.times().get("local", BoardTime())),)

    def take_times(self) -> dict[str, BoardTime]:
        """Return the work of this machine since the last call."""
        return self._ledger.take()

    def close(self) -> None:
        """End the measuring process."""
        self._process.kill()
