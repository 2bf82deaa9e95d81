"""Rows of tables in blocks, against the dequantised table."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.builder.kernels.blocked import blocked_weights
from tests.builder.kernels.machines import machine, run


@pytest.mark.parametrize(
    ("columns", "block", "dtype", "bits", "axis", "zeros"),
    [
        (64, 32, "int8", 4, 1, False),
        (33, 8, "uint8", 4, 1, True),
        (7, 7, "int8", 8, 1, False),
        (5, 4, "uint8", 8, 0, True),
    ],
)
def test_rows_are_decoded_exactly(
    columns: int, block: int, dtype: str, bits: int, axis: int, zeros: bool
) -> None:
    """Also for indices out of range, which take the nearest row."""
    table = blocked_weights((10, columns), block, dtype, bits, axis=axis, zeros=zeros)
    indices = np.array([[3, 0, 9], [-5, 12, 2**40]], "int64")

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.take(table.emit(relax.BlockBuilder.current()), v, axis=0, mode="clip")

    result = run(build, {"indices": indices}, machine(8))
    assert np.array_equal(result.outputs[0], table.dense()[np.clip(indices, 0, 9)])
