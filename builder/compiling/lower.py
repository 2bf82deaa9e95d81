"""From a static Relax module to a graph of scheduled kernels.

Promises: each node of `main` is a call of a kernel (with one output or several) or a reshape, constants stay
constants, every kernel is scheduled for the target, and equal kernels exist once. Leaves storage to the
memory plan and machine code to `builder.codegen`.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call

from builder.calls.spans import carry
from builder.kernels.decisions import UNTUNED, Schedules
from builder.kernels.passes.blocked import keep_blocks, write_blocks
from builder.kernels.passes.byte_operands import read_bytes_late
from builder.kernels.passes.canonical import canonicalise
from builder.kernels.passes.classic import write_classic
from builder.kernels.passes.convolutions import to_conv2d
from builder.kernels.passes.fusion import fuse_operators
from builder.kernels.passes.halves import use_halves
from builder.kernels.passes.integers import use_integers
from builder.kernels.passes.layouts import choose_layouts
from builder.kernels.passes.legalise import legalise
from builder.kernels.passes.names import shorten_names
from builder.kernels.passes.recognise import recognise
from builder.kernels.passes.recurrent import write_recurrent
from builder.kernels.passes.separables import join_separables
from builder.kernels.rewriter import RESHAPES, op_name, run
from builder.kernels.schedule import schedule
from builder.target.device_target import DeviceTarget


@dataclass(frozen=True, slots=True)
class LoweredModule:
    """What `lower` returns.

    `main`: one dataflow block of `R.call_tir` and reshapes over constants and parameters.
    `kernels`: scheduled functions; each has the `global_symbol` by which `main` calls it.
    """

    main: relax.Function
    kernels: tvm.IRModule


def lower(mod: tvm.IRModule, target: DeviceTarget, schedules: Schedules = UNTUNED) -> LoweredModule:
    """Lower `mod` for `target`.

    `mod`: a static Relax module with a `main`, weights as constants.
    """
    # Ctrl-C in a function that TVM calls: without this, TVM raises an empty RuntimeError.
    tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)
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
        mod = use_halves(recognise(canonicalise(_convolutions(mod, target))))
        mod = write_blocks(choose_layouts(mod, target), target)
        mod = read_bytes_late(write_classic(write_recurrent(mod, target), target))
        mod = carry(mod, legalise(mod, target))
        # No constant folding from here on: it would transform weights now instead of at load.
        mod = run(mod, t.AnnotateTIROpPattern(), t.DeadCodeElimination(["main"]))
        mod = join_separables(fuse_operators(mod), target)
        mod = run(mod, t.CanonicalizeBindings(), t.DeadCodeElimination(["main"]))
        return shorten_names(mod)


def _convolutions(mod: tvm.IRModule, target: DeviceTarget) -> tvm.IRModule:
    """Write all convolutions as two-dimensional ones, and those of bytes with their integers."""
    mod = to_conv2d(keep_blocks(mod))
    whole = use_integers(mod, target)
    # What is not computed with integers has its weights as constants only now.
    return mod if whole.same_as(mod) else to_conv2d(whole)


def is_reshape(value: relax.Expr) -> bool:
    """Whether a node of `main` only gives its input's storage another name."""
    return isinstance(value, Call) and op_name(value) in RESHAPES
