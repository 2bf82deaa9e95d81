"""Decides which weights of few bits stay so, and writes the kernels that decode them.

Weights stay as they are for matrix products and for gathers of rows. A convolution of float32 numbers with
weights in int8 becomes one with weights that are integers, followed by a multiplication by the scales: the
bundle then stores the integers, and they become float32 when it is loaded. For every other operator, blocked
weights become float32 constants, before any other pass sees them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from builder.calls.blocked_weights import BlockedWeights
from builder.kernels.rewriter import RESHAPES, Values, constant_of, in_anf, op_name, rewrite_main, shape_of
from builder.kernels.spaces import blocked_matmul, blocked_rows
from builder.target.device_target import DeviceTarget

_CONVOLUTIONS: Final = ("relax.nn.conv1d", "relax.nn.conv2d")
# Operators whose result is quantised if their operand is; see `builder.kernels.passes.integers`.
_MOVES: Final = {
    *RESHAPES,
    *(
        f"relax.{name}"
        for name in ("permute_dims", "strided_slice", "nn.max_pool2d", "broadcast_to", "tile", "concat")
    ),
}
_BYTES: Final = ("uint8", "int8")


def keep_blocks(mod: tvm.IRModule) -> tvm.IRModule:
    """Make constants of the weights that no kernel decodes, and calls of those that are dequantised bytes.

    Parameters
    ----------
    mod
        A static Relax module whose weights are constants.
    """
    mod = in_anf(mod)
    keeping = _Keeping(mod)
    if not keeping.weights and not keeping.filters:
        return mod
    mod = rewrite_main(mod, keeping.emit, Values)
    return relax.transform.DeadCodeElimination(["main"])(mod)


class _Keeping:
    """Decides for each reader of weights in which form it gets them."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._bound = {
            binding.var: binding.value
            for block in mod["main"].body.blocks
            for binding in block.bindings
            if isinstance(binding.value, Call)
        }
        self.weights: dict[relax.Var, BlockedWeights] = {}
        self.filters: dict[relax.Var, _Filters] = {}
        for var, call in self._bound.items():
            found = BlockedWeights.of(call) or self._transposed(call) or _dequantised(call)
            if found is not None:
                self.weights[var] = found
            filters = _Filters.of(call)
            if filters is not None:
                self.filters[var] = filters
        self._calls: dict[relax.Var, relax.Expr] = {}

    def emit(self, table: Values, var: relax.Var, call: Call) -> bool:
        """Define weights, and give them to their readers."""
        if var in self.weights:
            if BlockedWeights.of(call) is not None:
                table.define(var, relax.const(self.weights[var].dense()))
                return True
            return False  # a reader that multiplies bytes will find them dequantised, and perhaps turned
        if op_name(call) in _CONVOLUTIONS and self._convolution(table, var, call):
            return True
        place = self._place(call)
        if place is None:
            return False
        weights = call.args[place]
        if weights not in self._calls:
            self._calls[weights] = self.weights[weights].emit(table.bb)
        args = [self._calls[weights] if at == place else table.plain(a) for at, a in enumerate(call.args)]
        table.define(var, table.bb.emit(Call(call.op, args, call.attrs, call.ty_args)))
        return True

    def _convolution(self, table: Values, var: relax.Var, call: Call) -> bool:
        """Replace a convolution of float32 numbers with dequantised filters."""
        filters = self.filters.get(call.args[1])
        if filters is None or str(call.attrs.kernel_layout) not in ("OIHW", "OIW"):
            return False
        if str(call.attrs.data_layout) not in ("NCHW", "NCW") or self._is_quantised(call.args[0]):
            return False
        weights = relax.const(filters.codes.astype(np.float32))
        x = table.plain(call.args[0])
        sums = table.bb.emit(Call(call.op, [x, weights], call.attrs, call.ty_args))
        shape = [1, -1, *[1] * (filters.codes.ndim - 2)]
        factor = relax.const(filters.scales.reshape(shape))
        table.define(var, table.bb.emit(relax.op.multiply(sums, factor)))
        return True

    def _place(self, call: Call) -> int | None:
        """Return which operand of a call is weights that a kernel decodes; None if there is none."""
        if op_name(call) == "relax.matmul" and str(call.ty.dtype) == "float32":
            found = self.weights.get(call.args[1])
            rank = len(shape_of(call.args[0]))
            if found is not None and found.axis == 0 and rank >= 2 and not self._is_quantised(call.args[0]):
                return 1
        if op_name(call) == "relax.take" and self.weights.get(call.args[0]) is not None:
            return 0 if call.attrs.axis is not None and int(call.attrs.axis) == 0 else None
        return None

    def _is_quantised(self, x: relax.Expr) -> bool:
        """Whether a tensor is dequantised: then the product is one of integers."""
        call = self._bound.get(x) if isinstance(x, relax.Var) else None
        while call is not None and op_name(call) in _MOVES:
            moved = call.args[0]
            if isinstance(moved, relax.Tuple):
                moved = moved.fields[0]
            call = self._bound.get(moved) if isinstance(moved, relax.Var) else None
        return call is not None and op_name(call) == "relax.dequantize"

    def _transposed(self, call: Call) -> BlockedWeights | None:
        if op_name(call) != "relax.permute_dims" or call.args[0] not in self.weights:
            return None
        return self.weights[call.args[0]].transposed()


