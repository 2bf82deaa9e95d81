"""The polynomials of exp, tanh, erf and the functions made of them, against SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special
from tvm import relax

from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import close, run

GRID = np.linspace(-30, 30, 4001, dtype="f4").reshape(1, -1)
FORMULAS = {
    "exp": (relax.op.exp, np.exp),
    "sigmoid": (relax.op.sigmoid, special.expit),
    "tanh": (relax.op.tanh, np.tanh),
    "erf": (relax.op.erf, special.erf),
    "silu": (relax.op.nn.silu, lambda x: x * special.expit(x)),
    "gelu": (relax.op.nn.gelu, lambda x: x * 0.5 * (1 + special.erf(x / 2**0.5))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMULAS)
def test_formula_is_accurate_over_the_whole_range(name: str, target: DeviceTarget) -> None:
    operator, reference = FORMULAS[name]
    got = run(operator, {"x": GRID}, target).outputs[0]
    want = reference(GRID.astype("f8"))
    close(got, want, 1e-6)


def test_exp_is_accurate_relative_to_each_value(target: DeviceTarget) -> None:
    got = run(relax.op.exp, {"x": GRID}, target).outputs[0]
    assert np.abs(got / np.exp(GRID.astype("f8")) - 1).max() < 1e-6
