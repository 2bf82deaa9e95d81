"""Resizing packed pictures, against TVM's expression on single planes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
from tvm import relax

from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, Result, close, conv2d, in_turn, machine, run

pytestmark = pytest.mark.slow

End: TypeAlias = Callable[[relax.Expr], relax.Expr]

MODES: dict[str, dict[str, Any]] = {
    "nearest": {
        "method": "nearest_neighbor",
        "coordinate_transformation_mode": "asymmetric",
        "rounding_method": "floor",
    },
    "linear": {"method": "linear", "coordinate_transformation_mode": "half_pixel"},
    "linear with aligned corners": {"method": "linear", "coordinate_transformation_mode": "align_corners"},
    "cubic": {"method": "cubic", "coordinate_transformation_mode": "half_pixel"},
}


SIZES = dict(zip(MODES, [(10, 18), (7, 31), (9, 9), (10, 17)], strict=True))


@pytest.mark.parametrize(("mode", "lanes"), in_turn(MODES))
def test_channels_are_resized_as_single_planes_are(mode: str, lanes: int, randn: Randn) -> None:
    x, size, target = randn(2, 21, 5, 9), SIZES[mode], machine(lanes)

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.nn.relu(relax.op.image.resize2d(v, size, layout="NCHW", **MODES[mode]))

    result = run(build, {"x": x}, target)
    assert any("resize2d" in func.name_hint for func in result.lowered.kernels.functions)
    assert any("pack" in func.name_hint for func in result.lowered.kernels.functions)
    planes = run(build, {"x": x.reshape(42, 1, 5, 9)}, target)
    close(result.outputs[0].reshape(42, 1, *size), planes.outputs[0], 1e-6)


def test_what_follows_may_read_the_picture_twice(randn: Randn) -> None:
    x, target, size = randn(2, 8, 5, 9), machine(8), SIZES["linear"]

    def resized(v: relax.Expr) -> relax.Expr:
        return relax.op.image.resize2d(v, size, layout="NCHW", **MODES["linear"])

    def build(v: relax.Expr) -> relax.Expr:
        y = resized(v)
        away = relax.op.log(relax.op.add(relax.const(1.0), relax.op.exp(relax.op.negative(relax.op.abs(y)))))
        return relax.op.add(relax.op.nn.relu(y), away)  # Softplus

    found, picture = run(build, {"x": x}, target).outputs[0], run(resized, {"x": x}, target).outputs[0]
    close(found, np.logaddexp(0, picture), 1e-5)


def test_picture_between_convolutions_stays_packed(target: DeviceTarget, randn: Randn) -> None:
    x, w = randn(1, 16, 6, 5), randn(16, 16, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.image.resize2d(
            relax.op.nn.conv2d(v, relax.const(w)), (12, 10), layout="NCHW", **MODES["nearest"]
        )
        return relax.op.nn.conv2d(y, relax.const(w))

    result = run(build, {"x": x}, target)
    y = np.einsum("oi,nihw->nohw", w[:, :, 0, 0].astype("f8"), x)
    close(result.outputs[0], np.einsum("oi,nihw->nohw", w[:, :, 0, 0], y.repeat(2, 2).repeat(2, 3)))
    assert len(result.lowered.kernels.functions) == 5, "pack, convolution, resize, convolution, unpack"


LINEAR: list[tuple[str, tuple[int, int]]] = [
    ("half_pixel", (19, 37)),
    ("half_pixel", (4, 3)),  # smaller
    ("pytorch_half_pixel", (1, 20)),
    ("align_corners", (12, 2)),
    ("asymmetric", (9, 34)),
]


def unpacked(x: np.ndarray, w: np.ndarray, mode: str, size: tuple[int, int], end: End, lanes: int) -> Result:
    """Resize the result of a 1x1 convolution, and return what `end` makes of it in the plain layout."""

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w))
        how = {"method": "linear", "coordinate_transformation_mode": mode}
        return end(relax.op.image.resize2d(y, size, layout="NCHW", **how))

    return run(build, {"x": x}, machine(lanes))


@pytest.mark.parametrize(("mode", "size"), LINEAR)
def test_result_is_unpacked_by_the_same_kernel(
    mode: str, size: tuple[int, int], target: DeviceTarget, randn: Randn
) -> None:
    x, w = randn(2, 7, 5, 9), randn(21, 7, 1, 1)
    result = unpacked(x, w, mode, size, lambda y: y, target.simd.lanes)
    y = np.einsum("oi,nihw->nohw", w[:, :, 0, 0].astype("f8"), x).astype("f4")

    def planes(v: relax.Expr) -> relax.Expr:
        how = {"method": "linear", "coordinate_transformation_mode": mode}
        return relax.op.image.resize2d(v, size, layout="NCHW", **how)

    one = run(planes, {"x": y.reshape(42, 1, 5, 9)}, target)
    close(result.outputs[0].reshape(42, 1, *size), one.outputs[0], 1e-5)
    assert "resize" in result.schedules
    assert "unpack" not in result.schedules


def test_channels_that_come_last_are_not_a_tile(target: DeviceTarget, randn: Randn) -> None:
    x, w = randn(1, 7, 5, 9), randn(21, 7, 1, 1)
    first = unpacked(x, w, "half_pixel", (40, 72), lambda y: y, target.simd.lanes)

    def last(y: relax.Expr) -> relax.Expr:
        return relax.op.exp(relax.op.permute_dims(y, [0, 2, 3, 1]))

    result = unpacked(x, w, "half_pixel", (40, 72), last, target.simd.lanes)
    close(result.outputs[0], np.exp(first.outputs[0]).transpose(0, 2, 3, 1), 1e-5)


def test_groups_that_do_not_fill_blocks(target: DeviceTarget, randn: Randn) -> None:
    x, w = randn(1, 12, 5, 9), randn(36, 4, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), groups=3)
        return relax.op.image.resize2d(y, (10, 18), layout="NCHW", **MODES["linear"])

    result = run(build, {"x": x}, target)
    y = conv2d(x, w, groups=3).astype("f4").reshape(36, 1, 5, 9)

    def planes(v: relax.Expr) -> relax.Expr:
        return relax.op.image.resize2d(v, (10, 18), layout="NCHW", **MODES["linear"])

    close(result.outputs[0].reshape(36, 1, 10, 18), run(planes, {"x": y}, target).outputs[0], 1e-5)
