"""Limits that keep numbers in float16 finite, whatever a device is given.

Two things make an infinity: a number beyond float16's largest that is rounded to it, and a sum of products in
float16. So each value has an interval, computed from those of its operands, and a need: the largest magnitude
at which no sum of a product that reads it can overflow. Where the interval is not within the need, the value
is limited to the need by a clip. On samples nothing is limited: products whose factors are larger there than
they may be stay in float32 (`builder.quantising.halves`).

A limit is applied after the element-wise operators that follow a product: an infinity may pass a ReLU, and be
added to a finite number, but not to another infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tvm import relax
from tvm.ir import Call
from tvm.tirx import FloatImm

from builder.kernels.rewriter import RESHAPES, constant_of, op_name
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.half_sums import LONGEST
from builder.kernels.spaces.half_winograd import largest_factors, picture_growth

LARGEST: Final = 65504.0
# Rounding makes a sum of `LONGEST` products at most 1.07 times as large.
_SAFE: Final = 0.9 * LARGEST

# Operators that move values without changing them.
MOVES: Final = frozenset(
    {*RESHAPES, *(f"relax.{n}" for n in ("permute_dims", "strided_slice", "concat", "nn.max_pool2d"))}
)
# Of these, those that take what they need from each of their operands.
_COPIES: Final = MOVES - {"relax.strided_slice", "relax.nn.max_pool2d"}
# Element-wise operators that make a number or an infinity of an infinity.
_PASSING: Final = frozenset(
    f"relax.{n}"
    for n in ("nn.relu", "nn.relu6", "nn.leakyrelu", "clip", "abs", "negative", "maximum", "minimum")
)
_SUMS: Final = ("relax.add", "relax.subtract")
# Functions whose results are within these bounds.
_WITHIN: Final = {
    "relax.sigmoid": (0.0, 1.0),
    "relax.tanh": (-1.0, 1.0),
    "relax.erf": (-1.0, 1.0),
    "relax.nn.softmax": (0.0, 1.0),
    "relax.nn.relu6": (0.0, 6.0),
}
# Functions that are at least this, and at most their operand.
_GATES: Final = {
    "relax.nn.relu": 0.0,
    "relax.nn.silu": -0.3,
    "relax.nn.gelu": -0.2,
    "relax.nn.gelu_tanh": -0.2,
}


@dataclass(frozen=True, slots=True)
class Interval:
    """Numbers from `low` to `high`, which may be infinite."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        """Return the smallest interval that has these numbers; `ANY` if one of them is not a number."""
        known = [float(value) for value in values]
        if not known or any(map(math.isnan, known)):
            return ANY
        return cls(min(known), max(known))

    @property
    def size(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    def within(self, most: float) -> Interval:
        """Return the interval of its numbers after they are limited to magnitudes up to `most`."""
        return Interval(min(max(self.low, -most), most), min(max(self.high, -most), most))

    def __add__(self, other: Interval) -> Interval:
        return Interval.of((self.low + other.low, self.high + other.high))

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __mul__(self, other: Interval) -> Interval:
        return Interval.of(a * b for a in (self.low, self.high) for b in (other.low, other.high))


ANY: Final = Interval(-math.inf, math.inf)


def most_for(factors: float) -> float:
    """Return the largest magnitude of left factors whose sums, which grow by `factors`, fit into float16."""
    return _SAFE / factors if factors > 0 else LARGEST


def needs_limit(interval: Interval, most: float) -> bool:
    """Whether a value may be larger than `most`, or than float16 can hold."""
    return not interval.size <= min(most, _SAFE)


def largest_sum(factors: NDArray[np.float64]) -> float:
    """Return the largest sum of magnitudes of `LONGEST` numbers of a row: no chunk has more products."""
    factors = np.abs(factors)
    if factors.shape[1] > LONGEST:
        factors = np.partition(factors, -LONGEST, axis=1)[:, -LONGEST:]
    return float(factors.sum(axis=1).max(initial=0))


def growth_of_convolution(weight: NDArray[np.float32], strides: Sequence[int] = (1, 1)) -> float:
    """Return how much larger than its largest input a sum in float16 of a convolution may be.

    Parameters
    ----------
    weight
        `[OC, IC / groups, KH, KW]`.
    strides
        Along rows and columns.
    """
    plain = largest_sum(weight.reshape(len(weight), -1).astype(np.float64))
    stride = strides[0]
    if weight.shape[2:] != (3, 3) or tuple(strides) not in ((1, 1), (2, 2)):
        return plain
    return max(plain, picture_growth(stride), largest_sum(largest_factors(weight, stride)))


def growth_of_matrix(weight: NDArray[np.float32]) -> float:
    """Return the same for a product with a matrix, `[..., K, N]`."""
    columns = weight.swapaxes(-1, -2).astype(np.float64)
    return largest_sum(columns.reshape(-1, columns.shape[-1]))


def growth_of(call: Call) -> float:
    """Return the same for a call of a product with constant weights."""
    weight = constant_of(call.args[1])
    assert weight is not None
    if op_name(call) == "relax.matmul":
        return growth_of_matrix(weight)
    return growth_of_convolution(weight, [int(v) for v in call.attrs.strides])


def passes_need(call: Call, *, only: bool) -> bool:
    """Whether a limit of a call's result holds for its operands; `only`: no other call reads them."""
    return op_name(call) in _COPIES or (only and op_name(call) == "relax.nn.max_pool2d")


