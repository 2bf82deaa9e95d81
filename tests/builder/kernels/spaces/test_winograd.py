"""Winograd's convolution, against the direct one."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from tvm import relax, tirx

from builder.codegen.lowering import build_kernels, to_loops
from builder.kernels.spaces import winograd
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.winograd_transforms import Matrix, Transforms, combine_sharing, paired, places
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


@pytest.mark.parametrize(("m", "taps"), [(4, 4), (3, 4), (3, 5), (2, 5), (4, 2)])
def test_transforms_of_other_windows_are_exact(m: int, taps: int) -> None:
    t = Transforms.of(m, taps=taps)
    g = [Fraction(3 * k - 4) for k in range(taps)]
    d = [Fraction(k * k - 5 * k) for k in range(m + taps - 1)]

    def times(rows: Matrix, v: list[Fraction]) -> list[Fraction]:
        return [sum((a * b for a, b in zip(row, v, strict=True)), Fraction(0)) for row in rows]

    product = [a * b for a, b in zip(times(t.weights, g), times(t.input, d), strict=True)]
    assert times(t.output, product) == [sum(g[k] * d[i + k] for k in range(taps)) for i in range(m)]
    assert places(m, 1, taps) == tuple(range(m + taps - 1))


def test_outputs_share_the_sums_of_opposite_points() -> None:
    assert paired(Transforms.of(4).output) == ((1, 2), (3, 4))
    assert paired(Transforms.of(4).input) == ()
    values = [tirx.Var(f"m{k}", "float32") for k in range(6)]

    def written(rows: Matrix) -> list[str]:
        return [str(combine_sharing(row, values.__getitem__, pairs=paired(rows))) for row in rows]

    outputs = written(Transforms.of(4).output)
    assert [("m1 + m2" in row, "m3 - m4" in row) for row in outputs] == [(True, False), (False, True)] * 2
    inputs = written(Transforms.of(4).input)
    assert not any("-1.0" in row for row in inputs), "a sum is negated"
    for part in ("m4 - T.float32(4.0) * m2", "m3 - T.float32(4.0) * m1"):
        assert sum(part in row for row in inputs) == 2, inputs


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
    monkeypatch.setattr(winograd, "output_tile", lambda *_: (m, m))
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
    ("tile", "shape", "padding", "band", "lanes"),
    [
        ((4, 3), (1, 16, 13, 17), (1, 1, 1, 1), None, 16),
        ((3, 5), (2, 20, 9, 10), (0, 1, 1, 0), None, 8),
        ((2, 4), (1, 16, 11, 15), (1, 1, 1, 1), 2, 4),
        ((5, 3), (2, 16, 10, 8), (1, 1, 1, 1), 1, 8),
        ((3, 3), (1, 16, 9, 9), (1, 1, 1, 1), None, 16),
    ],
)
def test_tiles_with_other_rows_than_columns_agree_with_the_convolution(
    tile: tuple[int, int],
    shape: tuple[int, ...],
    padding: tuple[int, ...],
    band: int | None,
    lanes: int,
    randn: Randn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Extents that tiles do not divide, padding on some sides, several pictures, and bands of rows."""
    monkeypatch.setattr(winograd, "output_tile", lambda *_: tile)
    monkeypatch.setattr(winograd, "rows_of_band", lambda *_: band)
    x, w, b = randn(*shape), randn(40, shape[1], 3, 3), randn(1, 40, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), padding=padding)
        return relax.op.nn.relu(relax.op.add(y, relax.const(b)))

    want = np.maximum(conv2d(x, w, padding=padding) + b, 0)
    for target in (machine(lanes), element_machine()) if lanes == 4 else (machine(lanes),):
        result = run(build, {"x": x}, target)
        close(result.outputs[0], want, 1e-4)
        assert {winograd.KIND, winograd.WEIGHTS_KIND} <= result.schedules