@dataclass(frozen=True, slots=True)
class _Filters:
    """The filters of a convolution, int8, and a scale for each output channel."""

    codes: np.ndarray
    scales: np.ndarray

    @classmethod
    def of(cls, call: Call) -> _Filters | None:
        """Return the filters that a call dequantises, None if it is any other call."""
        if op_name(call) != "relax.dequantize" or str(call.ty.dtype) != "float32":
            return None
        codes, scale, zero = (constant_of(a) for a in call.args)
        if codes is None or scale is None or zero is None or codes.dtype != np.int8 or codes.ndim < 3:
            return None
        if zero.any() or scale.ndim > 1 or (scale.size > 1 and int(call.attrs.axis) % codes.ndim):
            return None
        return cls(codes, np.broadcast_to(scale.astype(np.float32).reshape(-1), (len(codes),)))


def _dequantised(call: Call) -> BlockedWeights | None:
    """Return a matrix of bytes with one scale, or one for each row or column, as weights in blocks."""
    if op_name(call) != "relax.dequantize" or str(call.ty.dtype) != "float32":
        return None
    codes, scale, zero = (constant_of(a) for a in call.args)
    if codes is None or scale is None or zero is None or codes.ndim != 2 or str(codes.dtype) not in _BYTES:
        return None
    if max(scale.ndim, zero.ndim) > 1 or not codes.size:
        return None
    per_row = scale.size > 1 and int(call.attrs.axis) % 2 == 0
    axis = 1 if per_row else 0
    count = codes.shape[1 - axis]
    parts = [np.broadcast_to(p.reshape(-1), (count,)) for p in (scale.astype("float32"), zero)]
    shape = (count, 1) if per_row else (1, count)
    scales, zeros = (np.ascontiguousarray(p.reshape(shape)) for p in parts)
    return BlockedWeights(codes, scales, zeros.astype(codes.dtype), axis, codes.shape[axis])


def write_blocks(mod: tvm.IRModule, target: DeviceTarget) -> tvm.IRModule:
    """Replace products with weights of few bits, and gathers of their rows, by kernels for `target`."""
    weights: dict[relax.Var, BlockedWeights] = {}

    def emit(table: Values, var: relax.Var, call: Call) -> bool:
        found = BlockedWeights.of(call)
        if found is not None:
            weights[var] = found
            table.define(var, var)
            return True
        if op_name(call) == "relax.matmul" and call.args[1] in weights:
            x = table.plain(call.args[0])
            table.define(var, blocked_matmul.emit(table.bb, x, weights[call.args[1]], target))
            return True
        if op_name(call) == "relax.take" and call.args[0] in weights:
            indices = table.plain(call.args[1])
            table.define(var, blocked_rows.emit(table.bb, weights[call.args[0]], indices))
            return True
        return False

    return rewrite_main(mod, emit, Values)
