"""Concatenations of many tensors, as copies.

In TVM's expression each element asks which input it comes from. For a few inputs LLVM moves the question out
of the loops, and other operators can be fused. For the thirty inputs of a layer of DenseNet it takes as long
as a convolution. So such loops are written out, and LLVM turns them into `memcpy`.

A kernel that only puts its inputs one after another has the attribute `JOINS`. It is not called if the graph
can let its inputs be made in their places (`builder.codegen.graph_codegen`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import tvm
from tvm import relax, te, tirx
from tvm.ir import Call
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

from builder.kernels.rewriter import legalise_as_tvm, shape_of
from builder.kernels.spaces.epilogue import NEVER_FUSED

# The kernel is written out, not scheduled: this names where its loops come from.
KIND: Final = "concatenate"
JOINS: Final = "edge.joins"  # a kernel's attribute: its output is its inputs, one after another
# TVM's expression is as fast for fewer.
_FEWEST_INPUTS: Final = 4
# Enough for the cores of a small board, and so few that a job copies more than it costs to hand it out.
JOBS: Final = 8
WORTH_A_LAUNCH: Final = 1 << 15  # elements


def legalise(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `concat`: copies of whole rows for many inputs, TVM's expression for a few."""
    parts = list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else []
    if len(parts) < _FEWEST_INPUTS:
        return legalise_as_tvm(bb, call)
    shape = shape_of(call)
    axis = int(call.attrs.axis) % len(shape)
    rows = math.prod(shape[:axis])
    widths = [math.prod(shape_of(part)[axis:]) for part in parts]
    dtype = str(call.ty.dtype)

    def compute(*tensors: te.Tensor) -> te.Tensor:
        return te.extern(
            [shape],
            list(tensors),
            lambda ins, outs: _copies(rows, widths, ins, outs[0]),
            name=KIND,
            dtype=[dtype],
            in_buffers=[tirx.decl_buffer(tensor.shape, dtype) for tensor in tensors],
            out_buffers=[tirx.decl_buffer(shape, dtype)],
        )

    attrs = {"edge.written": KIND, **NEVER_FUSED, **({JOINS: 1} if rows == 1 else {})}
    return bb.call_te(compute, *parts, primfunc_name_hint="concatenate", primfunc_attrs=attrs)


def joins_of(kernels: tvm.IRModule) -> frozenset[str]:
    """Return the names of the kernels that only put their inputs one after another."""
    return frozenset(
        var.name_hint for var, func in kernels.functions.items() if func.attrs and JOINS in func.attrs
    )


def _copies(rows: int, widths: Sequence[int], ins: Sequence[tirx.Buffer], out: tirx.Buffer) -> tirx.Stmt:
    """Return the loops that copy `ins`, `[rows, width]` each, side by side to `out`."""
    width = sum(widths)
    target = ir.buffer_proxy(out)
    sources = [ir.buffer_proxy(buffer) for buffer in ins]
    begins = list(itertools.accumulate(widths, initial=0))
    jobs = 1 if rows * width < WORTH_A_LAUNCH else rows if rows >= JOBS else JOBS

    def copy(row: tirx.Expr | int, index: int, begin: tirx.Expr | int, count: tirx.Expr | int) -> None:
        with ir.serial(0, count) as i:
            target[row * width + begins[index] + begin + i] = sources[index][row * widths[index] + begin + i]

    with IRBuilder() as builder, ir.seq_scope(), ir.parallel(0, jobs) as job:
        if jobs == rows:
            for index, count in enumerate(widths):
                copy(job, index, 0, count)
        else:
            # Each job takes its share of every input.
            with ir.serial(0, rows) as row:
                for index, count in enumerate(widths):
                    share = -(-count // jobs)
                    copy(row, index, job * share, tirx.max(tirx.min(share, count - job * share), 0))
    return builder.get()
