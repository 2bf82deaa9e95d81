"""Operators that no layout pass has replaced, as tensor expressions: TVM's, and ours where those are slow."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax
from tvm.ir import Call

# Reshapes move nothing: the graph keeps them, as names for the same storage.
RESHAPES = ("relax.reshape", "relax.flatten", "relax.squeeze", "relax.expand_dims")

Legalisation = Callable[[relax.BlockBuilder, Call], relax.Expr]


def legalise_map() -> dict[str, Legalisation]:
    """Our tensor expressions, by the operator they replace."""
    return {}


def legalise(mod: tvm.IRModule) -> tvm.IRModule:
    """Every operator but reshapes as a call of a tensor expression."""
    return relax.transform.LegalizeOps(legalise_map(), skip_ops=list(RESHAPES))(mod)
