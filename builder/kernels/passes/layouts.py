"""Chooses the layout of channels for the graph as a whole.

A convolution is fastest if its channels are stored in blocks of a vector, `[N, C/b, H, W, b]`, and operators
between two convolutions should keep them so. This pass walks the model once. A convolution asks for packed
input and produces packed output. Element-wise operators, pooling, reductions, and what moves whole pixels
keep the packing of their input. Slices, shuffles and concatenations of packed channels are only noted
(`routes`). Every other operator asks for the plain layout. A value is converted, once, when a consumer asks
for a form in which it does not exist yet. Weights are packed here, as constants.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.ir import Call

from builder.kernels.passes import routes
from builder.kernels.passes.packed import LayoutValues, Packed, channel_block, pack_array
from builder.kernels.passes.paddings import Padding
from builder.kernels.passes.routes import Route
from builder.kernels.rewriter import (
    RESHAPES,
    constant_of,
    integers_of,
    op_name,
    rewrite_main,
    shape_of,
    users_of,
)
from builder.kernels.spaces import (
    attention,
    channels,
    convolution,
    depthwise,
    half_convolution,
    half_matmul,
    half_winograd,
    integer_convolution,
    integer_depthwise,
    integer_matmul,
    integer_winograd,
    matmul,
    padding,
    pixels,
    planes,
    pooling,
    quantisation,
    resize,
    rows,
    winograd,
)
from builder.kernels.spaces.integer_convolution import block_of, in_block_of
from builder.target.device_target import DeviceTarget

# Element-wise operators whose results in the padding stay finite: it begins as zeros.
_UNARY: Final = {
    f"relax.{name}"
    for name in (
        "nn.relu", "nn.relu6", "nn.silu", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.softplus", "sigmoid",
        "tanh", "abs", "negative", "clip", "erf", "round", "floor", "ceil", "square", "cos", "sin",
        "quantize", "dequantize", "astype",
    )
}  # fmt: skip
# Operators whose results in padding may be infinite or no numbers: for values without padding.
_WHOLE: Final = {f"relax.{name}" for name in ("exp", "log", "sqrt", "rsqrt")}
# Operators whose other operands are a scale and a zero point, which may be computed.
_OF_A_SCALE: Final = ("relax.quantize", "relax.dequantize")
# Operator -> the right operand's value in padding: a division needs a one.
_BINARY: Final = {"relax.add": 0.0, "relax.subtract": 0.0, "relax.multiply": 0.0, "relax.divide": 1.0,
           "relax.maximum": 0.0, "relax.minimum": 0.0}  # fmt: skip
# Operators that are so slow on plain planes that packing them first pays, unless channels are few.
_WORTH_PACKING: Final = {"relax.nn.max_pool2d", "relax.nn.avg_pool2d", resize.NAME}
_FEWEST_CHANNELS: Final = 4
_IMAGE_RANK: Final = 4
_PIXEL_AXES: Final = (2, 3)
_MOVED_AXES: Final = (0, *_PIXEL_AXES)
# A convolution rather closes gaps than multiply more than this share of zeros.
_WIDEST_GAPS: Final = 1.25


class _Packing:
    """Decides for each call whether it is computed in packed form."""

    def __init__(self, mod: tvm.IRModule, target: DeviceTarget) -> None:
        self._target = target
        self._lanes = target.simd.lanes
        self._users = users_of(mod["main"])
        self._attentions: dict[relax.Var, attention.Attention] = {}
        self._products: dict[relax.Var, matmul.Heads] = {}
        self._bound: dict[relax.Expr, Call] = {}

    def emit(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace `call` by its packed form if it has one."""
        name = op_name(call)
        self._bound[var] = call
        if name == "relax.nn.conv2d":
            return self._conv2d(table, var, call)
        if name == "relax.matmul":
            panels = (matmul.emit, integer_matmul.emit, half_matmul.emit)
            known = any(emit(table, var, call, self._target) for emit in panels)
            return known or self._attention(table, var, call) or self._heads(table, var, call)
        if name == "relax.permute_dims" and call.args[0] in self._attentions:
            order = attention.order_of(call)
            if order is not None:
                table.define(var, self._attentions[call.args[0]].emit(table.bb, order))
                return True
        if (
            name == "relax.permute_dims"
            and call.args[0] in self._products
            and matmul.swaps_heads_and_rows(call)
        ):
            table.define(var, self._products[call.args[0]].emit(table.bb, rows_first=True))
            return True
        if not isinstance(call.ty, relax.TensorType) or not call.args:
            return False
        if quantisation.is_table(call):
            have = table.packed(call.args[1])
            if have is None:
                return False
            new = table.bb.emit(Call(call.op, [call.args[0], have.expr], call.attrs))
            table.define_packed(var, replace(have, expr=new))
            return True
        if name in RESHAPES and self._instance_norm(table, var, call):
            return True
        if name in routes.OPERATORS:
            return self._route(table, var, call) or self._pixels(table, var, call)
        if name == "relax.nn.pad":
            return self._pixels(table, var, call)
        if name == "relax.nn.layer_norm":
            return self._channel_norm(table, var, call)
        if (name in _BINARY or name in _UNARY) and self._before_route(table, var, call):
            return True
        if name in _BINARY and len(shape_of(call)) == 4:
            return self._binary(table, var, call, _BINARY[name])
        x = table.packed(call.args[0])
        if x is None and name in _WORTH_PACKING and shape_of(call)[1] >= _FEWEST_CHANNELS:
            x = table.as_packed(call.args[0], channel_block(shape_of(call)[1], table.lanes_of(call.args[0])))
        if x is None:
            return False
        mean = self._mean_of_bytes(table, call)
        if mean is not None:
            table.define_packed(var, replace(x, expr=mean))
            return True
        if name in rows.REDUCTIONS:
            return self._reduction(table, var, call, x)
        if name == "relax.nn.prelu":
            return self._prelu(table, var, call, x)
        if name in _UNARY or (name in _WHOLE and x.is_whole):
            if name in _OF_A_SCALE and any(math.prod(shape_of(arg)) != 1 for arg in call.args[1:]):
                return False  # a scale for each channel
            operands = [x.expr, *map(table.plain, call.args[1:])]
            new = table.bb.emit(Call(call.op, operands, call.attrs, call.ty_args))
            table.define_packed(var, replace(x, expr=new))
            return True
        emit = resize.emit if name == resize.NAME else pooling.emit
        new = emit(table.bb, call, x.expr)
        if new is not None:
            table.define_packed(var, replace(x, expr=new))
            return True
        return False

    def _attention(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace attention from its scores on, and remember it: a transpose may follow."""
        found = attention.Attention.of(table, call, self._bound, self._users, self._target)
        if found is None:
            return False
        self._attentions[var] = found
        table.define(var, found.emit(table.bb))
        return True

    def _heads(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace a product of attention's heads, and remember it: a transpose may follow."""
        heads = matmul.Heads.of(table, call)
        if heads is None:
            return False
        self._products[var] = heads
        table.define(var, heads.emit(table.bb, rows_first=False))
        return True

    def _conv2d(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace a convolution: depthwise, by Winograd, or direct."""
        weight = constant_of(call.args[1])
        op = convolution.Conv2d.of(call)
        if op is None:
            return False
        if weight is None:
            return self._computed_weights(table, var, call, op)
        if weight.dtype == np.int8:
            return self._bytes(table, var, call, op, weight)
        if weight.dtype not in (np.float32, np.float16):
            return False
        op, weight = convolution.without_idle_taps(op, weight)
        halves = weight.dtype == np.float16
        lanes = 2 * self._lanes if halves else self._lanes
        group = channels = op.out_channels
        if op.is_depthwise:
            have = table.packed(call.args[0])
            block = have.block if have is not None else channel_block(op.in_channels, lanes)
            bytes_ = self._bytes_of(call.args[0])
            x = table.as_packed(call.args[0] if bytes_ is None else bytes_[0], block)
            zero = None if bytes_ is None else relax.const(np.int32(bytes_[1]))
            new = depthwise.emit(table.bb, op, x.expr, weight, zero)
        else:
            out_block = channel_block(op.out_channels, lanes)
            if op.groups > 1:
                op, weight, out_block = convolution.merge_groups(op, weight, lanes)
                group = channels // op.groups
            have = table.packed(call.args[0])
            if have is not None and self._may_read_gaps(op, have):
                weight = convolution.with_gaps(weight, 1, have.group, have.block)
                op, x = replace(op, in_channels=op.groups * weight.shape[1]), have
            else:
                x = table.as_packed(call.args[0], self._in_block(table, call.args[0], op, lanes))
            m = None if halves else winograd.output_tile(op, x.block, self._target)
            if halves and half_winograd.applies(op, x.block, self._target):
                new = half_winograd.emit(table.bb, op, x.expr, weight, out_block, self._target)
            elif halves:
                new = half_convolution.emit(table.bb, op, x.expr, weight, out_block, self._target)
            elif m is None:
                new = convolution.emit(table.bb, op, x.expr, weight, out_block, self._target)
            else:
                new = winograd.emit(
                    table.bb, op, x.expr, weight, out_block=out_block, m=m, target=self._target
                )
        table.define_packed(var, Packed(new, channels, group))
        return True

    def _computed_weights(
        self, table: LayoutValues, var: relax.Var, call: Call, op: convolution.Conv2d
    ) -> bool:
        """Replace a convolution of float32 whose weights are computed: depthwise or without groups."""
        x, weight = call.args
        if any(str(each.ty.dtype) != "float32" for each in (x, weight, call)):
            return False
        if op.is_depthwise:
            have = table.packed(x)
            block = have.block if have is not None else channel_block(op.in_channels, self._lanes)
            new = depthwise.emit(table.bb, op, table.as_packed(x, block).expr, table.plain(weight))
        elif op.groups == 1:
            data = table.as_packed(x, self._in_block(table, x, op, self._lanes))
            block = channel_block(op.out_channels, self._lanes)
            filters = table.plain(weight)
            new = convolution.emit(table.bb, op, data.expr, filters, block, self._target)
        else:
            return False
        table.define_packed(var, Packed.dense(new, op.out_channels))
        return True

    def _mean_of_bytes(self, table: LayoutValues, call: Call) -> relax.Expr | None:
        """Emit the mean of planes that are dequantised: of their bytes, whose sums are exact; else None."""
        source = self._bound.get(call.args[0])
        if source is None or op_name(source) != "relax.dequantize" or not pooling.is_mean_of_planes(call):
            return None
        bytes_, (scale, zero) = table.packed(source.args[0]), map(constant_of, source.args[1:])
        if bytes_ is None or scale is None or zero is None or scale.size != 1 or zero.size != 1:
            return None
        if str(bytes_.expr.ty.dtype) not in ("uint8", "int8"):
            return None
        if math.prod(shape_of(source)[2:]) > pooling.LARGEST_PLANE:
            return None
        return pooling.mean_of_bytes(table.bb, bytes_.expr, float(scale.item()), int(zero.item()))

    def _bytes_of(self, x: relax.Expr) -> tuple[relax.Expr, int] | None:
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
        self, table: LayoutValues, var: relax.Var, call: Call, op: convolution.Conv2d, weight: np.ndarray
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
        have = table.packed(data)
        if op.is_depthwise and integer_depthwise.taps_at_once(weight, self._target):
            fits = have is not None and have.is_dense and have.block % max(8, self._target.dot.lanes) == 0
            block = have.block if have is not None and fits else block_of(op.in_channels, self._target)
            x = table.as_packed(data, block)
            new = integer_depthwise.emit(table.bb, op, x.expr, point, weight, self._target)
            table.define_packed(var, Packed.dense(new, op.out_channels))
            return True
        if op.groups > 1:
            return False
        fits = have is not None and have.is_dense and have.block % max(4, self._target.dot.group) == 0
        block = have.block if have is not None and fits else in_block_of(op.in_channels, self._target)
        x = table.as_packed(data, block)
        out_block = block_of(op.out_channels, self._target)
        m = integer_winograd.output_tile(op, weight, str(data.ty.dtype), self._target)
        if m is None:
            new = integer_convolution.emit(table.bb, op, x.expr, point, weight, out_block, self._target)
        else:
            new = integer_winograd.emit(
                table.bb, op, x.expr, point, weight, out_block=out_block, m=m, target=self._target
            )
        table.define_packed(var, Packed.dense(new, op.out_channels))
        return True

    @staticmethod
    def _may_read_gaps(op: convolution.Conv2d, value: Packed) -> bool:
        """Whether a convolution reads a value with its gaps, which it multiplies by zeros."""
        if value.is_dense or op.in_channels // op.groups % value.group:
            return False
        return value.padded_group <= _WIDEST_GAPS * value.group

    @staticmethod
    def _in_block(table: LayoutValues, x: relax.Expr, op: convolution.Conv2d, lanes: int) -> int:
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

    def _binary(self, table: LayoutValues, var: relax.Var, call: Call, fill: float) -> bool:
        """Replace an element-wise operator if its operands agree on one block of channels.

        `fill` is a constant's value in padding.
        """
        packed = [table.packed(a) for a in call.args]
        blocks = {p.block for p in packed if p is not None and p.block > 1}
        if not blocks:
            return False
        block = max(blocks)
        channels = shape_of(call)[1]
        group = self._common_group(packed, call, channels)
        operands: list[relax.Expr] = []
        for arg, have in zip(call.args, packed, strict=True):
            numbers = constant_of(arg)
            if numbers is not None:
                operands.append(relax.const(pack_array(numbers, block, fill, group)))
            elif len(shape_of(arg)) == 4 and shape_of(arg)[1] == 1 and channels > 1:  # one for each pixel
                operands.append(table.as_packed(arg, 1).expr)
            elif have is not None and have.block == block and (have.is_dense or have.group == group):
                operands.append(have.expr)
            elif math.prod(shape_of(arg)) == 1 and len(shape_of(arg)) < 2:  # the scale of one run
                operands.append(table.plain(arg))
            elif len(shape_of(arg)) != 4:
                return False
            else:
                operands.append(table.as_packed(arg, block).expr)
        has_padding = channels % block != 0 or group != channels
        if (
            fill
            and has_padding
            and not all(
                (p is not None and p.is_whole) or constant_of(a) is not None
                for p, a in zip(packed[1:], call.args[1:], strict=True)
            )
        ):
            return False
        if any(p is not None and p.channels not in (1, channels) for p in packed):
            return False
        new = table.bb.emit(Call(call.op, operands, call.attrs, call.ty_args))
        table.define_packed(var, Packed(new, channels, group))
        return True

    def _route(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Note the route of a value whose channels come, at least in part, from packed values."""
        route = Route.of(call, table.routes, self._bound)
        if route is None:
            return False
        packed = [table.packed(source) for source in route.sources]
        lanes = table.lanes_of(call)
        blocks = [lanes if have is None else have.block for have in packed]
        if all(have is None or have.block == 1 for have in packed):
            return False
        block = channel_block(len(route.picks[0]), lanes)
        if channels.loops(route.picks, block, blocks) > channels.MOST_LOOPS:
            return False
        table.define_route(var, route, call)
        return True

    @staticmethod
    def _pixels(table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace what moves whole pixels: a slice, a padding or a concatenation, except of channels."""
        if len(shape_of(call)) != _IMAGE_RANK or not _moves_pixels(call):
            return False
        parts = list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else [call.args[0]]
        packed = [table.packed(part) for part in parts]
        block = max((have.block for have in packed if have is not None), default=1)
        if block == 1:
            return False
        if op_name(call) == "relax.concat":
            whole = [table.as_packed(part, block) for part in parts]
            new = relax.op.concat([each.expr for each in whole], int(call.attrs.axis) % _IMAGE_RANK)
            table.define_packed(var, replace(whole[0], expr=table.bb.emit(new)))
            return True
        [x] = packed
        assert x is not None
        if op_name(call) == "relax.strided_slice":
            axes, *others = (integers_of(argument) for argument in call.args[1:])
            new = relax.op.strided_slice(x.expr, [axis % _IMAGE_RANK for axis in axes], *others)
        else:
            widths = [*(int(width) for width in call.attrs.pad_width), 0, 0]
            new = padding.emit(
                table.bb, x.expr, widths, str(call.attrs.pad_mode), float(call.attrs.pad_value)
            )
        table.define_packed(var, replace(x, expr=table.bb.emit(new)))
        return True

    @staticmethod
    def _reduction(table: LayoutValues, var: relax.Var, call: Call, x: Packed) -> bool:
        """Replace a reduction over rows and columns, or over channels."""
        name, arg = op_name(call), call.args[0]
        axes = {int(axis) % _IMAGE_RANK for axis in call.attrs.axis or range(_IMAGE_RANK)}
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

    def _channel_norm(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace a layer norm over the channels of an image."""
        if [int(axis) for axis in call.attrs.axes] != [1] or len(shape_of(call)) != _IMAGE_RANK:
            return False
        x, gain, shift = call.args
        numbers = [constant_of(gain), constant_of(shift)]
        if str(call.ty.dtype) != "float32" or any(each is None for each in numbers):
            return False
        channels, have = shape_of(call)[1], table.packed(x)
        block = channel_block(channels, self._lanes) if have is None or have.block == 1 else have.block
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

    @staticmethod
    def _prelu(table: LayoutValues, var: relax.Var, call: Call, x: Packed) -> bool:
        """Replace a PReLU with a constant slope for each channel, or for all."""
        slopes = constant_of(call.args[1])
        axis = int(call.attrs.axis) % _IMAGE_RANK
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

    def _instance_norm(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace a layer norm of the flat planes of a packed image; `call` makes an image of them again."""
        norm = self._bound.get(call.args[0])
        flat = self._bound.get(norm.args[0]) if norm is not None and norm.args else None
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

    def _before_route(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Move an element-wise operator from behind a route to its source, where it can be fused.

        Only if all channels of the source are on the route, so that it costs nothing more.
        """
        x, *others = call.args
        route = table.open_route(x)
        if route is None or len(route.sources) != 1:
            return False
        source = table.packed(route.sources[0])
        order = [channel for phase in route.picks for _, channel in phase]
        if source is None or source.block == 1 or sorted(order) != list(range(source.channels)):
            return False
        operands: list[relax.Expr] = []
        for other in others:
            numbers = constant_of(other)
            if numbers is not None and numbers.ndim <= 4 and numbers.size == len(route.picks[0]):
                if (1, 1, 1, *numbers.shape)[-3:-2] != (numbers.size,):
                    return False
                spread = np.empty(source.channels, numbers.dtype)
                spread[order] = np.tile(numbers.ravel(), len(route.picks))
                fill = _BINARY[op_name(call)]
                array = spread.reshape(-1, 1, 1)
                operands.append(relax.const(pack_array(array, source.block, fill, source.group)))
            elif isinstance(other.ty, relax.TensorType) and (numbers is None or numbers.size != 1):
                return False
            else:
                operands.append(other)
        new = table.bb.emit(Call(call.op, [source.expr, *operands], call.attrs, call.ty_args))
        moved = relax.Var("moved", route.sources[0].ty)
        table.define_packed(moved, replace(source, expr=new))
        table.define_route(var, replace(route, sources=(moved,)), call)
        return True

    @staticmethod
    def _common_group(packed: list[Packed | None], call: Call, channels: int) -> int:
        """Return the gaps of the operands if all have the same; otherwise none, and gaps are closed."""
        groups = {
            channels if have is None or have.is_dense else have.group
            for arg, have in zip(call.args, packed, strict=True)
            if constant_of(arg) is None
        }
        return groups.pop() if len(groups) == 1 else channels


def _moves_pixels(call: Call) -> bool:
    """Whether a slice, a padding or a concatenation leaves channels as they are."""
    name = op_name(call)
    if name == "relax.concat":
        return int(call.attrs.axis) % _IMAGE_RANK in _MOVED_AXES
    if name == "relax.nn.pad":
        # In padding, an infinity would be multiplied by zeros.
        return not any(int(w) for w in call.attrs.pad_width[2:4]) and math.isfinite(
            float(call.attrs.pad_value)
        )
    if name != "relax.strided_slice":
        return False
    axes, *others = (integers_of(argument) for argument in call.args[1:])
    return bool(axes) and all(others) and {axis % _IMAGE_RANK for axis in axes} <= set(_MOVED_AXES)


def choose_layouts(mod: tvm.IRModule, target: DeviceTarget) -> tvm.IRModule:
    """Choose the layout of every value of `mod`, and pack its weights.

    Parameters
    ----------
    mod
        A canonical module.
    target
        The device; the largest block has as many channels as its vectors have lanes.
    """
    packing = _Packing(mod, target)
    return rewrite_main(mod, packing.emit, lambda bb: LayoutValues(bb, target.simd.lanes))
