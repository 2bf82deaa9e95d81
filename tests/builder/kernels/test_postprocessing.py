"""The last step for every scheduled function: only kernels that are worth a launch keep their threads."""

from __future__ import annotations

import pytest
from tvm import relax

from builder.kernels.cost_model import time_us
from builder.kernels.postprocessing import WORTH_A_LAUNCH_US
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, machine, run


@pytest.fixture(params=[4, 16])
def target(request: pytest.FixtureRequest) -> DeviceTarget:
    return machine(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 512])
def test_only_kernels_worth_a_launch_are_parallel(size: int, target: DeviceTarget, randn: Randn) -> None:
    x, w = randn(1, 16, size, size), randn(16, 16, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.max_pool2d(relax.op.nn.conv2d(v, relax.const(w)), (2, 2), (2, 2))
        return relax.op.nn.softmax(relax.op.permute_dims(y, [0, 2, 3, 1]))

    kernels = run(build, {"x": x}, target).lowered.kernels.functions
    assert len(kernels) >= 4  # from three design spaces and the fallback
    for func in kernels.values():
        assert ("T.parallel" in func.script()) == (size == 512)
        assert (time_us(func, target) >= WORTH_A_LAUNCH_US) == (size == 512)
