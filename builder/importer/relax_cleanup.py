"""Replace slow or unsafe code that TVM's front end writes.

- Code that computes the shape of a static tensor becomes a constant.
- Max and Min of several tensors become element-wise operators. The front end stacks the tensors and reduces
  the stack: five kernels instead of one instruction.
- A split of channels becomes slices. Layouts know where the channels of a slice come from.
- Batch norm of signals and videos becomes a multiplication and an addition, which can be computed on images.
- A gather in `fast` mode, which reads wherever an index points, becomes one in `clip` mode. Indices come with
  requests, so one may be wrong (a token id beyond the vocabulary). In `clip` mode, a wrong index selects a
  wrong number but never reads other memory.
"""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst, IRModule, Op
from tvm.relax.expr_functor import PyExprMutator, mutator

_NOT_IMAGES: Final = (3, 5)  # ranks
_BINARY: Final = {"relax.max": relax.op.maximum, "relax.min": relax.op.minimum}


def clean_up(mod: IRModule) -> IRModule:
    """Rewrite `main` of a module from the front end, and remove the code that is then unused."""
    rewriter = _Rewriter(mod)
    rewriter.builder_.update_func(mod.get_global_var("main"), rewriter.visit_expr(mod["main"]))
    return relax.transform.DeadCodeElimination()(rewriter.builder_.get())


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]  # TVM has no types
    """Visits every call once, operands first."""

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, Op):
            return call
        if call.op.name == "relax.take" and call.attrs.mode == "fast":
            axis = None if call.attrs.axis is None else int(call.attrs.axis)
            return relax.op.take(call.args[0], call.args[1], axis, mode="clip")
        if call.op.name == "relax.shape_to_tensor":
            dims = [getattr(dim, "value", None) for dim in call.args[0].ty.values or ()]
            return call if None in dims or not dims else relax.const(np.array(dims, np.int64), "int64")
        if call.op.name == "relax.split" and call.args[0].ty.ndim > 2 and int(call.attrs.axis) == 1:
            return self._slices(call)
        if call.op.name == "relax.nn.batch_norm" and call.args[0].ty.ndim in _NOT_IMAGES:
            return self._scaled(call)
        if call.op.name in _BINARY:
            operands = self._stacked(call)
            if operands is not None:
                result = operands[0]
                for operand in operands[1:]:
                    result = _BINARY[call.op.name](result, operand)
                return result
        return call

    @staticmethod
    def _slices(call: relax.Call) -> relax.Expr:
        """The parts of a split of channels, each as a slice."""
        x, extent, parts = call.args[0], int(call.args[0].ty.shape[1]), call.attrs.indices_or_sections
        if isinstance(parts, tirx.IntImm):
            size = -(-extent // int(parts))
            inner = list(range(size, extent, size))
        else:
            inner = [int(place) for place in parts]
        bounds = itertools.pairwise([0, *inner, extent])
        return relax.Tuple([relax.op.strided_slice(x, [1], [begin], [end]) for begin, end in bounds])

    @staticmethod
    def _scaled(call: relax.Call) -> relax.Expr:
        """A batch norm with constant statistics as its scale and shift; any other as it is."""
        statistics = call.args[1:5]
        if call.attrs.training or not all(isinstance(each, GenericConst) for each in statistics):
            return call
        gamma, beta, mean, variance = (each.value.numpy().astype(np.float64) for each in statistics)
        factor = gamma / np.sqrt(variance + float(call.attrs.epsilon))
        dims = [1] * call.args[0].ty.ndim
        dims[int(call.attrs.axis)] = gamma.size
        dtype = statistics[0].value.numpy().dtype
        scale, shift = (
            relax.const(each.reshape(dims).astype(dtype)) for each in (factor, beta - mean * factor)
        )
        y = relax.op.add(relax.op.multiply(call.args[0], scale), shift)
        return relax.Tuple([y, *statistics[2:]])

    def _stacked(self, call: relax.Call) -> list[relax.Expr] | None:
        """The tensors of a stack that `call` reduces to one tensor; None if it reduces anything else."""
        stack = self._value(call.args[0])
        if not _is_call(stack, "relax.stack") or call.attrs.axis is None or call.attrs.keepdims:
            return None
        if [int(axis) for axis in call.attrs.axis] != [0] or int(stack.attrs.axis) != 0:
            return None
        fields = self._value(stack.args[0])
        return (
            [self._without_broadcast(field) for field in fields.fields]
            if isinstance(fields, relax.Tuple)
            else None
        )

    def _without_broadcast(self, expr: relax.Expr) -> relax.Expr:
        """The operand of a broadcast: the element-wise operator broadcasts by itself."""
        value = self._value(expr)
        return value.args[0] if _is_call(value, "relax.broadcast_to") else expr

    def _value(self, expr: relax.Expr) -> relax.Expr:
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        return expr if value is None else value


def _is_call(expr: relax.Expr, operator: str) -> bool:
    return isinstance(expr, relax.Call) and isinstance(expr.op, Op) and expr.op.name == operator
