"""Computes quantised layers with their integers.

A quantised model says that a tensor of bytes stands for real numbers, and computes with those: dequantise,
convolve, quantise. Here a convolution or a product with constant weights becomes one of the bytes themselves,
whose int32 sums are exact, followed by one multiplication:

    sum((x - zx) * sx * w * sw)  =  (sum(x * w) - zx * sum(w)) * (sx * sw)

The second sum is a constant for each output channel and is added with the bias. Operators that only move
elements, and maxima, are applied to the bytes. Functions of one tensor may become tables (`byte_functions`).
All else computes with real numbers, as the model says.

Layers for which bytes do not pay (grouped, of few input channels, depthwise on some processors) compute with
float32 numbers that are integers. Their sums are exact too: no sum is as large as 2^24.

The definitions are those of QuantizeLinear and DequantizeLinear in ONNX. Activations are kept in the byte
type that the processor's instruction takes, whichever the model has: with the zero point moved by 128, `int8`
and `uint8` stand for the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from builder.calls.spans import names_of
from builder.kernels.passes import byte_functions
from builder.kernels.passes.byte_functions import ByteFunction
from builder.kernels.passes.integer_forms import BYTES, Forms, Real, Shifted, Sum, centred
from builder.kernels.passes.integer_products import Products
from builder.kernels.rewriter import RESHAPES, constant_of, in_anf, op_name, rewrite_main, shape_of, users_of
from builder.target.device_target import DeviceTarget

# Scales of two operands of a sum that are further apart are not expressed in each other.
_LEAST_RATIO: Final = 2.0**-16
# Operators that only move elements, or take one of them: of their first operand.
_MOVES: Final = {
    *RESHAPES,
    *(f"relax.{name}" for name in ("permute_dims", "strided_slice", "nn.max_pool2d", "broadcast_to", "tile")),
}


def use_integers(mod: tvm.IRModule, target: DeviceTarget) -> tvm.IRModule:
    """Rewrite the quantised layers of `mod`.

    Parameters
    ----------
    mod
        A static Relax module whose weights are constants.
    target
        The device; its instruction decides between `int8` and `uint8`.
    """
    mod = in_anf(mod)
    if not _has_quantised(mod):
        return mod
    mod = rewrite_main(mod, _Integers(mod, target).emit, Forms)
    cleaned: tvm.IRModule = relax.transform.DeadCodeElimination(["main"])(mod)
    return cleaned


def _has_quantised(mod: tvm.IRModule) -> bool:
    bindings = (binding for block in mod["main"].body.blocks for binding in block.bindings)
    calls = (binding.value for binding in bindings if isinstance(binding.value, Call))
    quantised = ("relax.dequantize", "relax.quantize")
    return any(op_name(call) in quantised or _multiplies_bytes(call) for call in calls)


def _multiplies_bytes(call: Call) -> bool:
    return op_name(call) in ("relax.matmul", "relax.nn.conv2d") and str(call.args[0].ty.dtype) in BYTES


class _Integers:
    """Decides for each call whether it is computed with integers."""

    def __init__(self, mod: tvm.IRModule, target: DeviceTarget) -> None:
        self._users = users_of(mod["main"])
        self._looks_up = target.looks_up_bytes
        self._bound: dict[relax.Expr, Call] = {}
        self._products = Products(target, self._bound)

    def emit(self, table: Forms, var: relax.Var, call: Call) -> bool:
        """Replace `call` if it has a form with integers."""
        name = op_name(call)
        self._bound[var] = call
        if not isinstance(call.ty, relax.TensorType):
            return False
        if self._looks_up and name in byte_functions.OPERATORS:
            self._function(table, var, call)
        return self._emit(table, var, call, name) or var in table.functions

    def _emit(self, table: Forms, var: relax.Var, call: Call, name: str) -> bool:
        """Replace `call`, an operator that is called `name`, if it has a form with integers."""
        if name == "relax.dequantize":
            return self._dequantize(table, var, call)
        if name == "relax.quantize":
            return self._quantize(table, var, call)
        if name == "relax.nn.conv2d" and str(call.ty.dtype) == "int32":
            return self._products.convolution_of_bytes(table, var, call)
        if name == "relax.nn.conv2d":
            return self._products.convolution(table, var, call)
        if name == "relax.matmul":
            return self._products.matmul(table, var, call)
        if name in _MOVES:
            return self._move(table, var, call)
        if name == "relax.concat":
            return self._concat(table, var, call)
        if name in ("relax.add", "relax.nn.relu", "relax.clip") and self._after_sum(table, var, call, name):
            return True
        return name in ("relax.add", "relax.subtract") and self._combine(table, var, call)

    def _dequantize(self, table: Forms, var: relax.Var, call: Call) -> bool:
        data, scale, zero = call.args[0], constant_of(call.args[1]), constant_of(call.args[2])
        if scale is None or zero is None or max(scale.ndim, zero.ndim) > 1 or str(call.ty.dtype) != "float32":
            return False
        axis = int(call.attrs.axis) % max(len(shape_of(call)), 1)
        scale, zero = scale.astype(np.float64).reshape(-1), zero.astype(np.float64).reshape(-1)
        scale, zero = (v.reshape(()) if v.size == 1 else v for v in (scale, zero))
        numbers = constant_of(data)
        if numbers is not None:
            shape = [1] * numbers.ndim
            shape[axis : axis + 1] = [-1] if numbers.ndim else []
            parts = (
                scale.reshape(shape) if scale.size > 1 else scale,
                zero.reshape(shape) if zero.size > 1 else zero,
            )
            table.constants[var] = (numbers.astype(np.float64) - parts[1]) * parts[0]
        dtype = str(data.ty.dtype)
        if dtype not in BYTES:
            return numbers is not None
        if isinstance(data, relax.Var) and data in table.shifted:
            shifted = table.shifted[data]
            table.reals[var] = Real(shifted.integers, scale, zero - shifted.shift, axis)
        else:
            table.reals[var] = Real(data if numbers is not None else table.plain(data), scale, zero, axis)
        return True

    def _quantize(self, table: Forms, var: relax.Var, call: Call) -> bool:
        x, scale, zero = call.args[0], constant_of(call.args[1]), constant_of(call.args[2])
        dtype = str(call.ty.dtype)
        if scale is None or zero is None or scale.size != 1 or zero.size != 1 or dtype not in BYTES:
            return False
        here = self._products.byte or dtype
        shift = {"uint8": 128, "int8": -128}[dtype] if here != dtype else 0
        goal = Real(x, scale.astype(np.float64).reshape(()), zero.astype(np.float64).reshape(()) - shift, 0)
        real = table.real(x)
        if real is not None and replace(goal, integers=real.integers).same_scale(real):
            integers = real.integers
            if str(integers.ty.dtype) != here:
                return False
        else:
            integers = self._quantised(table, x, goal, here)
        table.shifted[var] = Shifted(integers, shift, dtype)
        if not shift:
            table.define(var, integers)
        return True

    def _quantised(self, table: Forms, x: relax.Expr, goal: Real, dtype: str) -> relax.Expr:
        """Emit the quantisation of `x`; a layer before it is computed in units of the scale."""
        bb, scale = table.bb, float(goal.scale)
        function = table.functions.get(x) if isinstance(x, relax.Var) else None
        if function is not None and function.is_long and dtype == "uint8" and scale > 0:
            bytes_ = function.quantised(scale, float(goal.zero))
            if bytes_ is not None:
                return bb.emit(relax.op.take(relax.const(bytes_), function.real.integers, mode="clip"))
        zero = relax.const(goal.zero.astype(dtype))
        # ONNX wants positive scales, but does not check it: bounds divided by others are no bounds.
        if isinstance(x, relax.Var) and x in table.sums and self._users[x] == 1 and scale > 0:
            layer = table.sums[x].divided(scale)
            lowest = np.iinfo(dtype).min - goal.zero
            if layer.low <= lowest:
                layer = replace(layer, low=-np.inf)
            if layer.high >= np.iinfo(dtype).max - goal.zero:
                layer = replace(layer, high=np.inf)
            value, scale = layer.write(bb), 1.0
        else:
            value = table.plain(x)
        factor = relax.const(np.asarray(scale, "float32"))
        return bb.emit(relax.op.quantize(value, factor, zero, axis=0, out_dtype=dtype))

    def _move(self, table: Forms, var: relax.Var, call: Call) -> bool:
        """Apply an operator that moves elements to the integers, or to a constant."""
        x = call.args[0]
        constant = table.constant(x) if str(call.ty.dtype) == "float32" else None
        real = table.real(x)
        if constant is not None and op_name(call) in ("relax.reshape", "relax.permute_dims"):
            move = _mover(call)
            table.constants[var] = move(constant)
            numbers = None if real is None else real.numbers
            if real is not None and numbers is not None:
                axis = _moved_axis(call, real)
                if axis is not None:
                    table.reals[var] = replace(real, integers=relax.const(move(numbers)), axis=axis)
            return True
        if real is None or not real.is_one_scale or constant is not None:
            return False
        args = [real.integers, *map(table.plain, call.args[1:])]
        moved = table.bb.emit(Call(call.op, args, call.attrs, call.ty_args))
        # The axis of the channels may be no axis any more.
        table.reals[var] = Real(moved, real.scale.reshape(()), real.zero.reshape(()), 0)
        return True

    def _concat(self, table: Forms, var: relax.Var, call: Call) -> bool:
        """Concatenate integers that have the same scale."""
        if not isinstance(call.args[0], relax.Tuple):
            return False
        reals = [table.real(field) for field in call.args[0].fields]
        first = reals[0]
        if first is None or not all(real is not None and real.same_scale(first) for real in reals):
            return False
        parts = relax.Tuple([real.integers for real in reals if real is not None])
        table.reals[var] = replace(first, integers=table.bb.emit(Call(call.op, [parts], call.attrs)))
        return True

    @staticmethod
    def _function(table: Forms, var: relax.Var, call: Call) -> None:
        """Note what `call` computes if it is a function of one tensor of bytes."""
        operands: list[ByteFunction | float] = []
        for arg in call.args[:1] if op_name(call) == "relax.clip" else call.args:
            real, known, constant = table.real(arg), table.functions.get(arg), table.constant(arg)
            if constant is not None and constant.size == 1:
                operands.append(constant.item())
                continue
            if known is None and real is not None:
                known = ByteFunction.identity(real)
            if known is None or shape_of(arg) != shape_of(call):
                return
            operands.append(known)
        function = ByteFunction.of(call, operands)
        if function is not None:
            table.functions[var] = function

    def _combine(self, table: Forms, var: relax.Var, call: Call) -> bool:
        """Add or subtract two tensors of bytes in units of one's scale; what reads the sum is in its units.

        (a - za) * sa + (b - zb) * sb  =  ((a - za) + (b - zb) * (sb / sa)) * sa
        """
        a, b = (table.real(arg) for arg in call.args)
        if a is None or b is None or not (a.is_one_scale and b.is_one_scale):
            return False
        if any(shape_of(arg) != shape_of(call) for arg in call.args) or self._users[var] != 1:
            return False
        with np.errstate(all="ignore"):
            ratio = float(b.scale / a.scale) * (-1.0 if op_name(call) == "relax.subtract" else 1.0)
        if not (a.scale > 0 and _LEAST_RATIO <= abs(ratio) <= 1 / _LEAST_RATIO):
            return False

        def emit() -> relax.Expr:
            first, second = (centred(table, real) for real in (a, b))
            return table.bb.emit(
                relax.op.add(first, table.bb.emit(relax.op.multiply(second, relax.const(np.float32(ratio)))))
            )

        shape = (1,) * len(shape_of(call))
        table.sums[var] = Sum(emit, shape, a.scale.reshape(1), np.zeros(1), nodes=names_of(call))
        return True

    def _after_sum(self, table: Forms, var: relax.Var, call: Call, name: str) -> bool:
        """Take a bias or an activation into the layer before it."""
        x, *others = call.args
        if name == "relax.add" and not (isinstance(x, relax.Var) and x in table.sums):
            x, others = call.args[1], [call.args[0]]
        layer = table.sums.get(x) if isinstance(x, relax.Var) else None
        if layer is None or self._users[x] != 1 or shape_of(x) != shape_of(call):
            return False
        bounded = layer.low > -np.inf or layer.high < np.inf
        nodes = layer.nodes + names_of(call)
        if name == "relax.nn.relu":
            table.sums[var] = replace(layer.bounded(0.0, np.inf), nodes=nodes)
            return True
        if name == "relax.clip":
            low, high = (float(a.value) for a in others)
            table.sums[var] = replace(layer.bounded(low, high), nodes=nodes)
            return True
        added = table.constant(others[0])
        if added is None or bounded:
            return False
        rank = len(layer.shape)
        if (1,) * (rank - added.ndim) + added.shape not in (layer.shape, (1,) * rank):
            return False
        biased = layer.with_bias(np.broadcast_to(added.reshape(-1), layer.scale.shape))
        table.sums[var] = replace(biased, nodes=nodes)
        return True


def _mover(call: Call) -> Callable[[np.ndarray], np.ndarray]:
    if op_name(call) == "relax.reshape":
        return lambda array: array.reshape(shape_of(call))
    axes = call.attrs.axes
    order = None if axes is None else [int(a) for a in axes]
    return lambda array: np.ascontiguousarray(array.transpose(order))


def _moved_axis(call: Call, real: Real) -> int | None:
    """Return the axis of the channels after a constant was moved, None if it is no axis any more."""
    if real.is_one_scale:
        return 0
    if op_name(call) == "relax.reshape":
        before, after = shape_of(call.args[0]), shape_of(call)
        is_kept = before[: real.axis + 1] == after[: real.axis + 1]
        return real.axis if is_kept else None
    axes = call.attrs.axes
    order = list(reversed(range(len(shape_of(call))))) if axes is None else [int(a) for a in axes]
    return order.index(real.axis)
