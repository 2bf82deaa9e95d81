"""Operators that no layout pass has replaced, as tensor expressions: TVM's, and ours where those are slow."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, topi
from tvm.ir import Call

from builder.kernels.rewriter import RESHAPES
from builder.kernels.spaces import elementary, matmul, ordering, rows, transpose

Legalisation = Callable[[relax.BlockBuilder, Call], relax.Expr]


def legalise_map() -> dict[str, Legalisation]:
    """Our tensor expressions, by the operator they replace."""
    own: dict[str, Legalisation] = dict.fromkeys(elementary.OPERATORS, elementary.legalise)
    own["relax.nn.softmax"] = rows.softmax
    own["relax.nn.layer_norm"] = rows.layer_norm
    own["relax.matmul"] = matmul.legalise
    own["relax.permute_dims"] = transpose.legalise
    own["relax.take"] = _take
    own["relax.cumsum"] = _cumsum
    own["relax.topk"] = ordering.topk
    own["relax.sort"] = ordering.sort
    own["relax.argsort"] = ordering.argsort
    return own


def _take(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Indices come from users: one out of range takes the nearest element, not what lies beyond."""
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    return bb.call_te(topi.take, call.args[0], call.args[1], axis, mode="clip", primfunc_name_hint="take")


def _cumsum(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    return bb.call_te(
        lambda x: topi.cumsum(x, axis, str(call.ty.dtype), bool(call.attrs.exclusive)),
        call.args[0],
        primfunc_name_hint="cumsum",
    )


def legalise(mod: tvm.IRModule) -> tvm.IRModule:
    """Every operator but reshapes as a call of a tensor expression."""
    return relax.transform.LegalizeOps(legalise_map(), skip_ops=list(RESHAPES))(mod)
