"""Channels that leave their blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from builder.kernels.spaces import rows, unpacking
from tests.builder.kernels.machines import Randn, close, conv2d, machine, run


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    batch=st.integers(1, 2),
    channels=st.integers(2, 40),
    groups=st.sampled_from([1, 1, 2, 3]),
    extents=st.tuples(st.integers(1, 5), st.integers(2, 37)),
    lanes=st.sampled_from([4, 8, 16]),
    then=st.sampled_from(["nothing", "exp", "transpose"]),
)
def test_any_channels(
    batch: int, channels: int, groups: int, extents: tuple[int, int], lanes: int, then: str
) -> None:
    state = np.random.RandomState(channels)
    x = state.randn(batch, 2 * groups, *extents).astype("f4")
    w = state.randn(channels * groups, 2, 1, 1).astype("f4")

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), groups=groups)
        if then == "exp":  # not computed on padding
            return relax.op.exp(relax.op.tanh(y))
        return relax.op.permute_dims(y, [0, 2, 3, 1]) if then == "transpose" else y

    result = run(build, {"x": x}, machine(lanes))
    y = conv2d(x, w, groups=groups)
    if then == "exp":
        y = np.exp(np.tanh(y))
    close(result.outputs[0], y.transpose(0, 2, 3, 1) if then == "transpose" else y)
    if then == "nothing" and extents[0] > 1:
        assert unpacking.KIND in result.schedules


def test_rows_of_unpacked_channels_have_their_own_space(randn: Randn) -> None:
    x, w = randn(1, 16, 6, 20), randn(24, 16, 1, 1)
    build = lambda v: relax.op.nn.softmax(relax.op.nn.conv2d(v, relax.const(w)), axis=-1)  # noqa: E731
    result = run(build, {"x": x}, machine(8))
    e = np.exp(conv2d(x, w))
    close(result.outputs[0], e / e.sum(-1, keepdims=True))
    assert rows.KIND in result.schedules
