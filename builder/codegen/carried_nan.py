"""Maxima and minima of real numbers as ARM's instructions, which are NaN if either number is.

TVM's maximum is a comparison and a choice. LLVM makes one instruction of them only where the second number is
a constant; that one drops NaN. FMAX (Arm Architecture Reference Manual for A-profile architecture) is one
instruction for any two numbers, and carries NaN. Maxima whose second number is a constant stay as they are:
they drop NaN, as their kernels may expect.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

import tvm
import tvm_ffi
from tvm import tirx

from builder.codegen.bodies import with_bodies
from builder.kernels.instructions import number_of
from builder.kernels.spaces.limits import CARRYING


def carry_nan(mod: tvm.IRModule, arch: str) -> tvm.IRModule:
    """Write the maxima and minima of all functions of `mod`; nothing may simplify them afterwards.

    `arch`: the machine's name, such as `aarch64`. Functions for machines without such instructions stay.
    Raises `BuildError` if TVM's LLVM lacks the instruction.
    """
    dtypes = CARRYING.get(arch)
    if dtypes is None:
        return mod
    numbers = {kind: number_of(name) for kind, name in _NAMES.items()}

    def write(expr: tirx.Max | tirx.Min) -> tirx.Expr:
        if not _is_written(expr, dtypes):
            return expr
        return tirx.call_llvm_pure_intrin(str(expr.ty.dtype), numbers[type(expr)], expr.a, expr.b)

    return with_bodies(mod, lambda body: tvm_ffi.structural_map(body, [(tirx.Max, write), (tirx.Min, write)]))


_NAMES: Final = {tirx.Max: "maximum", tirx.Min: "minimum"}


def _is_written(expr: tirx.Max | tirx.Min, dtypes: AbstractSet[str]) -> bool:
    second = expr.b.value if isinstance(expr.b, tirx.Broadcast) else expr.b
    return str(expr.ty.dtype).partition("x")[0] in dtypes and not isinstance(second, tirx.FloatImm)
