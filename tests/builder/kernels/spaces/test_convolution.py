"""Direct convolution on packed channels, against its definition."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

from builder.compiling.lower import fuse
from builder.kernels.decisions import Space
from builder.kernels.design_space import DesignSpace, decisions_of
from builder.kernels.schedule import without_pragmas
from builder.kernels.spaces import convolution, winograd
from builder.kernels.spaces.convolution import ConvolutionTiles, Sums
from builder.kernels.spaces.geometry import Rows
from builder.kernels.spaces.register_tile import tilings
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.kernels.machines import (
    Randn,
    Result,
    close,
    conv2d,
    element_machine,
    in_turn,
    lower_expression,
    machine,
    module_of,
    run,
)

pytestmark = pytest.mark.slow


def convolve(x: np.ndarray, w: np.ndarray, target: DeviceTarget, **how: Any) -> Result:
    build = lambda v: relax.op.nn.relu(  # noqa: E731
        relax.op.nn.conv2d(
            v,
            relax.const(w),
            strides=how.get("strides", (1, 1)),
            padding=how.get("padding", (0, 0, 0, 0)),
            dilation=how.get("dilation", (1, 1)),
            groups=how.get("groups", 1),
        )
    )
    result = run(build, {"x": x}, target)
    close(result.outputs[0], np.maximum(conv2d(x, w, **how), 0))
    return result


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1x1": ((1, 32, 7, 7), (48, 32, 1, 1), {}),
    "3x3 at stride 2": ((1, 16, 15, 15), (32, 16, 3, 3), {"strides": (2, 2), "padding": (1, 1, 1, 1)}),
    "first layer of three channels": (
        (1, 3, 20, 20),
        (16, 3, 7, 7),
        {"strides": (2, 2), "padding": (3, 3, 3, 3)},
    ),
    "one channel, padded above and to the right": (
        (2, 1, 9, 21),
        (16, 1, 3, 3),
        {"strides": (2, 1), "padding": (1, 0, 0, 2)},
    ),
    "three channels, padded below": ((1, 3, 8, 16), (8, 3, 3, 1), {"padding": (0, 0, 2, 0)}),
    "one pixel, padded": ((1, 1, 1, 1), (16, 1, 1, 2), {"strides": (1, 2), "padding": (1, 3, 1, 0)}),
    "dilated": ((1, 16, 12, 12), (16, 16, 3, 3), {"dilation": (2, 2), "padding": (2, 2, 2, 2)}),
    "padded on one side": ((1, 16, 9, 9), (16, 16, 2, 2), {"padding": (0, 0, 1, 1)}),
    "odd channels": ((1, 5, 6, 6), (7, 5, 1, 1), {}),
    "grouped": ((1, 32, 8, 8), (32, 8, 3, 3), {"groups": 4, "padding": (1, 1, 1, 1)}),
    "grouped by narrow groups": ((1, 12, 6, 6), (12, 3, 1, 1), {"groups": 4}),
    "groups of 24": ((1, 48, 9, 9), (48, 24, 3, 3), {"groups": 2, "padding": (1, 1, 1, 1)}),
    "groups of 10": ((1, 30, 7, 7), (30, 10, 1, 1), {"groups": 3}),
    "more outputs than inputs in a group": ((1, 14, 6, 6), (35, 2, 3, 3), {"groups": 7}),
    "odd planes": ((1, 32, 17, 19), (48, 32, 1, 1), {}),
    "many odd planes": ((3, 16, 13, 37), (16, 16, 3, 3), {"strides": (2, 2), "padding": (1, 1, 1, 1)}),
    "a prime width": ((1, 16, 13, 13), (16, 16, 1, 1), {}),
    "a batch of three": ((3, 16, 5, 5), (16, 16, 1, 1), {}),
    "1x1 at stride 2": ((2, 16, 9, 11), (200, 16, 1, 1), {"strides": (2, 2)}),
    "1x1 at stride 3 along rows": ((1, 24, 5, 14), (136, 24, 1, 1), {"strides": (1, 3)}),
    "rectangular": ((1, 16, 4, 18), (24, 16, 1, 5), {"padding": (0, 2, 0, 2)}),
}


IN_DESIGN_SPACE = {"1x1", "3x3 at stride 2", "first layer of three channels", "dilated", "grouped"}


@pytest.mark.parametrize(("name", "lanes"), in_turn(CASES))
def test_convolution_agrees_with_its_definition(name: str, lanes: int, randn: Randn) -> None:
    shape, weight, how = CASES[name]
    schedules = convolve(randn(*shape), randn(*weight), machine(lanes), **how).schedules
    assert convolution.KIND in schedules or name not in IN_DESIGN_SPACE


@pytest.mark.parametrize(
    ("target", "outputs", "strides", "padding", "expected"),
    [
        ("rpi4", 256, (2, 2), 0, True),
        ("rpi3", 256, (1, 3), 0, True),
        ("rpi4", 16, (2, 2), 0, False),
        ("rpi4", 256, (2, 1), 0, False),
        ("rpi4", 256, (2, 2), 1, False),
        ("x86-64-v4", 256, (2, 2), 0, True),
        ("x86-64-v4", 160, (2, 2), 0, False),
    ],
)
def test_which_windows_of_one_pixel_are_read_once(
    target: str, outputs: int, strides: tuple[int, int], padding: int, expected: bool, randn: Randn
) -> None:
    weight, around = relax.const(randn(outputs, 32, 1, 1)), (padding,) * 4
    lowered = lower_expression(
        lambda v: relax.op.nn.conv2d(v, weight, strides=strides, padding=around),
        {"x": randn(1, 32, 13, 15)},
        resolve(target) if target.startswith("rpi") else machine(16),
    )
    assert any("pixels" in str(function) for function in lowered.kernels.functions.values()) == expected


@pytest.mark.parametrize("name", CASES)
def test_operands_held_in_registers_agree_with_the_definition(name: str, randn: Randn) -> None:
    shape, weight, how = CASES[name]
    convolve(randn(*shape), randn(*weight), element_machine(), **how)


@pytest.mark.parametrize("width", [5, 32, 57])
def test_an_image_is_padded_in_vectors(width: int) -> None:
    w, data = np.ones((16, 3, 3, 3), "f4"), {"x": np.ones((1, 3, 9, width), "f4")}
    lowered = lower_expression(
        lambda x: relax.op.nn.conv2d(x, relax.const(w), padding=(1, 1, 1, 1)), data, element_machine()
    )
    (kernel,) = [f.script() for f in lowered.kernels.functions.values() if "pad" in f.script()]
    copy = kernel[: kernel.index('T.sblock("pad")')]
    assert "T.vectorized(T.int64(16))" in copy[copy.rindex("T.parallel") if "T.parallel" in copy else 0 :]


def test_weights_of_a_register_tile_lie_side_by_side() -> None:
    w = np.arange(16 * 8, dtype="f4").reshape(16, 8, 1, 1)
    packed = convolution.pack_weights(w, 4, 4, together=2)
    assert packed.shape == (2, 2, 1, 1, 4, 2, 4)
    assert (packed[1, 0, 0, 0, 3].ravel() == w[8:, 3].ravel()).all()


def test_bias_residual_and_activation_are_one_kernel(target: DeviceTarget, randn: Randn) -> None:
    x, w, b = randn(1, 32, 8, 8), randn(32, 32, 1, 1), randn(1, 32, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w))
        z = relax.op.nn.conv2d(relax.op.nn.relu(y), relax.const(w))
        return relax.op.nn.relu(relax.op.add(relax.op.add(z, relax.const(b)), y))

    result = run(build, {"x": x}, target)
    y = conv2d(x, w)
    close(result.outputs[0], np.maximum(conv2d(np.maximum(y, 0), w) + b + y, 0))
    names = [n.name_hint for n in result.lowered.kernels.functions]
    assert len(names) <= 5, names  # pack, two convolutions, an activation with two readers, unpack


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_shape_agrees_with_its_definition(data: st.DataObject) -> None:
    draw = data.draw
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    how = {
        "strides": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        "dilation": draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        "padding": draw(st.tuples(*[st.integers(0, 2)] * 4)),
    }
    size = draw(st.tuples(st.integers(8, 20), st.integers(8, 20)))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    i, o = draw(st.integers(1, 20)) * groups, draw(st.integers(1, 40)) * groups
    state = np.random.RandomState(draw(st.integers(0, 99)))
    x, w = state.randn(1, i, *size).astype("f4"), state.randn(o, i // groups, *kernel).astype("f4")
    convolve(x, w, machine(draw(st.sampled_from([4, 8, 16]))), groups=groups, **how)


SAME: dict[str, Any] = {"padding": (1, 1, 1, 1)}


# Groups, their inputs and outputs, and lanes.
GAPS = [(3, 13, 13, 4), (5, 5, 29, 8), (2, 30, 31, 16)]
READERS = [
    "constant",
    "sum of values with gaps",
    "sum with a value without gaps",
    "sum with a plain value",
    "1x1",
    "3x3",
    "grouped",
    "depthwise",
    "pooling",
    "concatenation",
]


@pytest.mark.parametrize(
    ("reader", "groups", "inputs", "outputs", "lanes"),
    [("output", *gaps) for gaps in GAPS] + [(reader, *GAPS[k % 3]) for k, reader in enumerate(READERS)],
)
def test_gaps_between_groups_are_never_read(
    reader: str, groups: int, inputs: int, outputs: int, lanes: int, randn: Randn
) -> None:
    x, first = randn(1, groups * inputs, 4, 5), randn(groups * outputs, inputs, 3, 3) / 4
    channels = groups * outputs
    plane = randn(1, channels, 4, 5)
    bias, point, wide = randn(1, channels, 1, 1), randn(19, channels, 1, 1), randn(21, channels, 3, 3)
    again, each = randn(channels, outputs, 3, 3), randn(channels, 1, 3, 3)
    into = randn(channels, groups * inputs, 1, 1)

    def read(y: relax.Expr, v: relax.Expr) -> relax.Expr:
        match reader:
            case "constant":
                return relax.op.multiply(y, relax.const(bias))
            case "sum of values with gaps":
                return relax.op.add(relax.op.nn.silu(y), y)
            case "sum with a value without gaps":
                return relax.op.add(y, relax.op.nn.conv2d(v, relax.const(into)))
            case "sum with a plain value":
                return relax.op.add(y, relax.const(plane))
            case "1x1":
                return relax.op.nn.conv2d(y, relax.const(point))
            case "3x3":
                return relax.op.nn.conv2d(y, relax.const(wide), **SAME)
            case "grouped":
                return relax.op.nn.conv2d(y, relax.const(again), groups=groups, **SAME)
            case "depthwise":
                return relax.op.nn.conv2d(y, relax.const(each), groups=channels, **SAME)
            case "pooling":
                return relax.op.nn.max_pool2d(y, (2, 2), (2, 2))
            case "concatenation":
                return relax.op.concat([y, v], axis=1)
            case _:
                return y

    # The sigmoid fills gaps with a half.
    result = run(
        lambda v: read(relax.op.sigmoid(relax.op.nn.conv2d(v, relax.const(first), groups=groups, **SAME)), v),
        {"x": x},
        machine(lanes),
    )
    y = 1 / (1 + np.exp(-conv2d(x, first, groups=groups, **SAME)))
    wanted: dict[str, Callable[[], np.ndarray]] = {
        "output": lambda: y,
        "constant": lambda: y * bias,
        "sum of values with gaps": lambda: y / (1 + np.exp(-y)) + y,
        "sum with a value without gaps": lambda: y + conv2d(x, into),
        "sum with a plain value": lambda: y + plane,
        "1x1": lambda: conv2d(y, point),
        "3x3": lambda: conv2d(y, wide, **SAME),
        "grouped": lambda: conv2d(y, again, groups=groups, **SAME),
        "depthwise": lambda: conv2d(y, each, groups=channels, **SAME),
        "pooling": lambda: y[:, :, :, :4].reshape(1, channels, 2, 2, 2, 2).max((3, 5)),
        "concatenation": lambda: np.concatenate([y, x], 1),
    }
    close(result.outputs[0], wanted[reader]())


def test_heuristic_stays_within_the_registers(target: DeviceTarget) -> None:
    for blocks in (1, 2, 4, 6, 32):
        for width in (1, 7, 13, 14, 28, 56, 112):
            tiles = convolution.space(Sums(blocks, width, 16), target).default
            assert tiles.oc * tiles.ow + min(tiles.oc, tiles.ow) < target.simd.registers
            assert tiles.oc in tilings(blocks, 8)
            assert tiles.ow in tilings(width, 32)


def rounds(shape: tuple[int, ...], weight: tuple[int, ...], target: DeviceTarget, **how: Any) -> list[int]:
    """Return the extents of the loops that threads share in the kernel of a convolution."""
    w = relax.const(np.ones(weight, "f4"))
    build = lambda v: relax.op.nn.conv2d(v, w, **how)  # noqa: E731
    lowered = lower_expression(build, {"x": np.zeros(shape, "f4")}, target)
    texts = [f.script() for name, f in lowered.kernels.functions.items() if "conv2d" in name.name_hint]
    return [int(n) for text in texts for n in re.findall(r"T\.parallel\(T\.int64\((\d+)\)", text)]


def test_tiles_have_pixels_of_several_rows() -> None:
    def flat(blocks: int, pixels: Rows, step: int = 1) -> Space[ConvolutionTiles]:
        sums = Sums(blocks, pixels.count, 16, rows=pixels, step=step)
        return convolution.flat_space(sums, machine(16))

    # 49 pixels are four tiles of up to 13, and 32 panels of two blocks are enough rounds.
    assert rounds((1, 1024, 7, 7), (1024, 1024, 1, 1), machine(16)) == [32]
    tiles = flat(64, Rows(49, 4096)).default
    assert (tiles.oc, tiles.ow, tiles.oh, tiles.together) == (2, 13, 4, 4)
    # Three panels are too few: threads share the tiles.
    tiles = flat(6, Rows(196, 4096)).default
    assert (tiles.oc, tiles.ow) == (2, 14)
    assert (tiles.oh, tiles.together) == (14, 1)
    # A window's tiles have whole rows.
    tiles = flat(32, Rows(49, 4096), step=7).default
    assert (tiles.oc, tiles.ow) == (2, 14)


# With 32 registers, and whether the rows of an image are one row.
FLAT: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], bool]] = {
    "1x1, a batch": ((2, 40, 5, 11), (72, 40, 1, 1), {}, True),
    "1x1, one block": ((1, 16, 9, 5), (64, 16, 1, 1), {}, True),
    "1x1 in groups": ((1, 64, 6, 9), (96, 32, 1, 1), {"groups": 2}, True),
    "1x1 at stride 2, read once": ((2, 16, 9, 11), (200, 16, 1, 1), {"strides": (2, 2)}, True),
    "1x1 at stride 2, too few outputs": ((1, 32, 13, 13), (64, 32, 1, 1), {"strides": (2, 2)}, False),
    "1x1, padded": ((1, 16, 5, 5), (32, 16, 1, 1), {"padding": (1, 1, 1, 1)}, False),
    "1x1, one channel": ((1, 1, 9, 9), (32, 1, 1, 1), {}, False),
    "3x3 at stride 2": ((2, 32, 15, 15), (48, 32, 3, 3), {"strides": (2, 2)}, True),
    "3x3 at stride 2, padded": ((2, 32, 13, 13), (48, 32, 3, 3), {"strides": (2, 2), **SAME}, False),
}


@pytest.mark.parametrize("name", FLAT)
def test_rows_of_an_image_as_one_row_agree_with_the_definition(name: str, randn: Randn) -> None:
    shape, weight, how, flat = FLAT[name]
    result = convolve(randn(*shape), randn(*weight), machine(16), **how)
    assert convolution.KIND in result.schedules
    assert any("edge.flat" in str(kernel) for kernel in result.lowered.kernels.functions.values()) == flat


def test_points_of_one_row_are_written_and_read(randn: Randn) -> None:
    weight = relax.const(randn(64, 32, 1, 1))
    module = module_of(lambda v: relax.op.nn.relu(relax.op.nn.conv2d(v, weight)), {"x": randn(2, 32, 7, 7)})
    functions = fuse(module, machine(16)).functions.values()
    (kernel,) = [f for f in functions if isinstance(f, tirx.PrimFunc) and "edge.flat" in str(f)]
    space = DesignSpace.of(without_pragmas(kernel), machine(16))
    assert space is not None
    for decisions in (space.default, tuple(0 for _ in space.values), tuple(len(v) - 1 for v in space.values)):
        point = space.point(decisions)
        assert point is not None
        assert point.trace.as_json()
        assert decisions_of(point.trace) == decisions


def test_rows_stay_rows_without_32_registers_for_sums() -> None:
    for target in (element_machine(), machine(8)):
        assert rounds((1, 512, 7, 7), (512, 512, 1, 1), target)[-1] % 7 == 0


@pytest.mark.parametrize(("channels", "lanes"), [(6, 4), (20, 8), (6, 8), (24, 16), (20, 16)])
def test_padding_of_the_last_block_is_never_read(
    channels: int, lanes: int, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the heuristic chooses, and without Winograd's algorithm."""
    x, first, last = randn(1, 8, 9, 9), randn(channels, 8, 3, 3), randn(19, channels, 3, 3)
    bias = randn(1, channels, 1, 1)
    how: dict[str, Any] = {"padding": (1, 1, 1, 1)}

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.add(relax.op.nn.conv2d(v, relax.const(first), **how), relax.const(bias))
        return relax.op.nn.conv2d(relax.op.add(y, y), relax.const(last), **how)

    y = 2 * (conv2d(x, first, **how) + bias)
    want = conv2d(y.astype("f4"), last, **how)
    close(run(build, {"x": x}, machine(lanes)).outputs[0], want)
    monkeypatch.setattr(winograd, "output_tile", lambda *_: None)
    result = run(build, {"x": x}, machine(lanes))
    close(result.outputs[0], want)
    assert convolution.KIND in result.schedules
    assert winograd.KIND not in result.schedules


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("weight", "groups", "lanes"),
    [((8, 4, 1, 1), 2, 8), ((8, 2, 3, 3), 4, 4), ((2, 3, 1, 1), 2, 16), ((21, 5, 1, 1), 3, 8)],
)
def test_nan_and_infinity_stay_in_their_group(
    weight: tuple[int, ...], groups: int, lanes: int, number: float, randn: Randn
) -> None:
    x, w, pad = randn(1, groups * weight[1], 5, 6), randn(*weight), weight[2] // 2
    x[0, weight[1] - 1, 2, 3] = number
    build = lambda v: relax.op.nn.conv2d(v, relax.const(w), padding=pad, groups=groups)  # noqa: E731
    (got,) = run(build, {"x": x}, machine(lanes)).outputs
    np.testing.assert_allclose(got, conv2d(x, w, padding=(pad,) * 4, groups=groups), 1e-4, 1e-5)


