"""Buffers of the scope `local` on the stack, where LLVM keeps them in registers.

TVM takes buffers of 1 KB and more from the launcher, and a tile of 8 rows x 3 vectors of 64 bytes has
1.5 KB. LLVM does not know that such memory is not that of the weights. If a loop prefetches weights, LLVM
then stores all sums in each round, which took a tenth more time than no prefetch. Nothing else reads a
buffer on the stack whose address is not passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from builder.kernels.rewriter import op_name
from builder.kernels.schedule import WRITTEN

# More than any tile of registers: 32 vectors of 64 bytes. A thread's stack has room for many such buffers.
MOST_BYTES: Final = 2048

_ALLOCATE: Final = "tirx.TVMBackendAllocWorkspace"
_IS_NULL: Final = "tirx.isnullptr"
_FREE: Final = "tirx.TVMBackendFreeWorkspace"


def keep_on_stack(mod: tvm.IRModule) -> tvm.IRModule:
    """Keep small local buffers on the stack, in functions as `LowerTVMBuiltin` leaves them.

    Kernels whose loops are written out stay as they are: LLVM would write the walks of trees as gathers.
    """
    changed = {
        var: func.with_body(tvm_ffi.structural_map(func.body, (tirx.SeqStmt, _kept)))
        for var, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc) and WRITTEN not in func.attrs
    }
    return tvm.IRModule({**dict(mod.functions.items()), **changed}, attrs=mod.attrs)


def _kept(sequence: tirx.SeqStmt) -> tirx.Stmt:
    """Replace each allocation by the launcher, and drop the branches that check it and free it."""
    steps = list(sequence.seq)
    taken = [
        step.buffer
        for step in steps
        if isinstance(step, tirx.DeclBuffer) and step.buffer.scope() == "local" and _is_small(step.data)
    ]
    if not taken:
        return sequence
    kept: list[tirx.Stmt] = []
    for step in steps:
        if isinstance(step, tirx.DeclBuffer) and any(step.buffer.same_as(each) for each in taken):
            kept.append(tirx.AllocBuffer(step.buffer))
        elif not (isinstance(step, tirx.IfThenElse) and _is_about(step.condition, taken)):
            kept.append(step)
    return tirx.SeqStmt(kept)


def _is_small(data: tirx.Expr) -> bool:
    return isinstance(data, Call) and op_name(data) == _ALLOCATE and int(data.args[2]) <= MOST_BYTES


def _is_about(condition: tirx.Expr, buffers: Sequence[tirx.Buffer]) -> bool:
    """Whether a condition checks the allocation of one of some buffers, or frees it."""
    calls: list[Call] = []
    tvm_ffi.structural_walk(condition, (Call, calls.append))
    found = [call.args[-1] for call in calls if op_name(call) in (_IS_NULL, _FREE)]
    return any(
        isinstance(data, Call) and any(data.args[0].same_as(buffer) for buffer in buffers) for data in found
    )
