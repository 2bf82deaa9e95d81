"""Replace slow or unsafe code that TVM's front end writes.

- Code that computes the shape of a static tensor becomes a constant.
- Max and Min of several tensors become element-wise operators. The front end stacks the tensors and reduces
  the stack: five kernels instead of one instruction.
- A gather in `fast` mode, which reads wherever an index points, becomes one in `clip` mode. Indices come with
  requests, so one may be wrong (a token id beyond the vocabulary). In `clip` mode, a wrong index selects a
  wrong number but never reads other memory.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from tvm import relax
from tvm.ir import IRModule, Op
from tvm.relax.expr_functor import PyExprMutator, mutator

_BINARY: Final = {"relax.max": relax.op.maximum, "relax.min": relax.op.minimum}


def clean_up(mod: IRModule) -> IRModule:
    """Rewrite `main` of a module from the front end, and remove the code that is then unused."""
    rewriter = _Rewriter(mod)
    rewriter.builder_.update_func(mod.get_global_var("main"), rewriter.visit_expr(mod["main"]))
    return relax.transform.DeadCodeElimination()(rewriter.builder_.get())


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]
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
        if call.op.name in _BINARY:
            operands = self._stacked(call)
            if operands is not None:
                result = operands[0]
                for operand in operands[1:]:
                    result = _BINARY[call.op.name](result, operand)
                return result
        return call

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
