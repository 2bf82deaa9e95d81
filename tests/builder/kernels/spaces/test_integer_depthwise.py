"""Depthwise convolution of bytes, against exact integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from builder.codegen.dot_products import write_dot_products
from builder.codegen.lowering import build_kernels, to_loops
from builder.kernels.decisions import heuristic
from builder.kernels.spaces import depthwise, integer_depthwise
from builder.kernels.spaces.depthwise import Pictures
from builder.kernels.spaces.geometry import Conv2d
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.integer_machines import (
    DEVICES,
    RandomChooser,
    any_bytes,
    device,
    lower_for,
    numbers,
    run_here,
)
from tests.builder.kernels.machines import conv2d

Shape = tuple[int, ...]


def convolve(
    x: np.ndarray, w: np.ndarray, zero: int, target: DeviceTarget, choose: Any = heuristic, **how: Any
) -> set[str]:
    """Convolve as numbers with scales of 1, compare with the sums of integers, and return the spaces."""
    kind, how = str(x.dtype), {**how, "groups": len(w)}

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.nn.conv2d(numbers(v, zero, kind), numbers(relax.const(w), 0, "int8"), **how)

    result = run_here(build, {"x": x}, target, choose)
    wanted = conv2d(x.astype("i8") - zero, w, **how)
    assert np.array_equal(result.outputs[0].astype("i8"), wanted.astype("i8"))
    return result.schedules


def _row_of(kernel: int, stride: int, dilation: int = 1) -> Conv2d:
    """Return a depthwise convolution whose windows have 3 rows and `kernel` columns."""
    strides, steps = (1, stride), (1, dilation)
    return Conv2d(1, 8, 9, 40, 8, (3, kernel), strides, (0, 0, 0, 0), steps, 8)


def assembly(w: np.ndarray, name: str) -> str:
    """Return the code of a convolution of a plane of bytes with `w` for a device."""
    target, kind = device(name), device(name).dot.data
    x = np.zeros((1, len(w), 9, 9), kind)
    kernels = lower_for(
        lambda v: relax.op.nn.conv2d(
            numbers(v, 3, kind), numbers(relax.const(w), 0, "int8"), groups=len(w), padding=(1, 1, 1, 1)
        ),
        {"x": x},
        target,
    ).kernels
    return str(build_kernels(kernels, target.tvm_target).inspect_source("asm"))


# Channels, rows and columns of the input, window, dtype, zero point, geometry.
CASES: dict[str, tuple[Shape, Shape, str, int, dict[str, Any]]] = {
    "same": ((1, 32, 9, 11), (3, 3), "uint8", 255, {"padding": (1, 1, 1, 1)}),
    "stride": ((1, 24, 10, 13), (3, 3), "int8", -128, {"padding": (0, 1, 1, 0), "strides": (2, 2)}),
    "batch": ((2, 19, 7, 6), (5, 5), "uint8", 0, {"padding": (2, 2, 2, 2)}),
    "dilation": ((1, 7, 12, 9), (3, 3), "int8", 127, {"padding": (2, 1, 0, 3), "dilation": (2, 3)}),
    "wide": ((1, 16, 8, 15), (4, 6), "uint8", 131, {"strides": (1, 2)}),
    "tall": ((1, 17, 14, 5), (7, 1), "int8", 3, {"padding": (3, 0, 3, 0), "strides": (3, 1)}),
    "row": ((1, 40, 1, 30), (1, 5), "int8", -1, {"padding": (0, 2, 0, 2)}),
    "even": ((1, 8, 6, 6), (2, 2), "int8", 5, {}),
    "single": ((1, 33, 5, 4), (1, 1), "uint8", 9, {"padding": (1, 0, 0, 2)}),
    "no padding": ((1, 16, 5, 17), (3, 3), "uint8", 128, {"strides": (2, 1)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rpi5", "rpi4", "cascadelake", "alderlake"])
@pytest.mark.parametrize("case", CASES)
def test_sums_are_exact(name: str, case: str) -> None:
    shape, window, kind, zero, how = CASES[case]
    random = np.random.default_rng(3)
    w = np.maximum(any_bytes(random, (shape[1], 1, *window), "int8"), -127)
    kinds = convolve(any_bytes(random, shape, kind), w, zero, device(name), **how)
    four = window[0] >= 3 or (window[1] >= 3 and "dilation" not in how) or name.startswith("rpi")
    assert (integer_depthwise.KIND if four else depthwise.KIND) in kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DEVICES if name not in ("host", "rpi4", "rpi5")])
def test_every_processor_gets_the_same_sums(name: str) -> None:
    random = np.random.default_rng(5)
    x, w = any_bytes(random, (1, 20, 8, 7), "uint8"), any_bytes(random, (20, 1, 3, 3), "int8")
    convolve(x, w, 77, device(name), padding=(1, 1, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rpi5", "rpi4", "cascadelake"])
def test_the_largest_sums_are_exact(name: str) -> None:
    kind = device(name).dot.data
    info = np.iinfo(kind)
    x = np.full((1, 16, 6, 6), info.min, kind)
    x[:, ::2] = info.max
    for weight in (-127, 127):
        w = np.full((16, 1, 5, 5), weight, "int8")
        assert integer_depthwise.KIND in convolve(x, w, int(info.max), device(name), padding=(2, 2, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "word"), [("rpi5", "sdot"), ("rpi4", "smlal"), ("cascadelake", "vpdpbusd")])
def test_the_processor_s_instruction_is_used(name: str, word: str) -> None:
    code = assembly(np.full((16, 1, 3, 3), 5, "int8"), name)
    assert word in code
    assert "fmla" not in code
    assert "vfmadd" not in code


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "fits"), [((-128, -128), False), ((-128, 1), True)])
def test_two_products_of_the_lowest_bytes_are_not_added_in_16_bits(
    weights: tuple[int, int], *, fits: bool
) -> None:
    """Then float32 takes over, and the sums are as exact."""
    w = np.zeros((16, 1, 3, 3), "int8")
    w[5, 0, 1, :2] = weights
    kinds = convolve(np.full((1, 16, 4, 4), -128, "int8"), w, 0, device("rpi4"))
    assert (integer_depthwise.KIND in kinds) == fits
    assert integer_depthwise.taps_at_once(w, device("rpi5")) == 4


@pytest.mark.parametrize(
    ("window", "at_once"),
    [
        ((3, 3), (4, 2, 4, 0)),
        ((1, 9), (2, 2, 4, 0)),
        ((2, 2), (2, 2, 0, 0)),
        ((7, 1), (4, 2, 4, 0)),
        ((7, 7), (4, 0, 4, 0)),
    ],
)
def test_which_taps_are_added_at_once(window: Shape, at_once: Shape) -> None:
    w = np.ones((8, 1, *window), "int8")
    names = ("rpi5", "rpi4", "cascadelake", "x86-64-v3")
    assert tuple(integer_depthwise.taps_at_once(w, device(name)) for name in names) == at_once


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cascadelake", "alderlake", "rpi5"])
@pytest.mark.parametrize("seed", range(8))
def test_sums_of_any_geometry_are_exact(name: str, seed: int) -> None:
    random = np.random.default_rng([11, seed])
    window = tuple(int(k) for k in random.integers(1, 10, 2))
    how: dict[str, Any] = {
        "padding": tuple(int(p) for p in random.integers(0, 4, 4)),
        "strides": tuple(int(s) for s in random.integers(1, 4, 2)),
        "dilation": (int(random.integers(1, 3)), int(random.choice([1, 1, 2]))),
    }
    size = [
        int(1 + (k - 1) * d + random.integers(0, 20)) for k, d in zip(window, how["dilation"], strict=True)
    ]
    channels, kind = int(random.integers(2, 40)), str(random.choice(["int8", "uint8"]))
    info = np.iinfo(kind)
    zero = (int(info.min), int(info.max), int(random.integers(info.min, info.max)))[seed % 3]
    w = np.maximum(any_bytes(random, (channels, 1, *window), "int8"), -127)
    x = any_bytes(random, (int(random.integers(1, 3)), channels, *size), kind)
    convolve(x, w, zero, device(name), RandomChooser(seed) if seed % 2 else heuristic, **how)


@pytest.mark.parametrize(
    ("kernel", "stride", "groups"),
    [
        (3, 1, (1, 2, 2)),
        (3, 2, (1, 1, 2)),
        (4, 1, (1, 1, 1)),
        (5, 1, (2, 4, 4)),
        (5, 2, (2, 2, 4)),
        (7, 3, (2, 1, 3)),
    ],
)
def test_outputs_that_read_the_same_four_columns(kernel: int, stride: int, groups: Shape) -> None:
    quads = integer_depthwise.Quads.of(_row_of(kernel, stride), device("cascadelake"))
    assert quads is not None
    assert (quads.count, quads.outputs, quads.stride) == groups
    for columns in range(1, 12):
        assert quads.reach(columns) >= (columns - 1) * stride + kernel


@pytest.mark.parametrize(
    ("name", "kernel", "dilation"), [("rpi5", 3, 1), ("cascadelake", 2, 1), ("cascadelake", 3, 2)]
)
def test_windows_whose_columns_are_not_read_by_four(name: str, kernel: int, dilation: int) -> None:
    assert integer_depthwise.Quads.of(_row_of(kernel, 1, dilation), device(name)) is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("cascadelake", 2), ("rpi5", 3), ("rpi4", 4)])
def test_every_point_of_the_space_is_valid(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, w = any_bytes(random, (1, 20, 11, 13), "int8"), np.full((20, 1, 3, 3), -7, "int8")
    chooser = RandomChooser(seed)
    convolve(x, w, 9, device(name), chooser, padding=(1, 0, 0, 1), strides=(1, 2))
    assert set(chooser.made) >= {"ow", "oh"}


@pytest.mark.parametrize("name", ["rpi5", "rpi4", "cascadelake"])
def test_incomplete_tiles_have_no_conditions_around_a_sum(name: str) -> None:
    chosen = {"ow": 3 if name.startswith("rpi") else 4, "oh": 2}
    kind = device(name).dot.data
    kernels = lower_for(
        lambda v: relax.op.nn.conv2d(
            numbers(v, 1, kind), numbers(relax.const(np.ones((9, 1, 3, 3), "int8")), 0, "int8"), groups=9
        ),
        {"x": np.zeros((1, 9, 7, 6), kind)},
        device(name),
        lambda name, _, default: chosen.get(name, default),
    ).kernels
    write_dot_products(to_loops(kernels), device(name).dot)  # refuses conditions around a sum


def test_columns_that_are_interleaved_together_fit_the_registers() -> None:
    narrow = integer_depthwise.space(Pictures(16, 16, 256), device("rpi5"), vectors=4).default.ow
    wide = integer_depthwise.space(Pictures(16, 16, 256), device("cascadelake"), vectors=1).default.ow
    assert (narrow, wide) == (4, 8)


def test_a_short_row_is_one_tile_and_a_padded_tile_stays_in_the_l1_cache() -> None:
    xeon = device("cascadelake")
    assert integer_depthwise.space(Pictures(14, 14, 500), xeon, outputs=4).default.ow == 14
    pictures = Pictures(112, 112, row_bytes=1800, blocks=64, again=2)
    long = integer_depthwise.space(pictures, xeon, outputs=2).default
    assert long.ow == 8
    assert long.oh * pictures.row_bytes <= xeon.core.l1_bytes // 2
    by_rows = integer_depthwise.space(pictures, xeon).default
    assert by_rows.oh > long.oh


def test_rounds_of_long_rows_do_not_copy_the_input_many_times() -> None:
    pictures = Pictures(128, 1024, 16 * 1026, blocks=64, again=2)
    space = integer_depthwise.space(pictures, device("cascadelake"), outputs=2)
    assert space.default.oh >= 8
