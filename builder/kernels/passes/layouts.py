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
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from builder.kernels.passes import packed_images
from builder.kernels.passes.packed import LayoutValues, Packed, channel_block, pack_array
from builder.kernels.passes.packed_convolutions import Convolutions
from builder.kernels.passes.routes import Route
from builder.kernels.rewriter import RESHAPES, constant_of, op_name, rewrite_main, shape_of, users_of
from builder.kernels.spaces import (
    attention,
    channels,
    half_matmul,
    integer_matmul,
    matmul,
    pooling,
    quantisation,
    resize,
    rows,
    tile_matmul,
)
from builder.target.device_target import DeviceTarget

# Element-wise operators whose results in the padding stay finite if it is.
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

# Replaces a call by its packed form if it has one, and says whether it did.
Rule = Callable[[LayoutValues, relax.Var, Call], bool]


class _Packing:
    """Decides for each call whether it is computed in packed form: by the first rule of its operator."""

    def __init__(self, mod: tvm.IRModule, target: DeviceTarget) -> None:
        self._target = target
        self._users = users_of(mod["main"])
        self._attentions: dict[relax.Var, attention.Attention] = {}
        self._products: dict[relax.Var, matmul.Heads] = {}
        self._bound: dict[relax.Expr, Call] = {}
        self._moves: tuple[Rule, ...] = (self._route, packed_images.move_pixels)
        self._rules: dict[str, tuple[Rule, ...]] = {
            "relax.nn.conv2d": (Convolutions(target, self._bound).emit,),
            "relax.matmul": (self._panels, self._attention, self._heads),
            "relax.permute_dims": (self._transposed, self._of_packed),
            "relax.take": (self._take,),
            "relax.nn.pad": (packed_images.move_pixels,),
            "relax.nn.layer_norm": (packed_images.image_norm, packed_images.channel_norm),
            **dict.fromkeys(_BINARY, (self._before_route, self._binary)),
            **dict.fromkeys(_UNARY, (self._before_route, self._of_packed)),
            **dict.fromkeys(RESHAPES, (self._group_norm, self._of_packed)),
            **dict.fromkeys(("relax.concat", "relax.strided_slice"), self._moves),
            "relax.reshape": (self._group_norm, *self._moves),
        }

    def emit(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace `call` by its packed form if it has one."""
        self._bound[var] = call
        if not isinstance(call.ty, relax.TensorType) or not call.args:
            return False
        rules = self._rules.get(op_name(call), (self._of_packed,))
        return any(rule(table, var, call) for rule in rules)

    def _of_packed(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace a pooling, a resize, a reduction or a function of a packed value."""
        name = op_name(call)
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
            return packed_images.reduction(table, var, call, x)
        if name == "relax.nn.prelu":
            return packed_images.prelu(table, var, call, x)
        if name in _UNARY or (name in _WHOLE and x.is_whole):
            if name in _OF_A_SCALE and any(math.prod(shape_of(arg)) != 1 for arg in call.args[1:]):
                return False  # a scale for each channel
            operands = [x.expr, *map(table.plain, call.args[1:])]
            new = table.bb.emit(Call(call.op, operands, call.attrs, call.ty_args))
            table.define_packed(var, replace(x, expr=new))
            return True
        resized = resize.emit(table.bb, call, x.expr)
        if resized is not None and resize.is_bilinear(call):
            table.define_resized(var, replace(x, expr=resized), call, x.expr)
            return True
        new = resized if resized is not None else pooling.emit(table.bb, call, x.expr)
        if new is None:
            return False
        table.define_packed(var, replace(x, expr=new))
        return True

    def _panels(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace a product with a constant matrix."""
        algorithms = (matmul.emit, tile_matmul.emit, integer_matmul.emit, half_matmul.emit)
        return any(emit(table, var, call, self._target) for emit in algorithms)

    def _transposed(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace attention, or a product of its heads, by one that is stored as `call` transposes it."""
        x, order = call.args[0], attention.order_of(call)
        if x in self._attentions and order is not None:
            table.define(var, self._attentions[x].emit(table.bb, order))
            return True
        if x in self._products and matmul.swaps_heads_and_rows(call):
            table.define(var, self._products[x].emit(table.bb, rows_first=True))
            return True
        return False

    def _take(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace a table of bytes, or a choice of channels or pixels."""
        if not quantisation.is_table(call):
            return any(rule(table, var, call) for rule in self._moves)
        have = table.packed(call.args[1])
        if have is None:
            return False
        new = table.bb.emit(Call(call.op, [call.args[0], have.expr], call.attrs))
        table.define_packed(var, replace(have, expr=new))
        return True

    def _group_norm(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        return packed_images.group_norm(table, var, call, self._bound)

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

    def _binary(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace an element-wise operator of images if its operands agree on one block of channels."""
        if len(shape_of(call)) != 4:
            return self._of_packed(table, var, call)
        fill = _BINARY[op_name(call)]  # a constant's value in padding
        packed = [table.packed(a) for a in call.args]
        blocks = {p.block for p in packed if p is not None and p.block > 1}
        if not blocks:
            return False
        block = max(blocks)
        channels = shape_of(call)[1]
        group = self._common_group(packed, call, channels)
        operands: list[relax.Expr] = []
        is_finite = True
        for arg, have in zip(call.args, packed, strict=True):
            numbers = constant_of(arg)
            if numbers is not None:
                is_finite &= bool(np.all(np.isfinite(numbers))) and not (fill and np.any(numbers == 0))
                operands.append(relax.const(pack_array(numbers, block, fill, group)))
            elif len(shape_of(arg)) == 4 and shape_of(arg)[1] == 1 and channels > 1:  # one for each pixel
                is_finite = False
                operands.append(table.as_packed(arg, 1).expr)
            elif have is not None and have.block == block and (have.is_dense or have.group == group):
                is_finite &= have.is_finite
                operands.append(have.expr)
            elif math.prod(shape_of(arg)) == 1 and len(shape_of(arg)) < 2:  # the scale of one run
                is_finite = False
                operands.append(table.plain(arg))
            elif len(shape_of(arg)) != 4:
                return False
            else:
                value = table.as_packed(arg, block)
                is_finite &= value.is_finite
                operands.append(value.expr)
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
        table.define_packed(var, Packed(new, channels, group, is_finite))
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
            if numbers is not None and 1 < numbers.size == len(route.picks[0]) and numbers.ndim <= 4:
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
