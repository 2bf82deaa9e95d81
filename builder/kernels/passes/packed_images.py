"""Operators on images that keep channels packed: what moves whole pixels, reductions, norms, PReLU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from tvm import relax, te, tirx
from tvm.ir import Call

from builder.kernels.passes.packed import LayoutValues, Packed, channel_block, pack_array
from builder.kernels.rewriter import RESHAPES, constant_of, integers_of, op_name, shape_of
from builder.kernels.spaces import padding, pixels, planes, pooling

IMAGE_RANK: Final = 4
_PIXEL_AXES: Final = (2, 3)
_MOVED_AXES: Final = (0, *_PIXEL_AXES)


def move_pixels(table: LayoutValues, var: relax.Var, call: Call) -> bool:
    """Replace what moves whole pixels: a slice, a padding or a concatenation, except of channels."""
    if len(shape_of(call)) != IMAGE_RANK or not _moves_pixels(call):
        return False
    parts = list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else [call.args[0]]
    packed = [table.packed(part) for part in parts]
    block = max((have.block for have in packed if have is not None), default=1)
    if block == 1:
        return False
    if op_name(call) == "relax.concat":
        whole = [table.as_packed(part, block) for part in parts]
        new = relax.op.concat([each.expr for each in whole], int(call.attrs.axis) % IMAGE_RANK)
        table.define_packed(var, replace(whole[0], expr=table.bb.emit(new)))
        return True
    [x] = packed
    assert x is not None
    if op_name(call) == "relax.strided_slice":
        axes, *others = (integers_of(argument) for argument in call.args[1:])
        new = relax.op.strided_slice(x.expr, [axis % IMAGE_RANK for axis in axes], *others)
    else:
        widths = [*(int(width) for width in call.attrs.pad_width), 0, 0]
        new = padding.emit(table.bb, x.expr, widths, str(call.attrs.pad_mode), float(call.attrs.pad_value))
    table.define_packed(var, replace(x, expr=table.bb.emit(new)))
    return True


def reduction(table: LayoutValues, var: relax.Var, call: Call, x: Packed) -> bool:
    """Replace a reduction over rows and columns, or over channels."""
    name, arg = op_name(call), call.args[0]
    axes = {int(axis) % IMAGE_RANK for axis in call.attrs.axis or range(IMAGE_RANK)}
    is_single = str(call.ty.dtype) == "float32"
    if x.block == 1:
        return False
    if axes <= set(_PIXEL_AXES) and (is_single or name == "relax.mean"):
        value = replace(x, expr=pooling.reduction(table.bb, name, x.expr, axes))
    elif axes == {1} and is_single:
        dense = table.as_packed(arg, x.block)
        value = Packed.dense(pixels.reduction(table.bb, call, dense.expr, x.channels), 1)
    else:
        return False
    if call.attrs.keepdims:
        table.define_packed(var, value)
    else:
        table.define(var, table.bb.emit(relax.op.reshape(table.unpacked(value), shape_of(call))))
    return True


def channel_norm(table: LayoutValues, var: relax.Var, call: Call) -> bool:
    """Replace a layer norm over the channels of an image."""
    if [int(axis) for axis in call.attrs.axes] != [1] or len(shape_of(call)) != IMAGE_RANK:
        return False
    x, gain, shift = call.args
    numbers = [constant_of(gain), constant_of(shift)]
    if str(call.ty.dtype) != "float32" or any(each is None for each in numbers):
        return False
    channels, have = shape_of(call)[1], table.packed(x)
    block = channel_block(channels, table.lanes_of(x)) if have is None or have.block == 1 else have.block
    value = table.as_packed(x, block)
    used = (call.attrs.scale, call.attrs.center)
    affine = [
        pack_array(each.reshape(-1, 1, 1), block, 0.0, channels) if each is not None and is_used else None
        for each, is_used in zip(numbers, used, strict=True)
    ]
    epsilon = float(call.attrs.epsilon)
    new = pixels.layer_norm(table.bb, value.expr, channels, epsilon, (affine[0], affine[1]))
    table.define_packed(var, Packed.dense(new, channels))
    return True


def prelu(table: LayoutValues, var: relax.Var, call: Call, x: Packed) -> bool:
    """Replace a PReLU with a constant slope for each channel, or for all."""
    slopes = constant_of(call.args[1])
    axis = int(call.attrs.axis) % IMAGE_RANK
    if slopes is None or (slopes.size > 1 and axis != 1):
        return False
    packed = relax.const(pack_array(slopes.reshape(-1, 1, 1), x.block, 0.0, x.group))

    def compute(data: te.Tensor, slope: te.Tensor) -> te.Tensor:
        def element(*i: tirx.Var) -> tirx.Expr:
            at = [index if int(extent) > 1 else 0 for index, extent in zip(i, slope.shape, strict=True)]
            return tirx.Select(data(*i) < tirx.const(0, data.dtype), data(*i) * slope(*at), data(*i))

        return te.compute(data.shape, element, name="prelu")

    new = table.bb.emit(table.bb.call_te(compute, x.expr, packed, primfunc_name_hint="prelu"))
    table.define_packed(var, replace(x, expr=new))
    return True


def instance_norm(table: LayoutValues, var: relax.Var, call: Call, bound: Mapping[relax.Expr, Call]) -> bool:
    """Replace a layer norm of the flat planes of a packed image; `call` makes an image of them again."""
    norm = bound.get(call.args[0])
    flat = bound.get(norm.args[0]) if norm is not None and norm.args else None
    if (
        norm is None
        or flat is None
        or op_name(norm) != "relax.nn.layer_norm"
        or op_name(flat) not in RESHAPES
    ):
        return False
    image = flat.args[0]
    shape = shape_of(image)
    if len(shape) != 4 or shape_of(call) != shape or shape_of(norm) != (*shape[:2], shape[2] * shape[3]):
        return False
    x = table.packed(image)
    if x is None or x.block == 1 or norm.attrs.center or norm.attrs.scale:
        return False
    new = planes.instance_norm(table.bb, x.expr, float(norm.attrs.epsilon))
    table.define_packed(var, replace(x, expr=new))
    return True


def _moves_pixels(call: Call) -> bool:
    """Whether a slice, a padding or a concatenation leaves channels as they are."""
    name = op_name(call)
    if name == "relax.concat":
        return int(call.attrs.axis) % IMAGE_RANK in _MOVED_AXES
    if name == "relax.nn.pad":
        # In padding, an infinity would be multiplied by zeros.
        return not any(int(w) for w in call.attrs.pad_width[2:4]) and math.isfinite(
            float(call.attrs.pad_value)
        )
    if name != "relax.strided_slice":
        return False
    axes, *others = (integers_of(argument) for argument in call.args[1:])
    return bool(axes) and all(others) and {axis % IMAGE_RANK for axis in axes} <= set(_MOVED_AXES)
