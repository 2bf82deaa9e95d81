"""Compile scheduled kernels to machine code: one relocatable object for a target."""

from __future__ import annotations

import os
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir.analysis import estimate_tir_flops

from builder.codegen.lowering import lower_kernels
from builder.codegen.workspaces import Workspaces, workspaces_of
from builder.errors import BuildError, lines_of
from builder.target.device_target import DeviceTarget


@dataclass(frozen=True, slots=True)
class KernelObject:
    """Compiled kernels.

    `code`: an ELF relocatable object; each kernel is `__tvm_ffi_<global_symbol>`.
    `workspaces`: the memory that they take while they run.
    """

    code: bytes
    workspaces: Workspaces


def compile_kernels(kernels: tvm.IRModule, target: DeviceTarget) -> KernelObject:
    """Compile scheduled kernels.

    Parameters
    ----------
    kernels
        Functions, each with a `global_symbol`, as `builder.compiling.lower.lower` returns them.
    target
        The device. It may differ from the one that the kernels were scheduled for, unless a schedule uses
        instructions of that device.

    Raises
    ------
    BuildError
        If LLVM refused the scheduled kernels: a fault of the builder.
    """
    try:
        functions = lower_kernels(kernels, target.tvm_target)
        module = tvm.get_global_func("target.build.llvm")(functions, target.tvm_target)
        # LLVM ends the process if the disk is full, so write to memory.
        fd = os.memfd_create("kernels.o", os.MFD_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            module.write_to_file(f"/proc/self/fd/{fd}", "o")
            return KernelObject(file.read(), workspaces_of(functions.functions.values()))
    except (RuntimeError, ValueError, TypeError, tvm.error.InternalError) as error:
        reason = lines_of(error)[-1][:300]
        raise BuildError(
            f"code generation for {target.cpu} failed: {reason}",
            hint="take a preset such as --target rpi4; if that was one, please report it with the model",
        ) from error


def compile_object(kernels: tvm.IRModule, target: DeviceTarget) -> bytes:
    """Return the object of `compile_kernels`; errors are the same."""
    return compile_kernels(kernels, target).code


def count_flops(kernels: tvm.IRModule) -> dict[str, float]:
    """Kernel's name -> floating-point operations of one call, by TVM's estimate; a multiply-add is two."""
    return {var.name_hint: _flops(kernel) for var, kernel in kernels.functions.items()}


def _flops(kernel: tirx.PrimFunc) -> float:
    shuffles: list[tirx.Shuffle] = []
    tvm_ffi.structural_walk(kernel.body, (tirx.Shuffle, shuffles.append))
    if shuffles:  # TVM's estimate does not know them; such kernels only move numbers
        return 0.0
    return float(estimate_tir_flops(tvm.IRModule({"main": kernel})))
