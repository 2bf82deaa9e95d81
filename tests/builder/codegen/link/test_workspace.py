"""Workspace: a thread keeps as much as one kernel needs at once, which the builder adds up in advance."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import tvm
from tvm import te, tirx

from builder.codegen.kernel_object import compile_kernels
from builder.codegen.link.linker import link
from builder.codegen.workspaces import HEADER_BYTES, Workspaces
from builder.target.device_target import resolve

pytestmark = pytest.mark.slow

ROWS = 8
KIB = 1024
# Kernel -> KiB of each of its tasks' blocks, and of its block outside of the parallel loop.
KERNELS: Mapping[str, tuple[tuple[int, ...], int]] = {
    "one_block": ((1024,), 0),
    "two_blocks": ((640, 256), 0),
    "around": ((128,), 2048),
}
HEADERS = {name: HEADER_BYTES * (len(blocks) + bool(outer)) for name, (blocks, outer) in KERNELS.items()}

SCRIPT = """
import os, sys, time
import numpy as np
import tvm_ffi
from agent.runtime.module import KernelModule
from agent.runtime.storage import allocate, view

def anonymous():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024

def tensors(name):
    columns = int(sizes[name])
    arrays = [view(allocate(4 * 8 * columns), "float32", (8, columns)) for _ in range(2)]
    arrays[0][:] = np.arange(8 * columns, dtype="float32").reshape(8, columns)
    arrays[1][:] = 1
    return arrays

sizes = dict(pair.split("=") for pair in sys.argv[3:])
module = KernelModule.load(sys.argv[1])
module.set_threads(int(sys.argv[2]))
made = {name: tensors(name) for name in sizes}
before = anonymous()
calls = [(module[name], [tvm_ffi.from_dlpack(a) for a in made[name]]) for name in sizes]
grown, end = 0, time.monotonic() + 20
while time.monotonic() < end and grown < int(os.environ["EXPECTED"]):
    for kernel, arguments in calls:
        kernel(*arguments)
    grown = anonymous() - before
right = all(np.array_equal(out, 2 * x[:, ::-1]) for x, out in made.values())
print(right, grown)
"""


def columns(name: str) -> int:
    blocks, outer = KERNELS[name]
    return max(*blocks, outer // ROWS) * KIB // 4


def kernel(name: str) -> tvm.IRModule:
    """Make a kernel over float32[8, columns] that doubles and mirrors rows in stages, one for each block."""
    blocks, outer = KERNELS[name]
    width = columns(name)
    x = te.placeholder((ROWS, width), name="x")
    sizes = [*([outer // ROWS] if outer else []), *blocks]
    stages = [
        te.compute((ROWS, size * KIB // 4), partial(_copy, x, stage), name=f"stage{stage}")
        for stage, size in enumerate(sizes)
    ]
    y = te.compute((ROWS, width), partial(_mirror, x, stages), name="y")
    func = te.create_prim_func([x, y]).with_attr("global_symbol", name)
    schedule = tvm.s_tir.Schedule(tvm.IRModule({name: func}))
    row = schedule.get_loops(schedule.get_sblock("y", name))[0]
    for stage in range(bool(outer), len(stages)):
        schedule.compute_at(schedule.get_sblock(f"stage{stage}", name), row)
    schedule.parallel(row)
    return schedule.mod


def _copy(x: te.Tensor, stage: int, i: tirx.Var, j: tirx.Var) -> tirx.Expr:
    return x[i, j] + float(stage)


def _mirror(x: te.Tensor, stages: Sequence[te.Tensor], i: tirx.Var, j: tirx.Var) -> tirx.Expr:
    at = int(x.shape[1]) - 1 - j
    value = x[i, at] * 2.0
    for number, stage in enumerate(stages):
        last = int(stage.shape[1]) - 1
        value += tirx.if_then_else(at <= last, stage[i, te.min(at, last)] - x[i, at] - float(number), 0.0)
    return value


def test_a_thread_takes_as_much_as_the_builder_says(tmp_path: Path) -> None:
    target = resolve("host")
    functions = {name: kernel(name)[name] for name in KERNELS}
    made = compile_kernels(tvm.IRModule(functions), target)
    assert made.workspaces == Workspaces(
        caller_bytes=2176 * KIB + HEADERS["around"], worker_bytes=1024 * KIB + HEADERS["one_block"]
    )
    library = tmp_path / "mod.so"
    library.write_bytes(link(made.code, target))
    for threads in (1, 3):
        needed = made.workspaces.caller_bytes + (threads - 1) * made.workspaces.worker_bytes
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(library), str(threads)]
        done = subprocess.run(
            [*command, *(f"{name}={columns(name)}" for name in KERNELS)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "EXPECTED": str(needed)},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        right, grown = done.stdout.split()
        assert right == "True"
        # Beyond the blocks: pages, the threads' stacks, Python's objects.
        assert needed <= int(grown) <= needed + 512 * KIB
