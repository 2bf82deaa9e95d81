"""Write the rounding of vectors of float32 to bytes as the instructions that 64-bit ARM has for it.

`quantisation` limits a number, rounds it by adding 1.5 * 2^23, and takes the lowest byte of the sum. That
is more than five instructions for four numbers, because LLVM does not know that the limits are numbers. On
ARM, FCVTNS rounds to the nearest integer, to the even one if there are two, and SQXTN and SQXTUN limit
integers while they take half of their bits. The zero point is added in between, limited to 16 bits. That is
three instructions.

Where a byte becomes a float32 again at once, as before a residual addition, it never becomes an integer:
FRINTN rounds the limited number.

The bytes are the same for every number, infinities included. A NaN, for which ONNX defines no byte, becomes
the zero point; elsewhere it becomes the highest byte.

What the instructions compute: Arm Architecture Reference Manual for A-profile architecture (FCVTNS, FRINTN,
SQADD, SQXTN, SQXTUN).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Call

from builder.codegen.bodies import with_bodies
from builder.kernels.instructions import instruction
from builder.kernels.rewriter import op_name
from builder.kernels.spaces.quantisation import ROUNDER

_ARCH: Final = "aarch64"
_LANES: Final = 4  # float32 in a vector
_PAIR: Final = 8  # 16-bit integers in a vector
_NARROW: Final = {"int8": "sqxtn", "uint8": "sqxtun"}


def write_byte_rounding(mod: tvm.IRModule, arch: str) -> tvm.IRModule:
    """Write the roundings to bytes in all functions of `mod`, whose vector loops were vectorised before.

    `arch`: the architecture of the processor that will run them. Nothing changes unless it is `aarch64`.
    """
    if arch != _ARCH:
        return mod
    return with_bodies(mod, lambda body: tvm_ffi.structural_map(body, (tirx.Cast, _written), order="pre"))


@dataclass(frozen=True, slots=True)
class Rounding:
    """A vector of float32 that is rounded to bytes.

    `number`: the numbers, not limited.
    `low`, `high`: the limits, one float32 each: those of the bytes less the zero point.
    `point`: the zero point, one float32 or int32.
    `kind`: `int8` or `uint8`.
    """

    number: tirx.Expr
    low: tirx.Expr
    high: tirx.Expr
    point: tirx.Expr
    kind: str

    @classmethod
    def of(cls, cast: tirx.Cast) -> Rounding | None:
        """Read what `quantisation.quantize` wrote, vectorised; None if it is anything else."""
        kind, lanes = str(cast.ty.dtype).partition("x")[0], int(cast.ty.dtype.lanes)
        if kind not in _NARROW or lanes % _PAIR:
            return None
        value, point = cast.value, None
        if isinstance(value, tirx.Add):  # an odd zero point, or one that is not known
            value, point = value.a, value.b
            if not isinstance(point, tirx.Broadcast):
                return None
            point = point.value
        if not (isinstance(value, Call) and op_name(value) == "tirx.reinterpret"):
            return None
        total = value.args[0]
        if not (isinstance(total, tirx.Add) and isinstance(total.b, tirx.Broadcast)):
            return None
        rounder = total.b.value
        if point is None and isinstance(rounder, tirx.Add):
            rounder, point = rounder.a, rounder.b
        if not _is_rounder(rounder):
            return None
        above = total.a
        if not (isinstance(above, tirx.Max) and isinstance(above.a, tirx.Min)):
            return None
        low, high = above.b, above.a.b
        if not (isinstance(low, tirx.Broadcast) and isinstance(high, tirx.Broadcast)):
            return None
        point = tirx.const(0, "int32") if point is None else point
        # The simplifier may have joined the limits of the bytes with those of an activation.
        info = np.iinfo(kind)
        if not (_is_limit(low.value, int(info.min), point) and _is_limit(high.value, int(info.max), point)):
            return None
        return cls(above.a.a, low.value, high.value, point, kind)

    def bytes(self) -> tirx.Expr:
        """Return the bytes."""
        lanes = int(self.number.ty.dtype.lanes)
        numbers = tirx.Var("numbers", f"float32x{lanes}")
        point = tirx.Broadcast(self.point.astype("int16"), _PAIR)

        def quarter(first: int) -> tirx.Expr:
            part = _lanes(numbers, first, _LANES)
            whole = instruction("aarch64.neon.fcvtns.v4i32.v4f32", "int32x4", part)
            return instruction("aarch64.neon.sqxtn.v4i16", "int16x4", whole)

        def half(first: int) -> tirx.Expr:
            both = _joined([quarter(first), quarter(first + _LANES)])
            moved = instruction("sadd.sat.v8i16", f"int16x{_PAIR}", both, point)
            return instruction(f"aarch64.neon.{_NARROW[self.kind]}.v8i8", f"{self.kind}x{_PAIR}", moved)

        return tirx.Let(numbers, self.number, _joined([half(first) for first in range(0, lanes, _PAIR)]))

    def floats(self) -> tirx.Expr:
        """Return the bytes as float32."""
        lanes = int(self.number.ty.dtype.lanes)
        dtype = f"float32x{lanes}"
        below = instruction(f"minnum.v{lanes}f32", dtype, self.number, tirx.Broadcast(self.high, lanes))
        limited = instruction(f"maxnum.v{lanes}f32", dtype, below, tirx.Broadcast(self.low, lanes))
        whole = instruction(f"roundeven.v{lanes}f32", dtype, limited)
        return whole + tirx.Broadcast(self.point.astype("float32"), lanes)


def _is_rounder(value: tirx.Expr) -> bool:
    return isinstance(value, tirx.FloatImm) and float(value.value) == ROUNDER


def _is_limit(limit: tirx.Expr, end: int, point: tirx.Expr) -> bool:
    """Whether a float32 is the end of the bytes, less the zero point."""
    if not isinstance(limit, tirx.Cast):
        return False
    whole = point.value if isinstance(point, tirx.Cast) and _is_float(point) else point
    return bool(sym.Analyzer().can_prove_equal(limit.value + whole, tirx.const(end, "int32")))


def _is_float(value: tirx.Expr) -> bool:
    return str(value.ty.dtype).startswith("float32")


def _written(cast: tirx.Cast) -> tirx.Expr:
    inner = cast.value
    if _is_float(cast) and isinstance(inner, tirx.Cast):
        rounding = Rounding.of(inner)
        return cast if rounding is None else rounding.floats()
    rounding = Rounding.of(cast)
    return cast if rounding is None else rounding.bytes()


def _lanes(vector: tirx.Expr, first: int, count: int) -> tirx.Expr:
    return tirx.Shuffle([vector], [tirx.const(first + k, "int32") for k in range(count)])


def _joined(vectors: list[tirx.Expr]) -> tirx.Expr:
    """Return one vector with the lanes of all."""
    if len(vectors) == 1:
        return vectors[0]
    lanes = sum(int(vector.ty.dtype.lanes) for vector in vectors)
    return tirx.Shuffle(vectors, [tirx.const(k, "int32") for k in range(lanes)])
