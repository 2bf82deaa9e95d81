"""Cores can share the kernels that take time: counted in rounds of parallel loops, not timed."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import relax

from benchmarks.balance import Balance
from builder.kernels.cost_model import time_us
from builder.kernels.postprocessing import WORTH_A_LAUNCH_US
from tests.builder.kernels.machines import REGISTERS, Build, Randn, lower_expression, machine


def speed_up(build: Build, randn: Randn, shape: tuple[int, ...], lanes: int, threads: int) -> float:
    """Return how many times as fast the kernels are on `threads` cores, without those too short to share."""
    target = machine(lanes)
    lowered = lower_expression(build, {"x": randn(*shape)}, target)
    kernels = [Balance.of(func, target) for func in lowered.kernels.functions.values()]
    long = [kernel for kernel in kernels if kernel.time_us >= WORTH_A_LAUNCH_US]
    assert long
    return sum(k.time_us for k in long) / sum(k.time_us_with(threads) for k in long)


def matmul(randn: Randn, depth: int, columns: int) -> Build:
    w = randn(depth, columns)
    return lambda v: relax.op.matmul(v, relax.const(w))


def depthwise(randn: Randn, channels: int, kernel: int, stride: int) -> Build:
    w = randn(channels, 1, kernel, kernel)
    how: dict[str, Any] = {
        "padding": (kernel // 2,) * 4, "strides": (stride, stride), "groups": channels,
    }  # fmt: skip
    return lambda v: relax.op.nn.conv2d(v, relax.const(w), **how)


def gate(randn: Randn, channels: int) -> Build:
    """A picture times what a convolution makes of its means, as in MobileNetV3."""
    w = randn(channels, channels, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        means = relax.op.mean(v, axis=[2, 3], keepdims=True)
        return relax.op.multiply(relax.op.sigmoid(relax.op.nn.conv2d(means, relax.const(w))), v)

    return build


def dense(randn: Randn, channels: int) -> Build:
    """A convolution's channels beside those that it reads, as in DenseNet, read by another."""
    w = randn(16, channels, 3, 3)
    v = randn(16, channels + 16, 1, 1)

    def build(x: relax.Expr) -> relax.Expr:
        new = relax.op.nn.conv2d(x, relax.const(w), padding=(1, 1, 1, 1))
        both = relax.op.concat([x, new], axis=1)
        return relax.op.nn.conv2d(relax.op.nn.relu(both), relax.const(v))

    return build


CASES = {
    "few columns": (lambda randn: matmul(randn, 128, 64), (1, 3136, 128)),
    "few columns in pictures": (lambda randn: matmul(randn, 96, 96), (4, 7, 112, 96)),
    "depthwise of few channels": (lambda randn: depthwise(randn, 32, 3, 1), (1, 32, 112, 112)),
    "depthwise of 48 channels": (lambda randn: depthwise(randn, 48, 5, 2), (1, 48, 120, 160)),
    "gate": (lambda randn: gate(randn, 256), (1, 256, 56, 56)),
    "channels side by side": (lambda randn: dense(randn, 56), (1, 56, 56, 56)),
}


@pytest.mark.parametrize("lanes", REGISTERS)
@pytest.mark.parametrize("case", CASES)
def test_cores_share_long_kernels(case: str, lanes: int, randn: Randn) -> None:
    make, shape = CASES[case]
    build = make(randn)
    assert speed_up(build, randn, shape, lanes, 4) >= 3.5
    assert speed_up(build, randn, shape, lanes, 16) >= 10.0


def test_a_ragged_part_costs_what_a_whole_one_does(randn: Randn) -> None:
    # Jobs share the rows of the copy, and the last job has fewer: its loop's extent is not a constant.
    target = machine(16)
    lowered = lower_expression(dense(randn, 56), {"x": randn(1, 56, 57, 56)}, target)
    copies = [f for g, f in lowered.kernels.functions.items() if g.name_hint.startswith("channels")]
    assert copies
    assert all(
        time_us(func, target) > 4 * 72 * 57 * 56 / 1e3 / target.core.cache_bytes_per_ns for func in copies
    )
    assert all("T.parallel" in func.script() for func in copies)
