"""Convolutions and matrix products of bytes, in the byte type that the processor's instruction takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from tvm import relax
from tvm.ir import Call

from builder.calls.byte_weights import ByteWeights
from builder.calls.spans import names_of
from builder.kernels.passes.integer_forms import BYTES, INT32, Forms, Real, Shifted, Sum, centred
from builder.kernels.passes.paddings import Padding
from builder.kernels.rewriter import constant_of, op_name, shape_of
from builder.kernels.spaces import integer_depthwise
from builder.target.device_target import DeviceTarget

# float32 holds all integers up to this one.
_EXACT: Final = 1 << 24
# Convolutions of fewer input channels compute with float32: most of a block of bytes would be padding. With
# an instruction that multiplies four adjacent bytes, only one in four is.
_FEWEST_CHANNELS: Final = 8
_FEWEST_OF_FOUR: Final = 3


class Products:
    """Turns products with constant weights into layers of integers.

    `byte`: the byte type that the processor's instruction takes; None if it takes both or none.
    """

    def __init__(self, target: DeviceTarget, bound: Mapping[relax.Expr, Call]) -> None:
        self._target = target
        self._bound = bound
        self.byte = target.dot.data if target.dot.data in BYTES else None
        of_four = target.dot.group == 4 and not target.dot.halves
        self._fewest = _FEWEST_OF_FOUR if of_four else _FEWEST_CHANNELS

    def convolution(self, table: Forms, var: relax.Var, call: Call) -> bool:
        """Replace a convolution of real numbers that bytes stand for; its sum is emitted when it is read."""
        x, w = table.real(call.args[0]), table.real(call.args[1])
        attrs = call.attrs
        images = op_name(call) == "relax.nn.conv2d"
        layouts = ("NCHW", "OIHW") if images else ("NCW", "OIW")
        if (
            x is None
            or w is None
            or not x.is_one_scale
            or (attrs.data_layout, attrs.kernel_layout) != layouts
        ):
            return False
        weights = _weights(w, 0)
        if weights is None:
            return False
        scale = np.broadcast_to(w.scale.reshape(-1) * float(x.scale), (len(weights),))
        depth = weights[0].size
        low, high = (abs(float(bound) - float(x.zero)) for bound in _limits(x))
        largest = max(low, high) * float(np.abs(weights).reshape(len(weights), -1).sum(1).max())
        zeros = np.zeros(len(weights))
        shape = (1, len(weights), 1, 1)
        dense = int(attrs.groups) == 1 and shape_of(call.args[0])[1] >= self._fewest
        parts = ByteWeights.of(weights, 0) if dense or self._is_depthwise(call, weights) else None
        if parts is not None and depth * _largest_product(parts) <= INT32:
            bias = (-self._preferred_zero(x) * parts.total).astype(np.float64)
            table.sums[var] = Sum(
                lambda: self._bytes(table, call, x, parts),
                shape,
                scale,
                bias,
                largest=depth * _largest_product(parts),
                nodes=names_of(call),
            )
            return True
        if largest < _EXACT:
            table.sums[var] = Sum(
                lambda: _floats(table, call, x, weights), shape, scale, zeros, nodes=names_of(call)
            )
            return True
        return False

    def _is_depthwise(self, call: Call, weights: np.ndarray) -> bool:
        """Whether a convolution is depthwise, and faster with bytes."""
        channels = shape_of(call.args[0])[1]
        if not 1 < channels == len(weights) == int(call.attrs.groups) or weights.ndim != 4:
            return False
        fits = weights.min() >= -128 and weights.max() <= 127
        dilation = int(call.attrs.dilation[1])
        return (
            bool(fits) and integer_depthwise.taps_at_once(weights.astype(np.int8), self._target, dilation) > 0
        )

    def _bytes(self, table: Forms, call: Call, x: Real, weights: ByteWeights) -> relax.Expr:
        """Emit a convolution of bytes whose padding is the zero point."""
        attrs, bb = call.attrs, table.bb
        data = self._preferred(table, x.integers)
        padding = [int(p) for p in attrs.padding]
        top, left, bottom, right = padding if len(padding) == 4 else padding * 2
        if any(padding):
            widths = [0, 0, 0, 0, top, bottom, left, right]
            data = bb.emit(relax.op.nn.pad(data, widths, pad_value=int(self._preferred_zero(x))))

        def convolve(filters: np.ndarray) -> relax.Expr:
            how = {"strides": attrs.strides, "dilation": attrs.dilation, "groups": int(attrs.groups)}
            return bb.emit(relax.op.nn.conv2d(data, relax.const(filters), out_dtype="int32", **how))

        sums = convolve(weights.numbers)
        if not weights.moved.any():
            return sums
        window = convolve(np.ones((1, *weights.numbers.shape[1:]), np.int8))
        moved = relax.const(weights.moved.reshape(1, -1, 1, 1).astype("int32"))
        return bb.emit(relax.op.add(sums, bb.emit(relax.op.multiply(window, moved))))

    def convolution_of_bytes(self, table: Forms, var: relax.Var, call: Call) -> bool:
        """Replace a convolution of bytes by one of the byte type that the processor's instruction takes."""
        weights, dtype = constant_of(call.args[1]), str(call.args[0].ty.dtype)
        attrs = call.attrs
        if weights is None or dtype not in BYTES or self.byte in (None, dtype) or any(attrs.padding):
            return False
        bb, shift = table.bb, _shift(dtype, self.byte)
        padding = Padding.of(call.args[0], self._bound)
        if padding is None:
            data = self._preferred(table, table.plain(call.args[0]))
        else:
            top, left, bottom, right = padding.widths
            data = self._preferred(table, table.plain(padding.data))
            widths = [0, 0, 0, 0, top, bottom, left, right]
            data = bb.emit(relax.op.nn.pad(data, widths, pad_value=padding.number + shift))
            if padding.scalar is not None:
                mask = self._bound[call.args[0]].args[0]
                zero = self._preferred(table, table.plain(padding.scalar))
                data = bb.emit(relax.op.where(mask, data, zero))
        sums = bb.emit(Call(call.op, [data, call.args[1]], attrs))
        added = weights.astype(np.int64).reshape(len(weights), -1).sum(1) * -shift
        constant = relax.const(added.reshape(1, -1, 1, 1).astype("int32"))
        table.define(var, bb.emit(relax.op.add(sums, constant)))
        return True

    def _preferred(self, table: Forms, data: relax.Expr) -> relax.Expr:
        """Return a tensor of bytes in the byte type that the processor's instruction takes."""
        dtype = str(data.ty.dtype)
        if self.byte is None or dtype == self.byte:
            return data
        return table.unshifted(Shifted(data, _shift(dtype, self.byte), self.byte))

    def _preferred_zero(self, x: Real) -> float:
        """Return the zero point of `_preferred` integers."""
        dtype = str(x.integers.ty.dtype)
        return float(x.zero) + _shift(dtype, self.byte or dtype)

    def matmul(self, table: Forms, var: relax.Var, call: Call) -> bool:
        """Replace a matrix product of real numbers that bytes stand for, or of bytes."""
        if str(call.ty.dtype) == "int32":
            return self.matmul_of_bytes(table, var, call)
        x, w = table.real(call.args[0]), table.real(call.args[1])
        if x is None or w is None or not x.is_one_scale or len(shape_of(call.args[1])) != 2:
            return False
        if len(shape_of(call.args[0])) < 2:
            return False
        weights = _weights(w, 1)
        parts = None if weights is None else ByteWeights.of(weights, 1)
        if weights is None or parts is None or weights.shape[0] * _largest_product(parts) > INT32:
            return False
        columns = weights.shape[1]
        scale = np.broadcast_to(w.scale.reshape(-1) * float(x.scale), (columns,))
        shape = (*[1] * (len(shape_of(call)) - 1), columns)

        def emit() -> relax.Expr:
            data = self._preferred(table, x.integers)
            bb = table.bb
            sums = bb.emit(relax.op.matmul(data, relax.const(parts.numbers), out_dtype="int32"))
            if not parts.moved.any():
                return sums
            rows = bb.emit(relax.op.sum(bb.emit(relax.op.astype(data, "int32")), axis=[-1], keepdims=True))
            moved = relax.const(parts.moved.astype("int32"))
            return bb.emit(relax.op.add(sums, bb.emit(relax.op.multiply(rows, moved))))

        bias = (-self._preferred_zero(x) * parts.total).astype(np.float64)
        largest = weights.shape[0] * _largest_product(parts)
        table.sums[var] = Sum(emit, shape, scale, bias, largest=largest, nodes=names_of(call))
        return True

    def matmul_of_bytes(self, table: Forms, var: relax.Var, call: Call) -> bool:
        """Replace a product of bytes by one of the byte type that the processor's instruction takes."""
        weights, dtype = constant_of(call.args[1]), str(call.args[0].ty.dtype)
        if weights is None or dtype not in BYTES or self.byte in (None, dtype):
            return False
        bb = table.bb
        data = self._preferred(table, table.plain(call.args[0]))
        sums = bb.emit(relax.op.matmul(data, call.args[1], out_dtype="int32"))
        added = weights.astype(np.int64).sum(0) * -_shift(dtype, str(data.ty.dtype))
        table.define(var, bb.emit(relax.op.add(sums, relax.const(added.astype("int32")))))
        return True


