"""The matrices of Winograd's convolution F(m, 3) as exact fractions, and products with them as arithmetic.

The matrices are those of Toom and Cook for the points 0, 1, -1, 2, -2, ... and infinity, transposed
(Winograd, *Arithmetic Complexity of Computations*, 1980; Lavin and Gray, arXiv:1509.09308). Products are
written out as arithmetic: terms with a zero vanish, and the rows of the points p and -p share their even
and odd halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Final

from tvm import tirx

_POINTS: Final = tuple(Fraction(p) for p in ("0", "1", "-1", "2", "-2", "1/2", "-1/2"))

Matrix = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True, slots=True)
class Transforms:
    """`y = A^T [(G g) * (B^T d)]` in one dimension.

    Attributes
    ----------
    input, weights, output
        `B^T` of shape [m + 2, m + 2], `G` of [m + 2, 3], `A^T` of [m, m + 2].
    """

    input: Matrix
    weights: Matrix
    output: Matrix

    @classmethod
    def of(cls, m: int) -> Transforms:
        """Return the matrices of F(m, 3)."""
        size = m + 2
        points = _POINTS[: size - 1]
        rows, weights = [], []
        for point in points:
            others = [p for p in points if p != point]
            factor = prod((point - p for p in others), start=Fraction(1))
            rows.append((*_polynomial(others), Fraction(0)))
            weights.append(tuple(point**k / factor for k in range(3)))
        rows.append(_polynomial(points))
        weights.append((Fraction(0), Fraction(0), Fraction(1)))
        output = tuple((*(point**r for point in points), Fraction(int(r == m - 1))) for r in range(m))
        return cls(tuple(rows), tuple(weights), output)


def _polynomial(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Return the coefficients of the product of all `x - root`, lowest power first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        coefficients = [s - root * c for s, c in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return tuple(coefficients)


def combine(row: Sequence[Fraction], value: Callable[[int], tirx.Expr]) -> tirx.Expr:
    """Return the sum of `row[k] * value(k)`.

    Even and odd terms are summed separately: the rows of the points p and -p share both sums.
    """
    even = _terms([(c, k) for k, c in enumerate(row) if c and k % 2 == 0], value)
    odd = _terms([(c, k) for k, c in enumerate(row) if c and k % 2 == 1], value)
    if odd is None or even is None:
        (sign, total) = even or odd or (1, tirx.const(0, "float32"))
        return total if sign > 0 else tirx.const(-1.0, "float32") * total
    if odd[0] == even[0]:
        both = even[1] + odd[1]
        return both if even[0] > 0 else tirx.const(-1.0, "float32") * both
    return even[1] - odd[1] if even[0] > 0 else odd[1] - even[1]


def _terms(
    terms: list[tuple[Fraction, int]], value: Callable[[int], tirx.Expr]
) -> tuple[int, tirx.Expr] | None:
    """Return the sign of the first term, and the sum of `terms` divided by it; None if there are no terms."""
    if not terms:
        return None
    sign = 1 if terms[0][0] > 0 else -1
    total: tirx.Expr | None = None
    for coefficient, k in terms:
        size = abs(coefficient)
        term = value(k) if size == 1 else tirx.const(float(size), "float32") * value(k)
        if total is not None:
            term = total + term if coefficient * sign > 0 else total - term
        total = term
    return sign, total


def select(index: tirx.Expr, rows: Matrix, value: Callable[[int], tirx.Expr]) -> tirx.Expr:
    """Return row `index` of a product; once the loop over `index` is unrolled, one row remains."""
    result = combine(rows[-1], value)
    for k in range(len(rows) - 2, -1, -1):
        result = tirx.Select(index == k, combine(rows[k], value), result)
    return result
