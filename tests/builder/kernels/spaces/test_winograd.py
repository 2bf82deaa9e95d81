"""Winograd's convolution, against the direct one."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from tvm import relax

from builder.codegen.lowering import build_kernels
from builder.kernels.spaces import winograd
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.winograd_transforms import Matrix, Transforms, places
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.kernels.machines import (
    Randn,
    close,
    conv2d,
    element_machine,
    lower_expression,
    machine,
    run,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("m", [2, 4, 5, 6])
def test_transforms_are_exact(m: int) -> None:
    t = Transforms.of(m)
    state = np.random.RandomState(m)
    g = [Fraction(int(v)) for v in state.randint(-9, 9, 3)]
    d = [Fraction(int(v)) for v in state.randint(-9, 9, m + 2)]

    def times(rows: Matrix, v: list[Fraction]) -> list[Fraction]:
        return [sum((a * b for a, b in zip(row, v, strict=True)), Fraction(0)) for row in rows]

    product = [a * b for a, b in zip(times(t.weights, g), times(t.input, d), strict=True)]
    assert times(t.output, product) == [sum(g[k] * d[i + k] for k in range(3)) for i in range(m)]
    assert places(m, 1) == tuple(range(m + 2))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_transforms_at_stride_2_are_exact(m: int) -> None:
    t = Transforms.at_stride_2(m)
    state = np.random.RandomState(m)
    g = [Fraction(int(v)) for v in state.randint(-9, 9, 3)]
    d = [Fraction(int(v)) for v in state.randint(-9, 9, 2 * m + 1)]

    def times(rows: Matrix, v: list[Fraction]) -> list[Fraction]:
        return [sum((a * b for a, b in zip(row, v, strict=True)), Fraction(0)) for row in rows]

    weights = times(t.weights, g)
    assert len(weights) == m + 2
    shared = [*weights[: m + 1], *([weights[-1]] * m)]
    product = [a * b for a, b in zip(shared, times(t.input, [d[k] for k in places(m, 2)]), strict=True)]
    assert times(t.output, product) == [sum(g[k] * d[2 * i + k] for k in range(3)) for i in range(m)]


# Each pair of a tile, a shape and a width once. No heuristic takes the tile of 6, whose code is the longest.
@pytest.mark.parametrize(
    ("m", "size", "channels", "lanes"),
    [
        (2, 8, (32, 32), 4),
        (2, 14, (16, 32), 8),
        (2, 9, (32, 16), 16),
        (4, 8, (32, 32), 8),
        (4, 14, (16, 32), 16),
        (4, 9, (32, 16), 4),
        (4, 8, (32, 32), 16),
        (2, 14, (16, 32), 4),
        (2, 9, (32, 16), 8),
        (6, 6, (16, 16), 8),
        (5, 14, (16, 16), 4),
    ],
)
def test_winograd_agrees_with_the_convolution(
    m: int,
    size: int,
    channels: tuple[int, int],
    lanes: int,
    randn: Randn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(winograd, "output_tile", lambda *_: m)
    x, w, b = (
        randn(1, channels[0], size, size),
        randn(channels[1], channels[0], 3, 3),
        randn(1, channels[1], 1, 1),
    )

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), padding=(1, 1, 1, 1))
        return relax.op.nn.relu(relax.op.add(y, relax.const(b)))

    result = run(build, {"x": x}, machine(lanes))
    close(result.outputs[0], np.maximum(conv2d(x, w, padding=(1, 1, 1, 1)) + b, 0), 2e-4 if m > 4 else 5e-5)
    assert {winograd.KIND, winograd.WEIGHTS_KIND} <= result.schedules


@pytest.mark.parametrize(
    ("band", "batch", "size", "lanes"),
    [(1, 1, 12, 16), (2, 1, 18, 8), (3, 1, 17, 4), (2, 2, 15, 16), (1, 3, 9, 8)],
)
def test_bands_of_rows_agree_with_the_convolution(
    band: int, batch: int, size: int, lanes: int, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that the band divides and that it does not, and several pictures."""
    monkeypatch.setattr(winograd, "output_tile", lambda *_: 4)
    monkeypatch.setattr(winograd, "rows_of_band", lambda *_: band)
    x, w, b = randn(batch, 16, size, size), randn(32, 16, 3, 3), randn(1, 32, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), padding=(1, 1, 1, 1))
        return relax.op.nn.relu(relax.op.add(y, relax.const(b)))

    result = run(build, {"x": x}, machine(lanes))
    close(result.outputs[0], np.maximum(conv2d(x, w, padding=(1, 1, 1, 1)) + b, 0), 5e-5)
    [kernel] = [
        f for f in result.lowered.kernels.functions.values() if f.attrs["edge.schedule"] == winograd.KIND
    ]
    assert str(kernel).count("T.parallel(") == 1


