"""The bodies of functions, which most passes of code generation rewrite one by one."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx


def with_bodies(mod: tvm.IRModule, rewrite: Callable[[tirx.Stmt], tirx.Stmt]) -> tvm.IRModule:
    """Return `mod` with `rewrite` applied to the bodies of all functions."""
    changed = {
        var: func.with_body(rewrite(func.body))
        for var, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc)
    }
    return tvm.IRModule({**dict(mod.functions.items()), **changed}, attrs=mod.attrs)
