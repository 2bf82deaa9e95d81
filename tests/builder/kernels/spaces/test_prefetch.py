"""Prefetches: on small planes and in products, on x86 only, without a change of the result."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from tvm import relax

from builder.codegen.lowering import lower_kernels
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.kernels.integer_machines import device
from tests.builder.kernels.machines import Randn, close, conv2d, lower_expression, machine, run

CASCADELAKE = device("cascadelake")


def prefetches(randn: Randn, size: int, target: DeviceTarget, images: int = 1) -> int:
    """Count the prefetches in the kernels of a 1x1 convolution on planes of `size`."""
    w = relax.const(randn(128, 64, 1, 1))
    lowered = lower_expression(
        lambda v: relax.op.nn.conv2d(v, w), {"x": randn(images, 64, size, size)}, target
    )
    return sum(f.script().count("prefetch(") for f in lowered.kernels.functions.values())


def test_a_small_plane_prefetches_the_next_panel(randn: Randn) -> None:
    # Two blocks of 16 x 64 weights are 128 lines, for 4 tiles x 4 blocks of input channels.
    assert prefetches(randn, 7, machine(16)) == 128 // 16


def test_each_image_of_a_batch_prefetches_whole_panels(randn: Randn) -> None:
    assert prefetches(randn, 7, machine(16), images=2) == prefetches(randn, 7, machine(16))


def test_the_panel_after_the_last_is_the_first(randn: Randn) -> None:
    """Of each image of a batch; with a single panel, there is nothing to prefetch."""
    w = relax.const(randn(128, 64, 1, 1))
    lowered = lower_expression(lambda v: relax.op.nn.conv2d(v, w), {"x": randn(2, 64, 7, 7)}, machine(16))
    (text,) = [f.script() for f in lowered.kernels.functions.values() if "prefetch(" in f.script()]
    # Four panels of two blocks of 16 channels.
    assert re.search(r"prefetch\(.* \+ T.int64\(1\)\) % T.int64\(4\)", text)
    one = relax.const(randn(32, 64, 1, 1))
    lowered = lower_expression(lambda v: relax.op.nn.conv2d(v, one), {"x": randn(2, 64, 7, 7)}, machine(16))
    assert not any("prefetch(" in f.script() for f in lowered.kernels.functions.values())


def test_a_large_plane_prefetches_nothing(randn: Randn) -> None:
    assert prefetches(randn, 56, machine(16)) == 0


def test_products_of_bytes_prefetch_too(randn: Randn) -> None:
    w = np.ones((128, 64, 1, 1), np.int8)

    def counted(size: int, target: DeviceTarget) -> int:
        x = {"x": np.zeros((1, 64, size, size), np.uint8)}
        build = lambda v: relax.op.nn.conv2d(v, relax.const(w), out_dtype="int32")  # noqa: E731
        lowered = lower_expression(build, x, target)
        return sum(f.script().count("prefetch(") for f in lowered.kernels.functions.values())

    # Two blocks of 16 x 64 weights are 32 lines, for 7 rows x 4 blocks of input channels.
    assert counted(7, CASCADELAKE) == round(32 / 28)
    assert counted(56, CASCADELAKE) == 0
    assert counted(7, resolve("rpi5")) == 0
    product = lambda v: relax.op.matmul(v, relax.const(w[:, :, 0, 0].T.copy()), out_dtype="int32")  # noqa: E731
    lowered = lower_expression(product, {"x": np.zeros((20, 64), np.uint8)}, CASCADELAKE)
    assert "prefetch(" in str(lowered.kernels.script())


def prefetches_of_product(randn: Randn, rows: int, depth: int, target: DeviceTarget) -> int:
    """Count the prefetches in a round of a product with 96 columns."""
    w = relax.const(randn(depth, 96))
    lowered = lower_expression(lambda v: relax.op.matmul(v, w), {"x": randn(rows, depth)}, target)
    return sum(f.script().count("prefetch(") for f in lowered.kernels.functions.values())


def test_products_prefetch_however_many_rows_they_have(randn: Randn) -> None:
    # A panel of 64 x 48 weights is 192 lines. A tile of 8 rows has 16 rounds.
    target = machine(16)
    assert prefetches_of_product(randn, 8, 64, target) == 192 // 16
    assert prefetches_of_product(randn, 16, 64, target) == 192 // 32
    assert prefetches_of_product(randn, 800, 64, target) == 1
    assert prefetches_of_product(randn, 13, 63, target) > 0


def test_products_of_one_row_prefetch_nothing(randn: Randn) -> None:
    """They read all weights in order, which the processor sees by itself."""
    assert prefetches_of_product(randn, 1, 64, machine(16)) == 0


def test_each_block_of_a_depth_prefetches_the_next_block(randn: Randn) -> None:
    target = machine(16)
    core = replace(target.core, l1_bytes=48 << 10, l2_bytes=256 << 10)
    # A block of 512 x 48 weights is 1536 lines. Two tiles of 8 rows have 256 rounds.
    small = replace(target, core=core)
    assert prefetches_of_product(randn, 16, 2048, small) == 1536 // 256
    w = relax.const(randn(2048, 96))
    lowered = lower_expression(lambda v: relax.op.matmul(v, w), {"x": randn(16, 2048)}, small)
    (func,) = lowered.kernels.functions.values()
    (outer, chunk), *others = {
        (found[1], found[2])
        for found in re.finditer(
            r"prefetch\(.*\((\w+) \* T.int64\(4\) \+ (\w+) \+ T.int64\(1\)\) \* T.int64\(24576\)",
            func.script(),
        )
    }
    assert not others
    assert f"for {outer} in T.parallel(" in func.script()
    assert f"for {chunk}, " in func.script(), "the loop over blocks"


def test_products_prefetch_no_panel_that_the_cache_has_no_room_for(randn: Randn) -> None:
    target = machine(16)
    small = replace(target, core=replace(target.core, l2_bytes=2 * 64 * 48 * 4))
    assert prefetches_of_product(randn, 16, 64, small) > 0
    assert prefetches_of_product(randn, 16, 68, small) == 0


@pytest.mark.slow
def test_a_prefetch_leaves_the_sums_in_registers(randn: Randn) -> None:
    """LLVM would store sums in memory of the launcher before each prefetch."""
    w = relax.const(randn(64, 96))
    lowered = lower_expression(lambda v: relax.op.matmul(v, w), {"x": randn(16, 64)}, machine(16))
    code = str(lower_kernels(lowered.kernels, machine(16).tvm_target).script())
    assert "prefetch" in code
    assert "TVMBackendAllocWorkspace" not in code


@pytest.mark.parametrize("kernel", [1, 3])
def test_sums_beside_a_prefetch_are_local(kernel: int, randn: Randn) -> None:
    """Winograd's product, too: it would store all sums of a tile in each round."""
    w = relax.const(randn(256, 256, kernel, kernel))
    build = lambda v: relax.op.nn.conv2d(v, w, padding=kernel // 2)  # noqa: E731
    lowered = lower_expression(build, {"x": randn(1, 256, 7, 7)}, machine(16))
    codes = [f.script() for f in lowered.kernels.functions.values()]
    prefetching = [code for code in codes if "prefetch(" in code]
    assert len(prefetching) == 1
    assert 'scope="local"' in prefetching[0]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(2, 96), (13, 100), (197, 48), (800, 96)])
def test_prefetches_do_not_change_products(randn: Randn, rows: int, columns: int) -> None:
    x, w = randn(rows, 64), randn(64, columns)
    result = run(lambda v: relax.op.matmul(v, relax.const(w)), {"x": x}, machine(16))
    close(result.outputs[0], x.astype("f8") @ w)
    assert "prefetch(" in str(result.lowered.kernels.script())


def test_arm_prefetches_nothing(randn: Randn) -> None:
    assert prefetches(randn, 7, resolve("rpi4")) == 0
    assert prefetches_of_product(randn, 16, 64, resolve("rpi4")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [(7, 7), (1, 5), (14, 14)])
def test_prefetches_do_not_change_results(randn: Randn, size: tuple[int, int]) -> None:
    x, w = randn(2, 48, *size), randn(80, 48, 3, 3)
    padding = (1, 1, 1, 1)
    build = lambda v: relax.op.nn.conv2d(v, relax.const(w), strides=(2, 2), padding=padding)  # noqa: E731
    got = run(build, {"x": x}, machine(16)).outputs[0]
    close(got, conv2d(x, w, strides=(2, 2), padding=padding))
    assert np.isfinite(got).all()
