"""Compiles and runs kernels: for targets with 4, 8 and 16 lanes, on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import tvm
from tvm import relax

from benchmarks.interpreter import Interpreter
from builder.compiling.lower import LoweredModule, lower
from builder.kernels.decisions import Schedules
from builder.target.core import Core
from builder.target.device_target import DeviceTarget, resolve
from builder.target.simd import Simd

Case = TypeVar("Case")
Other = TypeVar("Other")

CORE = "sapphirerapids"
REGISTERS = {4: 32, 8: 16, 16: 32}


def in_turn(cases: Iterable[Case]) -> list[tuple[Case, int]]:
    """Return each case with a number of lanes, which take turns: a case's code depends little on it."""
    return list(zip(cases, itertools.cycle(REGISTERS), strict=False))


def narrow_and_wide(cases: Iterable[Case]) -> list[tuple[Case, int]]:
    """Return each case with 4 lanes, whose padding is written in another way, and with 8 or 16 in turn."""
    return [(case, lanes) for i, case in enumerate(cases) for lanes in (4, 8 << i % 2)]


def crossed(cases: Iterable[Case], others: Sequence[Other]) -> list[tuple[Case, Other, int]]:
    """Return each case with each number of lanes, and with two others in turn.

    Both of `others` meet each case, and each number of lanes.
    """
    return [
        (case, others[(i + j) % len(others)], lanes)
        for i, case in enumerate(cases)
        for j, lanes in enumerate(REGISTERS)
    ]


def machine(lanes: int, core: Core | None = None, cores: int = 2) -> DeviceTarget:
    """Return a machine that runs here, with another vector width: LLVM splits or widens the vectors.

    Its caches and cores are those that are given, or always the same: what is decided does not depend on who
    runs the tests.
    """
    simd = Simd(lanes, REGISTERS[lanes], fma=True)
    return replace(resolve("host"), simd=simd, core=core or Core.of("x86_64", CORE, simd), cores=cores)


def element_machine() -> DeviceTarget:
    """Return this machine as one that multiplies by an element of a register, as ARM does."""
    return replace(machine(4), arch="aarch64")


@dataclass(frozen=True)
class Result:
    outputs: list[np.ndarray]
    lowered: LoweredModule

    @property
    def schedules(self) -> set[str]:
        """The kinds of design space that the kernels come from."""
        funcs = self.lowered.kernels.functions.values()
        return {str(f.attrs["edge.schedule"]) for f in funcs}


Build = Callable[..., relax.Expr]
Randn = Callable[..., np.ndarray]


def module_of(build: Build, inputs: Mapping[str, np.ndarray]) -> tvm.IRModule:
    """Return a module of the expression that `build` returns for variables with the types of `inputs`."""
    bb = relax.BlockBuilder()
    params = [relax.Var(k, relax.TensorType(v.shape, str(v.dtype))) for k, v in inputs.items()]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(bb.normalize(build(*params)))
        bb.emit_func_output(out)
    return bb.get()


def lower_expression(build: Build, inputs: Mapping[str, np.ndarray], target: DeviceTarget) -> LoweredModule:
    """Lower the expression that `build` returns for variables with the types of `inputs`."""
    return lower(module_of(build, inputs), target, Schedules(strict=True))


def run(build: Build, inputs: Mapping[str, np.ndarray], target: DeviceTarget) -> Result:
    """Lower the expression that `build` returns, and run it on `inputs`."""
    lowered = lower_expression(build, inputs, target)
    outputs = Interpreter(lowered, target.tvm_target).run(inputs)
    return Result(list(outputs), lowered)


def conv2d(
    x: np.ndarray,
    w: np.ndarray,
    strides: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> np.ndarray:
    """Return the convolution of `x`, [N, C, H, W], in double precision, by its definition."""
    top, left, bottom, right = padding
    x = np.pad(x.astype("f8"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    n, c, h, w_in = x.shape
    o, i, kh, kw = w.shape
    oh = (h - (kh - 1) * dilation[0] - 1) // strides[0] + 1
    ow = (w_in - (kw - 1) * dilation[1] - 1) // strides[1] + 1
    out = np.zeros((n, groups, o // groups, oh, ow))
    x = x.reshape(n, groups, c // groups, h, w_in)
    weights = w.astype("f8").reshape(groups, o // groups, i, kh, kw)
    for a in range(kh):
        for b in range(kw):
            y, z = a * dilation[0], b * dilation[1]
            part = x[
                ...,
                y : y + strides[0] * (oh - 1) + 1 : strides[0],
                z : z + strides[1] * (ow - 1) + 1 : strides[1],
            ]
            out += np.einsum("ngcyz,goc->ngoyz", part, weights[..., a, b])
    return out.reshape(n, o, oh, ow)


def close(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * max(np.abs(want).max(), 1e-30)
