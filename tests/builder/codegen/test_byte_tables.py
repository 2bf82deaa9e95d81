"""Tables of 256 bytes: one instruction where the processor has it, and the same bytes everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.codegen.lowering import build_kernels
from builder.target.device_target import resolve
from tests.builder.kernels.integer_machines import device, lower_for, run_here

TABLE = np.random.default_rng(4).integers(0, 256, 256).astype("u1")


@pytest.mark.parametrize("shape", [(256,), (3, 64), (5, 7, 16), (2, 31), (1, 9, 3, 3)])
def test_each_byte_is_that_of_the_table(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(5).permutation(np.resize(np.arange(256), shape).ravel()).reshape(shape)
    x = x.astype("u1")
    build = lambda v: relax.op.take(relax.const(TABLE), v)  # noqa: E731
    assert np.array_equal(run_here(build, {"x": x}, device("host")).outputs[0], TABLE[x])


@pytest.mark.parametrize(("cpu", "uses_it"), [("icelake-server", True), ("cascadelake", False)])
def test_the_instruction_is_used_where_the_processor_has_it(cpu: str, uses_it: bool) -> None:
    target = resolve(f"llvm -mtriple=x86_64-linux-gnu -mcpu={cpu}")
    assert target.looks_up_bytes is uses_it
    lowered = lower_for(
        lambda v: relax.op.take(relax.const(TABLE), v), {"x": np.zeros((4, 64), "u1")}, target
    )
    assembly = build_kernels(lowered.kernels, target.tvm_target).inspect_source("asm")
    assert ("\tvpermi2b\t" in assembly or "\tvpermt2b\t" in assembly) is uses_it
