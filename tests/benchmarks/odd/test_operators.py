"""Random extents can be repeated, neighbours are smooth, and every kind can be lowered."""

from __future__ import annotations

import pytest

from benchmarks.odd.operators import KINDS, MOST_PADDING, Operator, drawn
from builder.compiling.lower import lower
from builder.target.device_target import resolve


def test_a_seed_gives_the_same_operators_again() -> None:
    assert drawn(list(KINDS), 30, 7) == drawn(list(KINDS), 30, 7)
    assert drawn(list(KINDS), 30, 7) != drawn(list(KINDS), 30, 8)


def test_kinds_come_in_turn() -> None:
    assert [operator.kind for operator in drawn(["matmul", "softmax"], 5, 0)] == [
        "matmul", "softmax", "matmul", "softmax", "matmul",
    ]  # fmt: skip


def test_the_neighbour_is_rounded_up_to_friendly_extents() -> None:
    odd = Operator("conv1x1", {"in": 61, "out": 75, "h": 13, "w": 17})
    assert odd.smooth().extents == {"in": 64, "out": 80, "h": 16, "w": 20}
    assert odd.smooth().smooth() == odd.smooth()
    assert (odd.useful, odd.smooth().useful) == (2 * 61 * 75 * 13 * 17, 2 * 64 * 80 * 16 * 20)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_extents_are_odd_and_padding_of_vectors_is_bounded(kind: str) -> None:
    for operator in drawn([kind], 50, 1):
        smooth = operator.smooth()
        low, high = KINDS[kind].work
        assert smooth != operator
        assert low <= operator.useful <= high
        for name, extent in operator.extents.items():
            assert KINDS[kind].ranges[name].low <= extent <= KINDS[kind].ranges[name].high
            if KINDS[kind].ranges[name].in_vectors:
                assert smooth.extents[name] / extent <= 1 + MOST_PADDING


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_of_an_operator_are_counted_and_changes_of_layout_are_not(kind: str) -> None:
    (operator,) = drawn([kind], 1, 3)
    kernels = [var.name_hint for var in lower(operator.module(), resolve("x86-64-v3")).kernels.functions]
    counted = {kernel for kernel in kernels if operator.counts(kernel)}
    assert counted
    assert not counted & {"pack", "unpack"}