def _weights(w: Real, axis: int) -> np.ndarray | None:
    """Return constant weights without their zero points, None unless scales belong to output channels."""
    numbers = w.numbers
    if numbers is None or (not w.is_one_scale and w.axis != axis):
        return None
    shape = [1] * numbers.ndim
    shape[axis] = -1
    result: np.ndarray = numbers.astype(np.int64) - w.zero.astype(np.int64).reshape(
        shape if w.zero.size > 1 else ()
    )
    return result


def _largest_product(weights: ByteWeights) -> int:
    """Return a bound of the magnitude of what each product with a byte adds to a sum."""
    return 255 * (128 + int(np.abs(weights.moved).max()))


def _limits(x: Real) -> tuple[int, int]:
    info = np.iinfo(str(x.integers.ty.dtype))
    return int(info.min), int(info.max)


def _shift(dtype: str, other: str) -> int:
    """Return what is added to integers of a byte type in the other one."""
    return 0 if dtype == other else {"uint8": -128, "int8": 128}[dtype]


def _floats(table: Forms, call: Call, x: Real, weights: np.ndarray) -> relax.Expr:
    """Emit a convolution of the integers as float32 numbers."""
    bb = table.bb
    data = centred(table, x)
    return bb.emit(Call(call.op, [data, relax.const(weights.astype("float32"))], call.attrs))
