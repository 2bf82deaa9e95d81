"""How long a scheduled kernel keeps one core busy, and whether waking others for it pays.

A launch costs two to five microseconds, and the cores that are to help must first hear of it. A kernel that
is over by then runs on the calling core alone, whatever design space its loops come from.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad
from tvm_ffi import WalkResult

from builder.target.device_target import DeviceTarget

# Below this, what other cores could take over is about what telling them costs.
WORTH_A_LAUNCH_US: Final = 20.0

# What a core does in a nanosecond when nothing is in its way: operations of a vector (wide cores have two
# units at 3 GHz, the others one at 1.5; a multiply-add is two operations), and bytes from the outer caches.
_WIDE_OPERATIONS, _OPERATIONS = 12.0, 3.0
_BYTES: Final = 8.0

_CALL: Final = 20  # operations in exp, erf and their like, which are called for each element
_CALLED: Final = {
    f"tirx.{name}" for name in ("exp", "erf", "tanh", "log", "pow", "sin", "cos", "sigmoid", "sqrt")
}
_ARITHMETIC: Final = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.FloorDiv, tirx.Max, tirx.Min, tirx.Select)


def serial_where_small(func: tirx.PrimFunc, target: DeviceTarget) -> tirx.PrimFunc:
    """`func`, with its parallel loops made serial if all of its work is not worth a launch."""
    if time_us(func, target) >= WORTH_A_LAUNCH_US:
        return func

    def serial(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body, None, loop.annotations
        )

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, serial)))


def time_us(func: tirx.PrimFunc, target: DeviceTarget) -> float:
    """The least time that one core of `target` needs for a scheduled function."""
    work = _Work(target.simd.lanes)
    work.add(func.body, times=1.0, at_once=1.0)
    operations = _WIDE_OPERATIONS if target.simd.lanes >= 8 else _OPERATIONS
    moved = 0.0
    for buffer, touched in work.touched.items():
        elements = math.prod(_extent(d) for d in buffer.ty.shape)
        moved += min(touched, elements) * np.dtype(str(buffer.ty.dtype)).itemsize
    return max(work.operations / operations, moved / _BYTES) / 1e3


def _extent(expr: object) -> int:
    """A loop's or a buffer's extent; one where the function does not say."""
    return int(expr) if isinstance(expr, (int, tirx.IntImm)) else 1


@dataclass
class _Work:
    """Counts over a function's loops.

    Attributes
    ----------
    operations
        Arithmetic, copies and calls; a vector's count once.
    touched
        For each buffer, how many elements are read and written, the same one each time anew.
    """

    lanes: int
    operations: float = 0.0
    touched: dict[Any, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, body: tirx.Stmt, *, times: float, at_once: float) -> None:
        """Add what `body` does when it runs so many times, `at_once` of them in one vector."""

        def loop(stmt: tirx.For) -> WalkResult:
            extent = _extent(stmt.extent)
            vector = min(extent, self.lanes) if stmt.kind == tirx.ForKind.VECTORIZED else 1
            self.add(stmt.body, times=times * extent, at_once=at_once * vector)
            return WalkResult.SKIP

        def store(stmt: tirx.BufferStore) -> WalkResult:
            self.touched[stmt.buffer] += times
            steps = 0.0

            def load(expr: TensorLoad) -> WalkResult:
                self.touched[expr.source] += times
                return WalkResult.SKIP

            def compute(_: object) -> None:
                nonlocal steps
                steps += 1

            def call(expr: Call) -> None:
                nonlocal steps
                if str(getattr(expr.op, "name", "")) in _CALLED:
                    steps += _CALL

            callbacks = ((TensorLoad, load), (_ARITHMETIC, compute), (Call, call))
            tvm_ffi.structural_walk(stmt.value, callbacks, order="pre")
            self.operations += max(steps, 1) * times / at_once
            return WalkResult.SKIP

        tvm_ffi.structural_walk(body, ((tirx.For, loop), (tirx.BufferStore, store)), order="pre")
