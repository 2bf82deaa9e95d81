"""Short names for kernels: fusion joins the names of all operators, and a graph allows 256 characters."""

from __future__ import annotations

import hashlib
from typing import Final

import tvm
from tvm import relax
from tvm.ir import Call, GlobalVar

from builder.kernels.rewriter import Values, op_name, rewrite_main

# Leaves room for what is appended to a kernel's name: a number for a node, one for an output.
MAX_CHARS: Final = 200
_DIGEST_CHARS: Final = 8


def shorten_names(mod: tvm.IRModule) -> tvm.IRModule:
    """Rename kernels whose names are longer than `MAX_CHARS`: the beginning, and a digest of the whole.

    Parameters
    ----------
    mod
        A module whose `main` is in A-normal form and calls kernels by `R.call_tir`.
    """
    long = {var: function for var, function in mod.functions.items() if len(var.name_hint) > MAX_CHARS}
    if not long:
        return mod
    others = {var: function for var, function in mod.functions.items() if var not in long}
    renamed: dict[GlobalVar, GlobalVar] = {}

    def emit(table: Values, var: relax.Var, call: Call) -> bool:
        if op_name(call) != "relax.call_tir" or call.args[0] not in long:
            return False
        kernel = call.args[0]
        if kernel not in renamed:
            renamed[kernel] = table.bb.add_func(long[kernel], _short(kernel.name_hint))
        arguments = [renamed[kernel], *(table.plain(argument) for argument in call.args[1:])]
        table.define(var, table.bb.emit(Call(call.op, arguments, call.attrs, call.ty_args)))
        return True

    return rewrite_main(tvm.IRModule(others), emit, Values)


def _short(name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{name[: MAX_CHARS - _DIGEST_CHARS - 1]}_{digest}"
