"""Convolutions of packed channels: each gets its design space, its blocks of channels and packed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from tvm import relax
from tvm.ir import Call

from builder.kernels.passes.packed import LayoutValues, Packed, channel_block
from builder.kernels.passes.paddings import Padding
from builder.kernels.rewriter import constant_of, op_name, shape_of
from builder.kernels.spaces import (
    convolution,
    depthwise,
    gaps,
    geometry,
    half_convolution,
    half_winograd,
    integer_convolution,
    integer_depthwise,
    integer_winograd,
    tile_convolution,
    winograd,
)
from builder.kernels.spaces.integer_convolution import block_of, in_block_of
from builder.kernels.spaces.layer import Layer
from builder.target.device_target import DeviceTarget

Emit = Callable[[Layer], relax.Expr | None]

# The algorithms of convolutions that are not depthwise. The first that applies to a layer computes it; the
# last one of each list applies to all that is left.
_OF_NUMBERS: Final[Sequence[Emit]] = (
    half_winograd.emit,
    half_convolution.emit,
    gaps.emit,
    winograd.emit,
    convolution.emit,
)
_OF_BYTES: Final[Sequence[Emit]] = (tile_convolution.emit, integer_winograd.emit, integer_convolution.emit)

# A convolution rather closes gaps than multiply more than this share of zeros.
_WIDEST_GAPS: Final = 1.25


class Convolutions:
    """Replaces convolutions."""

    def __init__(self, target: DeviceTarget, bound: Mapping[relax.Expr, Call]) -> None:
        self._target = target
        self._lanes = target.simd.lanes
        self._bound = bound

    def emit(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace a convolution: depthwise, by Winograd, or direct."""
        weight = constant_of(call.args[1])
        op = geometry.Conv2d.of(call)
        if op is None:
            return False
        if weight is None:
            return self._computed_weights(table, var, call, op)
        if weight.dtype == np.int8:
            return self._bytes(table, var, call, op, weight)
        if weight.dtype not in (np.float32, np.float16):
            return False
        window = op.kernel
        op, weight = geometry.without_idle_taps(op, weight)
        halves, dtype = weight.dtype == np.float16, str(call.ty.dtype)
        lanes = 2 * self._lanes if halves else self._lanes
        group = channels = op.out_channels
        if op.is_depthwise:
            have = table.packed(call.args[0])
            block = have.block if have is not None else channel_block(op.in_channels, lanes)
            bytes_ = self._bytes_before(call.args[0])
            x = table.as_packed(call.args[0] if bytes_ is None else bytes_[0], block)
            is_finite = x.is_finite
            zero = None if bytes_ is None else relax.const(np.int32(bytes_[1]))
            new = depthwise.emit(Layer(table.bb, op, x.expr, weight, block, self._target, zero))
        else:
            out_block = channel_block(op.out_channels, lanes)
            if op.groups > 1:
                op, weight, out_block = geometry.fill_groups(op, weight, lanes)
                group = channels // op.groups
            have = table.packed(call.args[0])
            if halves and half_winograd.is_faster_in_floats(op, self._target):
                x, weight = table.as_packed(call.args[0], 1), weight.astype(np.float32)
            elif have is not None and self._may_read_gaps(op, have):
                weight = geometry.with_gaps(weight, 1, have.group, have.block)
                op, x = replace(op, in_channels=op.groups * weight.shape[1]), have
            else:
                x = table.as_packed(call.args[0], self._in_block(table, call.args[0], op, lanes))
            if _multiplies_padding(op, weight, x):
                x = table.finite(call.args[0], x)
            is_finite = False
            layer = Layer(table.bb, op, x.expr, weight, out_block, self._target, dtype=dtype)
            new = _first(replace(layer, is_whole=op.kernel == window), _OF_NUMBERS)
        if str(new.ty.dtype) != dtype:
            new = table.bb.emit(relax.op.astype(new, dtype))
        table.define_packed(var, Packed(new, channels, group, is_finite))
        return True

    def _computed_weights(self, table: LayoutValues, var: relax.Var, call: Call, op: geometry.Conv2d) -> bool:
        """Replace a convolution of float32 whose weights are computed: depthwise or without groups."""
        x, weight = call.args
        if any(str(each.ty.dtype) != "float32" for each in (x, weight, call)):
            return False
        if op.is_depthwise:
            have = table.packed(x)
            block = have.block if have is not None else channel_block(op.in_channels, self._lanes)
            data = table.as_packed(x, block)
            new = depthwise.emit(Layer(table.bb, op, data.expr, table.plain(weight), block, self._target))
        elif op.groups == 1:
            data = table.finite(x, table.as_packed(x, self._in_block(table, x, op, self._lanes)))
            block = channel_block(op.out_channels, self._lanes)
            new = convolution.emit(Layer(table.bb, op, data.expr, table.plain(weight), block, self._target))
        else:
            return False
        table.define_packed(var, Packed.dense(new, op.out_channels))
        return True

    def _bytes_before(self, x: relax.Expr) -> tuple[relax.Expr, int] | None:
        """Return the bytes and the zero point that `x` was computed from as their difference, else None."""
        call, zero = self._bound.get(x), 0
        if call is not None and op_name(call) == "relax.subtract":
            numbers = constant_of(call.args[1])
            if numbers is None or numbers.ndim:
                return None
            call, zero = self._bound.get(call.args[0]), int(numbers)
        if call is None or op_name(call) != "relax.astype":
            return None
        data = call.args[0]
        return (data, zero) if str(data.ty.dtype) in ("uint8", "int8") else None

    def _bytes(
        self, table: LayoutValues, var: relax.Var, call: Call, op: geometry.Conv2d, weight: np.ndarray
    ) -> bool:
        """Replace a convolution of bytes; a padding before it becomes its own."""
        data, point = call.args[0], relax.const(np.int32(0))
        padding = None if any(op.padding) else Padding.of(data, self._bound)
        if padding is not None:
            data, point = padding.data, padding.value(table)
            _, _, height, width = shape_of(data)
            op = replace(op, in_height=height, in_width=width, padding=padding.widths)
        takes = self._target.dot.data
        if takes in ("int8", "uint8") and takes != str(data.ty.dtype):
            return False
        have, target = table.packed(data), self._target
        depthwise = op.is_depthwise and integer_depthwise.taps_at_once(weight, target, op.dilation[1]) > 0
        if op.groups > 1 and not depthwise:
            return False
        least = max(8, target.dot.lanes) if depthwise else max(4, target.dot.group)
        block = (block_of if depthwise else in_block_of)(op.in_channels, target)
        if have is not None and have.is_dense and have.block % least == 0:
            block = have.block
        x = table.as_packed(data, block)
        layer = Layer(table.bb, op, x.expr, weight, block_of(op.out_channels, target), target, point)
        new = _first(layer, (integer_depthwise.emit,) if depthwise else _OF_BYTES)
        table.define_packed(var, Packed.dense(new, op.out_channels))
        return True

    @staticmethod
    def _may_read_gaps(op: geometry.Conv2d, value: Packed) -> bool:
        """Whether a convolution reads a value with its gaps, which it multiplies by zeros."""
        if value.is_dense or op.in_channels // op.groups % value.group:
            return False
        return value.padded_group <= _WIDEST_GAPS * value.group

    @staticmethod
    def _in_block(table: LayoutValues, x: relax.Expr, op: geometry.Conv2d, lanes: int) -> int:
        """Return the block of channels in which a convolution reads `x`: the present one if possible."""
        have = table.packed(x)
        per_group = op.in_channels // op.groups
        if have is not None and (op.groups == 1 or per_group % have.block == 0):
            return have.block
        if per_group < lanes:
            return 1
        if op.groups > 1:
            block = channel_block(per_group, lanes)
            return block if per_group % block == 0 else 1
        return channel_block(per_group, lanes)


def _multiplies_padding(op: geometry.Conv2d, weight: np.ndarray, x: Packed) -> bool:
    """Whether a convolution may multiply the padding of `x` by zeros; one of single pixels may not."""
    if op.groups > 1 or op.kernel != (1, 1) or weight.dtype != np.float32:
        return True
    return op.in_channels % convolution.reduction_block(x.block, op.in_channels) != 0


def _first(layer: Layer, candidates: Sequence[Emit]) -> relax.Expr:
    """Emit a layer by the first algorithm that applies."""
    made = (emit(layer) for emit in candidates)
    return next(new for new in made if new is not None)