@pytest.mark.parametrize(
    ("band", "batch", "size", "lanes"),
    [(1, 1, 12, 16), (2, 1, 18, 8), (3, 1, 17, 4), (2, 2, 15, 16), (1, 3, 9, 8)],
)
def test_bands_of_rows_agree_with_the_convolution(
    band: int, batch: int, size: int, lanes: int, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that the band divides and that it does not, and several pictures."""
    monkeypatch.setattr(winograd, "output_tile", lambda *_: (4, 4))
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
    monkeypatch.setattr(winograd, "output_tile", lambda *_: (m, m))
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


# Pictures of even and odd extents, several of them, one to three channels, padding on one side.
@pytest.mark.parametrize(
    ("shape", "window", "padding", "band"),
    [
        ((1, 3, 32, 32), 7, (3, 3, 3, 3), None),
        ((2, 3, 31, 27), 7, (3, 3, 3, 3), None),
        ((1, 3, 64, 40), 7, (3, 3, 3, 3), 1),
        ((2, 3, 33, 30), 7, (3, 3, 3, 3), 1),
        ((1, 1, 30, 45), 6, (2, 2, 2, 2), None),
        ((1, 2, 23, 24), 5, (2, 2, 2, 2), None),
        ((1, 3, 24, 24), 5, (1, 1, 2, 2), 2),
        ((1, 3, 21, 24), 7, (2, 3, 3, 2), None),
        ((3, 3, 9, 8), 7, (0, 0, 0, 0), None),
    ],
)
def test_phases_of_a_picture_agree_with_the_convolution(
    shape: tuple[int, ...],
    window: int,
    padding: tuple[int, ...],
    band: int | None,
    randn: Randn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(winograd, "output_tile", lambda *_: (4, 4))
    monkeypatch.setattr(winograd, "rows_of_band", lambda *_: band)
    x, w, b = randn(*shape), randn(24, shape[1], window, window), randn(1, 24, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), strides=(2, 2), padding=padding)
        return relax.op.nn.relu(relax.op.add(y, relax.const(b)))

    result = run(build, {"x": x}, element_machine())
    close(result.outputs[0], np.maximum(conv2d(x, w, (2, 2), padding) + b, 0), 1e-4)
    assert {winograd.KIND, winograd.WEIGHTS_KIND} <= result.schedules


@pytest.mark.parametrize(
    ("window", "tile", "shape", "padding", "band"),
    [
        ((5, 5), (3, 3), (1, 16, 14, 14), (2, 2, 2, 2), None),
        ((5, 5), (3, 3), (2, 16, 9, 13), (2, 1, 2, 2), None),
        ((4, 4), (4, 4), (1, 16, 17, 16), (1, 1, 2, 2), None),
        ((4, 4), (4, 4), (1, 16, 30, 18), (0, 0, 0, 0), 1),
        ((5, 5), (2, 3), (1, 16, 15, 11), (2, 2, 2, 2), 2),
        ((4, 4), (4, 3), (2, 16, 13, 14), (1, 2, 2, 1), None),
        ((5, 3), (2, 4), (1, 16, 13, 18), (2, 1, 2, 1), 1),
        ((3, 4), (4, 2), (2, 16, 12, 9), (1, 1, 1, 2), None),
    ],
)
def test_larger_windows_agree_with_the_convolution(
    window: tuple[int, int],
    tile: tuple[int, int],
    shape: tuple[int, ...],
    padding: tuple[int, ...],
    band: int | None,
    randn: Randn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(winograd, "output_tile", lambda *_: tile)
    monkeypatch.setattr(winograd, "rows_of_band", lambda *_: band)
    x, w = randn(*shape), randn(40, shape[1], *window)
    result = run(
        lambda v: relax.op.nn.conv2d(v, relax.const(w), padding=padding), {"x": x}, element_machine()
    )
    close(result.outputs[0], conv2d(x, w, padding=padding), 1e-4)
    assert {winograd.KIND, winograd.WEIGHTS_KIND} <= result.schedules


@pytest.mark.parametrize(("outputs", "band"), [(40, 1), (8, 2), (52, 3)])
def test_a_band_is_complete_panel_by_panel_on_arm(
    outputs: int, band: int, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the panels of a register tile do not divide the blocks of channels."""
    monkeypatch.setattr(winograd, "output_tile", lambda *_: (4, 4))
    monkeypatch.setattr(winograd, "rows_of_band", lambda *_: band)
    x, w = randn(1, 16, 28, 27), randn(outputs, 16, 3, 3)
    result = run(
        lambda v: relax.op.nn.conv2d(v, relax.const(w), padding=(1, 1, 1, 1)), {"x": x}, element_machine()
    )
    close(result.outputs[0], conv2d(x, w, padding=(1, 1, 1, 1)), 5e-5)
    loops = to_loops(result.lowered.kernels).functions.values()
    [kernel] = [f.script() for f in loops if f.attrs["edge.schedule"] == winograd.KIND]
    sums = {int(size) for size in re.findall(r"product = T\.alloc_buffer\(\((\d+),\)", kernel)}
    tiles, blocks = band * 7, -(-outputs // 4)
    oc = winograd.space(tiles, blocks, (4, 4), element_machine()).default.oc
    assert sums == {36 * tiles * min(oc, blocks) * 4}


def test_bands_keep_what_is_between_the_stages_in_the_cache() -> None:
    large = Conv2d(1, 128, 56, 56, 32, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    target = machine(16)
    target = replace(target, core=replace(target.core, l2_bytes=2 << 20))
    assert winograd.rows_of_band(large, (4, 4), target) == 1
    # The smallest that fills the registers, and no fewer bands than keep some threads busy.
    assert winograd.rows_of_band(replace(large, in_width=28), (4, 4), target) == 2
    assert winograd.rows_of_band(replace(large, batch=2, in_width=28), (4, 4), target) == 2
    # It all stays in the cache, or the weights do not, or not even a row of tiles.
    assert winograd.rows_of_band(replace(large, in_height=14), (4, 4), target) is None
    assert winograd.rows_of_band(replace(large, out_channels=256), (4, 4), target) is None
    assert winograd.rows_of_band(replace(large, in_width=560), (4, 4), target) is None


def test_cores_that_share_a_cache_share_the_weights_of_bands() -> None:
    """The first block of a ResNet-18 on a Cortex-A72: weights of 576 KiB in a cache of 1 MiB."""
    block = Conv2d(1, 64, 56, 56, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    shared = resolve("rpi4")
    assert winograd.rows_of_band(block, (4, 4), shared) == 1
    own = replace(shared, core=replace(shared.core, l2_bytes=1 << 20, l2_cores=1))
    assert winograd.rows_of_band(block, (4, 4), own) is None
    assert winograd.rows_of_band(block, (4, 4), resolve("rpi3")) is None  # 512 KiB


@pytest.mark.parametrize("m", [2, 4])
def test_operands_held_in_registers_agree_with_the_convolution(
    m: int, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "output_tile", lambda *_: (m, m))
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
    assert winograd.output_tile(few, 16, machine(16)) == (4, 4)
    assert winograd.output_tile(many, 16, machine(16)) == (2, 2)


def test_extents_that_equal_tiles_exceed_take_another_tile() -> None:
    """Tiles of 4x4 compute 1.33 to 1.78 times the pixels of the picture."""
    plain = Conv2d(1, 64, 9, 9, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    wide = replace(plain, in_channels=53, in_height=37, in_width=13, out_channels=45)
    assert winograd.output_tile(plain, 16, machine(16)) == (3, 3)
    assert winograd.output_tile(wide, 16, machine(16)) == (4, 5)
    assert winograd.output_tile(replace(wide, in_height=13, in_width=37), 16, machine(16)) == (5, 4)
    assert winograd.output_tile(wide, 4, resolve("rpi4")) == (5, 5), "ARM keeps to equal tiles"


@pytest.mark.parametrize("target", [machine(8), machine(16), resolve("x86-64-v3")])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_layers_of_a_resnet_keep_equal_tiles(batch: int, target: DeviceTarget) -> None:
    for channels, extent in ((64, 56), (128, 28), (256, 14), (512, 7)):
        op = Conv2d(batch, channels, extent, extent, channels, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
        assert winograd.output_tile(op, target.simd.lanes, target) in ((4, 4), (2, 2)), op


def test_arm_takes_the_tile_that_saves_products() -> None:
    few = Conv2d(1, 64, 56, 56, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1)
    middle = replace(few, in_channels=256, in_height=14, in_width=14, out_channels=256)
    many = replace(few, in_channels=512, in_height=7, in_width=7, out_channels=512)
    found = [winograd.output_tile(op, 4, resolve("rpi4")) for op in (few, middle, many)]
    assert found == [(4, 4), (5, 5), (4, 4)]


def test_arm_computes_first_layers_on_phases() -> None:
    """Those of a ResNet, a YOLO and a MobileNet: with few products, the transforms take too long."""
    resnet = Conv2d(1, 3, 224, 224, 64, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), 1)
    yolo = replace(resnet, kernel=(6, 6), padding=(2, 2, 2, 2))
    mobilenet = replace(resnet, out_channels=32, kernel=(3, 3), padding=(1, 1, 1, 1))
    few = replace(resnet, out_channels=32)
    ops = (resnet, yolo, mobilenet, few, replace(resnet, strides=(1, 1)), replace(resnet, kernel=(7, 5)))
    assert [winograd.output_tile(op, 1, resolve("rpi4")) for op in ops] == [
        (4, 4),
        (5, 5),
        *[None] * 4,
    ]
    # What is between the stages must fit a core's cache, whatever the number of pictures and their height.
    assert winograd.output_tile(replace(resnet, batch=3, in_height=900), 1, resolve("rpi4")) == (4, 4)
    assert winograd.output_tile(replace(resnet, in_width=900), 1, resolve("rpi4")) is None
    assert [winograd.output_tile(resnet, 1, resolve(name)) for name in ("rpi3", "rpi5")] == [None, (4, 4)]
    for target in (machine(4), machine(8), machine(16), resolve("rpi-armv7")):
        assert winograd.output_tile(resnet, 1, target) is None


def test_arm_uses_winograd_for_larger_windows() -> None:
    five = Conv2d(1, 64, 28, 28, 64, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 1)
    ops = (five, replace(five, kernel=(4, 4)), replace(five, kernel=(6, 6)), replace(five, groups=2))
    assert [winograd.output_tile(op, 4, resolve("rpi4")) for op in ops] == [(3, 3), (4, 4), None, None]
    small = replace(five, in_channels=32, in_height=14, in_width=14, kernel=(4, 4), padding=(1, 1, 1, 1))
    assert winograd.output_tile(small, 4, resolve("rpi4")) is None  # its weights take too long


def test_arm_uses_winograd_at_stride_2_if_the_weights_are_worth_it() -> None:
    """The layers of a ResNet-18 at stride 2: the weights of the last are read for seven rows only."""
    first = Conv2d(1, 64, 56, 56, 128, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1)
    second = replace(first, in_channels=128, in_height=28, in_width=28, out_channels=256)
    third = replace(first, in_channels=256, in_height=14, in_width=14, out_channels=512)
    found = [winograd.output_tile(op, 4, resolve("rpi4")) for op in (first, second, third)]
    assert found == [(2, 2), (2, 2), None]
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
