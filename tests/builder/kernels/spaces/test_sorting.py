"""Sorting by rank: stable, along any axis, and up to a limit."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from builder.compiling.compilation import compile
from builder.errors import UnsupportedOperatorError
from builder.importer.onnx_import import import_onnx
from builder.kernels.spaces import sorting
from builder.target.device_target import resolve
from tests.builder.kernels.machines import Randn, run

HOST = resolve("host")


@pytest.mark.slow
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(
    ("shape", "axis", "k"),
    [((3, 100), 1, 5), ((7, 4, 3), 0, 7), ((2, 9, 5), 1, 1), ((1,), 0, 1), ((4, 33), -1, 33)],
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
    graph = helper.make_graph(
        [helper.make_node("TopK", ["x", "k"], ["v", "i"])],
        "topk",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, n])],
        [helper.make_tensor_value_info("v", TensorProto.FLOAT, [1, 5])],
        [numpy_helper.from_array(np.array([5], np.int64), "k")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    with pytest.raises(UnsupportedOperatorError, match="operator topk has no kernel") as caught:
        compile(import_onnx(model), HOST)
    assert caught.value.hint is not None
    assert str(sorting.MAX_EXTENT) in caught.value.hint
