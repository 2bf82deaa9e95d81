"""A machine with AMX for tests: a process whose instructions for tiles are done by `tiles.c`.

`python -m tests.builder.kernels.tile_machine` reads cases as JSON, computes each on tiles, compares the sums
with exact integers, and prints an outcome a line.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tvm import relax

from agent.bundle.machine import Machine
from benchmarks.interpreter import Interpreter
from builder.codegen.link.linker import _zig
from builder.kernels.decisions import heuristic
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.kernels.integer_machines import RandomChooser, any_bytes, device, lower_for, numbers
from tests.builder.kernels.machines import conv2d

Shared = Callable[[str, Callable[[Path], None]], Path]

_ROOT: Final = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Case:
    """A product of random bytes.

    Attributes
    ----------
    shape
        Of the left operand, uint8: `[N, C, H, W]` of a convolution, else `[..., K]`.
    weights
        Of the right operand, int8: `[OC, IC, KH, KW]` or `[K, N]`.
    zero
        The zero point of the uint8 operand.
    how
        The geometry of a convolution.
    seed
        Of random decisions; None for the heuristic's.
    l2_bytes, cores
        Of the machine that decides, 0 for those of the processor that has tiles.
    """

    shape: tuple[int, ...]
    weights: tuple[int, ...]
    zero: int = 7
    how: dict[str, Any] | None = None
    seed: int | None = None
    l2_bytes: int = 0
    cores: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case.

    Attributes
    ----------
    is_exact
        Whether all sums are right.
    schedules
        The kinds of design spaces of its kernels.
    products
        Products of tiles that were executed, if they are counted.
    decided
        The names of random decisions.
    """

    is_exact: bool
    schedules: tuple[str, ...]
    products: int
    decided: tuple[str, ...]


def processor(path: Path) -> None:
    """Compile `tiles.c` to `path`."""
    command = [_zig(), "cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-fno-sanitize=all"]
    source = Path(__file__).with_name("tiles.c")
    subprocess.run([*command, str(source), "-o", str(path)], check=True, timeout=300)


def require_x86() -> None:
    """Skip on a machine of another architecture."""
    if Machine.detect().arch != "x86_64":
        pytest.skip("needs an x86-64 processor, whose tiles are emulated")


def with_tiles() -> DeviceTarget:
    """Return this machine as if its processor had tiles, whatever else it multiplies bytes with."""
    host = resolve("host")
    attributes = ["+amx-tile", "+amx-int8"]
    return resolve({"kind": "llvm", "mtriple": host.triple, "mcpu": host.cpu, "mattr": attributes})


def environment(emulator: Path) -> dict[str, str]:
    """Return the environment of a process with tiles."""
    return {**os.environ, "LD_PRELOAD": str(emulator), "PYTHONPATH": str(_ROOT), "TVM_NUM_THREADS": "2"}


def run_on_tiles(cases: Sequence[Case], emulator: Path) -> list[Outcome]:
    """Run cases in one process with tiles."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.builder.kernels.tile_machine"],
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(emulator),
        cwd=_ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    return [
        Outcome(each["is_exact"], tuple(each["schedules"]), each["products"], tuple(each["decided"]))
        for each in outcomes
    ]


def exact_on_tiles(cases: Sequence[Case], shared_file: Shared) -> list[tuple[Case, Outcome]]:
    """Run cases in one process with tiles, each with exact sums; skip on another architecture."""
    require_x86()
    outcomes = run_on_tiles(cases, shared_file("tiles.so", processor))
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.is_exact, case
    return list(zip(cases, outcomes, strict=True))


def _deciding(case: Case) -> DeviceTarget:
    target = device("sapphirerapids")
    core = replace(target.core, l2_bytes=case.l2_bytes or target.core.l2_bytes)
    return replace(target, core=core, cores=case.cores or target.cores)


def _run(case: Case, count: Any) -> Outcome:
    target, random = _deciding(case), np.random.default_rng(len(case.shape) + case.weights[0])
    x, w = any_bytes(random, case.shape, "uint8"), any_bytes(random, case.weights, "int8")

    def build(v: relax.Expr) -> relax.Expr:
        left, right = numbers(v, case.zero, "uint8"), numbers(relax.const(w), 0, "int8")
        if case.how is None:
            return relax.op.matmul(left, right)
        return relax.op.nn.conv2d(left, right, **case.how)

    chooser = heuristic if case.seed is None else RandomChooser(case.seed)
    lowered = lower_for(build, {"x": x}, target, chooser)
    before = count()
    [result] = Interpreter(lowered, with_tiles().tvm_target).run({"x": x})
    left = x.astype("i8") - case.zero
    wanted = left @ w.astype("i8") if case.how is None else conv2d(left, w, **case.how)
    kinds = tuple(str(f.attrs.get("edge.schedule")) for _, f in lowered.kernels.functions.items())
    decided = tuple(chooser.made) if isinstance(chooser, RandomChooser) else ()
    return Outcome(np.array_equal(result.astype("i8"), wanted.astype("i8")), kinds, count() - before, decided)


def main() -> None:
    """Run the cases on standard input."""
    libc = ctypes.CDLL(None)
    if libc.syscall(158, 0x1023, 18) != 0:
        raise SystemExit("the kernel refuses tiles")
    for each in json.load(sys.stdin):
        case = Case(**{**each, "shape": tuple(each["shape"]), "weights": tuple(each["weights"])})
        outcome = _run(case, libc.tile_products)
        left = libc.threads_with_tiles()
        if left:
            raise SystemExit(f"expected released tiles, got them in use in {left} threads")
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
