"""A board, namely this machine, that counts user cycles: figures are exact even if other processes run.

The CPU's counter stops while another process has the core. It counts one thread, so kernels run on one
thread. Cycles are reported as seconds, at the frequency that was measured when the session was opened.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.timer import counter
from builder.boards.local_board import LocalBoard
from builder.boards.measuring_process import (
    BoardAddress,
    BuiltKernel,
    MeasuringProcess,
    RunnerOptions,
    Timing,
)
from builder.boards.measuring_session import MeasuringSession, serve
from builder.boards.remote_functions import BoardState, compare_json

SPIN: Final = 200_000


def cycle_board(options: RunnerOptions) -> LocalBoard:
    """Return the board; `options` must ask for one thread."""
    assert options.threads == 1
    return LocalBoard(options, MeasuringProcess("benchmarks.tuning.cycle_board"))


class CycleSession(MeasuringSession):
    """A measuring session that counts cycles instead of reading the clock."""

    def __init__(self, address: BoardAddress) -> None:
        super().__init__(address)
        self._read = counter()
        self._kept: dict[tuple[tuple[str, tuple[int, ...]], ...], list[Any]] = {}
        self._hertz = max(_hertz(self._read) for _ in range(5))

    def clock(self) -> float:
        """Return the cycles so far, as seconds."""
        return self._read() / self._hertz

    def arguments(self, code: BuiltKernel) -> list[Any]:
        """Return tensors for a kernel; consecutive kernels with the same arguments share them."""
        if code.arguments not in self._kept:
            import numpy as np
            import tvm

            state = np.random.default_rng(0)
            self._kept.clear()
            self._kept[code.arguments] = [
                tvm.runtime.empty(shape, dtype).copyfrom(state.standard_normal(shape).astype(dtype))
                for dtype, shape in code.arguments
            ]
        return self._kept[code.arguments]

    def _kernel(self, code: BuiltKernel) -> Callable[..., Any]:
        import tvm_ffi

        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            Path(file.name).write_bytes(code.content)
            module = tvm_ffi.load_module(file.name)
        module["edge_set_threads"](1)
        return module[code.name]

    def _seconds(self, kernel: Callable[..., Any], arguments: Sequence[Any], options: RunnerOptions) -> float:
        kernel(*arguments)
        start = self.clock()
        kernel(*arguments)
        once = max(self.clock() - start, 1e-7)
        number = max(1, min(10000, round(options.min_repeat_ms / 1e3 / once)))
        start = self.clock()
        for _ in range(number):
            kernel(*arguments)
        return (self.clock() - start) / number

    def measure(self, code: BuiltKernel, options: RunnerOptions) -> Timing:
        """Return the cycles of a kernel, as seconds, for each repetition."""
        kernel, arguments = self._kernel(code), self.arguments(code)
        seconds = tuple(self._seconds(kernel, arguments, options) for _ in range(options.repeat))
        return Timing(seconds, BoardState())

    def compare(
        self, untuned: BuiltKernel, tuned: BuiltKernel, pairs: int, options: RunnerOptions
    ) -> tuple[tuple[float, float], ...]:
        """Return the cycles of two kernels that run in turn, each with its own arguments."""
        kernels = [self._kernel(code) for code in (untuned, tuned)]
        result = []
        for index in range(pairs):
            seconds = [0.0, 0.0]
            for which in (0, 1) if index % 2 == 0 else (1, 0):
                arguments = self.arguments((untuned, tuned)[which])
                seconds[which] = self._seconds(kernels[which], arguments, options)
            result.append((seconds[0], seconds[1]))
        return tuple(result)

    def call(
        self, name: str, request: str, files: Sequence[tuple[str, bytes]], wanted: Sequence[str]
    ) -> tuple[str, tuple[bytes, ...]]:
        """Compare two bundles by cycles; `name` must be `compare`."""
        assert name == "compare", wanted
        with tempfile.TemporaryDirectory() as work:
            for file, content in files:
                Path(work, file).write_bytes(content)
                request = request.replace(f"{{path:{file}}}", str(Path(work, file)))
            return compare_json(json.dumps({**json.loads(request), "threads": 1}), self.clock), ()


def _hertz(read: Callable[[], int]) -> float:
    cycles, start = read(), time.perf_counter()
    for _ in range(SPIN):
        pass
    return (read() - cycles) / (time.perf_counter() - start)


if __name__ == "__main__":
    serve(CycleSession)
    os._exit(0)
