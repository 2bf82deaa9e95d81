"""Resizing packed pictures, against TVM's expression on single planes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, in_turn, machine, run

pytestmark = pytest.mark.slow

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
