"""Reads bytes where they are added, so that no kernel stores them as float32.

A residual of bytes is widened, centred and scaled before it is added:

    y = x + (float32(b) - zero) * scale

If only this addition reads `b`, fusion would join those steps to the kernel that computes `b`, up to the
addition, which belongs to the kernel of `x`. The first kernel would then store, and the other one load, four
times the bytes. So the steps and the addition become one call, which no fusion can divide.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import tvm
from tvm import relax, te, tirx
from tvm.ir import Call

from builder.kernels.rewriter import Values, constant_of, op_name, rewrite_main, shape_of, users_of

_ARITHMETIC: Final[Mapping[str, Callable[[tirx.Expr, tirx.Expr], tirx.Expr]]] = {
    "relax.add": operator.add,
    "relax.subtract": operator.sub,
    "relax.multiply": operator.mul,
}
_BYTES: Final = ("uint8", "int8")


def read_bytes_late(mod: tvm.IRModule) -> tvm.IRModule:
    """Join the steps that widen bytes to the arithmetic on whole tensors that reads them.

    What the joined calls replace stays in `main` until dead code is eliminated.
    """
    joining = _Joining(mod["main"])
    return rewrite_main(mod, joining.emit, Values) if joining.has_bytes else mod


@dataclass(frozen=True, slots=True)
class _Widened:
    """Bytes as float32: widened, then combined with a number in each of `steps`, in order."""

    data: relax.Expr
    steps: tuple[tuple[str, relax.Expr], ...]

    def element(self, first: int, tensors: Sequence[te.Tensor], i: Sequence[tirx.Var]) -> tirx.Expr:
        """Return an element; `tensors` has the bytes at the place `first`, then the numbers."""
        value = tensors[first](*i).astype("float32")
        for (name, _), number in zip(self.steps, tensors[first + 1 :], strict=False):
            value = _ARITHMETIC[name](value, number(*[0] * len(number.shape)))
        return value


class _Joining:
    """Decides for each call whether it reads bytes that only it reads."""

    def __init__(self, main: relax.Function) -> None:
        self._users = users_of(main)
        bindings = [binding for block in main.body.blocks for binding in block.bindings]
        self._bound = {b.var: b.value for b in bindings if isinstance(b.value, Call)}
        self.has_bytes = any(map(_is_widening, self._bound.values()))

    def emit(self, table: Values, var: relax.Var, call: Call) -> bool:
        """Replace `call` if it combines tensors of which at least one is widened bytes."""
        operation = _ARITHMETIC.get(op_name(call))
        if operation is None or any(constant_of(arg) is not None for arg in call.args):
            return False
        operands = [self._widened(arg, shape_of(call)) for arg in call.args]
        if all(operand is None for operand in operands):
            return False
        values: list[relax.Expr] = []
        readers: list[Callable[[Sequence[te.Tensor], Sequence[tirx.Var]], tirx.Expr]] = []
        for arg, operand in zip(call.args, operands, strict=True):
            first = len(values)
            if operand is None:
                values.append(table.plain(arg))
                readers.append(partial(_element, first))
            else:
                values += [table.plain(operand.data), *(number for _, number in operand.steps)]
                readers.append(partial(operand.element, first))

        def compute(*tensors: te.Tensor) -> te.Tensor:
            return te.compute(
                shape_of(call), lambda *i: operation(*(read(tensors, i) for read in readers)), name="joined"
            )

        hint = op_name(call).removeprefix("relax.") + "_bytes"
        table.define(var, table.bb.emit(table.bb.call_te(compute, *values, primfunc_name_hint=hint)))
        return True

    def _widened(self, expr: relax.Expr, shape: tuple[int, ...]) -> _Widened | None:
        """Return the bytes that `expr` is made of; None if it has other readers or another shape."""
        steps: list[tuple[str, relax.Expr]] = []
        while isinstance(expr, relax.Var) and self._users[expr] == 1 and shape_of(expr) == shape:
            call = self._bound.get(expr)
            if call is None:
                return None
            if _is_widening(call):
                return _Widened(call.args[0], tuple(reversed(steps)))
            number = constant_of(call.args[1]) if op_name(call) in _ARITHMETIC else None
            if number is None or number.size != 1 or str(call.ty.dtype) != "float32":
                return None
            steps.append((op_name(call), call.args[1]))
            expr = call.args[0]
        return None


def _element(place: int, tensors: Sequence[te.Tensor], i: Sequence[tirx.Var]) -> tirx.Expr:
    """Return an element of a tensor that is read as it is, repeated along axes of one element."""
    tensor = tensors[place]
    own = list(i)[len(i) - len(tensor.shape) :]
    return tensor(*(0 if int(d) == 1 else k for k, d in zip(own, tensor.shape, strict=True)))


def _is_widening(call: Call) -> bool:
    if op_name(call) != "relax.astype" or str(call.ty.dtype) != "float32":
        return False
    return str(call.args[0].ty.dtype) in _BYTES
