"""Convolutions of other kinds than the two-dimensional one, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.ir import Call

from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, Result, close, conv2d, machine, run

pytestmark = pytest.mark.slow


@pytest.fixture
def target() -> DeviceTarget:
    """One width: the operators are rewritten before anything depends on it."""
    return machine(8)


def transposed(x: np.ndarray, w: np.ndarray, stride: int, padding: int, more: int) -> np.ndarray:
    """Return the transposed convolution in double precision, by its definition."""
    n, _, height, width = x.shape
    _, outputs, kh, kw = w.shape
    full = np.zeros((n, outputs, (height - 1) * stride + kh + more, (width - 1) * stride + kw + more))
    for y in range(height):
        for z in range(width):
            part = np.einsum("ni,iokl->nokl", x[:, :, y, z].astype("f8"), w.astype("f8"))
            full[:, :, y * stride : y * stride + kh, z * stride : z * stride + kw] += part
    end = -padding or None
    return full[:, :, padding:end, padding:end]


@pytest.mark.parametrize(
    ("size", "stride", "padding", "more"),
    [
        (4, 2, 1, 0),
        (3, 2, 1, 1),
        (2, 2, 0, 0),
        (3, 1, 1, 0),
        (2, 1, 2, 0),
        (5, 3, 0, 2),
        (3, 2, 0, 1),
        (1, 2, 0, 1),
    ],
)
def test_transposed_convolution(
    size: int, stride: int, padding: int, more: int, target: DeviceTarget, randn: Randn
) -> None:
    x, w = randn(1, 16, 5, 6), randn(16, 8, size, size)
    build = lambda v: relax.op.nn.conv2d_transpose(  # noqa: E731
        v, relax.const(w), strides=stride, padding=padding, output_padding=more
    )
    result = run(build, {"x": x}, target)
    close(result.outputs[0], transposed(x, w, stride, padding, more))
    assert result.schedules & {"conv2d", "winograd"}


def convolutions(result: Result) -> int:
    """Return the number of convolutions that are computed."""
    calls = [binding.value for block in result.lowered.main.body.blocks for binding in block.bindings]
    names = [str(call.args[0]) for call in calls if isinstance(call, Call) and len(call.args) > 1]
    return sum("conv2d" in name or "winograd" in name for name in names if "weights" not in name)


@pytest.mark.parametrize(
    ("size", "stride", "padding", "more", "count"),
    [
        (4, 2, 1, 0, 4),  # a small image: no position computes what is cut off
        (3, 2, 1, 1, 4),  # windows of one and of two elements
        (5, 2, 2, 1, 4),
        (5, 3, 1, 0, 9),
        (16, 8, 4, 0, 1),  # too many positions
        (4, 3, 1, 1, 9),
        (3, 2, 0, 0, 1),  # positions have different numbers of outputs
        (2, 2, 0, 0, 1),  # nothing is cut off
        (1, 2, 0, 1, 1),  # positions without an element
    ],
)
def test_positions_of_a_transposed_convolution(
    size: int, stride: int, padding: int, more: int, count: int, target: DeviceTarget, randn: Randn
) -> None:
    x, w, bias = randn(2, 8, 5, 6), randn(8, 16, size, size), randn(1, 16, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d_transpose(
            v, relax.const(w), strides=stride, padding=padding, output_padding=more
        )
        return relax.op.nn.relu(relax.op.add(y, relax.const(bias)))

    result = run(build, {"x": x}, target)
    close(result.outputs[0], np.maximum(transposed(x, w, stride, padding, more) + bias, 0))
    assert convolutions(result) == count


def test_few_channels_of_a_transposed_convolution_are_computed_together(
    target: DeviceTarget, randn: Randn
) -> None:
    x, w = randn(1, 8, 5, 6), randn(8, 3, 4, 4)
    build = lambda v: relax.op.nn.conv2d_transpose(v, relax.const(w), strides=2, padding=1)  # noqa: E731
    result = run(build, {"x": x}, target)
    close(result.outputs[0], transposed(x, w, 2, 1, 0))
    assert convolutions(result) == 1


@pytest.mark.parametrize(("size", "stride", "padding", "more"), [(11, 5, 3, 0), (3, 2, 1, 1), (4, 2, 1, 0)])
def test_positions_of_a_transposed_signal(
    size: int, stride: int, padding: int, more: int, target: DeviceTarget, randn: Randn
) -> None:
    x, w = randn(1, 8, 5), randn(8, 16, size)
    build = lambda v: relax.op.nn.conv1d_transpose(  # noqa: E731
        v, relax.const(w), strides=stride, padding=padding, output_padding=more
    )
    result = run(build, {"x": x}, target)
    full = np.pad(transposed_by_definition(x, w, stride, 1, 1), [(0, 0), (0, 0), (0, more)])
    close(result.outputs[0], full[:, :, padding : full.shape[2] - padding])
    assert convolutions(result) == stride


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"), [(1, 1, 1, 1), (2, 0, 2, 1), (1, 2, 1, 4)]
)
def test_convolution_in_one_dimension(
    stride: int, padding: int, dilation: int, groups: int, target: DeviceTarget, randn: Randn
) -> None:
    x, w = randn(2, 16, 20), randn(32, 16 // groups, 3)
    build = lambda v: relax.op.nn.conv1d(  # noqa: E731
        v, relax.const(w), strides=stride, padding=padding, dilation=dilation, groups=groups
    )
    result = run(build, {"x": x}, target)
    pads = (0, padding, 0, padding)
    want = conv2d(x[:, :, None], w[:, :, None], (1, stride), pads, (1, dilation), groups)[:, :, 0]
    close(result.outputs[0], want)
    assert "conv2d" in result.schedules


def test_bias_activation_and_residual_stay_with_a_convolution_in_one_dimension(
    target: DeviceTarget, randn: Randn
) -> None:
    x, w, b, residual = randn(1, 16, 20), randn(16, 16, 3), randn(1, 16, 1), randn(1, 16, 20)

    def build(v: relax.Expr, r: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv1d(v, relax.const(w), padding=1)
        y = relax.op.nn.relu(relax.op.add(y, relax.const(b)))
        return relax.op.nn.conv1d(relax.op.add(y, r), relax.const(w), padding=1)

    result = run(build, {"x": x, "r": residual}, target)

    def conv(v: np.ndarray) -> np.ndarray:
        return conv2d(v[:, :, None], w[:, :, None], padding=(0, 1, 0, 1))[:, :, 0]

    close(result.outputs[0], conv(np.maximum(conv(x) + b, 0) + residual))
    convolutions = [g for g in result.lowered.kernels.functions if "conv2d" in g.name_hint]
    assert any("relu_add" in g.name_hint for g in convolutions)


def transposed_by_definition(
    x: np.ndarray, w: np.ndarray, stride: int, dilation: int, groups: int
) -> np.ndarray:
    """Return the transposed convolution of `[N, I, W]` in double precision, without padding."""
    n, inputs, width = x.shape
    _, outputs, taps = w.shape
    full = np.zeros((n, groups * outputs, (width - 1) * stride + (taps - 1) * dilation + 1))
    per_group = inputs // groups
    for g in range(groups):
        part = x[:, g * per_group : (g + 1) * per_group].astype("f8")
        weights = w[g * per_group : (g + 1) * per_group].astype("f8")
        for z in range(width):
            for k in range(taps):
                at = z * stride + k * dilation
                full[:, g * outputs : (g + 1) * outputs, at] += part[:, :, z] @ weights[:, :, k]
    return full


@pytest.mark.parametrize(
    ("channels", "outputs", "taps", "stride", "dilation", "groups"),
    [(16, 8, 16, 8, 1, 1), (6, 5, 3, 2, 1, 1), (8, 4, 4, 2, 1, 4), (8, 8, 3, 2, 1, 8), (6, 6, 5, 1, 3, 2),
     (4, 6, 3, 3, 2, 2), (5, 15, 4, 2, 1, 5)],
)  # fmt: skip
def test_transposed_convolution_in_one_dimension(
    channels: int, outputs: int, taps: int, stride: int, dilation: int, groups: int, target: DeviceTarget,
    randn: Randn,
) -> None:  # fmt: skip
    x, w = randn(2, channels, 11), randn(channels, outputs // groups, taps)
    one = lambda v: relax.op.nn.conv1d_transpose(  # noqa: E731
        v, relax.const(w), strides=stride, dilation=dilation, groups=groups
    )
    want = transposed_by_definition(x, w, stride, dilation, groups)
    result = run(one, {"x": x}, target)
    close(result.outputs[0], want)
    assert result.schedules & {"conv2d", "winograd", "depthwise"}
    two = lambda v: relax.op.nn.conv2d_transpose(  # noqa: E731
        v, relax.const(w[:, :, None]), strides=(1, stride), dilation=(1, dilation), groups=groups
    )
    close(run(two, {"x": x[:, :, None]}, target).outputs[0], want[:, :, None])


@pytest.mark.parametrize(
    ("kernel", "strides", "padding", "dilation", "groups"),
    [
        ((3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), 1),
        ((2, 3, 1), (2, 1, 2), (0, 1, 0, 1, 2, 0), (2, 1, 1), 1),
        ((1, 3, 3), (1, 2, 2), (0, 1, 1, 0, 1, 1), (1, 1, 1), 2),
        ((3, 1, 1), (1, 1, 1), (2, 0, 0, 0, 0, 0), (1, 1, 1), 4),
    ],
)
def test_convolution_in_three_dimensions(
    kernel: tuple[int, ...], strides: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...],
    groups: int, target: DeviceTarget, randn: Randn,
) -> None:  # fmt: skip
    x, w = randn(2, 8, 5, 9, 8), randn(12, 8 // groups, *kernel)
    build = lambda v: relax.op.nn.conv3d(  # noqa: E731
        v, relax.const(w), strides=strides, padding=padding, dilation=dilation, groups=groups
    )
    result = run(build, {"x": x}, target)
    padded = np.pad(x, [(0, 0), (0, 0), (padding[0], padding[3]), (0, 0), (0, 0)])
    frames = (padded.shape[2] - (kernel[0] - 1) * dilation[0] - 1) // strides[0] + 1
    want = np.stack(
        [
            sum(
                conv2d(
                    padded[:, :, f * strides[0] + k * dilation[0]], w[:, :, k], strides[1:],
                    (padding[1], padding[2], padding[4], padding[5]), dilation[1:], groups,
                )
                for k in range(kernel[0])
            )
            for f in range(frames)
        ],
        axis=2,
    )  # fmt: skip
    close(result.outputs[0], want)
    assert result.schedules & {"conv2d", "winograd"}


@pytest.mark.parametrize(
    ("kernel", "strides", "padding", "dilation", "groups", "more"),
    [
        ((2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1), 1, (0, 0, 0)),
        ((3, 4, 3), (1, 2, 3), (1, 1, 0), (1, 1, 1), 1, (0, 0, 2)),
        ((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1, (0, 0, 0)),
        ((1, 3, 2), (2, 1, 2), (0, 2, 0), (1, 2, 1), 2, (1, 0, 1)),
        ((3, 1, 2), (2, 2, 1), (1, 0, 1), (2, 1, 3), 4, (1, 0, 0)),
        ((2, 3, 1), (1, 2, 1), (2, 0, 0), (1, 1, 1), 8, (0, 1, 0)),
    ],
)
def test_transposed_convolution_in_three_dimensions(
    kernel: tuple[int, ...], strides: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...],
    groups: int, more: tuple[int, ...], target: DeviceTarget, randn: Randn,
) -> None:  # fmt: skip
    x, w = randn(2, 8, 4, 5, 6), randn(8, 8 // groups, *kernel)
    build = lambda v: relax.op.nn.conv3d_transpose(  # noqa: E731
        v, relax.const(w), strides=strides, padding=padding, output_padding=more, dilation=dilation,
        groups=groups,
    )  # fmt: skip
    result = run(build, {"x": x}, target)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    ends = [(e - 1) * s + r for e, s, r in zip(x.shape[2:], strides, reach, strict=True)]
    full = np.zeros((2, 8, *(e + m for e, m in zip(ends, more, strict=True))))
    for g in range(groups):
        part = slice(g * (8 // groups), (g + 1) * (8 // groups))
        for taps in np.ndindex(*kernel):
            product = np.einsum("nidhw,io->nodhw", x[:, part].astype("f8"), w[(part, slice(None), *taps)])
            at = tuple(
                slice(t * d, t * d + (e - 1) * s + 1, s)
                for t, d, e, s in zip(taps, dilation, x.shape[2:], strides, strict=True)
            )
            full[(slice(None), part, *at)] += product
    inside = tuple(slice(p, n - p) for p, n in zip(padding, full.shape[2:], strict=True))
    close(result.outputs[0], full[(slice(None), slice(None), *inside)])
    assert result.schedules & {"conv2d", "winograd", "depthwise"}


def test_several_filters_for_each_channel(target: DeviceTarget, randn: Randn) -> None:
    x, w = randn(1, 10, 9, 9), randn(30, 1, 3, 3)
    build = lambda v: relax.op.nn.relu(  # noqa: E731
        relax.op.nn.conv2d(v, relax.const(w), strides=2, padding=1, groups=10)
    )
    result = run(build, {"x": x}, target)
    close(result.outputs[0], np.maximum(conv2d(x, w, (2, 2), (1, 1, 1, 1), groups=10), 0))
    assert "depthwise" in result.schedules