@pytest.mark.parametrize(
    ("m", "shape", "padding", "band", "lanes"),
    [
        (2, (1, 16, 16, 16), (1, 1, 1, 1), None, 4),
        (2, (2, 16, 9, 13), (0, 0, 1, 1), None, 8),
        (4, (1, 16, 15, 18), (1, 1, 1, 1), None, 4),
        (4, (1, 32, 11, 9), (0, 1, 0, 1), None, 16),
        (4, (1, 16, 34, 17), (1, 1, 1, 1), 2, 4),
        (2, (2, 16, 13, 15), (1, 1, 1, 1), 1, 4),
    ],
)
def test_stride_2_agrees_with_the_convolution(
    m: int,
    shape: tuple[int, ...],
    padding: tuple[int, ...],
    band: int | None,
    lanes: int,
    randn: Randn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Extents that tiles do not divide, padding on one side, several pictures, and bands of rows."""
    monkeypatch.setattr(winograd, "output_tile", lambda *_: m)
    monkeypatch.setattr(winograd, "rows_of_band", lambda *_: band)
    x, w, b = randn(*shape), randn(24, shape[1], 3, 3), randn(1, 24, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), strides=(2, 2), padding=padding)
        return relax.op.nn.relu(relax.op.add(y, relax.const(b)))

    want = np.maximum(conv2d(x, w, (2, 2), padding) + b, 0)
    for target in (machine(lanes), element_machine()) if lanes == 4 else (machine(lanes),):
        result = run(build, {"x": x}, target)
        close(result.outputs[0], want, 5e-5)
        assert {winograd.KIND, winograd.WEIGHTS_KIND} <= result.schedules


def test_bands_keep_what_is_between_the_stages_in_the_cache() -> None:
    large = Conv2d(1, 128, 56, 56, 32, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    target = machine(16)
    target = replace(target, core=replace(target.core, l2_bytes=2 << 20))
    assert winograd.rows_of_band(large, 4, target) == 1
    # The smallest that fills the registers, and no fewer bands than keep some threads busy.
    assert winograd.rows_of_band(replace(large, in_width=28), 4, target) == 2
    assert winograd.rows_of_band(replace(large, batch=2, in_width=28), 4, target) == 2
    # It all stays in the cache, or the weights do not, or not even a row of tiles.
    assert winograd.rows_of_band(replace(large, in_height=14), 4, target) is None
    assert winograd.rows_of_band(replace(large, out_channels=256), 4, target) is None
    assert winograd.rows_of_band(replace(large, in_width=560), 4, target) is None


def test_cores_that_share_a_cache_share_the_weights_of_bands() -> None:
    """The first block of a ResNet-18 on a Cortex-A72: weights of 576 KiB in a cache of 1 MiB."""
    block = Conv2d(1, 64, 56, 56, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    shared = resolve("rpi4")
    assert winograd.rows_of_band(block, 4, shared) == 1
    own = replace(shared, core=replace(shared.core, l2_bytes=1 << 20, l2_cores=1))
    assert winograd.rows_of_band(block, 4, own) is None
    assert winograd.rows_of_band(block, 4, resolve("rpi3")) is None  # 512 KiB


@pytest.mark.parametrize("m", [2, 4])
def test_operands_held_in_registers_agree_with_the_convolution(
    m: int, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "output_tile", lambda *_: m)
    x, w = randn(1, 16, 14, 14), randn(32, 16, 3, 3)
    result = run(
        lambda v: relax.op.nn.conv2d(v, relax.const(w), padding=(1, 1, 1, 1)), {"x": x}, element_machine()
    )
    close(result.outputs[0], conv2d(x, w, padding=(1, 1, 1, 1)), 5e-5)
    assert {winograd.KIND, winograd.WEIGHTS_KIND} <= result.schedules


def test_weights_are_transformed_at_load_and_not_in_the_bundle(target: DeviceTarget, randn: Randn) -> None:
    w = randn(64, 64, 3, 3)
    result = run(
        lambda v: relax.op.nn.conv2d(v, relax.const(w), padding=(1, 1, 1, 1)),
        {"x": randn(1, 64, 28, 28)},
        target,
    )
    assert winograd.WEIGHTS_KIND in result.schedules
    constants = []
    relax.analysis.post_order_visit(
        result.lowered.main, lambda e: constants.append(e) if type(e).__name__ == "GenericConst" else None
    )
    assert sum(c.value.numpy().nbytes for c in constants) <= w.nbytes


def test_large_weights_on_a_small_map_take_the_small_tile(randn: Randn) -> None:
    few = Conv2d(1, 64, 56, 56, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    many = replace(few, in_channels=512, in_height=7, in_width=7, out_channels=512)
    assert winograd.output_tile(few, 16, machine(16)) == 4
    assert winograd.output_tile(many, 16, machine(16)) == 2


def test_arm_takes_the_tile_that_saves_products() -> None:
    few = Conv2d(1, 64, 56, 56, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    middle = replace(few, in_channels=256, in_height=14, in_width=14, out_channels=256)
    many = replace(few, in_channels=512, in_height=7, in_width=7, out_channels=512)
    found = [winograd.output_tile(op, 4, resolve("rpi4")) for op in (few, middle, many)]
    assert found == [4, 5, 4]


def test_arm_uses_winograd_at_stride_2_if_the_weights_are_worth_it() -> None:
    """The layers of a ResNet-18 at stride 2: the weights of the last are read for seven rows only."""
    first = Conv2d(1, 64, 56, 56, 128, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1)
    second = replace(first, in_channels=128, in_height=28, in_width=28, out_channels=256)
    third = replace(first, in_channels=256, in_height=14, in_width=14, out_channels=512)
    found = [winograd.output_tile(op, 4, resolve("rpi4")) for op in (first, second, third)]
    assert found == [2, 2, None]
    assert winograd.output_tile(replace(first, strides=(2, 1)), 4, resolve("rpi4")) is None
    assert winograd.output_tile(first, 16, machine(16)) is None


@pytest.mark.parametrize("change", [{"strides": (2, 2)}, {"dilation": (2, 2)}, {"kernel": (5, 5)}])
def test_other_convolutions_stay_direct(change: dict[str, Any], target: DeviceTarget) -> None:
    op = Conv2d(1, 64, 28, 28, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    assert winograd.output_tile(replace(op, **change), target.simd.lanes, target) is None


def test_accumulators_stay_in_registers_on_arm(randn: Randn) -> None:
    target = resolve("rpi4")
    w = relax.const(randn(128, 64, 3, 3))
    lowered = lower_expression(
        lambda v: relax.op.nn.conv2d(v, w, padding=(1, 1, 1, 1)), {"x": randn(1, 64, 14, 14)}, target
    )
    assembly = build_kernels(lowered.kernels, target.tvm_target).inspect_source("asm")
    blocks = re.split(r"\n\.LBB\w+:", assembly)
    by_element = re.compile(r"\tfmla\t\S+, \S+, v\d+\.s\[")  # the transforms multiply by whole vectors
    products = [b for b in blocks if len(by_element.findall(b)) >= 200]
    assert products
    for block in products:
        loop = block[: block.rindex("\tfmla\t")]
        assert not re.search(r"\tst[rp]\t", loop), "an accumulator goes through memory"
