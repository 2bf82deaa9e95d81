"""Conditions that are used as numbers, such as `x % (y < 0)`, become choices between 1 and 0.

TVM 0.27 gives the quotient inside a remainder a name, looks into what it is made of when it generates code
for LLVM, and fails on a cast of a vector of booleans. The machine code is the same.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx

from builder.codegen.bodies import with_bodies


def write_choices(mod: tvm.IRModule) -> tvm.IRModule:
    """Write casts of vectors of booleans in all functions of `mod` as choices."""
    return with_bodies(mod, lambda body: tvm_ffi.structural_map(body, (tirx.Cast, _choice)))


def _choice(cast: tirx.Cast) -> tirx.Expr:
    if not str(cast.value.ty.dtype).startswith("boolx"):
        return cast
    one, zero = (tirx.const(number, str(cast.ty.dtype)) for number in (1, 0))
    return tirx.Select(cast.value, one, zero)
