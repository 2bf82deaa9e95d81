"""The forms in which a value of a quantised model may exist: integers, and layers not emitted yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from tvm import relax

from builder.calls.spans import Names, TracingBuilder, span_of
from builder.kernels.rewriter import Values, constant_of

if TYPE_CHECKING:
    from builder.kernels.passes.byte_functions import ByteFunction

BYTES: Final = ("uint8", "int8")
INT32: Final = (1 << 31) - 1
# A bias is an integer multiple of the product of the scales, but for the rounding of these to float32.
_BIAS_ERROR: Final = 1e-2

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Real:
    """Integers that stand for real numbers: `(integers - zero) * scale`.

    `integers`: a tensor of bytes.
    `scale`, `zero`: one number, or one for each channel.
    `axis`: the axis of the channels.
    """

    integers: relax.Expr
    scale: Floats
    zero: Floats
    axis: int

    @property
    def is_one_scale(self) -> bool:
        """Whether all elements have the same scale and zero point."""
        return self.scale.size == 1 and self.zero.size == 1

    @property
    def numbers(self) -> np.ndarray | None:
        """The integers if they are constant."""
        return constant_of(self.integers)

    def same_scale(self, other: Real) -> bool:
        """Whether equal integers of both stand for equal numbers."""
        return (
            self.is_one_scale
            and other.is_one_scale
            and self.scale.item() == other.scale.item()
            and self.zero.item() == other.zero.item()
            and str(self.integers.ty.dtype) == str(other.integers.ty.dtype)
        )


@dataclass(frozen=True, slots=True)
class Sum:
    """A layer whose kernel is not emitted yet: `clip((sums + bias) * scale + offset)`.

    `emit`: emits the sums, int32 or float32.
    `shape`: a constant for each channel, in a form that broadcasts.
    `scale`, `bias`, `offset`: for each channel; `bias` has integers.
    `low`, `high`: bounds of an activation.
    `largest`: the greatest magnitude of the sums if they are int32; 0 if they are float32.
    `nodes`: the nodes of the model that the layer is made of: its kernel is emitted for the node that reads
        it.
    """

    emit: Callable[[], relax.Expr]
    shape: tuple[int, ...]
    scale: Floats
    bias: Floats
    offset: Floats | None = None
    low: float = -np.inf
    high: float = np.inf
    largest: float = 0.0
    nodes: Names = ()

    def divided(self, scale: float) -> Sum:
        """Return the layer in units of `scale`."""
        offset = None if self.offset is None else self.offset / scale
        return replace(
            self, scale=self.scale / scale, offset=offset, low=self.low / scale, high=self.high / scale
        )

    def bounded(self, low: float, high: float) -> Sum:
        """Return the layer with another activation, `max(min(x, high), low)`, after its own."""
        return replace(self, low=max(min(self.low, high), low), high=max(min(self.high, high), low))

    def with_bias(self, added: Floats) -> Sum:
        """Return the layer plus a constant: added to its sums, if it is a multiple of the scale there."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            steps = added / self.scale
        total = self.bias + np.rint(steps)
        if (
            np.isfinite(steps).all()
            and np.abs(steps - np.rint(steps)).max() <= _BIAS_ERROR
            and np.abs(total).max() + self.largest < INT32
        ):
            return replace(self, bias=total)
        return replace(self, offset=added if self.offset is None else self.offset + added)

    def write(self, bb: TracingBuilder) -> relax.Expr:
        """Emit the layer as float32."""
        reader, bb.current = bb.current, span_of(self.nodes) or bb.current
        y = self._written(bb)
        bb.current = reader
        return y

    def _written(self, bb: TracingBuilder) -> relax.Expr:
        y = self.emit()
        dtype = str(y.ty.dtype)
        if self.bias.any():
            y = bb.emit(relax.op.add(y, self._constant(self.bias, dtype)))
        if dtype != "float32":
            y = bb.emit(relax.op.astype(y, "float32"))
        y = bb.emit(relax.op.multiply(y, self._constant(self.scale, "float32")))
        if self.offset is not None:
            y = bb.emit(relax.op.add(y, self._constant(self.offset, "float32")))
        if self.low == 0 and self.high == np.inf:
            return bb.emit(relax.op.nn.relu(y))
        if self.low > -np.inf or self.high < np.inf:
            return bb.emit(relax.op.clip(y, float(self.low), float(self.high)))
        return y

    def _constant(self, values: Floats, dtype: str) -> relax.Expr:
        size = int(np.prod(self.shape))
        return relax.const(np.broadcast_to(values, (size,)).reshape(self.shape).astype(dtype), dtype)


@dataclass(frozen=True, slots=True)
class Shifted:
    """A tensor of bytes in the other byte type: the model's integers are these plus `shift`."""

    integers: relax.Expr
    shift: int
    dtype: str


class Forms(Values):
    """A table of values that may also exist as integers, or as layers that are not emitted yet."""

    def __init__(self, bb: TracingBuilder) -> None:
        super().__init__(bb)
        self.reals: dict[relax.Var, Real] = {}
        self.sums: dict[relax.Var, Sum] = {}
        self.shifted: dict[relax.Var, Shifted] = {}
        self.constants: dict[relax.Var, Floats] = {}
        self.functions: dict[relax.Expr, ByteFunction] = {}

    def plain(self, expr: relax.Expr) -> relax.Expr:
        """Return `expr` as the model has it.

        Each reader of a dequantised tensor gets an operator of its own, which is fused with it.
        """
        if isinstance(expr, relax.Var) and expr not in self._plain:
            if expr in self.constants:
                self.define(expr, relax.const(self.constants[expr].astype("float32")))
            elif expr in self.sums:
                self.define(expr, self.sums[expr].write(self.bb))
            elif expr in self.shifted:
                self.define(expr, self.unshifted(self.shifted[expr]))
            elif expr in self.reals:
                return self._dequantised(self.reals[expr])
            elif expr in self.functions:
                call = self.functions[expr].call
                assert call is not None
                reader, self.bb.current = self.bb.current, call.span
                self.define(expr, self.bb.emit(self.call(call)))
                self.bb.current = reader
        return super().plain(expr)

    def real(self, expr: relax.Expr) -> Real | None:
        """Return the integers that stand for `expr`, None if there are none."""
        return self.reals.get(expr) if isinstance(expr, relax.Var) else None

    def constant(self, expr: relax.Expr) -> Floats | None:
        """Return the value of a constant, or of a dequantised one."""
        if isinstance(expr, relax.Var):
            return self.constants.get(expr)
        numbers = constant_of(expr)
        return None if numbers is None else numbers.astype(np.float64)

    def unshifted(self, value: Shifted) -> relax.Expr:
        """Emit bytes in the type that they are not kept in."""
        wide = self.bb.emit(relax.op.astype(value.integers, "int32"))
        wide = self.bb.emit(relax.op.add(wide, relax.const(value.shift, "int32")))
        return self.bb.emit(relax.op.astype(wide, value.dtype))

    def _dequantised(self, real: Real) -> relax.Expr:
        scale = relax.const(real.scale.astype("float32"))
        zero = relax.const(real.zero.astype(str(real.integers.ty.dtype)))
        return self.bb.emit(relax.op.dequantize(real.integers, scale, zero, axis=real.axis))


def centred(table: Forms, x: Real) -> relax.Expr:
    """Emit integers less their zero point as float32 numbers."""
    data = table.bb.emit(relax.op.astype(x.integers, "float32"))
    if float(x.zero):
        data = table.bb.emit(relax.op.subtract(data, relax.const(np.float32(x.zero))))
    return data