def passes_infinity(call: Call, other: Callable[[relax.Expr], Interval], value: relax.Var) -> bool:
    """Whether a call makes a number, not a NaN, of an operand `value` that may be infinite.

    `call`: the call, which reads `value` once.
    `other`: returns the interval of another operand.
    """
    if op_name(call) in _PASSING:
        return op_name(call) != "relax.nn.leakyrelu" or float(call.attrs.alpha) > 0
    return op_name(call) in _SUMS and all(
        math.isfinite(other(arg).size) for arg in call.args if not arg.same_as(value)
    )


def interval_of(call: Call, operand: Callable[[relax.Expr], Interval]) -> Interval:
    """Return the interval of a call's result."""
    name = op_name(call)
    if name in _WITHIN:
        return Interval(*_WITHIN[name])
    if name in _GATES:
        return Interval(_GATES[name], max(operand(call.args[0]).high, 0.0))
    if name in MOVES:
        first = call.args[0]
        parts = list(first.fields) if isinstance(first, relax.Tuple) else [first]
        each = [operand(part) for part in parts]
        return Interval(min(i.low for i in each), max(i.high for i in each))
    if name == "relax.clip":
        return _clipped(call, operand(call.args[0]))
    if name == "relax.nn.leakyrelu":
        x = operand(call.args[0])
        steep = x * Interval(float(call.attrs.alpha), float(call.attrs.alpha))
        return Interval(min(x.low, steep.low), max(x.high, steep.high))
    if name in ("relax.abs", "relax.negative"):
        x = operand(call.args[0])
        return -x if name == "relax.negative" else Interval(0.0, x.size)
    if name in ("relax.nn.conv2d", "relax.matmul"):
        weight = constant_of(call.args[1])
        return ANY if weight is None else _product(call, weight.astype(np.float64), operand(call.args[0]))
    return _of_two(call, operand)


def _of_two(call: Call, operand: Callable[[relax.Expr], Interval]) -> Interval:
    name = op_name(call)
    if len(call.args) != 2:
        return ANY
    a, b = operand(call.args[0]), operand(call.args[1])
    if name == "relax.add":
        return a + b
    if name == "relax.subtract":
        return a + -b
    if name == "relax.multiply":
        return a * b
    if name == "relax.maximum":
        return Interval(max(a.low, b.low), max(a.high, b.high))
    if name == "relax.minimum":
        return Interval(min(a.low, b.low), min(a.high, b.high))
    return ANY


def _clipped(call: Call, x: Interval) -> Interval:
    bounds = [float(arg.value) if isinstance(arg, FloatImm) else math.nan for arg in call.args[1:]]
    if len(bounds) != 2 or any(map(math.isnan, bounds)):
        return ANY
    low, high = bounds
    return Interval(min(max(x.low, low), high), min(max(x.high, low), high))


def _product(call: Call, weight: NDArray[np.float64], x: Interval) -> Interval:
    """Return the interval of a product with constant weights."""
    if not math.isfinite(x.size):
        return ANY
    if op_name(call) == "relax.matmul":
        rows = weight.swapaxes(-1, -2).reshape(-1, weight.shape[-2])
    else:
        rows = weight.reshape(len(weight), -1)
        op = Conv2d.of(call)
        if op is None or any(op.padding):
            x = Interval(min(x.low, 0.0), max(x.high, 0.0))
    above, below = np.maximum(rows, 0).sum(axis=1), np.minimum(rows, 0).sum(axis=1)
    return Interval.of((*(above * x.low + below * x.high), *(above * x.high + below * x.low)))
