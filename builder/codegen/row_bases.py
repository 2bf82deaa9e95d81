"""Rows that are far apart get an address each, so that 64-bit ARM loads and stores their vectors in pairs.

One LDP loads two vectors, at an offset of at most 1008 bytes; LDR, which loads one, takes offsets up to 65520
(Arm Architecture Reference Manual for A-profile architecture). LLVM sees that the rows of a tile are a
constant number of bytes apart, addresses all of them from the first, and loads and stores the others vector
by vector. Here it cannot see the constant: it is the result of an instruction. Then each row has an address.

The instruction is a saturating addition of zero. It runs once in a call of a kernel.
"""

from __future__ import annotations

from typing import Final

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import TensorLoad

from builder.kernels.instructions import instruction
from builder.kernels.schedule import SCHEDULE
from builder.kernels.spaces import convolution, depthwise, separable

# The first vectors of a nearer row are loaded in pairs anyway. Measured: with a limit of 512 bytes, LLVM
# keeps so many addresses for pictures of 7 x 7 that a MobileNetV2 takes 1.3 % more instructions, not 0.9 %
# less.
_FAR_BYTES: Final = 1024
_ELEMENT_BYTES: Final = 4
# With 32 bits, LLVM would add and extend the address of each row in each round, instead of adding to it.
_INDEX: Final = "int64"
# The kernels that gain. Winograd's transforms read more rows at once than there are registers for addresses.
_KINDS: Final = (convolution.KIND, depthwise.KIND, separable.KIND)


def separate_rows(mod: tvm.IRModule, arch: str) -> tvm.IRModule:
    """Hide the constants between far rows of float32 in the convolutions of `mod`, on 64-bit ARM.

    `mod`: the functions. Their buffers are flat, and their loops are vectorised and not yet unrolled.
    `arch`: the processor's architecture: on others, `mod` is returned as it is.
    """
    if arch != "aarch64":
        return mod
    changed = {
        var: func.with_body(_Rows(func.body).separated())
        for var, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc) and func.attrs.get(SCHEDULE) in _KINDS
    }
    return tvm.IRModule({**dict(mod.functions.items()), **changed}, attrs=mod.attrs)


class _Rows:
    """The far rows of a function."""

    def __init__(self, body: tirx.Stmt) -> None:
        loops: list[tirx.For] = []
        tvm_ffi.structural_walk(body, (tirx.For, loops.append))
        self._body = body
        self._unrolled = [loop.loop_var for loop in loops if loop.kind == tirx.ForKind.UNROLLED]
        self._serial = [loop.loop_var for loop in loops if loop.kind == tirx.ForKind.SERIAL]
        self._strides: dict[int, tirx.Var] = {}

    def separated(self) -> tirx.Stmt:
        """Return the function's body with hidden constants."""

        def load(expr: TensorLoad) -> TensorLoad:
            index = self._apart(expr.source, expr.indices)
            return expr if index is None else tirx.BufferLoad(expr.source, [index])

        def store(stmt: tirx.BufferStore) -> tirx.BufferStore:
            index = self._apart(stmt.buffer, stmt.indices)
            return stmt if index is None else tirx.BufferStore(stmt.buffer, stmt.value, [index])

        body = tvm_ffi.structural_map(self._body, ((TensorLoad, load), (tirx.BufferStore, store)))
        zero = tirx.const(0, _INDEX)
        hidden = [
            tirx.Bind(var, instruction("aarch64.neon.uqadd", _INDEX, tirx.const(stride, _INDEX), zero))
            for stride, var in self._strides.items()
        ]
        return tirx.SeqStmt([*hidden, body]) if hidden else body

    def _apart(self, buffer: tirx.Buffer, indices: tvm_ffi.Array) -> tirx.Expr | None:
        """Return the index of a vector with hidden constants; None if it has none to hide."""
        index = indices[0]
        if len(indices) != 1 or not isinstance(index, tirx.Ramp) or str(buffer.dtype) != "float32":
            return None
        if buffer.scope() != "global" or str(index.base.ty.dtype) != "int32":
            return None
        base, far = index.base, list[tirx.Expr]()
        for var in self._unrolled:
            stride, rest = _factor(base, var)
            if stride * _ELEMENT_BYTES < _FAR_BYTES:
                continue
            hidden = self._strides.setdefault(stride, tirx.Var(f"stride_{stride}", _INDEX))
            far.append(var.astype(_INDEX) * hidden)
            base = rest
            # A loop over several such rows must not know the constant either.
            for other in self._serial:
                step, rest = _factor(base, other)
                if step and step % stride == 0:
                    far.append(other.astype(_INDEX) * (step // stride) * hidden)
                    base = rest
        return tirx.Ramp(sum(far, base.astype(_INDEX)), index.stride, index.lanes) if far else None


def _factor(index: tirx.Expr, var: tirx.Var) -> tuple[int, tirx.Expr]:
    """Return the constant by which `var` is multiplied in `index`, and the rest; 0 if it is not linear."""
    parts = sym.detect_linear_equation(index, [var])
    if not parts or not isinstance(parts[0], tirx.IntImm):
        return 0, index
    return int(parts[0]), parts[1]
