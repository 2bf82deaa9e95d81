"""Constant padding before a convolution of bytes, which its kernel does itself.

The padding of a quantised layer is its zero point. That is a constant (`nn.pad`), or computed at run time:
then the importer pads with zeros, and puts the zero point around the picture with `where`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.ir import Call

from builder.kernels.rewriter import Values, constant_of, op_name, shape_of


@dataclass(frozen=True, slots=True)
class Padding:
    """A padding of the last two axes of pictures.

    `data`: what is padded, `[N, C, H, W]`.
    `widths`: top, left, bottom, right.
    `number`: the padding's value if it is a constant.
    `scalar`: its value, a scalar, if it is computed; else None.
    """

    data: relax.Expr
    widths: tuple[int, int, int, int]
    number: int
    scalar: relax.Expr | None = None

    @classmethod
    def of(cls, expr: relax.Expr, bound: Mapping[relax.Expr, Call]) -> Padding | None:
        """Return the padding that `expr` is the result of, None if it is another value."""
        call = bound.get(expr)
        if call is None:
            return None
        if op_name(call) != "relax.where":
            return cls._constant(call)
        inner = bound.get(call.args[1])
        found = None if inner is None else cls._constant(inner)
        mask = constant_of(call.args[0])
        if found is None or mask is None or shape_of(call.args[2]) != ():
            return None
        top, left, bottom, right = found.widths
        inside = np.zeros(shape_of(call)[2:], np.bool_)
        inside[top : inside.shape[0] - bottom, left : inside.shape[1] - right] = True
        if mask.shape != (1, 1, *inside.shape) or not np.array_equal(mask[0, 0], inside):
            return None
        return cls(found.data, found.widths, 0, call.args[2])

    @classmethod
    def _constant(cls, call: Call) -> Padding | None:
        if op_name(call) != "relax.nn.pad" or str(call.attrs.pad_mode) != "constant":
            return None
        widths = [int(w) for w in call.attrs.pad_width]
        if len(widths) != 8 or any(widths[:4]) or min(widths) < 0:
            return None
        top, bottom, left, right = widths[4:]
        return cls(call.args[0], (top, left, bottom, right), int(call.attrs.pad_value))

    def value(self, table: Values) -> relax.Expr:
        """Return the padding's value as a scalar, int32."""
        if self.scalar is None:
            return relax.const(np.int32(self.number))
        return table.bb.emit(relax.op.astype(table.plain(self.scalar), "int32"))
