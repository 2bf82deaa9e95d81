"""From a static Relax module to a graph of scheduled kernels.

Promises: each node of `main` is a call of a kernel (with one output or several) or a reshape, constants stay
constants, every kernel is scheduled for the target, and equal kernels exist once. Leaves storage to the
memory plan and machine code to `builder.codegen`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import tvm
from tvm import relax, tirx
from tvm.ir import Call

from builder.kernels.decisions import UNTUNED, Schedules
from builder.kernels.passes.canonical import canonicalise
from builder.kernels.passes.classic import write_classic
from builder.kernels.passes.convolutions import to_conv2d
from builder.kernels.passes.layouts import choose_layouts
from builder.kernels.passes.legalise import legalise
from builder.kernels.passes.recognise import recognise
from builder.kernels.passes.recurrent import write_recurrent
from builder.kernels.rewriter import RESHAPES, Values, op_name, rewrite_main
from builder.kernels.schedule import schedule
from builder.target.device_target import DeviceTarget

# A kernel's name goes into names of tensors and of symbols, which have 256 characters.
MAX_NAME: Final = 120


@dataclass(frozen=True, slots=True)
class LoweredModule:
    """What `lower` returns.

    Attributes
    ----------
    main
        One dataflow block of `R.call_tir` and reshapes over constants and parameters.
    kernels
        Scheduled functions; each has the `global_symbol` by which `main` calls it.
    """

    main: relax.Function
    kernels: tvm.IRModule


def lower(mod: tvm.IRModule, target: DeviceTarget, schedules: Schedules = UNTUNED) -> LoweredModule:
    """Lower `mod` for `target`.

    Parameters
    ----------
    mod
        A static Relax module with a `main`, weights as constants.
    target
        The device.
    schedules
        Where each kernel's schedule comes from.
    """
    mod = fuse(mod, target)
    with target.tvm_target:
        kernels = {
            var.name_hint: schedule(func, target, schedules).with_attr("global_symbol", var.name_hint)
            for var, func in sorted(mod.functions.items(), key=lambda item: item[0].name_hint)
            if isinstance(func, tirx.PrimFunc)
        }
    return LoweredModule(mod["main"], tvm.IRModule(kernels))


def fuse(mod: tvm.IRModule, target: DeviceTarget) -> tvm.IRModule:
    """The first half of `lower`: a module whose `main` calls fused, unscheduled functions."""
    t = relax.transform
    with target.tvm_target:
        mod = recognise(canonicalise(to_conv2d(mod)))
        mod = write_classic(write_recurrent(choose_layouts(mod, target), target), target)
        mod = legalise(mod)
        passes = [
            # No constant folding from here on: it would transform weights now instead of at load.
            t.AnnotateTIROpPattern(),
            t.DeadCodeElimination(["main"]),
            t.FuseOps(),
            t.FuseTIR(),
            t.CanonicalizeBindings(),
            t.DeadCodeElimination(["main"]),
        ]
        return _with_short_names(tvm.transform.Sequential(passes)(mod))


def _with_short_names(mod: tvm.IRModule) -> tvm.IRModule:
    """Shorten the names of kernels that consist of many operators: TVM joins the names of all of them."""
    long = {var: func for var, func in mod.functions.items() if len(var.name_hint) > MAX_NAME}
    if not long:
        return mod
    short: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}

    def emit(table: Values, var: relax.Var, call: Call) -> bool:
        if op_name(call) != "relax.call_tir" or call.args[0] not in long:
            return False
        kernel = call.args[0]
        if kernel not in short:
            # The builder makes the name unique.
            short[kernel] = table.bb.add_func(long[kernel], kernel.name_hint[:MAX_NAME].rstrip("_"))
        args = [short[kernel], *(table.plain(a) for a in call.args[1:])]
        table.define(var, table.bb.emit(Call(call.op, args, call.attrs, call.ty_args)))
        return True

    others = {var: func for var, func in mod.functions.items() if var not in long}
    return rewrite_main(tvm.IRModule(others), emit, Values)


def is_reshape(value: relax.Expr) -> bool:
    """Whether a node of `main` only gives its input's storage another name."""
    return isinstance(value, Call) and op_name(value) in RESHAPES
