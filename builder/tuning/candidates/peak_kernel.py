"""The kernel that measures a board's peak rate: a matrix product that stays in the L1 cache.

The live view and the report show each kernel's rate as a share of this peak.
"""

from __future__ import annotations

from typing import Final

import tvm
from tvm import s_tir as st
from tvm import te

from builder.boards.measuring_process import KERNEL, BuiltKernel
from builder.kernels.decisions import heuristic
from builder.kernels.spaces import matmul
from builder.target.device_target import DeviceTarget
from builder.tuning.candidates.candidate_builder import build_module

DEPTH: Final = 128
ROWS: Final = 256  # enough work to make the cost of waking the threads negligible
ATTEMPTS: Final = 3  # the fastest one counts: disturbances only make a measurement slower


def peak_kernel(target: DeviceTarget, threads: int | None) -> tuple[BuiltKernel, float]:
    """Return the kernel for `threads` threads (None: one per core), and its floating-point operations."""
    cores = threads or target.cores
    panel, rows = 2 * target.simd.lanes, ROWS  # each thread's panel fits its L1 cache
    a = te.placeholder((rows, DEPTH), "float32", name="a")
    b = te.placeholder((cores, DEPTH, panel), "float32", name="b")
    product = matmul.product(a, b, cores * panel, target.simd.lanes)
    func = te.create_prim_func([a, b, product]).with_attr("global_symbol", KERNEL)
    owner = tvm.IRModule({"main": func})
    sch = st.Schedule(owner)
    with target.tvm_target:
        matmul.schedule(sch, sch.get_sblock("matmul"), target, heuristic)
    kernel = tvm.IRModule({KERNEL: sch.mod["main"].with_attr("global_symbol", KERNEL)})
    shapes = ((rows, DEPTH), (cores, DEPTH, panel), (rows, cores * panel))
    flops = 2.0 * rows * DEPTH * panel * cores
    return BuiltKernel(build_module(kernel, target), tuple(("float32", shape) for shape in shapes)), flops
