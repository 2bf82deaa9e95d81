"""Counts user cycles of kernels that run in turn, by the CPU's counter; runs in a separate process.

    timer.py JOBS.json

It imports only what it needs to call kernels. The counter stops while other processes have the core, so a
busy machine hardly disturbs it. Without a counter, or with more than one thread (the counter counts only
one), it reads the clock's nanoseconds instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

PERF_EVENT_OPEN: Final = 298  # the system call's number on x86-64
WARM_CALLS: Final = 2
LEAST_S: Final = 0.0015  # seconds of one measurement


def counter() -> Callable[[], int]:
    """Return a function that reads this thread's user cycles, or nanoseconds if there is no counter."""
    # struct perf_event_attr: type 0 (hardware), size, config 0 (cycles), and at byte 40 the flags that
    # exclude kernel and hypervisor.
    attributes = struct.pack("<IIQQQQQ", 0, 64, 0, 0, 0, 0, 1 << 5 | 1 << 6) + bytes(16)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(PERF_EVENT_OPEN, attributes, 0, -1, -1, 0)
    if fd < 0:
        return time.perf_counter_ns
    return lambda: int.from_bytes(os.read(fd, 8), "little")


def aligned(dtype: str, shape: tuple[int, ...], state: Any) -> Any:  # noqa: ANN401
    """Return an array, aligned to 64 bytes: normally distributed numbers if floating point, else zeros."""
    import numpy as np

    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + size].view(dtype).reshape(shape)
    array[...] = state.standard_normal(shape) if "float" in dtype else 0
    return array


def main() -> None:
    """Measure the jobs in the file named on the command line, and print the results as JSON."""
    import numpy as np
    import tvm_ffi

    jobs = json.loads(Path(sys.argv[1]).read_text())
    cycles = counter()
    out = []
    for job in jobs:
        os.environ["EDGE_NUM_THREADS"] = str(job["threads"])  # read at the first launch of each library
        read = cycles if job["threads"] == 1 else time.perf_counter_ns
        state = np.random.default_rng(0)
        arrays = [tvm_ffi.from_dlpack(aligned(d, tuple(s), state)) for d, s in job["arguments"]]
        module = tvm_ffi.load_module(job["code"])
        functions = [module[f"k{i}"] for i in job["kernels"]]
        calls = []
        for function in functions:
            for _ in range(WARM_CALLS):
                function(*arrays)
            began = time.perf_counter()
            function(*arrays)
            took = max(time.perf_counter() - began, 1e-7)
            calls.append(max(1, round(LEAST_S / took)))
        rounds: list[list[float]] = [[] for _ in functions]
        for _ in range(job["rounds"]):
            for function, number, results in zip(functions, calls, rounds, strict=True):
                function(*arrays)  # bring this kernel's weights and code back into the caches
                began = read()
                for _ in range(number):
                    function(*arrays)
                results.append((read() - began) / number)
        out.append(rounds)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
