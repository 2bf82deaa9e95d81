"""Kernels for any core: their default points are valid, and compute right, whatever its caches are.

Kernels of float32 are in `tests/builder/compiling/test_any_operator.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax

from builder.kernels.spaces import half_winograd, tile_convolution, tile_matmul, winograd
from builder.target.core import Core
from tests.builder.kernels.core_models import CORE_COUNTS, CORES
from tests.builder.kernels.integer_machines import any_bytes, device, numbers, run_here
from tests.builder.kernels.machines import close, conv2d, element_machine, run
from tests.builder.kernels.signal_to_noise import decibels
from tests.builder.kernels.tile_machine import Case, Shared, exact_on_tiles

# A device for each instruction.
DEVICES = ("riscv64", "rpi4", "rpi5", "alderlake", "cascadelake")
SIZES = st.integers(1, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICES)
def test_sums_of_small_integers_are_exact(name: str) -> None:
    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(CORES, CORE_COUNTS, st.sampled_from([1, 3, "depthwise", "matmul"]), st.tuples(*[SIZES] * 4))
    def check(core: Core, cores: int, kind: int | str, sizes: tuple[int, int, int, int]) -> None:
        target = replace(device(name), core=core, cores=cores)
        random, (c, h, w, o) = np.random.default_rng(sum(sizes)), sizes
        if kind == "matmul":
            x, weights = any_bytes(random, (h, c), "uint8"), any_bytes(random, (c, o), "int8")
            wanted = (x.astype("i8") - 9) @ weights.astype("i8")
        else:
            window, groups = (3, c) if kind == "depthwise" else (int(kind), 1)
            x = any_bytes(random, (1, c, h, w), "uint8")
            weights = any_bytes(random, (c if groups > 1 else o, c // groups, window, window), "int8")
            how: dict[str, Any] = {"padding": (window // 2,) * 4, "groups": groups}
            wanted = conv2d(x.astype("i8") - 9, weights, **how).astype("i8")

        def build(v: relax.Expr) -> relax.Expr:
            factors = numbers(v, 9, "uint8"), numbers(relax.const(weights), 0, "int8")
            return relax.op.matmul(*factors) if kind == "matmul" else relax.op.nn.conv2d(*factors, **how)

        result = run_here(build, {"x": x}, target)
        # Winograd's algorithm on a device without products of bytes has rounded factors.
        rounds = winograd.KIND in result.schedules
        close(result.outputs[0], wanted, 1e-5 if rounds else 0.0)

    check()


@pytest.mark.slow
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(CORES, CORE_COUNTS, st.sampled_from([1, 3]), st.tuples(*[st.integers(3, 40)] * 4))
def test_sums_of_halves_are_right(
    core: Core, cores: int, window: int, sizes: tuple[int, int, int, int]
) -> None:
    random, (c, h, w, o) = np.random.default_rng(sum(sizes)), sizes
    x = np.maximum(random.standard_normal((1, c, h, w)), 0).astype("f2")
    depth = c * window * window
    weights = (random.standard_normal((o, c, window, window)) * (2 / depth) ** 0.5).astype("f2")
    padding = (window // 2,) * 4

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.nn.conv2d(v, relax.const(weights), padding=padding, out_dtype="float32")

    result = run(build, {"x": x}, replace(element_machine(), core=core, cores=cores))
    wanted = conv2d(x.astype("f4"), weights.astype("f4"), padding=padding)
    least = 44 if half_winograd.KIND in result.schedules else 52
    assert decibels(result.outputs[0], wanted) > least


@pytest.mark.slow
def test_sums_on_tiles_are_exact(shared_file: Shared) -> None:
    machines = list(itertools.product([128 << 10, 320 << 10, 4 << 20], [1, 3, 128]))
    random = np.random.default_rng(5)
    cases = []
    for l2_bytes, cores in machines:
        h, w, o = (int(n) for n in random.integers(3, 40, 3))
        padding = {"padding": (1, 1, 1, 1)}
        cases += [
            Case((1, 64, h, w), (o, 64, 3, 3), how=padding, l2_bytes=l2_bytes, cores=cores),
            Case((1, 128, w, h), (4 * o, 128, 1, 1), how={}, l2_bytes=l2_bytes, cores=cores),
            Case((h, 128), (128, 3 * o), l2_bytes=l2_bytes, cores=cores),
        ]
    kinds = {kind for _, outcome in exact_on_tiles(cases, shared_file) for kind in outcome.schedules}
    assert kinds >= {tile_convolution.KIND, tile_matmul.KIND}
