"""The matrices of Winograd's convolution F(m, 3) as exact fractions, and products with them as arithmetic.

At stride 2, the outer two taps only meet numbers at even places and the middle tap only numbers at odd
ones. The former is F(m, 2), the latter a product for each output: `2 m + 1` products instead of `3 m`.

The matrices are those of Toom and Cook for the points 0, 1, -1, 2, -2, ... and infinity, transposed
(Winograd, *Arithmetic Complexity of Computations*, 1980; Lavin and Gray, arXiv:1509.09308). Products are
written out as arithmetic: terms with a zero vanish, and the rows of the points p and -p share their even
and odd halves. On ARM, columns of such points share sums as well (`combine_sharing`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import lcm, prod
from typing import Final

from tvm import tirx

_POINTS: Final = tuple(Fraction(p) for p in ("0", "1", "-1", "2", "-2", "1/2", "-1/2"))

Matrix = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True, slots=True)
class Transforms:
    """`y = A^T [(G g) * (B^T d)]` in one dimension.

    `input`, `weights`, `output`: `B^T` of shape [m + 2, m + 2], `G` of [m + 2, 3], `A^T` of [m, m + 2]. At
        stride 2, there are `2 m + 1` instead of `m + 2` numbers and products, and the last m products have
        the last row of `G` in common.
    """

    input: Matrix
    weights: Matrix
    output: Matrix

    @classmethod
    def of(cls, m: int, points: Sequence[Fraction] = _POINTS, taps: int = 3) -> Transforms:
        """Return the matrices of F(m, taps) for the first m + taps - 2 of `points`, and infinity."""
        size = m + taps - 1
        points = points[: size - 1]
        rows, weights = [], []
        for point in points:
            others = [p for p in points if p != point]
            factor = prod((point - p for p in others), start=Fraction(1))
            rows.append((*_polynomial(others), Fraction(0)))
            weights.append(tuple(point**k / factor for k in range(taps)))
        rows.append(_polynomial(points))
        weights.append(tuple(Fraction(int(k == taps - 1)) for k in range(taps)))
        output = tuple((*(point**r for point in points), Fraction(int(r == m - 1))) for r in range(m))
        return cls(tuple(rows), tuple(weights), output)

    @classmethod
    def at_stride_2(cls, m: int) -> Transforms:
        """Return the matrices at stride 2, for numbers in the order of `places`: even ones first."""
        outer, zero, one = cls.of(m, taps=2), Fraction(0), Fraction(1)
        units = tuple(tuple(one if k == j else zero for k in range(m)) for j in range(m))
        even = tuple((*row, *([zero] * m)) for row in outer.input)
        odd = tuple((*([zero] * (m + 1)), *row) for row in units)
        weights = (*((first, zero, last) for first, last in outer.weights), (zero, one, zero))
        output = tuple((*row, *own) for row, own in zip(outer.output, units, strict=True))
        return cls((*even, *odd), weights, output)

    def whole(self) -> WholeTransforms:
        """Return the matrices multiplied by the smallest numbers that make them whole."""
        rows = [lcm(*(value.denominator for value in row)) for row in self.weights]
        divisor = lcm(*rows)
        weights = tuple(
            tuple(value * factor for value in row) for row, factor in zip(self.weights, rows, strict=True)
        )
        output = tuple(
            tuple(value * Fraction(divisor, factor) for value, factor in zip(row, rows, strict=True))
            for row in self.output
        )
        return WholeTransforms(self.input, weights, output, divisor)


@dataclass(frozen=True, slots=True)
class WholeTransforms:
    """`d y = A'^T [(G' g) * (B^T d)]` in one dimension, with integers only.

    `input`, `weights`, `output`: `B^T`; `G'`, whose rows are those of `G` multiplied by the least common
        denominator; `A'^T`.
    `divisor`: d.
    """

    input: Matrix
    weights: Matrix
    output: Matrix
    divisor: int

    @property
    def shift(self) -> int:
        """The power of two in `d**2`."""
        return ((self.divisor**2) & -(self.divisor**2)).bit_length() - 1

    @property
    def inverse(self) -> int:
        """The inverse modulo 2^32 of the odd factor of `d**2`, as int32."""
        value = pow(self.divisor**2 >> self.shift, -1, 1 << 32)
        return value - (1 << 32) if value >> 31 else value


def places(m: int, stride: int, taps: int = 3) -> tuple[int, ...]:
    """Return the places, along an axis of an input tile, of the numbers that `Transforms.input` takes.

    At stride 2, there are three taps.
    """
    return tuple(range(m + taps - 1)) if stride == 1 else (*range(0, 2 * m + 1, 2), *range(1, 2 * m, 2))


def _polynomial(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Return the coefficients of the product of all `x - root`, lowest power first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        coefficients = [s - root * c for s, c in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return tuple(coefficients)


def combine(row: Sequence[Fraction], value: Callable[[int], tirx.Expr], dtype: str = "float32") -> tirx.Expr:
    """Return the sum of `row[k] * value(k)`, all of `dtype`; in int32 it wraps around.

    Even and odd terms are summed separately: the rows of the points p and -p share both sums.
    """
    even = _terms([(c, k) for k, c in enumerate(row) if c and k % 2 == 0], value, dtype)
    odd = _terms([(c, k) for k, c in enumerate(row) if c and k % 2 == 1], value, dtype)
    if odd is None or even is None:
        (sign, total) = even or odd or (1, tirx.const(0, dtype))
        return total if sign > 0 else times(total, -1)
    if odd[0] == even[0]:
        both = _sum(even[1], odd[1])
        return both if even[0] > 0 else times(both, -1)
    return _difference(even[1], odd[1]) if even[0] > 0 else _difference(odd[1], even[1])


def _terms(
    terms: list[tuple[Fraction, int]], value: Callable[[int], tirx.Expr], dtype: str
) -> tuple[int, tirx.Expr] | None:
    """Return the sign of the first term, and the sum of `terms` divided by it; None if there are no terms."""
    if not terms:
        return None
    sign = 1 if terms[0][0] > 0 else -1
    total: tirx.Expr | None = None
    for coefficient, k in terms:
        size = abs(coefficient)
        term = value(k).astype(dtype) if size == 1 else times(value(k).astype(dtype), size)
        if total is not None:
            term = _sum(total, term) if coefficient * sign > 0 else _difference(total, term)
        total = term
    return sign, total


def paired(rows: Matrix) -> tuple[tuple[int, int], ...]:
    """Return pairs of columns that have the same numbers but for signs, which differ in some rows only.

    Those are the columns of the points p and -p in a transform of the output: all rows share the sums and the
    differences of such values.
    """
    columns = list(zip(*rows, strict=True))
    found: list[tuple[int, int]] = []
    for k in range(1, len(columns)):
        one, other = columns[k - 1], columns[k]
        signs = {a == b for a, b in zip(one, other, strict=True) if a}
        if [abs(a) for a in one] == [abs(b) for b in other] and len(signs) == 2:
            found.append((k - 1, k))
    return tuple(found)


def combine_sharing(
    row: Sequence[Fraction],
    value: Callable[[int], tirx.Expr],
    dtype: str = "float32",
    pairs: Sequence[tuple[int, int]] = (),
) -> tirx.Expr:
    """Return the same sum as `combine`, of which rows share more, and which negates none.

    The values of `pairs` (`paired`) are added, or subtracted, first. Without pairs, even and odd terms are
    summed separately, from the last on.
    """
    parts: list[tuple[Fraction, tirx.Expr]] = []
    if pairs:
        second = {b for _, b in pairs}
        for k, coefficient in enumerate(row):
            if not coefficient or k in second:
                continue
            number = value(k).astype(dtype)
            if (k, k + 1) in pairs:
                other = value(k + 1).astype(dtype)
                number = _sum(number, other) if row[k + 1] == coefficient else _difference(number, other)
            parts.append((coefficient, number))
        return _total(parts, dtype)
    for rest in (0, 1):
        terms = [(c, k) for k, c in enumerate(row) if c and k % 2 == rest]
        if terms:
            parts.append(_factored(terms, value, dtype))
    return _total(parts, dtype)


def _factored(
    terms: Sequence[tuple[Fraction, int]], value: Callable[[int], tirx.Expr], dtype: str
) -> tuple[Fraction, tirx.Expr]:
    """Return the sum of `terms` as a factor and what it multiplies.

    The factor has the sign of the last term, and the size of all terms if they have the same. The rows of p
    and -p then share what it multiplies.
    """
    last = terms[-1][0]
    same = all(abs(coefficient) == abs(last) for coefficient, _ in terms)
    factor = last if same else last / abs(last)
    parts = [(coefficient / factor, value(k).astype(dtype)) for coefficient, k in reversed(terms)]
    return factor, _total(parts, dtype)


def _total(parts: Sequence[tuple[Fraction, tirx.Expr]], dtype: str) -> tirx.Expr:
    """Return the sum of products of factors and numbers, 0 without any; it begins with a positive factor."""
    positive = next((at for at, (factor, _) in enumerate(parts) if factor > 0), None)
    if not parts:
        return tirx.const(0, dtype)
    if positive is None:
        return times(_total([(-factor, number) for factor, number in parts], dtype), -1)
    total: tirx.Expr | None = None
    for factor, number in (parts[positive], *parts[:positive], *parts[positive + 1 :]):
        size = abs(factor)
        term = number if size == 1 else times(number, size)
        if total is not None:
            term = _sum(total, term) if factor > 0 else _difference(total, term)
        total = term
    return total


def times(x: tirx.Expr, factor: Fraction | int) -> tirx.Expr:
    """Return `x * factor` of the dtype of `x`; int32 wraps around."""
    dtype = str(x.ty.dtype)
    if dtype.startswith("float"):
        return tirx.const(float(factor), dtype) * x
    return _wrapping(operator.mul, x, tirx.const(int(factor), dtype))


def _sum(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    return _wrapping(operator.add, a, b)


def _difference(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    return _wrapping(operator.sub, a, b)


def _wrapping(function: Callable[[tirx.Expr, tirx.Expr], tirx.Expr], a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    """Return a sum, difference or product; int32 wraps around.

    TVM tells LLVM that int32 never overflows. So the operation is written for 64 bits, of which the lower
    half is kept; LLVM makes one of 32 bits of it, without that promise.
    """
    if str(a.ty.dtype) != "int32":
        return function(a, b)
    return function(a.astype("int64"), b.astype("int64")).astype("int32")


def select(
    index: tirx.Expr,
    rows: Matrix,
    value: Callable[[int], tirx.Expr],
    dtype: str = "float32",
    *,
    sharing: bool = False,
) -> tirx.Expr:
    """Return row `index` of a product; once the loop over `index` is unrolled, one row remains.

    `sharing` chooses `combine_sharing` instead of `combine`.
    """
    form = partial(combine_sharing, pairs=paired(rows)) if sharing else combine
    result = form(rows[-1], value, dtype)
    for k in range(len(rows) - 2, -1, -1):
        result = tirx.Select(index == k, form(rows[k], value, dtype), result)
    return result
