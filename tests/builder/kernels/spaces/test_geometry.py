"""Convolutions that are changed and keep their results."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx

from builder.kernels.spaces.geometry import Conv2d, Rows, without_idle_taps
from tests.builder.kernels.machines import close, conv2d, machine, run


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_taps_that_read_only_padding_are_dropped(data: st.DataObject) -> None:
    draw = data.draw
    dilation = draw(st.tuples(st.integers(4, 11), st.integers(4, 11)))
    how = {
        "strides": draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        "dilation": dilation,
        "padding": tuple(d + draw(st.integers(0, 3)) for d in dilation * 2),
    }
    state = np.random.RandomState(draw(st.integers(0, 99)))
    size = draw(st.tuples(st.integers(3, 9), st.integers(3, 9)))
    groups = draw(st.sampled_from([1, 4]))
    x, w = state.randn(1, 4, *size).astype("f4"), state.randn(8, 4 // groups, 3, 3).astype("f4")
    if groups == 4:
        w = w[:4]
    build = lambda v: relax.op.nn.conv2d(v, relax.const(w), groups=groups, **how)  # noqa: E731
    close(run(build, {"x": x}, machine(8)).outputs[0], conv2d(x, w, groups=groups, **how))


@pytest.mark.parametrize(("dilation", "kernel"), [(36, (1, 1)), (33, (1, 1)), (32, (3, 3))])
def test_a_dilation_of_a_whole_image_is_one_tap(dilation: int, kernel: tuple[int, int]) -> None:
    op = Conv2d(1, 8, 33, 33, 8, (3, 3), (1, 1), (dilation,) * 4, (dilation,) * 2, 1)
    new, weight = without_idle_taps(op, np.zeros((8, 8, 3, 3), "f4"))
    assert new.kernel == weight.shape[2:] == kernel
    assert (new.out_height, new.out_width) == (33, 33)


@pytest.mark.parametrize(("dtype", "each"), [("float32", 512), ("uint8", 128)])
def test_rows_share_the_bytes_of_an_image(dtype: str, each: int) -> None:
    rows = Rows.of(4, tirx.decl_buffer((3, 2, 8, 8, 4), dtype))
    assert (rows.count, rows.bytes_each) == (4, each)
    assert [rows.at_once(cache) for cache in (0, 4 * each, 100 * each)] == [1, 2, 4]
