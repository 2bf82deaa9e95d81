"""Padding: an element outside the input is a constant, or a copy of an element inside it.

Only padded axes have arithmetic and a condition in their index, so rows that are copied whole stay vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tvm import relax, te, tirx
from tvm.ir import Call

from builder.kernels.rewriter import shape_of
from builder.kernels.spaces.epilogue import INJECTIVE

Place = Callable[[tirx.Expr, int], tirx.Expr]


def _reflected(place: tirx.Expr, extent: int) -> tirx.Expr:
    last = extent - 1
    return last - tirx.abs(last - tirx.abs(place))


# Modes other than `constant`: a place along an axis and the axis's extent -> the place that is copied.
_PLACES: Final[Mapping[str, Place]] = {
    "reflect": _reflected,
    "replicate": lambda place, extent: tirx.max(tirx.min(place, extent - 1), 0),
    "circular": tirx.floormod,
}


def legalise(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `nn.pad`."""
    attrs = call.attrs
    widths = [int(width) for width in attrs.pad_width]
    return emit(bb, call.args[0], widths, str(attrs.pad_mode), float(attrs.pad_value))


def emit(bb: relax.BlockBuilder, x: relax.Expr, widths: Sequence[int], mode: str, value: float) -> relax.Expr:
    """Emit the padding of a tensor.

    `widths`: how much is added before the first axis and after it, then around the second, and so on.
    `mode`: `constant`, `reflect`, `replicate` or `circular`.
    `value`: the number of `constant`.
    """
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    shape = [extent + sum(pair) for extent, pair in zip(shape_of(x), pairs, strict=True)]

    def compute(data: te.Tensor) -> te.Tensor:
        extents = [int(d) for d in data.shape]

        def element(*i: tirx.Var) -> tirx.Expr:
            places, inside = [], []
            for index, extent, (before, after) in zip(i, extents, pairs, strict=True):
                place = index - before if before else index
                if before or after:
                    if mode in _PLACES:
                        place = _PLACES[mode](place, extent)
                    inside += [index >= before] if before else []
                    inside += [index < extent + before] if after else []
                places.append(place)
            found = data(*places)
            if mode in _PLACES or not inside:
                return found
            test = functools.reduce(tirx.And, inside)
            return tirx.if_then_else(test, found, tirx.const(value, data.dtype))

        return te.compute(shape, element, name="pad")

    return bb.call_te(compute, x, primfunc_name_hint="pad", primfunc_attrs=INJECTIVE)
