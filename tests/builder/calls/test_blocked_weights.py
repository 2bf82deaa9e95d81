"""Weights in blocks, as a value and as a call in a module."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.calls.blocked_weights import BlockedWeights
from tests.builder.kernels.blocked import blocked_weights


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 4), ("uint8", 4), ("int8", 8), ("uint8", 8)])
@pytest.mark.parametrize("axis", [0, 1])
def test_weights_are_those_of_dequantize_linear(dtype: str, bits: int, axis: int) -> None:
    weights = blocked_weights((7, 11), 4, dtype, bits, axis=axis)
    assert weights.bits == bits
    for row, column in np.ndindex(7, 11):
        at = (row // 4, column) if axis == 0 else (row, column // 4)
        wanted = np.float32(int(weights.codes[row, column]) - int(weights.zeros[at])) * weights.scales[at]
        assert weights.dense()[row, column] == wanted
    assert np.array_equal(weights.transposed().dense(), weights.dense().T)


def test_a_call_stands_for_the_same_weights() -> None:
    weights = blocked_weights((6, 5), 4, "uint8", 4)
    bb = relax.BlockBuilder()
    with bb.function("main", []):
        with bb.dataflow():
            var = weights.emit(bb)
            call = bb.lookup_binding(var)
            out = bb.emit_output(var)
        bb.emit_func_output(out)
    found = BlockedWeights.of(call)
    assert found is not None
    assert np.array_equal(found.dense(), weights.dense())
    assert (found.axis, found.block) == (0, 4)
    assert BlockedWeights.of(relax.op.add(var, var)) is None


def test_shapes_and_types_that_do_not_fit_are_refused() -> None:
    codes, ones = np.zeros((8, 3), "int8"), np.ones((2, 3), "float32")
    with pytest.raises(ValueError, match=r"expected scales and zero points of shape \[2, 3\]"):
        BlockedWeights(codes, np.ones((3, 3), "float32"), np.zeros((2, 3), "int8"), 0, 4)
    with pytest.raises(ValueError, match="int8 or uint8"):
        BlockedWeights(codes, ones, np.zeros((2, 3), "uint8"), 0, 4)
    with pytest.raises(ValueError, match="a matrix in blocks"):
        BlockedWeights(codes[0], ones, np.zeros((2, 3), "int8"), 0, 4)