@pytest.mark.parametrize("number", [np.inf, -np.inf])
@pytest.mark.parametrize(
    ("middle", "groups", "last", "lanes"),
    [(6, 1, (8, 6, 1, 1), 4), (18, 1, (16, 18, 3, 3), 4), (14, 2, (6, 7, 1, 1), 8)],
)
def test_padding_that_an_infinity_makes_nan_is_not_multiplied(
    middle: int, groups: int, last: tuple[int, ...], lanes: int, number: float, randn: Randn
) -> None:
    """Also of Winograd's algorithm: what it reads is finite."""
    x, w, v = abs(randn(1, 8, 12, 12)), abs(randn(middle, 8 // groups, 1, 1)), randn(*last)
    x[0, :: 8 // groups, 1, 2] = number

    def build(data: relax.Expr) -> relax.Expr:
        y = relax.op.clip(relax.op.nn.conv2d(data, relax.const(w), groups=groups), -1, 1)
        scaled = relax.op.multiply(y, relax.const(np.full((1, middle, 1, 1), 0.5, "f4")))
        return relax.op.nn.conv2d(scaled, relax.const(v), padding=last[2] // 2, groups=groups)

    y = np.clip(conv2d(x, w, groups=groups), -1, 1) / 2
    close(
        run(build, {"x": x}, machine(lanes)).outputs[0],
        conv2d(y, v, padding=(last[2] // 2,) * 4, groups=groups),
    )
