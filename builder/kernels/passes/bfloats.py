"""Marks a module whose products are to be computed in bfloat16.

The operands of such products are rounded to bfloat16, their sums are float32, and everything else is computed
in float32 (docs/decisions/0056). The choice of layouts does this (`layouts`), because it packs the weights.
"""

from __future__ import annotations

from typing import Final

import tvm

_MARK: Final = "edge.bfloats"


def mark(mod: tvm.IRModule) -> tvm.IRModule:
    """Return `mod`, whose products are to be computed in bfloat16."""
    functions = dict(mod.functions.items())
    functions[mod.get_global_var("main")] = mod["main"].with_attr(_MARK, 1)
    return tvm.IRModule(functions, attrs=mod.attrs)


def rounds_products(mod: tvm.IRModule) -> bool:
    """Whether the products of a module are to be computed in bfloat16."""
    attrs = mod["main"].attrs
    return bool(attrs) and _MARK in attrs
