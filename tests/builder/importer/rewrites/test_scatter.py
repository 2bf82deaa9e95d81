"""Elements placed, selected and counted at known places, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from builder.errors import ModelError
from builder.importer import import_onnx
from tests.builder.importer.rewrites.cases import INT64, ModelMaker, one

POOLS: dict[str, dict[str, Any]] = {
    "padded": {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2], "strides": [2, 1]},
    "dilated": {"kernel_shape": [2, 3], "dilations": [2, 2]},
    "same": {"kernel_shape": [3, 2], "auto_pad": "SAME_UPPER", "strides": [2, 2]},
    "rounded up": {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
    "columns first": {"kernel_shape": [2, 3], "storage_order": 1, "pads": [1, 1, 0, 1]},
    "large": {"kernel_shape": [10, 9]},
    "whole": {"kernel_shape": [11, 12]},
}


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_max_pool_says_where_the_maxima_are(
    make_model: ModelMaker, noise: Any, run_onnx: Any, pool: str
) -> None:
    node = one("MaxPool", ["x"], ["y", "i"], **POOLS[pool])
    model = make_model([node], {"x": [2, 3, 11, 12]}, {"y": [None] * 4, "i": ([None] * 4, INT64)})
    x = {"x": np.round(noise(2, 3, 11, 12) * 2)}  # with equal numbers, of which the first counts
    wanted = run_onnx(model, x)
    for found, want in zip(run_onnx(import_onnx(model).onnx, x), wanted, strict=True):
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float32])
@pytest.mark.parametrize("pool", ["padded", "columns first", "same", "rounded up"])
def test_padding_is_never_a_maximum(make_model: ModelMaker, run_onnx: Any, pool: str, dtype: Any) -> None:
    node = one("MaxPool", ["x"], ["y", "i"], **POOLS[pool])
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = make_model(
        [node], {"x": ([2, 3, 11, 12], kind)}, {"y": ([None] * 4, kind), "i": ([None] * 4, INT64)}
    )
    lowest = -np.inf if dtype is np.float32 else np.iinfo(dtype).min
    x = np.full((2, 3, 11, 12), lowest, dtype)
    x[1] = np.random.default_rng(0).choice([lowest, lowest, 1], (3, 11, 12))
    if dtype is np.float32:
        x[0, 0] = np.nan
    wanted = run_onnx(model, {"x": x})
    for found, want in zip(run_onnx(import_onnx(model).onnx, {"x": x}), wanted, strict=True):
        np.testing.assert_array_equal(found, want)


def test_a_window_with_indices_that_is_too_large(make_model: ModelMaker) -> None:
    node = one("MaxPool", ["x"], ["y", "i"], kernel_shape=[600])
    model = make_model([node], {"x": [1, 1, 601]}, {"y": [None] * 3, "i": ([None] * 3, INT64)})
    with pytest.raises(ModelError, match="at most 512 places along its axes, got 600"):
        import_onnx(model)


@pytest.mark.parametrize("opset", [12, 22])
@pytest.mark.parametrize(("kernel", "strides"), [((3, 2), (2, 3)), ((2, 2), (1, 1)), ((4, 3), (3, 2))])
def test_max_pool_with_more_padding_at_the_begin(
    make_model: ModelMaker, noise: Any, agrees: Any, kernel: Any, strides: Any, opset: int
) -> None:
    node = one("MaxPool", ["x"], kernel_shape=kernel, strides=strides, auto_pad="SAME_LOWER")
    agrees(make_model([node], {"x": [1, 2, 9, 10]}, {"y": [None] * 4}, opset=opset), noise(1, 2, 9, 10))


@pytest.mark.parametrize(
    ("image", "block", "how"),
    [
        ((5, 7), (2, 3), {"strides": [2, 2]}),
        ((6, 6), (3, 2), {"pads": [1, 1, 0, 1], "dilations": [2, 1]}),
        ((9,), (3,), {"strides": [3]}),
    ],
)
def test_columns_become_an_image(
    make_model: ModelMaker, noise: Any, run_onnx: Any, image: Any, block: Any, how: dict[str, Any]
) -> None:
    rank = len(image)
    pads = how.get("pads", [0] * 2 * rank)
    steps = [
        (i + pads[a] + pads[rank + a] - how.get("dilations", [1] * rank)[a] * (block[a] - 1) - 1)
        // how.get("strides", [1] * rank)[a]
        + 1
        for a, i in enumerate(image)
    ]
    shape = [2, 3 * int(np.prod(block)), int(np.prod(steps))]
    weights = {"image": np.array(image), "block": np.array(block)}
    node = one("Col2Im", ["x", "image", "block"], **how)
    model = make_model([node], {"x": shape}, {"y": [2, 3, *image]}, weights, opset=18)
    x = {"x": noise(*shape)}
    [found], [wanted] = run_onnx(import_onnx(model).onnx, x), run_onnx(model, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_determinants(make_model: ModelMaker, noise: Any, run_onnx: Any, size: int) -> None:
    model = make_model([one("Det", ["x"])], {"x": [6, size, size]}, {"y": [6]})
    x = noise(6, size, size)
    x[1] = x[1] > 0  # zeros in the diagonal
    x[2] = np.eye(size)[::-1]
    x[3, -1] = x[3, 0]  # no inverse
    x[4, :, 0] = 0
    x[5] *= 1e4
    [found], [wanted] = run_onnx(import_onnx(model).onnx, {"x": x}), run_onnx(model, {"x": x})
    np.testing.assert_allclose(found / 1e4**size, wanted / 1e4**size, rtol=1e-4, atol=1e-6 / 1e4**size)


def test_the_determinant_of_one_matrix(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    agrees(make_model([one("Det", ["x"])], {"x": [5, 5]}, {"y": []}), noise(5, 5))


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize(("kind", "nothing"), [("CumSum", 0), ("CumProd", 1)])
def test_a_scalar_is_its_own_sum_and_product(
    make_model: ModelMaker, run_onnx: Any, kind: str, nothing: int, exclusive: int
) -> None:
    node = one(kind, ["x", "axis"], exclusive=exclusive)
    model = make_model([node], {"x": []}, {"y": []}, {"axis": np.int64(0)}, opset=26)
    (found,) = run_onnx(import_onnx(model).onnx, {"x": np.array(7, np.float32)})
    np.testing.assert_array_equal(found, np.float32(nothing if exclusive else 7))
