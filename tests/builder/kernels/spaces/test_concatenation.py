"""Concatenations: plain and of packed channels, of a few tensors and of many."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from builder.kernels.spaces import concatenation
from tests.builder.kernels.machines import (
    Randn,
    Result,
    close,
    conv2d,
    in_turn,
    lower_expression,
    machine,
    run,
)

pytestmark = pytest.mark.slow


def concatenate(parts: Sequence[np.ndarray], axis: int, lanes: int = 8) -> Result:
    inputs = {f"x{index}": part for index, part in enumerate(parts)}
    result = run(lambda *xs: relax.op.concat(list(xs), axis), inputs, machine(lanes))
    np.testing.assert_array_equal(result.outputs[0], np.concatenate(parts, axis))
    return result


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "bool", "float64"])
def test_many_inputs_of_any_type_are_copied(dtype: str) -> None:
    parts = [np.arange(2 * n * 3).reshape(2, n, 3).astype(dtype) for n in (1, 4, 2, 7, 1)]
    assert concatenate(parts, 1).schedules == {concatenation.KIND}


@pytest.mark.parametrize(
    ("rows", "axis", "joins"), [((), 0, True), ((1, 1), 2, True), ((2,), 1, False), ((1, 3), 2, False)]
)
def test_only_parts_that_follow_each_other_in_memory_are_joined(
    rows: tuple[int, ...], axis: int, *, joins: bool
) -> None:
    inputs = {f"x{n}": np.zeros((*rows, n + 1, 16), "f4") for n in range(concatenation._FEWEST_INPUTS)}
    lowered = lower_expression(lambda *xs: relax.op.concat(list(xs), axis), inputs, machine(8))
    assert bool(concatenation.joins_of(lowered.kernels)) == joins


@settings(max_examples=8, deadline=None)
@given(
    extents=st.lists(st.integers(1, 9), min_size=2, max_size=9),
    before=st.sampled_from([(), (1,), (3,), (2, 5)]),
    after=st.sampled_from([(), (1,), (7,), (300, 11)]),
    negative=st.booleans(),
)
def test_any_shape(
    extents: list[int], before: tuple[int, ...], after: tuple[int, ...], *, negative: bool
) -> None:
    parts = [
        np.random.default_rng(n).standard_normal((*before, extent, *after)).astype("f4")
        for n, extent in enumerate(extents)
    ]
    concatenate(parts, -1 - len(after) if negative else len(before))


CHANNELS = {
    "whole blocks": (16, 8, 24),
    "the last block is not full": (16, 8, 13),
    "the same gap in each": (13, 13),
    "one block is not full": (13, 16),
    "narrow": (3, 3, 3),
    "many": (8, 8, 16, 8, 8, 8, 12),
    "one": (24,),
}
THEN = ("nothing", "pooled", "convolved")


@pytest.mark.parametrize(("case", "lanes"), in_turn(zip(CHANNELS, itertools.cycle(THEN), strict=False)))
def test_convolutions_are_concatenated(randn: Randn, case: tuple[str, str], lanes: int) -> None:
    name, then = case
    channels = CHANNELS[name]
    x, other = randn(1, 16, 9, 9), randn(1, channels[0], 9, 9)
    weights = [randn(c, 16, 1, 1) for c in channels]
    last = randn(8, sum(channels) + channels[0], 1, 1)

    def build(x: relax.Expr, other: relax.Expr) -> relax.Expr:
        parts = [relax.op.nn.conv2d(x, relax.const(w)) for w in weights]
        # The first one has another layout.
        joined = relax.op.concat([other] + [relax.op.tanh(part) for part in parts], 1)
        if then == "pooled":
            return relax.op.nn.max_pool2d(joined, (3, 3), (2, 2), (1, 1, 1, 1))
        if then == "convolved":
            return relax.op.nn.conv2d(relax.op.nn.relu(joined), relax.const(last))
        return joined

    want = np.concatenate([other, *(np.tanh(conv2d(x, w)) for w in weights)], 1)
    if then == "pooled":
        padded = np.pad(want, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
        want = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2].max((4, 5))
    elif then == "convolved":
        want = conv2d(np.maximum(want, 0), last)
    result = run(build, {"x": x, "other": other}, machine(lanes))
    close(result.outputs[0], want)
