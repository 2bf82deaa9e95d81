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
from builder.kernels.spaces import group_norm as packed_groups
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
        is_finite = all(each.is_finite for each in whole)
        table.define_packed(var, replace(whole[0], expr=table.bb.emit(new), is_finite=is_finite))
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


def group_norm(table: LayoutValues, var: relax.Var, call: Call, bound: Mapping[relax.Expr, Call]) -> bool:
    """Replace a layer norm of the flat groups of a packed image; `call` makes an image of them again.

    With a group for each channel this is instance norm, with one group the layer norm of the whole image.
    """
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
    if len(shape) != IMAGE_RANK or shape_of(call) != shape or norm.attrs.center or norm.attrs.scale:
        return False
    rows, rank = shape_of(norm), len(shape_of(norm))
    groups = math.prod(rows[1:-1]) if rows[:1] == shape[:1] else 0
    whole = math.prod(shape[1:])
    if [int(a) % rank for a in norm.attrs.axes] != [rank - 1] or groups * rows[-1] != whole or groups < 1:
        return False
    if shape[1] % groups:
        return False
    new = _normalised(table, image, groups, float(norm.attrs.epsilon))
    if new is None:
        return False
    table.define_packed(var, new)
    return True


def image_norm(table: LayoutValues, var: relax.Var, call: Call) -> bool:
    """Replace a layer norm over the channels, rows and columns of a packed image, and its gain and shift."""
    x, *numbers = call.args
    shape = shape_of(call)
    if len(shape) != IMAGE_RANK or sorted(int(a) % IMAGE_RANK for a in call.attrs.axes) != [1, 2, 3]:
        return False
    known = [constant_of(each) for each in numbers]
    new = None if any(each is None for each in known) else _normalised(table, x, 1, float(call.attrs.epsilon))
    if new is None:
        return False
    expr = new.expr
    used = (call.attrs.scale, relax.op.multiply), (call.attrs.center, relax.op.add)
    for array, (is_used, operator) in zip(known, used, strict=True):
        if is_used and array is not None:
            packed = pack_array(array.reshape(1, *shape[1:]), new.block, 0.0, shape[1])
            expr = table.bb.emit(operator(expr, relax.const(packed)))
    table.define_packed(var, replace(new, expr=expr))
    return True


def _normalised(table: LayoutValues, image: relax.Expr, groups: int, epsilon: float) -> Packed | None:
    """Emit the norm of each group of a packed image of float32; None if the image is not packed."""
    have = table.packed(image)
    if have is None or have.block == 1 or str(image.ty.dtype) != "float32":
        return None
    if groups == have.channels:
        return replace(have, expr=planes.instance_norm(table.bb, have.expr, epsilon), is_finite=False)
    x = table.as_packed(image, have.block)
    new = packed_groups.group_norm(table.bb, x.expr, x.channels, groups, epsilon)
    return replace(x, expr=new, is_finite=False)


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
