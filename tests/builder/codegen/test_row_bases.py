"""Rows that are far apart: what kernels compute stays the same, and ARM loads more vectors in pairs."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from builder.codegen import lowering, row_bases
from builder.codegen.row_bases import separate_rows
from builder.compiling.lower import lower
from builder.kernels.decisions import Schedules
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.kernels.machines import close, conv2d, element_machine, run


def pointwise(size: int, target: DeviceTarget) -> tvm.IRModule:
    """Return the kernels of a 1x1 convolution of `size` x `size` pixels."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 64, size, size), "float32"))
    weight = relax.const(np.ones((24, 64, 1, 1), np.float32))
    with bb.function("main", [x]):
        with bb.dataflow():
            out = bb.emit_output(bb.emit(relax.op.nn.relu(relax.op.nn.conv2d(x, weight))))
        bb.emit_func_output(out)
    return lower(bb.get(), target, Schedules(strict=True)).kernels


def single_loads(kernels: tvm.IRModule, target: DeviceTarget) -> int:
    """Count the instructions that load one vector."""
    code = lowering.build_kernels(kernels, target.tvm_target).inspect_source("asm")
    return len(re.findall(r"^\tldr\tq", code, re.MULTILINE))


def test_far_rows_are_loaded_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    target = resolve("rpi4")
    kernels = pointwise(14, target)
    new = single_loads(kernels, target)
    monkeypatch.setattr(lowering, "separate_rows", lambda mod, _: mod)
    assert new <= 0.6 * single_loads(kernels, target)


def test_the_hot_loop_adds_to_addresses_only() -> None:
    """Four rows of the input and the weights have an address each, which takes one addition in a round."""
    target = resolve("rpi4")
    code = lowering.build_kernels(pointwise(14, target), target.tvm_target).inspect_source("asm")
    blocks = [block.split("\n") for block in re.split(r"^\.LBB.*\n", code, flags=re.MULTILINE)]
    loop = max(blocks, key=lambda lines: sum(line.startswith("\tfmla") for line in lines))
    loop = loop[: next(at for at, line in enumerate(loop) if line.startswith("\tb.")) + 1]
    others = [line for line in loop if not re.match(r"\t(fmla|ldp|ldr)\t[vq]", line)]
    assert len(others) <= 7, others
    assert not any("sxtw" in line for line in others)


def test_near_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    target = resolve("rpi4")
    kernels = pointwise(7, target)
    new = single_loads(kernels, target)
    monkeypatch.setattr(lowering, "separate_rows", lambda mod, _: mod)
    assert new == single_loads(kernels, target)


@pytest.mark.parametrize(("channels", "groups", "window"), [(64, 1, 1), (8, 8, 3)])
def test_numbers_are_the_same(
    channels: int, groups: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine, with an addition in place of ARM's instruction."""
    found: list[tvm.IRModule] = []

    def separate(mod: tvm.IRModule, _: str) -> tvm.IRModule:
        found.append(separate_rows(mod, "aarch64"))
        assert not tvm_ffi.structural_equal(found[-1], mod)
        return found[-1]

    monkeypatch.setattr(lowering, "separate_rows", separate)
    monkeypatch.setattr(row_bases, "instruction", lambda _name, _dtype, a, b: a + b)
    rng = np.random.default_rng(0)
    filters = (24 if groups == 1 else groups, channels // groups, window, window)
    x, w = (rng.standard_normal(shape, "float32") for shape in ((1, channels, 66, 66), filters))
    result = run(
        lambda v: relax.op.nn.relu(relax.op.nn.conv2d(v, relax.const(w), groups=groups)),
        {"x": x},
        element_machine(),
    )
    close(result.outputs[0], np.maximum(conv2d(x, w, groups=groups), 0))
    assert found


@pytest.mark.parametrize("arch", ["x86_64", "armv7l", "riscv64"])
def test_other_architectures_stay(arch: str) -> None:
    mod = tvm.IRModule({})
    assert separate_rows(mod, arch) is mod
