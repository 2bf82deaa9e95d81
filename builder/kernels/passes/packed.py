"""Values in the packed layout, `[N, C/b, H, W, b]`, and the table of the forms in which values exist.

The last block of channels is padded with zeros if it is not full; after a grouped convolution, the last
block of each group. After further operators the padding is meaningless, and NaN where a convolution
multiplied an infinity by the zeros of its weights. Operators that do not mix channels may read it, and those
that multiply it by zeros if it is finite (`LayoutValues.finite`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax, te
from tvm.ir import Call

from builder.kernels.passes.routes import Route
from builder.kernels.rewriter import Values, shape_of
from builder.kernels.spaces import channels, geometry, resize
from builder.kernels.spaces.unpacking import unpack


@dataclass(frozen=True, slots=True)
class Packed:
    """A value as `[N, blocks, H, W, block]`.

    `expr`: the five-dimensional tensor.
    `channels`: C, without padding.
    `group`: after so many channels follows padding up to a whole block; C if only the last block is padded.
    `is_finite`: whether no number in the padding is NaN or infinite, whatever the channels are.
    """

    expr: relax.Expr
    channels: int
    group: int
    is_finite: bool = False

    @classmethod
    def dense(cls, expr: relax.Expr, channels: int, *, is_finite: bool = False) -> Packed:
        """Return a value that is padded only in its last block."""
        return cls(expr, channels, channels, is_finite)

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

    @property
    def places(self) -> list[int]:
        """Where each channel is, counting padding.

        All at once, because the shape of `expr` is slow to read: once per channel took seconds in DenseNet.
        """
        group, padded = self.group, self.padded_group
        return [channel // group * padded + channel % group for channel in range(self.channels)]

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

    `lanes`: the float32 lanes of a vector.
    """

    def __init__(self, bb: relax.BlockBuilder, lanes: int) -> None:
        super().__init__(bb)
        self._lanes = lanes
        self._packed: dict[relax.Var, Packed] = {}
        self._calls: dict[relax.Var, Call] = {}
        self.routes: dict[relax.Expr, Route] = {}
        self._followed: dict[relax.Var, Route] = {}  # the routes of packed values
        # Packed values that are resized images -> the resize, and the image before it.
        self._resized: dict[relax.Expr, tuple[Call, relax.Expr]] = {}

    def lanes_of(self, expr: relax.Expr) -> int:
        """Return how many elements of a tensor fit a vector: twice as many if it is float16."""
        return self._lanes * (2 if str(expr.ty.dtype) == "float16" else 1)

    def define_packed(self, var: relax.Var, value: Packed) -> None:
        """Make `value` the packed form of the old variable `var`."""
        self._packed[var] = value

    def define_resized(self, var: relax.Var, value: Packed, call: Call, image: relax.Expr) -> None:
        """Make `value`, which `call` resizes from a packed image, the packed form of the old `var`."""
        self._resized[value.expr] = (call, image)
        self.define_packed(var, value)

    def define_route(self, var: relax.Var, route: Route, call: Call) -> None:
        """Make `route` a form of the old variable `var`, which is bound to `call`."""
        self.routes[var] = route
        self._calls[var] = call

    def open_route(self, expr: relax.Expr) -> Route | None:
        """Return the route of `expr`, None if it has none, or if its channels have already been moved."""
        is_open = isinstance(expr, relax.Var) and expr not in self._packed and expr not in self._plain
        return self.routes.get(expr) if is_open else None

    def packed(self, expr: relax.Expr) -> Packed | None:
        """Return the packed form of `expr`, None if it does not exist; follow its route, if it has one."""
        if not isinstance(expr, relax.Var):
            return None
        if expr not in self._packed and expr in self.routes:
            self._packed[expr] = self._follow(self.routes[expr].over(self._followed))
            if self.routes[expr].spread is None:
                self._followed[expr] = self.routes[expr]
        return self._packed.get(expr)

    def plain(self, expr: relax.Expr) -> relax.Expr:
        """Return `expr` in the plain layout; convert it when it is first asked for."""
        if isinstance(expr, relax.Var) and expr not in self._plain:
            if expr in self._packed:
                self.define(expr, self.unpacked(self._packed[expr]))
            else:
                self.define(expr, self.bb.emit(self.call(self._calls[expr])))
        return super().plain(expr)

    def _follow(self, route: Route) -> Packed:
        """Collect the channels of a route from its packed sources."""
        count = len(route.picks[0])
        block = channel_block(count, self.lanes_of(route.sources[0]))
        sources = []
        for source in route.sources:
            have = self.packed(source)
            sources.append(have if have is not None and have.block > 1 else self.as_packed(source, block))
        places = [source.places for source in sources]
        picks = [[(n, places[n][channel]) for n, channel in phase] for phase in route.picks]
        if picks == [[(0, channel) for channel in range(count)]] and route.spread is None:
            blocks = shape_of(sources[0].expr)[1]
            if sources[0].block == block and blocks * block - count < block:
                return Packed.dense(sources[0].expr, count, is_finite=sources[0].is_finite)
        new = channels.emit(self.bb, [source.expr for source in sources], picks, block, route.spread)
        return Packed.dense(new, count, is_finite=True)

    def as_packed(self, expr: relax.Expr, block: int) -> Packed:
        """Return `expr`, `[N, C, H, W]`, packed in blocks of `block`, converting it if needed."""
        have = self.packed(expr)
        if have is not None and have.block == block and have.is_dense:
            return have
        n, c, h, w = shape_of(expr)
        if have is not None and have.block > 1 and block > 1:
            picks = [[(0, place) for place in have.places]]
            value = Packed.dense(channels.emit(self.bb, [have.expr], picks, block), c, is_finite=True)
            if have.block == block:
                self._packed[expr] = value
            return value
        plain = self.plain(expr)
        if c % block == 0 and (block == 1 or h * w == 1):
            new = self.bb.emit(relax.op.reshape(plain, (n, c // block, h, w, block)))
        else:
            new = self.bb.emit(self.bb.call_te(pack, plain, block, primfunc_name_hint="pack"))
        value = Packed.dense(new, c, is_finite=True)
        if isinstance(expr, relax.Var) and have is None and block > 1:
            self._packed[expr] = value
        return value

    def finite(self, expr: relax.Expr, value: Packed) -> Packed:
        """Return `value`, a packed form of `expr`, with zeros in its padding if that may not be finite."""
        if value.is_finite or value.is_whole:
            return value
        new = self.bb.emit(
            self.bb.call_te(_with_zeros, value.expr, relax.const(_bits(value)), primfunc_name_hint="zeros")
        )
        clean = replace(value, expr=new, is_finite=True)
        if self.packed(expr) is value:
            self._packed[expr] = clean
        return clean

    def unpacked(self, value: Packed) -> relax.Expr:
        """Return a packed value in the plain layout."""
        n, blocks, h, w, b = shape_of(value.expr)
        if value.is_whole and (h * w == 1 or b == 1):
            return self.bb.emit(relax.op.reshape(value.expr, (n, blocks * b, h, w)))
        if value.expr in self._resized:
            return resize.emit_unpacked(self.bb, *self._resized[value.expr], value.channels, value.group)
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


def _bits(value: Packed) -> np.ndarray:
    """Return all bits for each channel of a value, and none for its padding, `[1, C/b, 1, 1, b]`."""
    shape = shape_of(value.expr)
    bits = np.zeros((1, shape[1], 1, 1, shape[4]), "int16" if value.expr.ty.dtype == "float16" else "int32")
    bits.reshape(-1)[value.places] = -1
    return bits


def _with_zeros(x: te.Tensor, bits: te.Tensor) -> te.Tensor:
    """Return `x` with zeros where there are no `bits`: a condition for each number would take longer."""

    def element(*i: tvm.tirx.Var) -> tvm.tirx.Expr:
        number = tvm.tirx.reinterpret(bits.dtype, x(*i)) & bits[0, i[1], 0, 0, i[4]]
        return tvm.tirx.reinterpret(x.dtype, number)

    return te.compute(x.shape, element, name="zeros")


def pack_array(array: np.ndarray, block: int, fill: float, group: int) -> np.ndarray:
    """Return a constant that broadcasts to `[N, C, H, W]` in a form that broadcasts to the packed layout.

    `fill`: its value in padding.
    `group`: after so many channels follows padding up to a whole block.
    """
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    if array.shape[1] > group:
        array = geometry.with_gaps(array, 1, group, block, fill)
    n, c, h, w = array.shape
    if c == 1:
        return array.reshape(n, 1, h, w, 1)
    blocks = -(-c // block)
    padded = np.full((n, blocks * block, h, w), fill, array.dtype)
    padded[:, :c] = array
    return np.ascontiguousarray(padded.reshape(n, blocks, block, h, w).transpose(0, 1, 3, 4, 2))
