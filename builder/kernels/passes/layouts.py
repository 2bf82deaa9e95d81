"""Chooses the layout of channels for the graph as a whole.

A convolution is fastest if its channels are stored in blocks of a vector, `[N, C/b, H, W, b]`, and operators
between two convolutions should keep them so. This pass walks the model once. A convolution asks for packed
input and produces packed output; element-wise operators and pooling keep the packing of their input; slices,
shuffles and concatenations of packed channels are only noted (`routes`). Every other operator asks for the
plain layout. A value is converted, once, when a consumer asks for a form in which it does not exist yet.
Weights are packed here, as constants.

The last block of channels is padded with zeros if it is not full; after a grouped convolution, the last
block of each group. After further operators the padding is still finite, but meaningless: only operators that
do not mix channels, or multiply the padding by zeros, may read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import tvm
from tvm import relax, te
from tvm.ir import Call

from builder.kernels.passes import routes
from builder.kernels.passes.routes import Route
from builder.kernels.rewriter import Values, constant_of, op_name, rewrite_main, shape_of
from builder.kernels.spaces import channels, convolution, depthwise, matmul, pooling, resize, winograd
from builder.target.device_target import DeviceTarget


@dataclass(frozen=True, slots=True)
class Packed:
    """A value as `[N, blocks, H, W, block]`.

    Attributes
    ----------
    expr
        The five-dimensional tensor.
    channels
        C, without padding.
    group
        After so many channels follows padding up to a whole block; C if only the last block is padded.
    """

    expr: relax.Expr
    channels: int
    group: int

    @classmethod
    def dense(cls, expr: relax.Expr, channels: int) -> Packed:
        """Return a value that is padded only in its last block."""
        return cls(expr, channels, channels)

    @property
    def is_dense(self) -> bool:
        """Whether only the last block is padded."""
        return self.group in (self.channels, self.padded_group)

    @property
    def padded_group(self) -> int:
        """The channels of a group and its padding."""
        return -(-self.group // self.block) * self.block

    @property
    def block(self) -> int:
        """The number of channels in a block."""
        return shape_of(self.expr)[4]

    def place(self, channel: int) -> int:
        """Return where a channel is, counting padding."""
        return channel // self.group * self.padded_group + channel % self.group

    @property
    def is_whole(self) -> bool:
        """Whether the last block is full: there is no padding."""
        shape = shape_of(self.expr)
        return shape[1] * shape[4] == self.channels


def channel_block(channels: int, lanes: int) -> int:
    """Return the block for `channels`: the one with the fewest vector operations, then the least padding.

    With 16 lanes, 24 channels become two vectors, a quarter of them padding, rather than three half vectors:
    a half vector takes as long as a whole one.
    """
    candidates = [b for b in (lanes, lanes // 2, lanes // 4) if b >= 4]
    return min(candidates, key=lambda b: (-(-channels // b), b), default=lanes)


class LayoutValues(Values):
    """A table of values that may exist plain, packed, or both, or are only known as routes.

    Parameters
    ----------
    bb
        Receives the new bindings.
    lanes
        The lanes of a vector.
    """

    def __init__(self, bb: relax.BlockBuilder, lanes: int) -> None:
        super().__init__(bb)
        self._lanes = lanes
        self._packed: dict[relax.Var, Packed] = {}
        self._calls: dict[relax.Var, Call] = {}
        self.routes: dict[relax.Expr, Route] = {}

    def define_packed(self, var: relax.Var, value: Packed) -> None:
        """Make `value` the packed form of the old variable `var`."""
        self._packed[var] = value

    def define_route(self, var: relax.Var, route: Route, call: Call) -> None:
        """Make `route` a form of the old variable `var`, which is bound to `call`."""
        self.routes[var] = route
        self._calls[var] = call

    def packed(self, expr: relax.Expr) -> Packed | None:
        """Return the packed form of `expr`, None if it does not exist; follow its route, if it has one."""
        if not isinstance(expr, relax.Var):
            return None
        if expr not in self._packed and expr in self.routes:
            self._packed[expr] = self._follow(self.routes[expr])
        return self._packed.get(expr)

    def plain(self, expr: relax.Expr) -> relax.Expr:
        """Return `expr` in the plain layout; convert it when it is first asked for."""
        if isinstance(expr, relax.Var) and expr not in self._plain:
            if expr in self._packed:
                self.define(expr, self._unpack(self._packed[expr]))
            else:
                self.define(expr, self.bb.emit(self.call(self._calls[expr])))
        return super().plain(expr)

    def _follow(self, route: Route) -> Packed:
        """Collect the channels of a route from its packed sources."""
        block = channel_block(len(route.picks), self._lanes)
        sources = []
        for source in route.sources:
            have = self.packed(source)
            sources.append(have if have is not None and have.block > 1 else self.as_packed(source, block))
        picks = [(number, sources[number].place(channel)) for number, channel in route.picks]
        blocks = [source.block for source in sources]
        counts = [shape_of(source.expr)[1] * source.block for source in sources]
        ends = [(number, channel) for number, count in enumerate(counts) for channel in range(count)]
        if set(blocks) == {block} and picks == ends[: len(picks)] and len(ends) - len(picks) < block:
            # Whole blocks, one source after the other: other operators can be fused with that.
            exprs = [source.expr for source in sources]
            new = exprs[0] if len(exprs) == 1 else self.bb.emit(relax.op.concat(exprs, 1))
        else:
            new = channels.emit(self.bb, [source.expr for source in sources], picks, block)
        return Packed.dense(new, len(picks))

    def as_packed(self, expr: relax.Expr, block: int) -> Packed:
        """Return `expr`, `[N, C, H, W]`, packed in blocks of `block`, converting it if needed."""
        have = self.packed(expr)
        if have is not None and have.block == block and have.is_dense:
            return have
        n, c, h, w = shape_of(expr)
        if have is not None and have.block == block:
            picks = [(0, have.place(channel)) for channel in range(c)]
            self._packed[expr] = Packed.dense(channels.emit(self.bb, [have.expr], picks, block), c)
            return self._packed[expr]
        plain = self.plain(expr)
        if c % block == 0 and (block == 1 or h * w == 1):
            new = self.bb.emit(relax.op.reshape(plain, (n, c // block, h, w, block)))
        else:
            new = self.bb.emit(self.bb.call_te(pack, plain, block, primfunc_name_hint="pack"))
        value = Packed.dense(new, c)
        if isinstance(expr, relax.Var) and have is None and block > 1:
            self._packed[expr] = value
        return value

    def _unpack(self, value: Packed) -> relax.Expr:
        n, blocks, h, w, b = shape_of(value.expr)
        if value.is_whole and (h * w == 1 or b == 1):
            return self.bb.emit(relax.op.reshape(value.expr, (n, blocks * b, h, w)))
        call = self.bb.call_te(unpack, value.expr, value.channels, value.group, primfunc_name_hint="unpack")
        return self.bb.emit(call)


def pack(x: te.Tensor, block: int) -> te.Tensor:
    """Convert `[N, C, H, W]` to `[N, ceil(C / block), H, W, block]`."""
    n, c, h, w = (int(d) for d in x.shape)

    def element(
        i: tvm.tirx.Var, o: tvm.tirx.Var, y: tvm.tirx.Var, z: tvm.tirx.Var, b: tvm.tirx.Var
    ) -> tvm.tirx.Expr:
        value = x[i, o * block + b, y, z]
        if c % block == 0:
            return value
        return tvm.tirx.if_then_else(o * block + b < c, value, tvm.tirx.const(0, x.dtype))

    return te.compute((n, -(-c // block), h, w, block), element, name="pack")


def unpack(x: te.Tensor, channels: int, group: int) -> te.Tensor:
    """Convert `[N, blocks, H, W, b]`, with padding after each `group` channels, to `[N, channels, H, W]`."""
    n, _, h, w, block = (int(d) for d in x.shape)
    padded = -(-group // block) * block

    def element(i: tvm.tirx.Var, c: tvm.tirx.Var, y: tvm.tirx.Var, z: tvm.tirx.Var) -> tvm.tirx.Expr:
        at = c if group in (channels, padded) else c // group * padded + c % group
        return x[i, at // block, y, z, at % block]

    return te.compute((n, channels, h, w), element, name="unpack")


def pack_array(array: np.ndarray, block: int, fill: float, group: int) -> np.ndarray:
    """Return a constant that broadcasts to `[N, C, H, W]` in a form that broadcasts to the packed layout.

    Parameters
    ----------
    array
        The constant.
    block
        Channels in a block.
    fill
        Its value in padding.
    group
        After so many channels follows padding up to a whole block.
    """
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    if array.shape[1] > group:
        array = convolution.with_gaps(array, 1, group, block, fill)
    n, c, h, w = array.shape
    if c == 1:
        return array.reshape(n, 1, h, w, 1)
    blocks = -(-c // block)
    padded = np.full((n, blocks * block, h, w), fill, array.dtype)
    padded[:, :c] = array
    return np.ascontiguousarray(padded.reshape(n, blocks, block, h, w).transpose(0, 1, 3, 4, 2))


# Element-wise operators whose results in the padding stay finite: it begins as zeros.
_UNARY: Final = {
    f"relax.{name}"
    for name in (
        "nn.relu", "nn.relu6", "nn.silu", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.softplus", "sigmoid",
        "tanh",        "abs", "negative", "clip", "erf", "round", "floor", "ceil", "square", "cos", "sin",
    )
}  # fmt: skip
# Operator -> the right operand's value in padding: a division needs a one.
_BINARY: Final = {"relax.add": 0.0, "relax.subtract": 0.0, "relax.multiply": 0.0, "relax.divide": 1.0,
           "relax.maximum": 0.0, "relax.minimum": 0.0}  # fmt: skip
# Operators that are so slow on plain planes that packing them first pays, unless channels are few.
_WORTH_PACKING: Final = {"relax.nn.max_pool2d", "relax.nn.avg_pool2d", resize.NAME}
_FEWEST_CHANNELS: Final = 4
# A convolution rather closes gaps than multiply more than this share of zeros.
_WIDEST_GAPS: Final = 1.25


class _Packing:
    """Decides for each call whether it is computed in packed form."""

    def __init__(self, target: DeviceTarget) -> None:
        self._target = target
        self._lanes = target.simd.lanes
        self._products: dict[relax.Var, matmul.Heads] = {}

    def emit(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace `call` by its packed form if it has one."""
        name = op_name(call)
        if name == "relax.nn.conv2d":
            return self._conv2d(table, var, call)
        if name == "relax.matmul":
            return matmul.emit(table, var, call, self._target) or self._heads(table, var, call)
        if (
            name == "relax.permute_dims"
            and call.args[0] in self._products
            and matmul.swaps_heads_and_rows(call)
        ):
            table.define(var, self._products[call.args[0]].emit(table.bb, rows_first=True))
            return True
        if not isinstance(call.ty, relax.TensorType) or not call.args:
            return False
        if name in routes.OPERATORS:
            return self._route(table, var, call)
        if name in _BINARY and len(shape_of(call)) == 4:
            return self._binary(table, var, call, _BINARY[name])
        x = table.packed(call.args[0])
        if x is None and name in _WORTH_PACKING and shape_of(call)[1] >= _FEWEST_CHANNELS:
            x = table.as_packed(call.args[0], channel_block(shape_of(call)[1], self._lanes))
        if x is None:
            return False
        if name in _UNARY:
            operands = [x.expr, *call.args[1:]]
            new = table.bb.emit(Call(call.op, operands, call.attrs, call.ty_args))
            table.define_packed(var, replace(x, expr=new))
            return True
        emit = resize.emit if name == resize.NAME else pooling.emit
        new = emit(table.bb, call, x.expr)
        if new is not None:
            table.define_packed(var, replace(x, expr=new))
            return True
        return False

    def _heads(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace a product of attention's heads, and remember it: a transpose may follow."""
        heads = matmul.Heads.of(table, call)
        if heads is None:
            return False
        self._products[var] = heads
        table.define(var, heads.emit(table.bb, rows_first=False))
        return True

    def _conv2d(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Replace a convolution with constant weights: depthwise, by Winograd, or direct."""
        weight = constant_of(call.args[1])
        op = convolution.Conv2d.of(call)
        if weight is None or op is None or weight.dtype != np.float32:
            return False
        group = channels = op.out_channels
        if op.is_depthwise:
            have = table.packed(call.args[0])
            block = have.block if have is not None else channel_block(op.in_channels, self._lanes)
            x = table.as_packed(call.args[0], block)
            new = depthwise.emit(table.bb, op, x.expr, weight)
        else:
            out_block = channel_block(op.out_channels, self._lanes)
            if op.groups > 1:
                op, weight, out_block = convolution.merge_groups(op, weight, self._lanes)
                group = channels // op.groups
            have = table.packed(call.args[0])
            if have is not None and self._may_read_gaps(op, have):
                weight = convolution.with_gaps(weight, 1, have.group, have.block)
                op, x = replace(op, in_channels=op.groups * weight.shape[1]), have
            else:
                x = table.as_packed(call.args[0], self._in_block(table, call.args[0], op))
            m = winograd.output_tile(op, x.block, self._target)
            if m is None:
                new = convolution.emit(table.bb, op, x.expr, weight, out_block, self._target)
            else:
                new = winograd.emit(
                    table.bb, op, x.expr, weight, out_block=out_block, m=m, target=self._target
                )
        table.define_packed(var, Packed(new, channels, group))
        return True

    @staticmethod
    def _may_read_gaps(op: convolution.Conv2d, value: Packed) -> bool:
        """Whether a convolution reads a value with its gaps, which it multiplies by zeros."""
        if value.is_dense or op.in_channels // op.groups % value.group:
            return False
        return value.padded_group <= _WIDEST_GAPS * value.group

    def _in_block(self, table: LayoutValues, x: relax.Expr, op: convolution.Conv2d) -> int:
        """Return the block of channels in which a convolution reads `x`: the present one if possible."""
        have = table.packed(x)
        per_group = op.in_channels // op.groups
        if have is not None and (op.groups == 1 or per_group % have.block == 0):
            return have.block
        if per_group < self._lanes:
            return 1
        if op.groups > 1:
            block = channel_block(per_group, self._lanes)
            return block if per_group % block == 0 else 1
        return channel_block(per_group, self._lanes)

    def _binary(self, table: LayoutValues, var: relax.Var, call: Call, fill: float) -> bool:
        """Replace an element-wise operator if its operands agree on one block of channels.

        `fill` is a constant's value in padding.
        """
        packed = [table.packed(a) for a in call.args]
        blocks = {p.block for p in packed if p is not None and p.block > 1}
        if len(blocks) != 1:
            return False
        block = blocks.pop()
        channels = shape_of(call)[1]
        group = self._common_group(packed, call, channels)
        operands: list[relax.Expr] = []
        for arg, have in zip(call.args, packed, strict=True):
            numbers = constant_of(arg)
            if numbers is not None:
                operands.append(relax.const(pack_array(numbers, block, fill, group)))
            elif have is not None and (have.is_dense or have.group == group):
                operands.append(have.expr)
            elif len(shape_of(arg)) != 4 or (shape_of(arg)[1] == 1 and channels > 1):
                return False
            else:
                operands.append(table.as_packed(arg, block).expr)
        if fill and not all(
            (p is not None and p.is_whole) or constant_of(a) is not None
            for p, a in zip(packed[1:], call.args[1:], strict=True)
        ):
            return False
        if any(p is not None and p.channels != channels for p in packed):
            return False
        new = table.bb.emit(Call(call.op, operands, call.attrs, call.ty_args))
        table.define_packed(var, Packed(new, channels, group))
        return True

    def _route(self, table: LayoutValues, var: relax.Var, call: Call) -> bool:
        """Note the route of a value whose channels come, at least in part, from packed values."""
        route = Route.of(call, table.routes)
        if route is None:
            return False
        packed = [table.packed(source) for source in route.sources]
        blocks = [self._lanes if have is None else have.block for have in packed]
        if all(have is None or have.block == 1 for have in packed):
            return False
        block = channel_block(len(route.picks), self._lanes)
        if channels.vectors(route.picks, block, blocks) > channels.MOST_VECTORS:
            return False
        table.define_route(var, route, call)
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
    packing = _Packing(target)
    return rewrite_main(mod, packing.emit, lambda bb: LayoutValues(bb, target.simd.lanes))
