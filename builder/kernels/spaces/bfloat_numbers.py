"""Numbers of bfloat16, as 16-bit integers: the upper half of the bits of a float32.

TVM has a type for them, but computes with it in float32 only, and makes float32 of buffers between loops. So
kernels read and write the bits, and `builder.codegen.dot_products` knows the two forms that are written here.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import tvm_ffi
from tvm import te, tirx
from tvm.ir import Call, TensorLoad

from builder.kernels.rewriter import op_name

BITS: Final = "uint16"
_INFINITY: Final = 0x7F800000
_REINTERPRET: Final = "tirx.reinterpret"
_QUIET: Final = 0x40  # the first bit of a NaN's fraction, which makes sure that it stays one


def bits_of(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return numbers rounded to the nearest bfloat16, ties to even, as their bits."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > _INFINITY
    return np.where(is_nan, (bits >> np.uint32(16)) | np.uint32(_QUIET), rounded).astype(np.uint16)


def numbers_of(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return the float32 numbers that bits of bfloat16 stand for."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def rounded(x: te.Tensor) -> te.Tensor:
    """Return a tensor of float32 as bfloat16; the rounding is that of `bits_of`.

    A NaN is chosen by a mask of bits. With a choice between two values, TVM writes a branch where `x` is a
    formula such as GELU, and a branch calls the C library for each element (`builder.codegen.named_values`).
    """

    def element(*i: tirx.Var) -> tirx.Expr:
        bits = tirx.reinterpret("uint32", x(*i))
        upper = bits >> _word(16)
        nearest = (bits + (upper & _word(1)) + _word(0x7FFF)) >> _word(16)
        size = tirx.reinterpret("int32", bits & _word(0x7FFFFFFF))
        below = tirx.const(_INFINITY, "int32") - size  # negative for a NaN
        is_nan = tirx.reinterpret("uint32", below >> tirx.const(31, "int32"))  # all bits, or none
        return ((nearest & ~is_nan) | ((upper | _word(_QUIET)) & is_nan)).astype(BITS)

    return te.compute(x.shape, element, name="rounded")


def _word(value: int) -> tirx.Expr:
    return tirx.const(value, "uint32")


def as_factor(element: tirx.Expr) -> tirx.Expr:
    """Return an element of a factor, or a vector, as its products are added.

    A bfloat16 becomes a float32, an integer an int32.
    """
    dtype, *lanes = str(element.ty.dtype).split("x")

    def of(kind: str) -> str:
        return "x".join([kind, *lanes])

    if dtype != BITS:
        return element.astype(of("int32"))
    return tirx.reinterpret(of("float32"), element.astype(of("uint32")) << tirx.const(16, of("uint32")))


def unwidened(factor: tirx.Expr) -> tirx.Expr:
    """Return a factor of a product without its conversion to a wider type, by a cast or by `as_factor`."""
    if isinstance(factor, tirx.Cast):
        return factor.value
    loads: list[TensorLoad] = []
    if isinstance(factor, Call) and op_name(factor) == _REINTERPRET:
        tvm_ffi.structural_walk(factor, (TensorLoad, loads.append))
    is_bfloat = len(loads) == 1 and str(loads[0].source.dtype) == BITS
    return loads[0] if is_bfloat else factor
