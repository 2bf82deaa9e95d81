"""Padded copies write zeros only around the data, and everywhere around it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.builder.kernels.machines import Randn, close, conv2d, element_machine, lower_expression, run

PADDINGS = {
    "on all sides": (1, 1, 1, 1),
    "uneven": (2, 0, 1, 3),
    "only to the right": (0, 0, 0, 2),
    "only above": (1, 0, 0, 0),
    "wide": (0, 9, 0, 9),
}


def depthwise(padding: tuple[int, ...], channels: int = 8) -> dict[str, Any]:
    return {"strides": (2, 1), "padding": padding, "groups": channels}


@pytest.mark.slow
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
def test_padded_rows_agree_with_their_definition(padding: tuple[int, ...], randn: Randn) -> None:
    x, w, how = randn(1, 8, 9, 11), randn(8, 1, 3, 3), depthwise(padding)
    got = run(lambda v: relax.op.nn.conv2d(v, relax.const(w), **how), {"x": x}, element_machine()).outputs[0]
    close(got, conv2d(x, w, **how))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row", "single"),
    [("on all sides", "ax2 >= T.int64(1) and ax2 < T.int64(10)", 2), ("only to the right", None, 2),
     ("wide", None, 0)],
)  # fmt: skip
def test_zeros_are_written_beside_rows_of_data(name: str, row: str | None, single: int) -> None:
    w, how = np.ones((8, 1, 3, 3), "f4"), depthwise(PADDINGS[name])
    data = {"x": np.ones((1, 8, 9, 11), "f4")}
    lowered = lower_expression(
        lambda v: relax.op.nn.conv2d(v, relax.const(w), **how), data, element_machine()
    )
    (kernel,) = [f.script() for f in lowered.kernels.functions.values() if "pad_pad_const" in f.script()]
    assert (row is None) == ("if ax2" not in kernel)
    assert row is None or f"if {row}" in kernel
    whole = kernel.count('T.sblock("pad_pad_const")') - single
    assert whole == (0 if name == "only to the right" else 1)


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
def test_the_data_of_one_channel_stays_where_only_rows_are_padded(
    padding: tuple[int, ...], randn: Randn
) -> None:
    """The rows' loop then has both the zeros and the data."""
    x, w, how = randn(1, 1, 9, 11), randn(3, 1, 3, 3), depthwise(padding, channels=1)
    got = run(lambda v: relax.op.nn.conv2d(v, relax.const(w), **how), {"x": x}, element_machine()).outputs[0]
    close(got, conv2d(x, w, **how))
