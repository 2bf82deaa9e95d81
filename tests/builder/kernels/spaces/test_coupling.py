"""Pairwise coupling, compared with the formulas in double precision."""

from __future__ import annotations

import numpy as np
from tvm import relax

from builder.calls.coupling import CouplingCall
from tests.builder.importer.classic.reference import couple
from tests.builder.kernels.machines import machine, run


def test_probabilities_are_those_of_the_formulas() -> None:
    random = np.random.default_rng(3)
    upper = np.triu(random.uniform(1e-4, 1 - 1e-4, (20, 5, 5)), 1)
    pairs = (upper + np.tril(1 - upper.transpose(0, 2, 1), -1)).astype("f4")

    def build(*params: relax.Var) -> relax.Expr:
        return CouplingCall(params[0]).emit(relax.BlockBuilder.current())

    result = run(build, {"pairs": pairs}, machine(8))
    assert result.schedules == {"coupling"}
    expected = np.stack([couple(one) for one in pairs])
    np.testing.assert_allclose(result.outputs[0], expected, atol=2e-3)
    np.testing.assert_allclose(result.outputs[0].sum(1), 1, atol=1e-5)
