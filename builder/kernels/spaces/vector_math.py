"""`exp`, `log`, `sin`, `tanh`, `erf` and functions made of them, as polynomials, so that they vectorise.

LLVM turns `exp` of a vector into a library call for each element, which costs a hundred times the arithmetic.
Here they are plain arithmetic, accurate to a few units in the last place of a float32. A call that
`formula_of` knows stays one until code is generated.

Promises: for every float32, infinities and NaN included, the result is what the function's definition gives,
except that zero stands for results below the smallest normal number, 1.2e-38. Such denormal numbers make each
operation on them a hundred cycles longer on some processors, and a masked softmax has many of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tvm import tirx
from tvm.ir import Call

from builder.kernels.rewriter import op_name

# Adding 1.5 * 2**23 to a float32 rounds it to an integer, which is then in the low bits of the sum.
_ROUND: Final = 12582912.0
_ROUND_BITS: Final = 0x4B400000
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# exp of more is infinite, exp of less is below the smallest normal number.
_LARGEST, SMALLEST = 88.7228317, -87.3365402
# exp(r) on [-ln2/2, ln2/2], as a Taylor series to the sixth power: its relative error is below 2e-8.
_EXP: Final = tuple(1.0 / math.factorial(n) for n in range(7))
# Rational approximations x * p(x**2) / q(x**2) of tanh and erf, highest power first, up to the limit from
# where on they round to 1: those of Eigen's `generic_fast_tanh_float` and `generic_fast_erf_float`.
_TANH_LIMIT: Final = 10.0  # where the quotient is more than 1, whatever rounding does
_TANH_P: Final = (
    -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
    1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03,
)  # fmt: skip
_TANH_Q: Final = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
_ERF_LIMIT: Final = 3.832506856900711
_ERF_P: Final = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
    -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
_ERF_Q: Final = (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
    -1.42647390514189e-02,
)  # fmt: skip
# log(1 + r) = r - r**2 / 2 + r**3 * p(r) for 1 + r from sqrt(1/2) to sqrt(2): a least-squares fit of p at
# Chebyshev's points, highest power first.
_LOG: Final = (
    0.07148994505405426, -0.1157149076461792, 0.11661966145038605, -0.12411023676395416, 0.14249876141548157,
    -0.1666848063468933, 0.2000070959329605, -0.24999989569187164, 0.3333333134651184,
)  # fmt: skip
# 2 / pi in parts of 27 bits: the product of one with a float32 is exact in float64.
_TWO_OVER_PI: Final = tuple(
    map(
        float.fromhex,
        (
            "0x1.45f306cp-1", "0x1.c9c8828p-29", "0x1.29fc27p-56", "0x1.5f47d4cp-82", "0x1.3770368p-110",
            "0x1.629599p-136", "0x1.e21c82p-163",
        ),
    )
)  # fmt: skip
# sin(r) = r + r**3 * p(r**2) and cos(r) = 1 - r**2 / 2 + r**4 * q(r**2) up to pi / 4, fitted like `_LOG`.
_SIN: Final = (-1.9515888239240853e-4, 8.332165292889021e-3, -0.16666654671295117)
_COS: Final = (2.4435779096557544e-5, -1.388734087036922e-3, 0.041666646224474926)
# Adding 1.5 * 2**54 to a float64 below 2**53 rounds it to a multiple of 4, and 1.5 * 2**52 to an integer.
_ROUND_TO_FOURS, _ROUND_TO_ONES = 1.5 * 2.0**54, 1.5 * 2.0**52
_ROOT_OF_HALF_BITS: Final = 0x3F3504F3
_SMALLEST_NORMAL_BITS, _INFINITY_BITS = 0x00800000, 0x7F800000
_DENORMAL_EXPONENT: Final = -149  # a denormal number is its bits, as an integer, times 2**-149

# Names a value that is used several times.
Bind = Callable[[tirx.Expr], tirx.Expr]
Formula = Callable[[tirx.Expr, Bind], tirx.Expr]


def _repeat(value: tirx.Expr) -> tirx.Expr:
    """Name nothing: a tensor expression repeats a value at each use."""
    return value


def _number(value: float) -> tirx.Expr:
    return tirx.const(value, "float32")


def _select(condition: tirx.Expr, yes: tirx.Expr | float, no: tirx.Expr | float) -> tirx.Expr:
    """Choose for each element; numbers are as wide as the other value."""
    wide = no if isinstance(yes, float) else yes
    dtype = str(wide.ty.dtype)  # type: ignore[union-attr]  # one of both is an expression
    return tirx.Select(condition, *(tirx.const(v, dtype) if isinstance(v, float) else v for v in (yes, no)))


def _polynomial(x: tirx.Expr, coefficients: Sequence[float]) -> tirx.Expr:
    """Return a polynomial, highest power first, by Horner's scheme."""
    value = _number(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + _number(coefficient)
    return value


def _reduced(x: tirx.Expr, bind: Bind) -> tuple[tirx.Expr, tirx.Expr]:
    """Return `n`, int32, and `exp(r)` with `x = n * ln 2 + r`. If `x` is NaN, so is `exp(r)`."""
    shifted = bind(x * _number(math.log2(math.e)) + _number(_ROUND))
    # Take the integer from the bits: the compiler would simplify (x + c) - c to x.
    floats = str(shifted.ty.dtype)
    integer = bind(
        tirx.reinterpret(floats.replace("float", "int"), shifted) - tirx.const(_ROUND_BITS, "int32")
    )
    n = bind(tirx.Cast(floats, integer))
    r = bind(x - n * _number(_LN2_HIGH) - n * _number(_LN2_LOW))
    return integer, _polynomial(r, _EXP[::-1])


def _power_of_two(exponent: tirx.Expr) -> tirx.Expr:
    """Return 2 to an int32 exponent of at least -126 and at most 127."""
    bits = (exponent + tirx.const(127, "int32")) << tirx.const(23, "int32")
    return tirx.reinterpret(str(exponent.ty.dtype).replace("int", "float"), bits)


def exp(x: tirx.Expr, bind: Bind) -> tirx.Expr:
    """Return the exponential of a float32 `x`, or of a vector of them."""
    integer, series = _reduced(x, bind)
    half = bind(integer >> tirx.const(1, "int32"))  # 2**128 is not a float32: multiply by two smaller powers
    value = series * _power_of_two(half) * _power_of_two(integer - half)
    value = _select(x < _number(SMALLEST), 0.0, value)
    return _select(x > _number(_LARGEST), math.inf, value)


def exp_of_negative(x: tirx.Expr, smallest: float = SMALLEST, bind: Bind = _repeat) -> tirx.Expr:
    """Return the exponential of a float32 `x` that is at most zero, and zero if `x` is below `smallest`."""
    integer, series = _reduced(x, bind)
    return _select(x < _number(smallest), 0.0, series * _power_of_two(integer))


def sigmoid(x: tirx.Expr, bind: Bind) -> tirx.Expr:
    """Return 1 / (1 + exp(-x)) of a float32 `x`, or of a vector of them."""
    power = bind(exp_of_negative(bind(_number(0.0) - tirx.abs(x)), bind=bind))
    return _select(x < _number(0.0), power, 1.0) / (_number(1.0) + power)


def log(x: tirx.Expr, bind: Bind) -> tirx.Expr:
    """Return the natural logarithm of a float32 `x`, or of a vector of them, denormal numbers included.

    Special cases are distinguished by their bits, as comparisons take denormal numbers for zeros while a
    kernel runs.
    """
    floats = str(x.ty.dtype)
    integers = floats.replace("float", "int")

    def integer(value: int) -> tirx.Expr:
        return tirx.const(value, integers)

    def number(value: float) -> tirx.Expr:
        return tirx.const(value, floats)

    bits = bind(tirx.reinterpret(integers, x))
    denormal = bits < integer(_SMALLEST_NORMAL_BITS)
    normal_bits = tirx.reinterpret(integers, tirx.Select(denormal, tirx.Cast(floats, bits), x))
    shifted = bind(normal_bits - integer(_ROOT_OF_HALF_BITS))
    exponent = shifted >> integer(23)
    exponent = exponent + tirx.Select(denormal, integer(_DENORMAL_EXPONENT), integer(0))
    n = bind(tirx.Cast(floats, exponent))
    mantissa_bits = (shifted & integer(0x007FFFFF)) + integer(_ROOT_OF_HALF_BITS)
    r = bind(tirx.reinterpret(floats, mantissa_bits) - number(1.0))
    square = bind(r * r)
    # The small terms first.
    tail = _polynomial(r, _LOG) * square * r + n * number(_LN2_LOW) - number(0.5) * square
    value = r + tail + n * number(_LN2_HIGH)
    value = tirx.Select(bits >= integer(_INFINITY_BITS), x, value)  # infinity and NaN
    # Of a negative number: NaN, or `x` itself if it is a NaN with a sign.
    nan = tirx.Select(bits > integer(_INFINITY_BITS - 2**31), x, number(math.nan))
    value = tirx.Select(bits < integer(0), nan, value)
    return tirx.Select((bits & integer(0x7FFFFFFF)) == integer(0), number(-math.inf), value)


def _wave(x: tirx.Expr, bind: Bind, quarters: int) -> tirx.Expr:
    """Return the sine of a float32 `x`, or of a vector of them, `quarters` quarter turns later."""
    floats = str(x.ty.dtype)
    doubles, integers = floats.replace("float32", "float64"), floats.replace("float", "int")

    def number(value: float, dtype: str = doubles) -> tirx.Expr:
        return tirx.const(value, dtype)

    # The quarter turns in `x`, less a multiple of 4: exact, however large `x` is.
    wide = bind(tirx.Cast(doubles, x))
    turned = number(0.0)
    for part in _TWO_OVER_PI:
        turns = bind(wide * number(part))
        rest = turns - ((turns + number(_ROUND_TO_FOURS)) - number(_ROUND_TO_FOURS))
        # A product of 2**53 and more is a multiple of 4 itself.
        rest = tirx.Select(tirx.abs(turns) < number(2.0**53), rest, number(0.0))
        turned = turned + rest
    turned = bind(turned)
    shifted = bind(turned + number(_ROUND_TO_ONES))
    r = bind(tirx.Cast(floats, (turned - (shifted - number(_ROUND_TO_ONES))) * number(math.pi / 2)))
    # The integer is in the lowest bits.
    whole = tirx.Cast(integers, tirx.reinterpret(integers.replace("int32", "int64"), shifted))
    quarter = bind(whole + tirx.const(quarters, integers))
    square = bind(r * r)
    sine = r + r * square * _polynomial(square, _SIN)
    cosine = number(1.0, floats) - number(0.5, floats) * square + square * square * _polynomial(square, _COS)
    zero = tirx.const(0, integers)
    value = bind(tirx.Select((quarter & tirx.const(1, integers)) == zero, sine, cosine))
    value = tirx.Select((quarter & tirx.const(2, integers)) == zero, value, number(0.0, floats) - value)
    # Infinity and NaN have no sine.
    return tirx.Select(tirx.abs(x) < number(math.inf, floats), value, number(math.nan, floats))


def sin(x: tirx.Expr, bind: Bind) -> tirx.Expr:
    """Return the sine of a float32 `x`, or of a vector of them."""
    return _wave(x, bind, 0)


def cos(x: tirx.Expr, bind: Bind) -> tirx.Expr:
    """Return the cosine of a float32 `x`, or of a vector of them."""
    return _wave(x, bind, 1)


def _clamped(x: tirx.Expr, limit: float) -> tirx.Expr:
    """Return `x` within plus and minus `limit`; NaN stays NaN.

    `min` and `max` become comparisons that choose the second operand if either is NaN. They repeat their
    operand only in machine code: a `Select` would double the expression, and formulas of formulas explode.
    """
    return tirx.max(_number(-limit), tirx.min(_number(limit), x))


def _quotient(x: tirx.Expr, p: Sequence[float], q: Sequence[float], bind: Bind) -> tirx.Expr:
    """Return `x * p(x**2) / q(x**2)` within plus and minus 1."""
    # With a last coefficient of about 1, a small x stays a normal number.
    above, below = [c / q[-1] for c in p], [c / q[-1] for c in q]
    square = bind(x * x)
    return _clamped(bind(x * _polynomial(square, above) / _polynomial(square, below)), 1.0)


def tanh(x: tirx.Expr, bind: Bind) -> tirx.Expr:
    """Return the hyperbolic tangent of a float32 `x`."""
    return _quotient(bind(_clamped(x, _TANH_LIMIT)), _TANH_P, _TANH_Q, bind)


def erf(x: tirx.Expr, bind: Bind) -> tirx.Expr:
    """Return the error function of a float32 `x`, or of a vector of them."""
    return _quotient(bind(_clamped(x, _ERF_LIMIT)), _ERF_P, _ERF_Q, bind)


def formula_of(call: Call) -> Formula | None:
    """Return the formula of a call such as `log(x)` of float32, or of a vector; None if there is none."""
    formula = _OF_CALLS.get(op_name(call))
    return formula if formula and str(call.ty.dtype).startswith("float32") else None


_OF_CALLS: Final[Mapping[str, Formula]] = {
    "tirx.exp": exp,
    "tirx.log": log,
    "tirx.sin": sin,
    "tirx.cos": cos,
    "tirx.sigmoid": sigmoid,
    "tirx.tanh": tanh,
    "tirx.erf": erf,
}
