"""Functions of one tensor of bytes, which have 256 results.

A quantised model writes `x * sigmoid(x)` as operators on real numbers between a dequantisation and a
quantisation. Whatever the formula, each result depends only on one byte, so there are 256 of them. They are
computed here, with NumPy, and become a table of bytes if the result is quantised and the formula takes more
instructions than reading a table: it contains an exponential, or several short operators.

Promises the results of the operators in float32, except for their rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from tvm.ir import Call

from builder.kernels.passes.integer_forms import Real
from builder.kernels.rewriter import op_name

Numbers = npt.NDArray[np.float64]
BYTES: Final = 256


def _sigmoid(x: Numbers) -> Numbers:
    return np.asarray(1 / (1 + np.exp(-x)))


_erf: Final = np.vectorize(math.erf, otypes=[np.float64])
# A table takes six instructions; three operators, and quantising their result, take twice as many.
_FEWEST_OPERATORS: Final = 3
# Operators with an exponential, which take many more instructions than a table.
_LONG: Final[Mapping[str, Callable[[Numbers], Numbers]]] = {
    "relax.sigmoid": _sigmoid,
    "relax.nn.silu": lambda x: x * _sigmoid(x),
    "relax.nn.gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "relax.tanh": np.tanh,
    "relax.exp": np.exp,
    "relax.erf": _erf,
}
_SHORT: Final[Mapping[str, Callable[[Numbers], Numbers]]] = {
    "relax.nn.relu": lambda x: np.maximum(x, 0),
    "relax.abs": np.abs,
    "relax.negative": np.negative,
}
_OF_TWO: Final[Mapping[str, Callable[[Numbers, Numbers], Numbers]]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.divide": np.divide,
    "relax.maximum": np.maximum,
    "relax.minimum": np.minimum,
}
_FORMULAS: Final[Mapping[str, Callable[..., Numbers]]] = {**_LONG, **_SHORT, **_OF_TWO}
OPERATORS: Final = frozenset({*_FORMULAS, "relax.clip"})


@dataclass(frozen=True, slots=True)
class ByteFunction:
    """A function of a tensor of bytes.

    `real`: the bytes, of type `uint8`, with one scale.
    `numbers`: its 256 results, in the order of the bytes.
    `operators`: how many operators compute it; one with an exponential counts as `_FEWEST_OPERATORS`.
    `call`: the operator that computes it last, in the model.
    """

    real: Real
    numbers: Numbers
    operators: int
    call: Call | None = None

    @classmethod
    def identity(cls, real: Real) -> ByteFunction | None:
        """Return the numbers that bytes stand for; None unless they are `uint8` with one scale."""
        if not real.is_one_scale or str(real.integers.ty.dtype) != "uint8":
            return None
        numbers = (np.arange(BYTES, dtype=np.float64) - float(real.zero)) * float(real.scale)
        return cls(real, numbers, operators=0)

    @classmethod
    def of(cls, call: Call, operands: list[ByteFunction | float]) -> ByteFunction | None:
        """Return the function that `call` computes; None if it is one of several tensors, or of none."""
        functions = [each for each in operands if isinstance(each, ByteFunction)]
        if not functions or any(not each.reads(functions[0]) for each in functions):
            return None
        numbers = [each.numbers if isinstance(each, ByteFunction) else np.float64(each) for each in operands]
        name = op_name(call)
        with np.errstate(all="ignore"):
            if name == "relax.clip":
                low, high = (float(bound.value) for bound in call.args[1:])
                result = np.clip(numbers[0], low, high)
            else:
                result = _FORMULAS[name](*numbers)
        operators = _FEWEST_OPERATORS if name in _LONG else 1
        operators += sum(each.operators for each in functions)
        return cls(functions[0].real, np.asarray(result, np.float64), operators, call)

    @property
    def is_long(self) -> bool:
        """Whether it takes more instructions than a table."""
        return self.operators >= _FEWEST_OPERATORS

    def reads(self, other: ByteFunction) -> bool:
        """Whether both are functions of the same bytes."""
        return self.real.integers.same_as(other.real.integers) and self.real.same_scale(other.real)

    def quantised(self, scale: float, zero: float) -> npt.NDArray[np.uint8] | None:
        """Return its results as `uint8` with this scale and zero point; None if one is not a number."""
        with np.errstate(all="ignore"):
            steps = np.rint(self.numbers.astype(np.float32) / np.float32(scale)) + zero
        return None if np.isnan(steps).any() else np.clip(steps, 0, BYTES - 1).astype(np.uint8)
