"""The kernels that no design space orders, and their share of a network's work.

Work is the time that `builder.kernels.cost_model` estimates for one core: the arithmetic or the memory
traffic of the scheduled loops, whichever takes longer. So one number covers products and element-wise
kernels, and loops that stayed scalar count as long as they take.

Left out is what a design space would not improve: copies, element-wise kernels whose loops are vectorised,
kernels that are shorter than `_WORTH_A_SPACE_US`, and those that run once, at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm_ffi import WalkResult

from builder.bundles.package import UncoveredKernel
from builder.compiling.lower import LoweredModule
from builder.importer.onnx_import import ImportedModel
from builder.kernels.cost_model import calls_library, time_us
from builder.kernels.rewriter import op_name
from builder.kernels.schedule import FALLBACK, FAULT, OPAQUE, SCHEDULE
from builder.target.device_target import DeviceTarget

_WORTH_A_SPACE_US: Final = 1.0  # about what a call of a kernel costs
_ARITHMETIC: Final = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)


def uncovered_kernels(lowered: LoweredModule, target: DeviceTarget) -> tuple[UncoveredKernel, ...]:
    """Return the kernels without a design space, those with the most work first."""
    kernels = {var.name_hint: func for var, func in lowered.kernels.functions.items()}
    calls = _calls(lowered.main)
    times = {name: time_us(kernels[name], target) for name in set(calls)}
    total = sum(times[name] for name in calls)
    found = [
        UncoveredKernel(name, calls.count(name) * time / total)
        for name, time in times.items()
        if time >= _WORTH_A_SPACE_US and _needs_space(kernels[name])
    ]
    return tuple(sorted(found, key=lambda kernel: (-kernel.share, kernel.name)))


def fallbacks(model: ImportedModel, lowered: LoweredModule) -> tuple[str, ...]:
    """Return a line for each rewrite and each design space that failed, so that nodes or loops are plain."""
    nodes = [f"not rewritten: {line}" for line in model.unrewritten]
    kernels = [
        f"slow kernel {var.name_hint}: {fault}"
        for var, func in lowered.kernels.functions.items()
        if (fault := func.attrs.get(FAULT))
    ]
    return (*nodes, *sorted(kernels))


def _calls(main: relax.Function) -> Sequence[str]:
    """Return the kernel of each call that depends on an input: the others run once, at load."""
    names = []
    varying = set(main.params)
    for block in main.body.blocks:
        for binding in block.bindings:
            if varying.isdisjoint(relax.analysis.free_vars(binding.value)):
                continue
            varying.add(binding.var)
            if isinstance(binding.value, Call) and op_name(binding.value) == "relax.call_tir":
                names.append(str(binding.value.args[0].name_hint))
    return names


def _needs_space(func: tirx.PrimFunc) -> bool:
    """Whether no design space ordered the loops of `func`, and one could improve them."""
    if str(func.attrs[SCHEDULE]) not in (FALLBACK, OPAQUE):
        return False
    return calls_library(func) or _reduces(func) or _has_scalar_arithmetic(func)


def _reduces(func: tirx.PrimFunc) -> bool:
    found: list[bool] = []

    def block(stmt: st.SBlock) -> None:
        found.append(any(int(v.iter_type) == tirx.IterVar.CommReduce for v in stmt.iter_vars))

    tvm_ffi.structural_walk(func.body, (st.SBlock, block))
    return any(found)


def _has_scalar_arithmetic(func: tirx.PrimFunc) -> bool:
    """Whether values are computed in a loop that is not vectorised; an index's arithmetic does not count."""
    found: list[tirx.BufferStore] = []

    def loop(stmt: tirx.For) -> WalkResult:
        vector = stmt.kind == tirx.ForKind.VECTORIZED
        return WalkResult.SKIP if vector else WalkResult.ADVANCE

    def store(stmt: tirx.BufferStore) -> WalkResult:
        if _computes(stmt.value):
            found.append(stmt)
        return WalkResult.SKIP

    tvm_ffi.structural_walk(func.body, ((tirx.For, loop), (tirx.BufferStore, store)), order="pre")
    return bool(found)


def _computes(value: tirx.Expr) -> bool:
    """Whether an element's value is computed from other values, rather than read."""
    found: list[object] = []

    def load(_: tvm.ir.TensorLoad) -> WalkResult:
        return WalkResult.SKIP  # do not enter the index

    tvm_ffi.structural_walk(value, ((tvm.ir.TensorLoad, load), (_ARITHMETIC, found.append)), order="pre")
    return bool(found)
