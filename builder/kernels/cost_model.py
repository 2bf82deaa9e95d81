"""An estimate of the least time that one core needs for a scheduled kernel.

The estimate is a roofline's: the time of the arithmetic or that of the memory traffic, whichever is longer.
It is good enough to decide whether waking other cores pays (`builder.kernels.postprocessing`), not to choose
between schedules.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Call, Range, TensorLoad
from tvm_ffi import WalkResult

from builder.kernels.rewriter import op_name
from builder.kernels.spaces.vector_math import formula_of
from builder.target.device_target import DeviceTarget

_CALL: Final = 20  # operations in exp, erf and the like, which are called for each element
_CALLED: Final = {
    f"tirx.{name}"
    for name in (
        *("exp", "exp2", "exp10", "log", "log2", "log10", "log1p", "pow", "sqrt", "erf", "sigmoid"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh"),
        "atanh",
    )
}
_ARITHMETIC: Final = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.FloorDiv, tirx.Max, tirx.Min),
    *(tirx.Select, tirx.Shuffle),
)


def time_us(func: tirx.PrimFunc, target: DeviceTarget) -> float:
    """Estimate the least time, in microseconds, that one core of `target` needs for a scheduled function."""
    work = _Work(target.simd.lanes)
    work.add(func.body, times=1.0, at_once=1.0)
    operations = 2 * target.core.products_per_ns
    moved = 0.0
    for buffer, touched in work.touched.items():
        elements = math.prod(_extent(d) for d in buffer.ty.shape)
        moved += min(touched, elements) * np.dtype(str(buffer.ty.dtype)).itemsize
    return max(work.operations / operations, moved / target.core.cache_bytes_per_ns) / 1e3


def calls_library(func: tirx.PrimFunc) -> bool:
    """Whether `func` calls the C library, as for `pow`, for each element; a square root is an instruction."""
    calls: list[Call] = []
    tvm_ffi.structural_walk(func.body, (Call, calls.append))
    names = {op_name(call) for call in calls if formula_of(call) is None}
    return not (_CALLED - {"tirx.sqrt"}).isdisjoint(names)


def _extent(expr: object) -> int:
    """Return the extent of a buffer's axis; 1 if it is not a constant."""
    return int(expr) if isinstance(expr, (int, tirx.IntImm)) else 1


def _lanes(expr: tirx.Expr) -> int:
    """Return how many elements a loaded or stored value has: more than one if it is written as a vector."""
    return int(expr.ty.dtype.lanes)


@dataclass
class _Work:
    """Counts over a function's loops.

    `operations`: arithmetic, copies and calls; an operation on a vector counts once.
    `touched`: buffer -> elements read and written; an element counts each time.
    """

    lanes: int
    operations: float = 0.0
    touched: dict[Any, float] = field(default_factory=lambda: defaultdict(float))
    bounds: sym.Analyzer = field(default_factory=sym.Analyzer)

    def add(self, body: tirx.Stmt, *, times: float, at_once: float) -> None:
        """Add the work of `body`, which runs `times` times, `at_once` of them in one vector."""

        def loop(stmt: tirx.For) -> WalkResult:
            extent = self._most(stmt.extent)
            self.bounds.bind(stmt.loop_var, Range.from_min_extent(stmt.min, max(extent, 1)))
            vector = min(extent, self.lanes) if stmt.kind == tirx.ForKind.VECTORIZED else 1
            self.add(stmt.body, times=times * extent, at_once=at_once * vector)
            return WalkResult.SKIP

        def store(stmt: tirx.BufferStore) -> WalkResult:
            self.touched[stmt.buffer] += times * _lanes(stmt.value)
            steps = 0.0

            def load(expr: TensorLoad) -> WalkResult:
                self.touched[expr.source] += times * _lanes(expr)
                return WalkResult.SKIP

            def compute(_: object) -> None:
                nonlocal steps
                steps += 1

            def call(expr: Call) -> None:
                nonlocal steps
                if op_name(expr) in _CALLED:
                    steps += _CALL

            callbacks = ((TensorLoad, load), (_ARITHMETIC, compute), (Call, call))
            tvm_ffi.structural_walk(stmt.value, callbacks, order="pre")
            self.operations += max(steps, 1) * times / at_once
            return WalkResult.SKIP

        tvm_ffi.structural_walk(body, ((tirx.For, loop), (tirx.BufferStore, store)), order="pre")

    def _most(self, extent: object) -> int:
        """Return the extent of a loop, or its upper bound: the last part of a ragged loop has fewer rounds.

        1 if it has no bound, as where it depends on data.
        """
        if isinstance(extent, (int, tirx.IntImm)):
            return int(extent)
        most = int(self.bounds.const_int_bound(extent).max_value)
        return max(1, most) if most < sym.ConstIntBound.POS_INF else 1
