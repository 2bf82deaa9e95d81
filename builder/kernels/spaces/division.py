"""Quotients and remainders of integers: `divide`, `floor_divide`, `mod` and `floor_mod`.

Promises a result for all integers, the same on every processor. x86 ends a process that divides by 0, or the
least integer by -1; ARM answers 0 and the least integer. Here a quotient by 0 is 0, the least integer by -1
is itself, and the remainder of both is 0, as in NumPy. A constant divisor that is neither is not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm.ir import Call

from builder.calls.divisors import is_harmless
from builder.kernels.rewriter import constant_of, legalise_as_tvm, shape_of
from builder.kernels.spaces.limits import element_of

Quotient = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]

_QUOTIENTS: Final[Mapping[str, Quotient]] = {
    "relax.divide": tirx.truncdiv,
    "relax.floor_divide": tirx.floordiv,
}
_REMAINDERS: Final[Mapping[str, Quotient]] = {"relax.mod": tirx.truncmod, "relax.floor_mod": tirx.floormod}
OPERATORS: Final = (*_QUOTIENTS, *_REMAINDERS)


def _is_plain(divisors: np.ndarray) -> bool:
    """Whether TVM can divide by these constants: it negates those below 0, but the least cannot be."""
    least = np.iinfo(divisors.dtype).min
    return is_harmless(divisors) and (least == 0 or not (divisors == least).any())


def legalise(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise a quotient or a remainder; those of real numbers as TVM does."""
    dtype = str(call.ty.dtype)
    x, y = call.args
    divisors = constant_of(y)
    if np.dtype(dtype).kind not in "iu" or (divisors is not None and _is_plain(divisors)):
        return legalise_as_tvm(bb, call)
    name = call.op.name.removeprefix("relax.")
    zero, one, minus = (tirx.const(number, dtype) for number in (0, 1, -1 if dtype[0] == "i" else 1))
    least = tirx.const(int(np.iinfo(dtype).min), dtype)

    def compute(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        def element(*place: tirx.Var) -> tirx.Expr:
            dividend, divisor = element_of(a, place), element_of(b, place)
            is_zero = tirx.EQ(divisor, zero)
            beyond = is_zero
            if dtype[0] == "i":
                # TVM takes `dividend == least` for false: its bounds of a type leave out the least integer.
                is_least = tirx.EQ(tirx.bitwise_xor(dividend, least), zero)
                beyond = tirx.Or(is_zero, tirx.And(tirx.EQ(divisor, minus), is_least))
            defined = tirx.Select(beyond, one, divisor)
            if call.op.name in _REMAINDERS:  # of a division by 1: 0
                return _REMAINDERS[call.op.name](dividend, defined)
            return tirx.Select(is_zero, zero, _QUOTIENTS[call.op.name](dividend, defined))

        return te.compute(shape_of(call), element, name=name)

    return bb.call_te(compute, x, y, primfunc_name_hint=name)
