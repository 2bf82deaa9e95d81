"""Sorting by rank: stable, along any axis, and up to a limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from builder.compiler import compile
from builder.errors import UnsupportedOperatorError
from builder.importer.onnx_import import import_onnx
from builder.kernels.spaces import selection, sorting
from builder.target.device_target import resolve
from tests.builder.kernels.machines import Randn, run

HOST = resolve("host")


@pytest.mark.slow
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(
    ("shape", "axis", "k"),
    [
        ((3, 100), 1, 5),
        ((7, 4, 3), 0, 7),
        ((2, 9, 5), 1, 1),
        ((1,), 0, 1),
        ((4, 33), -1, 33),
        ((3, 100), 1, 7),
        ((2, 64, 3), 1, 4),
        ((500,), 0, 20),
        ((16, 2), 0, 1),
    ],
)
def test_topk_puts_the_first_of_equals_first(
    shape: tuple[int, ...], axis: int, k: int, largest: bool, randn: Randn
) -> None:
    x = np.round(randn(*shape) * 3) / 2  # with many equal elements
    build = lambda v: relax.op.topk(v, k, axis, "both", largest, "int64")  # noqa: E731
    values, indices = run(build, {"x": x}, HOST).outputs
    order = np.argsort(-x if largest else x, axis, kind="stable").take(range(k), axis)
    assert np.array_equal(indices, order)
    assert indices.dtype == np.int64
    assert np.array_equal(values, np.take_along_axis(x, order, axis))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    count=st.integers(1, 6),
    more=st.integers(0, 60),
    part=st.sampled_from(["few", "many", "all"]),
    kind=st.sampled_from(["float32", "int32", "int64"]),
    order=st.sampled_from(["any", "rising", "falling", "equal"]),
    largest=st.booleans(),
)
def test_any_selection(
    shape: tuple[int, int], count: int, more: int, part: str, kind: str, order: str, largest: bool
) -> None:
    extent = 16 * count + more if part == "few" else 512 + more
    count = {"few": count, "many": 60 * count, "all": extent}[part]
    x = np.random.RandomState(more).randint(-9, 9, (shape[0], extent, shape[1])).astype(kind)
    x = {"any": x, "rising": np.sort(x, 1), "falling": -np.sort(-x, 1), "equal": np.ones_like(x)}[order]
    result = run(lambda v: relax.op.topk(v, count, 1, "both", largest, "int64"), {"x": x}, HOST)
    wanted = np.argsort(-x if largest else x, 1, kind="stable")[:, :count]
    assert np.array_equal(result.outputs[1], wanted)
    assert np.array_equal(result.outputs[0], np.take_along_axis(x, wanted, 1))
    assert result.schedules == {selection.KIND}


@pytest.mark.slow
def test_a_selection_of_no_numbers_has_places_of_elements(randn: Randn) -> None:
    x = np.full((2, 40), np.nan, "f4")
    x[1, 20] = 1
    _, indices = run(lambda v: relax.op.topk(v, 2, 1, "both", True, "int64"), {"x": x}, HOST).outputs
    assert all(len(set(row)) == 2 and min(row) >= 0 and max(row) < 40 for row in indices.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("descending", [True, False])
def test_sort_and_argsort(descending: bool, randn: Randn) -> None:
    x = (randn(5, 50) * 4).astype("int32")
    order = np.argsort(-x if descending else x, -1, kind="stable")
    got = run(lambda v: relax.op.sort(v, -1, descending), {"x": x}, HOST).outputs[0]
    assert np.array_equal(got, np.take_along_axis(x, order, -1))
    got = run(lambda v: relax.op.argsort(v, -1, descending), {"x": x}, HOST).outputs[0]
    assert np.array_equal(got, order)


@pytest.mark.parametrize("which", ["values", "indices"])
def test_topk_of_values_or_of_indices(which: str, randn: Randn) -> None:
    x = randn(2, 20)
    got = run(lambda v: relax.op.topk(v, 3, -1, which), {"x": x}, HOST).outputs[0]
    order = np.argsort(-x, -1, kind="stable")[:, :3]
    assert np.array_equal(got, order if which == "indices" else np.take_along_axis(x, order, -1))


def test_an_axis_beyond_the_limit_is_refused_with_a_hint() -> None:
    n = sorting.MAX_EXTENT + 1
    k = n // 2  # fewer would be selected
    graph = helper.make_graph(
        [helper.make_node("TopK", ["x", "k"], ["v", "i"])],
        "topk",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, n])],
        [helper.make_tensor_value_info("v", TensorProto.FLOAT, [1, k])],
        [numpy_helper.from_array(np.array([k], np.int64), "k")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    with pytest.raises(UnsupportedOperatorError, match="operator topk has no kernel") as caught:
        compile(import_onnx(model), HOST)
    assert caught.value.hint is not None
    assert str(sorting.MAX_EXTENT) in caught.value.hint


@pytest.mark.parametrize("largest", [True, False])
def test_nan_is_the_largest_number(largest: bool) -> None:
    x = np.array([[3, np.nan, 1, np.inf, np.nan, 2]], np.float32)
    build = lambda v: relax.op.topk(v, 6, 1, "both", largest, "int64")  # noqa: E731
    values, indices = run(build, {"x": x}, HOST).outputs
    order = [1, 3, 4, 0, 5, 2] if largest else [2, 5, 0, 1, 3, 4]
    assert indices.tolist() == [order]
    np.testing.assert_array_equal(values, x[:, order])
