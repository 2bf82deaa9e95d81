"""Quantisation and its inverse, element by element.

The formulas are ONNX's, QuantizeLinear-21 and DequantizeLinear-21: a quotient is rounded to the nearest
integer, to the even one if there are two; then the zero point is added, and the sum is limited to the type.

A quotient is rounded by adding 1.5 * 2^23: that sum has no room for a fraction, and its last bits are the
integer (the trick of Hecker, "Let's Get to the (Floating) Point", Game Developer, February 1996). Every
processor has the three instructions as vectors, and all give the same bits.

A division takes as long as ten multiplications. So where the core has a fused multiply-add, a quotient is
computed with the inverse of the scale, and then corrected by its remainder, which is exact: the result is the
rounded quotient, bit by bit (Markstein, "Computation of elementary functions on the IBM RISC System/6000
processor", IBM Journal of Research and Development 34(1), 1990).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm.ir import Call, TensorLoad

from builder.kernels.instructions import instruction
from builder.kernels.rewriter import constant_of, legalise_as_tvm, op_name, shape_of

_BYTES: Final = ("uint8", "int8")
TABLE: Final = 256
# Marks a function that is element-wise although TVM does not see it. TVM's own attribute is 0 for that, which
# TVM takes for a missing attribute.
ELEMENTWISE: Final = "edge.elementwise"
ROUNDER: Final = 1.5 * 2**23
# The range of scales whose inverse, and whose products with bytes, are normal numbers of float32.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100


def quantize(bb: relax.BlockBuilder, call: Call, *, fma: bool) -> relax.Expr:
    """Legalise a quantisation to bytes with one scale; a scale of 1 is not divided by. Else TVM's.

    Parameters
    ----------
    bb
        Receives the call.
    call
        The quantisation.
    fma
        Whether the core has a fused multiply-add.
    """
    x, scale, zero = call.args
    dtype = str(call.ty.dtype)
    if dtype not in _BYTES or str(x.ty.dtype) != "float32" or not (_is_one(scale) and _is_one(zero)):
        return legalise_as_tvm(bb, call)
    info = np.iinfo(dtype)
    factor = constant_of(scale)
    divides = factor is None or factor.item() != 1.0
    is_inverted = divides and fma and (factor is None or _SMALLEST <= factor.item() <= _LARGEST)
    point_value = constant_of(zero)
    # An even zero point may be added before rounding: it changes no tie.
    is_even = point_value is not None and int(point_value.item()) % 2 == 0

    def compute(data: te.Tensor, point: te.Tensor, *divisor: te.Tensor) -> te.Tensor:
        def element(*i: tirx.Var) -> tirx.Expr:
            offset = point(*[0] * len(point.shape)).astype("int32")
            low = (tirx.const(info.min, "int32") - offset).astype("float32")
            high = (tirx.const(info.max, "int32") - offset).astype("float32")
            number = data(*i)
            steps = [each(*[0] * len(each.shape)) for each in divisor]
            if is_inverted:
                # Limited before the division, because an infinity has no remainder.
                ends = low * steps[0], high * steps[0]
                if factor is None:  # it may be negative
                    ends = tirx.min(*ends), tirx.max(*ends)
                limited = _quotient(_limited(number, *ends), *steps)
            elif divides:
                step = steps[0] if factor is not None else _apart_from_zero(steps[0])
                limited = _limited(number / step, low, high)
            else:
                limited = _limited(number, low, high)
            if is_even:
                return _rounded(limited, offset.astype("float32")).astype(dtype)
            return (_rounded(limited) + offset).astype(dtype)

        return te.compute(data.shape, element, name="quantize")

    divisor = [scale] if divides else []
    if is_inverted and factor is not None:
        divisor.append(relax.const((np.float32(1) / factor).astype("float32")))
    return bb.call_te(compute, x, zero, *divisor, primfunc_name_hint="quantize")


def _quotient(x: tirx.Expr, divisor: tirx.Expr, inverse: tirx.Expr | None = None) -> tirx.Expr:
    """Return `x / divisor`, rounded as a division rounds it; a divisor near 0 is replaced."""
    if inverse is None:
        inverse = tirx.const(1.0, "float32") / _apart_from_zero(divisor)
    near = x * inverse
    remainder = _fused(near, -divisor, x)
    return _fused(remainder, inverse, near)


def _apart_from_zero(scale: tirx.Expr) -> tirx.Expr:
    """Return a scale of the request, or the smallest one if it is below: the same bytes on each processor."""
    smallest = tirx.const(_SMALLEST, "float32")
    return tirx.Select(tirx.abs(scale) < smallest, smallest, scale)


def _fused(a: tirx.Expr, b: tirx.Expr, c: tirx.Expr) -> tirx.Expr:
    """Return `a * b + c`, rounded once. TVM's own operator is rounded twice where LLVM finds that faster."""
    return instruction("fma", "float32", a, b, c)


def _limited(x: tirx.Expr, low: tirx.Expr, high: tirx.Expr) -> tirx.Expr:
    return tirx.max(tirx.min(x, high), low)


def _rounded(x: tirx.Expr, added: tirx.Expr | None = None) -> tirx.Expr:
    """Return a number below 2^22, rounded, as int32. Only its lowest byte counts: above is a constant.

    `added` is a small even integer, float32, that is added to the result: `ROUNDER` plus it is exact.
    """
    rounder = tirx.const(ROUNDER, "float32")
    return tirx.reinterpret("int32", x + (rounder if added is None else rounder + added))


def dequantize(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise a dequantisation of integers to float32 with one scale; else TVM's."""
    x, scale, zero = call.args
    whole = str(x.ty.dtype) in (*_BYTES, "int16", "uint16")
    if not whole or str(call.ty.dtype) != "float32" or not (_is_one(scale) and _is_one(zero)):
        return legalise_as_tvm(bb, call)

    def compute(data: te.Tensor, factor: te.Tensor, point: te.Tensor) -> te.Tensor:
        def element(*i: tirx.Var) -> tirx.Expr:
            offset = point(*[0] * len(point.shape)).astype("int32")
            steps = (data(*i).astype("int32") - offset).astype("float32")
            return steps * factor(*[0] * len(factor.shape))

        return te.compute(data.shape, element, name="dequantize")

    return bb.call_te(compute, x, scale, zero, primfunc_name_hint="dequantize")


def is_table(call: Call) -> bool:
    """Whether `call` replaces each byte of a tensor by that of a constant table."""
    if op_name(call) != "relax.take" or str(call.args[1].ty.dtype) != "uint8":
        return False
    table = constant_of(call.args[0])
    return table is not None and table.shape == (TABLE,) and table.dtype == np.uint8


def look_up(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise a table of bytes; `builder.codegen.byte_tables` recognises it by the table's shape."""

    def compute(table: te.Tensor, x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: table[x(*i).astype("int32")], name="look_up")

    table, x = call.args
    return bb.call_te(compute, table, x, primfunc_name_hint="look_up", primfunc_attrs={ELEMENTWISE: 1})


def is_look_up(load: TensorLoad) -> bool:
    """Whether an element, or a vector of them, is read from a table of bytes at the value of another byte."""
    index, *others = load.indices
    if others or str(load.source.dtype) != "uint8" or not isinstance(index, tirx.Cast):
        return False
    is_table = [int(d) for d in load.source.shape if isinstance(d, tirx.IntImm)] == [TABLE]
    return is_table and str(index.value.ty.dtype).startswith("uint8")


def _is_one(tensor: relax.Expr) -> bool:
    return int(np.prod(shape_of(tensor))) == 1
