"""`exp`, `tanh`, `erf` and functions made of them, as polynomials, so that they vectorise.

LLVM turns `exp` of a vector into a library call for each element, which costs a hundred times the arithmetic.
Here they are plain arithmetic on float32, accurate to a few units in the last place.
"""

from __future__ import annotations

import math
from typing import Final

from tvm import relax, te, tirx, topi
from tvm.ir import Call

from builder.kernels.rewriter import legalise_as_tvm

# Adding 1.5 * 2**23 to a float32 rounds it to an integer, which is then in the low bits of the sum.
_ROUND: Final = 12582912.0
_ROUND_BITS: Final = 0x4B400000
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_LARGEST, _SMALLEST = 88.3762626647949, -87.3365478515625
# exp(r) on [-ln2/2, ln2/2], as a Taylor series to the sixth power: its relative error is below 2e-8.
_EXP: Final = tuple(1.0 / math.factorial(n) for n in range(7))


def exp(x: tirx.Expr) -> tirx.Expr:
    """Return the exponential of a float32 `x`, clamped to [-87.3, 88.3]: the result is a normal number."""
    x = tirx.max(tirx.min(x, tirx.const(_LARGEST, "float32")), tirx.const(_SMALLEST, "float32"))
    shifted = x * tirx.const(math.log2(math.e), "float32") + tirx.const(_ROUND, "float32")
    # Take the integer from the bits: the compiler would simplify (x + c) - c to x.
    integer = tirx.reinterpret("int32", shifted) - tirx.const(_ROUND_BITS, "int32")
    n = integer.astype("float32")
    r = x - n * tirx.const(_LN2_HIGH, "float32") - n * tirx.const(_LN2_LOW, "float32")
    series = tirx.const(_EXP[-1], "float32")
    for coefficient in reversed(_EXP[:-1]):
        series = series * r + tirx.const(coefficient, "float32")
    exponent = integer + tirx.const(127, "int32")
    return series * tirx.reinterpret("float32", exponent << tirx.const(23, "int32"))


def sigmoid(x: tirx.Expr) -> tirx.Expr:
    """Return 1 / (1 + exp(-x)) of a float32 `x`."""
    return tirx.const(1.0, "float32") / (tirx.const(1.0, "float32") + exp(tirx.const(0.0, "float32") - x))


def _elementwise(formula: object, name: str) -> object:
    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: formula(x(*i)), name=name)  # type: ignore[operator]

    return compute


def legalise(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `exp`, `sigmoid`, `silu`, `tanh`, `erf` or `gelu`: ours for float32, TVM's for other types."""
    name = str(call.op.name).rsplit(".", 1)[-1]
    if str(call.ty.dtype) != "float32":
        return legalise_as_tvm(bb, call)
    return bb.call_te(_FORMULAS[name], call.args[0], primfunc_name_hint=name)


def _gelu(x: te.Tensor) -> te.Tensor:
    scaled = te.compute(x.shape, lambda *i: x(*i) * tirx.const(math.sqrt(0.5), "float32"), name="scaled")
    erf = topi.fast_erf(scaled)
    half = tirx.const(0.5, "float32")
    return te.compute(x.shape, lambda *i: x(*i) * (half + half * erf(*i)), name="gelu")


_FORMULAS: Final = {
    "exp": _elementwise(exp, "exp"),
    "sigmoid": _elementwise(sigmoid, "sigmoid"),
    "silu": _elementwise(lambda x: x * sigmoid(x), "silu"),
    "tanh": topi.fast_tanh,
    "erf": topi.fast_erf,
    "gelu": _gelu,
}
OPERATORS: Final = ("relax.exp", "relax.sigmoid", "relax.nn.silu", "relax.tanh", "relax.erf", "relax.nn.gelu")
