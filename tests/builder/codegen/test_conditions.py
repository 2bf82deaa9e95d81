"""Conditions that are used as numbers, in quotients and remainders by numbers that differ."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.builder.kernels.machines import machine, run


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("columns", [2, 16])
def test_remainder_of_a_number_less_a_condition(columns: int, dtype: str) -> None:
    x = np.arange(-20, -20 + 6 * columns, dtype=dtype).reshape(6, columns)
    by = np.arange(3, 3 + columns, dtype=dtype)

    def build(t: relax.Expr, divisors: relax.Expr) -> relax.Expr:
        negative = relax.op.astype(relax.op.less(t, relax.const(0, dtype)), dtype)
        return relax.op.floor_mod(relax.op.subtract(t, negative), divisors)

    (got,) = run(build, {"t": x, "divisors": by}, machine(8)).outputs
    np.testing.assert_array_equal(got, (x - (x < 0)) % by)
