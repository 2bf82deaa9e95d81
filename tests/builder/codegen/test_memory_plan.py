"""In no graph are two values that share a storage alive at the same time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.codegen.memory_plan import Lifetime, plan


def overlaps(a: Lifetime, b: Lifetime) -> bool:
    return a.start <= b.end and b.start <= a.end


lifetimes = st.builds(
    lambda nbytes, start, length, pinned: Lifetime(nbytes, start, start + length, pinned),
    st.integers(0, 1000),
    st.integers(0, 30),
    st.integers(0, 10),
    st.booleans(),
)


@given(st.lists(lifetimes, max_size=40))
def test_no_two_values_alive_together_share_a_storage(values: list[Lifetime]) -> None:
    result = plan(values)
    for i, a in enumerate(values):
        assert result.storage_bytes[result.storage_id[i]] >= a.nbytes
        for j, b in enumerate(values[:i]):
            if result.storage_id[i] == result.storage_id[j]:
                assert not overlaps(a, b)
                assert not a.pinned
                assert not b.pinned


@pytest.mark.slow
@given(st.lists(lifetimes, max_size=40))
def test_arena_lies_between_the_peak_and_the_sum(values: list[Lifetime]) -> None:
    loose = [v for v in values if not v.pinned]
    steps = range(50)
    peak = max(sum(v.nbytes for v in loose if v.start <= step <= v.end) for step in steps)
    assert peak <= plan(values).arena_bytes <= sum(v.nbytes for v in loose)


def test_a_chain_of_equal_values_needs_two_storages() -> None:
    chain = [Lifetime(100, i, i + 1) for i in range(10)]
    assert plan(chain).arena_bytes == 200


def test_storages_are_numbered_from_zero_in_the_order_of_values() -> None:
    values = [Lifetime(8, 0, 9, pinned=True), Lifetime(4, 0, 1), Lifetime(4, 1, 2), Lifetime(4, 2, 3)]
    assert plan(values).storage_id == (0, 1, 2, 1)
