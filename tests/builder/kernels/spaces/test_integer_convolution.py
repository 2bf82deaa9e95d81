"""Convolution of small integers, against exact integers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from builder.codegen.dot_products import write_dot_products
from builder.codegen.lowering import build_kernels, to_loops
from builder.kernels.decisions import heuristic
from builder.kernels.spaces import integer_convolution
from builder.target.device_target import DeviceTarget, resolve
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
) -> None:
    """Convolve as numbers with scales of 1, and compare with the sums of integers."""
    kind = str(x.dtype)

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.nn.conv2d(numbers(v, zero, kind), numbers(relax.const(w), 0, "int8"), **how)

    result = run_here(build, {"x": x}, target, choose)
    assert integer_convolution.KIND in result.schedules
    wanted = conv2d(x.astype("i8") - zero, w, **how)
    assert np.array_equal(result.outputs[0].astype("i8"), wanted.astype("i8"))


# Input, weights, dtype, zero point, geometry. Zero points are at both ends of the type and inside.
# A window of 3x3 with stride 1 is dilated where Winograd's algorithm would be faster.
CASES: list[tuple[Shape, Shape, str, int, dict[str, Any]]] = [
    ((1, 8, 5, 5), (1, 8, 1, 1), "uint8", 255, {}),
    ((1, 32, 7, 7), (40, 32, 1, 1), "int8", -128, {"strides": (2, 1)}),
    ((2, 19, 9, 11), (21, 19, 3, 3), "uint8", 0, {"padding": (1, 0, 2, 1), "dilation": (1, 2)}),
    ((1, 9, 13, 8), (17, 9, 3, 2), "int8", 127, {"padding": (0, 1, 1, 2), "strides": (2, 2)}),
    ((3, 12, 8, 7), (33, 12, 2, 3), "uint8", 131, {"padding": (2, 1, 0, 3), "dilation": (2, 1)}),
    ((1, 40, 6, 10), (7, 40, 1, 5), "int8", 3, {"padding": (0, 2, 0, 2), "dilation": (1, 2)}),
    ((1, 48, 5, 7), (72, 48, 3, 3), "uint8", 9, {"padding": (1, 1, 0, 1), "strides": (1, 2)}),
    ((1, 16, 1, 1), (16, 16, 1, 1), "uint8", 128, {}),
    ((1, 13, 10, 4), (3, 13, 5, 3), "int8", -1, {"padding": (4, 2, 4, 2), "strides": (3, 2)}),
    ((1, 10, 4, 17), (20, 10, 4, 1), "uint8", 77, {"padding": (3, 0, 3, 0), "strides": (1, 3)}),
    ((2, 24, 5, 6), (24, 24, 3, 3), "uint8", 255, {"padding": (1, 1, 1, 1)}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), list(zip(DEVICES, CASES, strict=True)))
def test_sums_are_exact(name: str, case: tuple[Shape, Shape, str, int, dict[str, Any]]) -> None:
    shape, weights, kind, zero, how = case
    random = np.random.default_rng(3)
    convolve(any_bytes(random, shape, kind), any_bytes(random, weights, "int8"), zero, device(name), **how)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rpi4", "rpi5", "cascadelake"])
@pytest.mark.parametrize("strides", [(2, 2), (1, 3)])
def test_windows_of_one_pixel_at_a_stride_are_exact(name: str, strides: tuple[int, int]) -> None:
    random, target = np.random.default_rng(9), device(name)
    x = any_bytes(random, (2, 24, 9, 14), target.dot.data)
    convolve(x, any_bytes(random, (200, 24, 1, 1), "int8"), 5, target, strides=strides)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("rpi5", "int8"), ("cascadelake", "uint8")])
def test_an_input_of_few_channels_is_one_group(name: str, kind: str) -> None:
    random, how = np.random.default_rng(8), {"strides": (2, 2), "padding": (3, 2, 3, 3)}
    x, w = any_bytes(random, (1, 3, 13, 11), kind), any_bytes(random, (24, 3, 7, 7), "int8")
    convolve(x, w, 3, device(name), **how)
    assert integer_convolution.in_block_of(3, device(name)) == 4


def test_small_pixels_are_elements_of_a_vector() -> None:
    """Filling a vector with one of them would take as long as four products."""
    target, w = device("rpi5"), np.ones((16, 3, 3, 3), "i1")

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.nn.conv2d(numbers(v, 3, "int8"), numbers(relax.const(w), 0, "int8"), strides=(2, 2))

    lowered = lower_for(build, {"x": np.zeros((1, 3, 33, 33), "i1")}, target)
    assembly = build_kernels(lowered.kernels, target.tvm_target).inspect_source("asm")
    [kernel] = [part for part in assembly.split(".globl") if "sdot" in part]
    lines = [line for line in kernel.splitlines() if "\tsdot\t" in line]
    assert sum(".4b[" in line for line in lines) >= 0.9 * len(lines)


def columns_held(window: Shape, channels: int = 64, width: int = 20, **how: Any) -> set[int]:
    """The columns of 16 channels that a kernel for SDOT holds in vector registers at once."""
    w = np.ones((16, channels, *window), "i1")

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.nn.conv2d(numbers(v, 3, "int8"), numbers(relax.const(w), 0, "int8"), **how)

    lowered = lower_for(build, {"x": np.zeros((1, channels, 20, width), "i1")}, device("rpi5"))
    [kernel] = [f for var, f in lowered.kernels.functions.items() if "integer_conv2d" in var.name_hint]
    copy = (
        r"unroll\(T.int64\((\d+)\)\):\s+for \w+ in T.vectorized\(T.int64\(16\)\):\s+with T.sblock\(.pad_local"
    )
    return {int(columns) for columns in re.findall(copy, str(kernel))}


def test_columns_that_overlap_are_loaded_once_for_a_row_of_the_window() -> None:
    assert columns_held((3, 3), padding=(1, 1, 1, 1)) == {7}
    assert columns_held((5, 5), padding=(2, 2, 2, 2)) == {5}  # nine would not fit the registers
    assert columns_held((3, 3), padding=(2, 2, 2, 2), dilation=(2, 2)) == {5}


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    channels=st.sampled_from([5, 16, 17, 32, 48, 64, 80]),
    outputs=st.sampled_from([3, 16, 20, 48]),
    height=st.integers(3, 6),
    width=st.integers(3, 13),
    window=st.sampled_from([(1, 1), (3, 3), (1, 2), (2, 4)]),
    stride=st.integers(1, 2),
    zero=st.sampled_from([-128, -1, 0, 127]),
    seed=st.none() | st.integers(0, 99),
)
def test_every_shape_is_exact_with_products_by_element(
    channels: int,
    outputs: int,
    height: int,
    width: int,
    window: tuple[int, int],
    stride: int,
    zero: int,
    seed: int | None,
) -> None:
    """Whether columns are shared and rounds unrolled, and for any decisions: None takes the heuristic's."""
    random = np.random.default_rng(5)
    x = any_bytes(random, (1, channels, height, width), "int8")
    w = any_bytes(random, (outputs, channels, *window), "int8")
    choose = heuristic if seed is None else RandomChooser(seed)
    how = {"strides": (stride, stride), "padding": (window[0] // 2, window[1] // 2, 0, 1)}
    convolve(x, w, zero, device("rpi5"), choose, **how)


@pytest.mark.parametrize(("name", "tile"), [("rpi4", (2, 2)), ("rpi5", (1, 5))])
def test_a_tile_goes_by_what_it_loads_and_repeats(name: str, tile: tuple[int, int]) -> None:
    tiles = integer_convolution.space(4, 20, 16, device(name)).default
    assert (tiles.oc, tiles.ow) == tile


@pytest.mark.parametrize(
    ("target", "blocks", "tile"), [("rpi4", 4, (2, 2)), ("rpi4", 1, (1, 3)), ("rpi3", 4, (1, 3))]
)
def test_a_tile_has_registers_for_a_longer_group(target: str, blocks: int, tile: tuple[int, int]) -> None:
    """A tile of 1 x 4 has as many sums as one of 2 x 2, but repeats the data of twice as many columns."""
    short, long = (
        integer_convolution.space(blocks, 24, 16, resolve(target), group=group).default for group in (4, 8)
    )
    assert (long.oc, long.ow) == tile
    assert blocks > 1 or short.ow == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rpi3", "rpi4"])
def test_longer_groups_do_not_spill_sums(name: str) -> None:
    """In a loop of 128 products, LLVM may keep a few operands on the stack, but no sum for each product."""
    w = np.full((64, 64, 1, 1), 60, "int8")
    kernels = lower_for(
        lambda v: relax.op.nn.conv2d(numbers(v, 0, "int8"), numbers(relax.const(w), 0, "int8")),
        {"x": np.zeros((1, 64, 8, 12), "int8")},
        resolve(name),
    ).kernels
    assembly = build_kernels(kernels, resolve(name).tvm_target).inspect_source("asm")
    loop = max(re.split(r"\n\.LBB\w+:", assembly), key=lambda part: part.count("sadalp"))
    loop = loop[: loop.rindex("sadalp")]
    assert loop.count("smull") + loop.count("smlal") == 4 * (loop.count("sadalp") + 1)
    assert len(re.findall(r"\tst[rp]\tq.*\[sp", loop)) < 16


@pytest.mark.parametrize("name", ["rpi5", "cascadelake"])
def test_padding_of_few_channels_has_no_test_for_each_pixel(name: str) -> None:
    target, w = device(name), np.ones((16, 3, 3, 3), "i1")

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.nn.conv2d(
            numbers(v, 3, "int8"), numbers(relax.const(w), 0, "int8"), padding=(1, 1, 1, 1)
        )

    lowered = lower_for(build, {"x": np.zeros((1, 3, 32, 32), "i1")}, target)
    [kernel] = [func for var, func in lowered.kernels.functions.items() if "integer_conv2d" in var.name_hint]
    assert "if_then_else" not in str(kernel)


def test_a_point_with_several_incomplete_tiles() -> None:
    """Rows and blocks of outputs that no tile divides, and an operand held in registers."""
    chosen = {"oc": 3, "ow": 2, "oh": 2, "iq": 1}
    w = relax.const(np.ones((36, 9, 4, 1), "int8"))
    kernels = lower_for(
        lambda v: relax.op.nn.conv2d(numbers(v, 127, "int8"), numbers(w, 0, "int8")),
        {"x": np.zeros((1, 9, 6, 3), "int8")},
        device("rpi4"),
        lambda name, _, default: chosen.get(name, default),
    ).kernels
    write_dot_products(to_loops(kernels), device("rpi4").dot)  # refuses conditions around a sum


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("cascadelake", 2), ("rpi-armv7", 4), ("rpi5", 7)])
def test_every_point_of_the_space_is_valid(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, w = any_bytes(random, (1, 20, 7, 9), "uint8"), any_bytes(random, (44, 20, 2, 2), "int8")
    chooser = RandomChooser(seed)
    convolve(x, w, 9, device(name), chooser, padding=(1, 0, 0, 1))
    assert set(chooser.made) >= {"oc", "ow", "oh", "iq"}


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("channels", [8, 9, 15, 16, 17, 24, 33, 40])
def test_a_block_has_whole_groups_and_little_padding(name: str, channels: int) -> None:
    target = device(name)
    block = integer_convolution.block_of(channels, target)
    assert block % target.dot.group == 0
    assert block >= target.dot.lanes
    assert -(-channels // block) * block - channels < target.dot.block


def test_weights_are_packed_for_groups_and_tiles() -> None:
    w = np.arange(24 * 8, dtype="i4").reshape(24, 8, 1, 1)
    packed = integer_convolution.pack_weights(w, in_block=8, out_block=8, together=2, group=4)
    assert packed.shape == (2, 1, 1, 1, 2, 2, 8, 4)
    assert packed[0, 0, 0, 0, 1, 1, 3].tolist() == w[8 + 3, 4:, 0, 0].tolist()
    assert not packed[1, ..., 1, :, :].any(), "the last tile is filled with zeros"


@pytest.mark.slow
@pytest.mark.parametrize(("lowest", "group"), [(-128, 1), (-127, 4), (-64, 4), (-63, 8)])
def test_products_that_do_not_fit_16_bits_are_added_in_32(lowest: int, group: int) -> None:
    """Two products of -128 and -128 are 2^15, as are four of -64: such sums are added earlier."""
    target = device("rpi4")
    x, w = np.full((1, 32, 5, 5), -128, "int8"), np.full((16, 32, 1, 1), lowest, "int8")
    w[1:, ::3] = 64  # four of these with -128 are -2^15
    convolve(x, w, 0, target)
    assert sums_of_words(w, target) == group


def sums_of_words(w: np.ndarray, target: DeviceTarget) -> int:
    """How many products are multiplied by the instructions for bytes until their sums are added to int32."""
    x = np.zeros((1, w.shape[1], 5, 5), "int8")
    kernels = lower_for(
        lambda v: relax.op.nn.conv2d(numbers(v, 0, "int8"), numbers(relax.const(w), 0, "int8")),
        {"x": x},
        target,
    ).kernels
    assembly = build_kernels(kernels, target.tvm_target).inspect_source("asm")
    words, products = assembly.count("sadalp"), len(re.findall(r"\tsm(?:ull|lal)2?\t.*\.8h", assembly))
    return 2 * products // words if words else 1


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    channels=st.sampled_from([8, 13, 16, 40]),
    outputs=st.sampled_from([3, 16, 36]),
    width=st.integers(3, 9),
    window=st.sampled_from([(1, 1), (2, 3)]),
    stride=st.integers(1, 2),
    datum=st.sampled_from([-128, 127, None]),
    too_large=st.booleans(),
    seed=st.none() | st.integers(0, 99),
)
def test_sums_at_the_limit_of_16_bits_are_exact(
    channels: int,
    outputs: int,
    width: int,
    window: tuple[int, int],
    stride: int,
    datum: int | None,
    seed: int | None,
    *,
    too_large: bool,
) -> None:
    """Weights whose sums are the largest that fit, and one that is larger; data that make them so."""
    random = np.random.default_rng(6)
    w = np.where(random.integers(0, 2, (outputs, channels, *window)) > 0, 64, -63).astype("int8")
    w[0, :8] = 64  # with -128, their sums are -2^15
    w[-1, 0, 0, 0] = -128 if too_large else 64
    x = any_bytes(random, (1, channels, 5, width), "int8")
    x = x if datum is None else np.full_like(x, datum)
    # Data with the sign of a channel's weights make its sums the largest.
    x[..., 1::2] = np.where(w[-1, :, 0, 0] > 0, 127, -128)[None, :, None, None]
    choose = heuristic if seed is None else RandomChooser(seed)
    convolve(x, w, 0, resolve("rpi3" if stride == 1 else "rpi4"), choose, strides=(stride, stride))
