"""Runs inside the emulated machine: each kernel of some libraries, with its data in the caches.

    variants.py JOBS.json

A job has a library, `code`, with kernels `k0`, `k1`, ..., their `number` and the dtypes and shapes of their
`arguments`. Marks are numbered: an even one before each measured call, an odd one after it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Final

import numpy as np
import tvm_ffi

from agent.runtime.module import KernelModule
from benchmarks.timer import aligned

MARK: Final = 24302  # the system call that caches.c watches; no kernel has it


def main(file: Path) -> None:
    """Call each kernel once to warm the caches, and again between two marks."""
    system_call = ctypes.CDLL(None).syscall
    mark = 0
    for job in json.loads(file.read_text()):
        module = KernelModule.load(Path(job["code"]))
        state = np.random.default_rng(0)
        arrays = [tvm_ffi.from_dlpack(aligned(d, tuple(s), state)) for d, s in job["arguments"]]
        for number in range(job["number"]):
            function = module[f"k{number}"]
            function(*arrays)
            system_call(MARK, mark)
            function(*arrays)
            system_call(MARK, mark + 1)
            mark += 2


main(Path(sys.argv[1]))
