"""Fixtures for kernels: targets with 4, 8 and 16 lanes, and random numbers with a fixed seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import machine


@pytest.fixture(params=[4, 8, 16])
def target(request: pytest.FixtureRequest) -> DeviceTarget:
    return machine(request.param)


@pytest.fixture
def randn() -> Callable[..., np.ndarray]:
    state = np.random.RandomState(7)
    return lambda *shape: state.randn(*shape).astype("f4")
