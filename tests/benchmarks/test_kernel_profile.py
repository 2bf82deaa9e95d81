"""The profile of kernels: which operations are counted, and that both kinds of models are taken."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tvm import te

from benchmarks.kernel_profile import flops_of
from builder.kernels.spaces import integer_winograd, winograd

OUT_BLOCKS, IN_BLOCKS, BLOCK, SIDE = 4, 3, 16, 14
OUTPUT = (1, OUT_BLOCKS, SIDE, SIDE, BLOCK)
INPUT = (1, IN_BLOCKS, SIDE, SIDE, BLOCK)


@pytest.mark.parametrize(("dtype", "group"), [("float32", 1), ("int8", 2), ("int8", 4)])
def test_winograd_counts_the_operations_of_the_convolution_that_it_replaces(dtype: str, group: int) -> None:
    together = 2
    shape: tuple[int, ...] = (OUT_BLOCKS // together, IN_BLOCKS, 3, 3, BLOCK // group, together, BLOCK)
    if dtype == "float32":
        weights = winograd.transform_weights(te.placeholder(shape, dtype), (4, 4))
    else:
        weights = integer_winograd.transform_weights(te.placeholder((*shape, group), dtype), 2)
    arguments = [INPUT, tuple(int(extent) for extent in weights.shape), OUTPUT]
    channels = IN_BLOCKS * BLOCK, OUT_BLOCKS * BLOCK
    expected = 2 * 9 * SIDE * SIDE * channels[0] * channels[1]
    assert flops_of("fused_winograd_add", arguments) == expected
    assert flops_of("fused_winograd_add", arguments, 25) == expected / 9 * 25


@pytest.mark.slow
def test_an_architecture_is_profiled_by_its_name() -> None:
    command = [sys.executable, "-m", "benchmarks.kernel_profile", "slim-320", "--repeat", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "conv2d" in done.stdout
    assert " GFLOP/s at most" in done.stdout.splitlines()[-1]
