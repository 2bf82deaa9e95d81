"""Slices of the rows and columns of a convolution's result, which it then does not compute.

A causal convolution is often written as one with padding on both sides whose last results are cut off. A
convolution with less padding has the same results, and no slice is fused to its kernel.
"""

from __future__ import annotations

from typing import Final

import tvm
from tvm import relax
from tvm.ir import Call

from builder.kernels.rewriter import Values, constant_of, integers_of, op_name, shape_of, users_of

_ROWS_AND_COLUMNS: Final = (2, 3)
_IMAGE_RANK: Final = 4
# Operators that may stand between the convolution and the slice: each element is computed from its own place.
_UNARY: Final = {
    f"relax.{n}" for n in ("nn.relu", "nn.leakyrelu", "nn.silu", "nn.gelu", "sigmoid", "tanh", "clip")
}
_WITH_CONSTANT: Final = {"relax.add", "relax.subtract", "relax.multiply", "relax.divide"}


class Crops:
    """Moves slices into the padding of the convolution before them."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._users = users_of(mod["main"])
        self._bound: dict[relax.Expr, Call] = {}

    def emit(self, table: Values, var: relax.Var, call: Call) -> bool:
        """Replace `call` if it is such a slice."""
        self._bound[var] = call
        ranges = _ranges(call) if op_name(call) == "relax.strided_slice" else None
        chain = None if ranges is None else self._chain(call.args[0], set(ranges))
        if ranges is None or chain is None:
            return False
        *between, convolution = chain
        padding = _cropped(convolution, ranges)
        if padding is None:
            return False
        y = table.bb.emit(_with_padding(table.call(convolution), padding))
        for step in reversed(between):
            args = [y if isinstance(arg, relax.Var) else arg for arg in step.args]
            y = table.bb.emit(Call(step.op, args, step.attrs, step.ty_args, step.span))
        table.define(var, y)
        return True

    def _chain(self, x: relax.Expr, axes: set[int]) -> list[Call] | None:
        """Return the calls from `x` back to a convolution that nothing else reads, None if there is none."""
        chain: list[Call] = []
        while isinstance(x, relax.Var) and self._users.get(x) == 1 and x in self._bound:
            call = self._bound[x]
            name = op_name(call)
            chain.append(call)
            if name == "relax.nn.conv2d":
                return chain
            if name in _WITH_CONSTANT:
                constants = [arg for arg in call.args if constant_of(arg) is not None]
                if len(constants) != 1 or not _is_same_along(constants[0], axes):
                    return None
                x = call.args[1 if constants[0].same_as(call.args[0]) else 0]
                if shape_of(x) != shape_of(call):
                    return None
            elif name in _UNARY:
                x = call.args[0]
            else:
                return None
        return None


def _ranges(call: Call) -> dict[int, tuple[int, int]] | None:
    """Return the first index and the end of each axis that a slice of an image cuts, None if it skips some.

    None also if it cuts other axes than rows and columns, or leaves nothing.
    """
    shape = shape_of(call.args[0])
    axes, begins, ends, *steps = (integers_of(arg) for arg in call.args[1:])
    if len(shape) != _IMAGE_RANK or not axes or len(begins) != len(axes) or len(ends) != len(axes):
        return None
    if steps and set(steps[0]) != {1}:
        return None
    found = {}
    for axis, begin, end in zip(axes, begins, ends, strict=True):
        first, last, _ = slice(begin, end).indices(shape[axis % _IMAGE_RANK])
        found[axis % _IMAGE_RANK] = (first, last)
        if axis % _IMAGE_RANK not in _ROWS_AND_COLUMNS or first >= last:
            return None
    return found


def _is_same_along(constant: relax.Expr, axes: set[int]) -> bool:
    """Whether a constant has one value along `axes` of the image that it is broadcast to."""
    shape = shape_of(constant)
    extents = (1,) * (_IMAGE_RANK - len(shape)) + shape
    return all(extents[axis] == 1 for axis in axes)


def _cropped(call: Call, ranges: dict[int, tuple[int, int]]) -> tuple[int, ...] | None:
    """Return the padding of a convolution of float32 with which it computes only `ranges`.

    None if it would be negative.
    """
    attrs = call.attrs
    if (attrs.data_layout, attrs.kernel_layout) != ("NCHW", "OIHW") or str(call.ty.dtype) != "float32":
        return None
    padding = [int(p) for p in attrs.padding]
    padding = padding * (4 // len(padding))
    for axis, (begin, end) in ranges.items():
        place = axis - _ROWS_AND_COLUMNS[0]
        span = (shape_of(call.args[1])[axis] - 1) * int(attrs.dilation[place]) + 1
        stride = int(attrs.strides[place])
        before = padding[place] - begin * stride
        after = (end - begin - 1) * stride + span - shape_of(call.args[0])[axis] - before
        if before < 0 or after <= -stride:
            return None
        padding[place], padding[place + 2] = before, max(0, after)
    return tuple(padding)


def _with_padding(call: Call, padding: tuple[int, ...]) -> relax.Expr:
    """Return a convolution of float32 with other padding: top, left, bottom, right."""
    attrs = call.attrs
    return relax.op.nn.conv2d(
        *call.args,
        strides=[int(s) for s in attrs.strides],
        padding=list(padding),
        dilation=[int(d) for d in attrs.dilation],
        groups=int(attrs.groups),
    )
