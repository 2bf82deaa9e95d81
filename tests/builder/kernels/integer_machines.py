"""Kernels of small integers: scheduled for any device, compiled for this machine, compared exactly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from benchmarks.interpreter import Interpreter
from builder.compiling.lower import LoweredModule, lower
from builder.kernels.decisions import Decision, Schedules, heuristic
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.kernels.machines import Build, Result

_X86: Final = "llvm -mtriple=x86_64-linux-gnu -mcpu="
# A device for each instruction, and for each way to do without one.
DEVICES: Final[Mapping[str, str]] = {
    "host": "host",
    "rpi5": "rpi5",
    "rpi4": "rpi4",
    "rpi-armv7": "rpi-armv7",
    "riscv64": "riscv64",
    "cascadelake": f"{_X86}cascadelake",
    "sapphirerapids": f"{_X86}sapphirerapids",  # with tiles, for what does not fit them
    "alderlake": f"{_X86}alderlake",
    "skylake-avx512": f"{_X86}skylake-avx512",
    "x86-64-v3": "x86-64-v3",
    "x86-64-v2": f"{_X86}x86-64-v2",
}

device = functools.cache(lambda name: resolve(DEVICES[name]))


class RandomChooser:
    """Makes random decisions, and remembers how many there were."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.made: dict[str, int] = {}

    def __call__(self, name: str, values: Sequence[int], default: int) -> Decision:
        self.made[name] = int(self._random.choice(sorted({*values, default})))
        return self.made[name]


def lower_for(
    build: Build,
    inputs: Mapping[str, np.ndarray],
    target: DeviceTarget,
    choose: Any = heuristic,
    mark: Callable[[tvm.IRModule], tvm.IRModule] | None = None,
) -> LoweredModule:
    """Lower the expression, or the tuple of expressions, that `build` returns, in strict mode.

    `mark` may mark the module before.
    """
    bb = relax.BlockBuilder()
    params = [relax.Var(k, relax.TensorType(v.shape, str(v.dtype))) for k, v in inputs.items()]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(bb.normalize(build(*params)))
        bb.emit_func_output(out)
    mod = bb.get() if mark is None else mark(bb.get())
    return lower(mod, target, Schedules(choose=choose, strict=True))


def run_here(
    build: Build,
    inputs: Mapping[str, np.ndarray],
    target: DeviceTarget,
    choose: Any = heuristic,
    mark: Callable[[tvm.IRModule], tvm.IRModule] | None = None,
) -> Result:
    """Lower for `target` and run: with its instruction if this machine has it, else in arithmetic."""
    lowered = lower_for(build, inputs, target, choose, mark)
    machine = target if target.is_native else device("host")
    return Result(list(Interpreter(lowered, machine.tvm_target).run(inputs)), lowered)


def const(value: Any, dtype: str) -> relax.Expr:
    return relax.const(np.asarray(value, dtype))


def numbers(x: relax.Expr, zero: Any, dtype: str, scale: Any = 1.0, axis: int = 0) -> relax.Expr:
    """Return the numbers that the integers `x` stand for; with a scale of 1, sums of products are exact."""
    return relax.op.dequantize(x, const(scale, "float32"), const(zero, dtype), axis=axis)


def any_bytes(random: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Return all values of a byte type, both ends among them if there is room."""
    info = np.iinfo(dtype)
    array = random.integers(int(info.min), int(info.max) + 1, tuple(shape)).astype(dtype)
    array.reshape(-1)[[0, -1]] = info.min, info.max
    return array
