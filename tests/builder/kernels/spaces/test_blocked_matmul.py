"""Products with weights in blocks, against the dequantised weights in double precision."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from builder.kernels.spaces import blocked_matmul, matmul, tiled
from tests.builder.kernels.blocked import blocked_weights
from tests.builder.kernels.machines import close, element_machine, in_turn, machine, run

# Left shape, columns, block, type of the codes, bits, whether blocks have zero points of their own.
Case = tuple[tuple[int, ...], int, int, str, int, bool]
CASES: list[Case] = [
    ((1, 64), 40, 32, "uint8", 4, True),
    ((3, 70), 17, 32, "int8", 4, False),
    ((2, 2, 33), 5, 33, "int8", 8, False),
    ((1, 1, 96), 100, 16, "uint8", 8, True),
    ((7, 45), 64, 5, "int8", 4, True),
    ((1, 3), 1, 32, "uint8", 4, False),
    ((8, 31), 24, 2, "int8", 8, True),
]


def multiply(case: Case, lanes: int) -> set[str]:
    shape, columns, block, dtype, bits, zeros = case
    weights = blocked_weights((shape[-1], columns), block, dtype, bits, zeros=zeros)
    x = np.random.default_rng(1).standard_normal(shape).astype("f4")
    b = np.linspace(-1, 1, columns).astype("f4")

    def build(v: relax.Expr) -> relax.Expr:
        product = relax.op.matmul(v, weights.emit(relax.BlockBuilder.current()))
        return relax.op.nn.relu(relax.op.add(product, relax.const(b)))

    target = element_machine() if lanes == 4 else machine(lanes)
    result = run(build, {"x": x}, target)
    close(result.outputs[0], np.maximum(x.astype("f8") @ weights.dense() + b, 0))
    return result.schedules


@pytest.mark.parametrize(("case", "lanes"), in_turn(CASES))
def test_products_of_few_rows_decode_in_registers(case: Case, lanes: int) -> None:
    assert blocked_matmul.KIND in multiply(case, lanes)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    depth=st.integers(1, 70),
    columns=st.integers(1, 70),
    block=st.integers(1, 40),
    kind=st.sampled_from([("int8", 4), ("uint8", 4), ("int8", 8), ("uint8", 8)]),
    zeros=st.booleans(),
    lanes=st.sampled_from([4, 8, 16]),
)
def test_any_shape_block_and_zero_point(
    lead: list[int], depth: int, columns: int, block: int, kind: tuple[str, int], zeros: bool, lanes: int
) -> None:
    multiply(((*lead, depth), columns, block, *kind, zeros), lanes)


@pytest.mark.parametrize(("rows", "lanes"), [(20, 8), (64, 4)])
def test_products_of_many_rows_decode_at_load(rows: int, lanes: int) -> None:
    """Strassen's sums of weights included, which read what another node has decoded."""
    case: Case = ((rows, 256), 256 if rows == 64 else 40, 32, "int8", 4, True)
    kinds = multiply(case, lanes)
    assert kinds & {matmul.KIND, tiled.KIND}
    assert blocked_matmul.KIND not in kinds


def test_codes_of_four_bits_take_half_a_byte() -> None:
    weights = blocked_weights((64, 40), 32, "int8", 4)
    packed = blocked_matmul.pack_codes(weights, 40)
    assert packed.nbytes == 64 * 40 // 2
