"""Workspaces: the memory that a kernel takes while it runs, added up from its lowered function.

Promises the figures that the launcher (`link/workspace.c`) comes to: the most that blocks and their headers
take at once. Leaves the memory between kernels to `builder.codegen.memory_plan`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from builder.kernels.rewriter import op_name

# As in link/workspace.c: what precedes a block, and what sizes are rounded up to.
HEADER_BYTES: Final = 64

_ALLOCATE: Final = "tirx.TVMBackendAllocWorkspace"
_FREE: Final = "tirx.TVMBackendFreeWorkspace"


@dataclass(frozen=True, slots=True)
class Workspaces:
    """The most memory that the threads take at once in any of some kernels, in bytes.

    Attributes
    ----------
    caller_bytes
        Of the thread that calls the kernels.
    worker_bytes
        Of each other thread, which runs only the bodies of parallel loops.
    """

    caller_bytes: int = 0
    worker_bytes: int = 0


def workspaces_of(functions: Iterable[tirx.PrimFunc]) -> Workspaces:
    """Return the workspaces of functions that call TVM's allocator, as `LowerTVMBuiltin` leaves them."""
    caller = worker = 0
    for function in functions:
        loops: list[tirx.For] = []
        tvm_ffi.structural_walk(function.body, (tirx.For, loops.append))
        tasks = [loop.body for loop in loops if loop.kind == tirx.ForKind.PARALLEL]
        caller = max(caller, _most_alive(function.body))
        worker = max(worker, *map(_most_alive, tasks), 0)
    return Workspaces(caller, worker)


def _most_alive(body: tirx.Stmt) -> int:
    """Return the most bytes that blocks take at once, if `body` is run by one thread."""
    alive: list[int] = []
    most = 0

    def call(each: Call) -> None:
        nonlocal most
        name = op_name(each)
        if name == _ALLOCATE:
            size = int(each.args[2])
            alive.append(-(-size // HEADER_BYTES) * HEADER_BYTES + HEADER_BYTES)
            most = max(most, sum(alive))
        elif name == _FREE:
            alive.pop()  # blocks are freed in the reverse order

    tvm_ffi.structural_walk(body, (Call, call), order="pre")
    return most
