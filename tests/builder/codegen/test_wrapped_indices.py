"""Tensors that repeat themselves: LLVM's vectoriser reads past the end of what is repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax

from builder.codegen import lowering
from builder.target.device_target import resolve
from tests.builder.kernels.machines import lower_expression, machine, run

Array = np.ndarray[Any, Any]


def tiled(x: relax.Expr, repeats: tuple[int, ...], first: int = 0, last: int | None = None) -> relax.Expr:
    """Repeat a tensor; of the last axis, only the columns from `first` are kept."""
    y = relax.op.tile(x, repeats)
    axis = len(repeats) - 1
    return y if last is None else relax.op.strided_slice(y, [axis], [first], [last])


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize(
    ("dtype", "shape", "repeats"),
    [("float32", (3, 16), (6, 4)), ("int8", (7, 32), (3, 5)), ("float32", (3, 8, 2), (3, 4, 4))],
)
def test_whole_repetitions(dtype: str, shape: tuple[int, ...], repeats: tuple[int, ...], lanes: int) -> None:
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    result = run(lambda a: tiled(a, repeats), {"x": x}, machine(lanes))
    np.testing.assert_array_equal(result.outputs[0], np.tile(x, repeats))


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("first", [1, 5, 19])
def test_repetitions_that_begin_within_one(first: int, lanes: int) -> None:
    x = np.arange(48, dtype=np.float32).reshape(3, 16)
    result = run(lambda a: tiled(a, (6, 4), first, first + 40), {"x": x}, machine(lanes))
    np.testing.assert_array_equal(result.outputs[0], np.tile(x, (6, 4))[:, first : first + 40])


def test_a_whole_repetition_becomes_a_loop() -> None:
    x = np.zeros((3, 16), np.float32)
    target = resolve("host")
    lowered = lower_expression(lambda a: tiled(a, (6, 4)), {"x": x}, target)
    text = str(lowering.lower_kernels(lowered.kernels, target.tvm_target))
    assert "& 15" not in text
    assert "umul.fix" not in text


@st.composite
def repetitions(draw: st.DrawFn) -> tuple[Array, tuple[int, ...], int, int, int]:
    """A tensor, how often it is repeated, the columns that are kept, and lanes."""
    rank = draw(st.integers(1, 4))
    extents = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 24, 32, 64])
    shape = tuple(draw(extents) if axis >= rank - 2 else draw(st.integers(1, 4)) for axis in range(rank))
    repeats = tuple(draw(st.integers(1, 6)) for _ in range(rank))
    dtype = draw(st.sampled_from(["float32", "int8", "int64"]))
    x = np.random.default_rng(0).integers(-100, 100, shape).astype(dtype)
    columns = shape[-1] * repeats[-1]
    first = draw(st.integers(0, columns - 1))
    last = draw(st.integers(first + 1, columns))
    return x, repeats, first, last, draw(st.sampled_from([4, 8, 16]))


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(repetitions())
def test_any_repetition(case: tuple[Array, tuple[int, ...], int, int, int]) -> None:
    x, repeats, first, last, lanes = case
    result = run(lambda a: tiled(a, repeats, first, last), {"x": x}, machine(lanes))
    np.testing.assert_array_equal(result.outputs[0], np.tile(x, repeats)[..., first:last])


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_padding_that_wraps_around(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([2, 4, 8, 16, 32]))
    before, after = data.draw(st.integers(0, columns)), data.draw(st.integers(0, columns))
    repeats = data.draw(st.sampled_from([(1, 1), (2, 3), (1, 8)]))
    x = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)

    def build(a: relax.Expr) -> relax.Expr:
        return relax.op.nn.pad(relax.op.tile(a, repeats), [0, 0, before, after], "circular")

    result = run(build, {"x": x}, machine(data.draw(st.sampled_from([4, 8, 16]))))
    expected = np.pad(np.tile(x, repeats), ((0, 0), (before, after)), mode="wrap")
    np.testing.assert_array_equal(result.outputs[0], expected)
