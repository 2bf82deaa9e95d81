"""Runs inside the emulated machine: each kernel of a list once, with a mark before each and one at the end.

    kernels.py ENGINE FOLDER

`mod.so` in the folder has the kernels, and `calls.json` lists them: a name, and the shapes of the float32
arguments.
ENGINE is not used: there is only ours.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
from pathlib import Path
from typing import Final

import numpy as np
import tvm_ffi

from agent.runtime.module import KernelModule

MARK: Final = 24302  # the system call that counter.c watches; no kernel has it


ALIGNMENT: Final = 64  # of tensors, in bytes, as kernels expect it


def ones(shape: list[int]) -> np.ndarray:
    """Return ones at an address that kernels accept."""
    size = math.prod(shape)
    memory = np.ones(size + ALIGNMENT // 4, "float32")
    first = -memory.ctypes.data % ALIGNMENT // 4
    return memory[first : first + size].reshape(shape)


def main(place: Path) -> None:
    """Call each kernel twice: to warm up, and between marks."""
    module = KernelModule.load(place / "mod.so")
    calls = [
        (module[name], [tvm_ffi.from_dlpack(ones(shape)) for shape in shapes])
        for name, shapes in json.loads((place / "calls.json").read_text())
    ]
    for function, arguments in calls:
        function(*arguments)
    system_call = ctypes.CDLL(None).syscall
    for number, (function, arguments) in enumerate(calls):
        system_call(MARK, number)
        function(*arguments)
    system_call(MARK, len(calls))


os.environ["EDGE_NUM_THREADS"] = "1"
main(Path(sys.argv[2]))
