"""Operators whose meaning changed with an opset do what they did in the file's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper

from builder.importer import import_onnx
from tests.builder.importer.rewrites.cases import ModelMaker


def _noise(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def branch(node: onnx.NodeProto) -> onnx.NodeProto:
    """An If on an input that takes `node`, and otherwise negates."""
    value = helper.make_tensor_value_info
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.output[0] = "t"
    other = helper.make_node("Neg", ["x"], ["e"])
    return helper.make_node(
        "If",
        ["c"],
        ["y"],
        then_branch=helper.make_graph([inner], "then", [], [value("t", 1, None)]),
        else_branch=helper.make_graph([other], "else", [], [value("e", 1, None)]),
    )


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(
    "scales", [(2, 2), (3, 1.5), (0.5, 0.5), (0.6, 0.75), (0.5, 2), (1.5, 0.6), (1.1, 1.3)]
)
@pytest.mark.parametrize("opset", [7, 9, 10])
def test_resizing(
    make_model: ModelMaker, run_onnx: Any, opset: int, scales: tuple[float, float], mode: str
) -> None:
    if opset < 10 and min(scales) < 1:
        return
    whole = np.array([1, 1, *scales], np.float32)
    if opset == 7:
        node = helper.make_node("Upsample", ["x"], ["y"], scales=whole.tolist(), mode=mode)
    else:
        node = helper.make_node("Upsample" if opset == 9 else "Resize", ["x", "s"], ["y"], mode=mode)
    weights = {"s": whole} if opset > 7 else {}
    model = make_model([node], {"x": [1, 2, 6, 10]}, {"y": [None] * 4}, weights, opset=opset)
    feeds = {"x": _noise(1, 2, 6, 10)}
    [wanted] = run_onnx(model, feeds)
    np.testing.assert_allclose(run_onnx(import_onnx(model).onnx, feeds)[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_branch", [False, True])
@pytest.mark.parametrize("operator", ["Hardmax", "Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [0, 1, 2, None])
def test_axes_that_are_one(
    make_model: ModelMaker, run_onnx: Any, operator: str, axis: int | None, in_branch: bool
) -> None:
    options = {} if axis is None else {"axis": axis}
    node = helper.make_node(operator, ["x"], ["y"], **options)
    inputs: dict[str, Any] = {"x": [2, 3, 4]}
    feeds = {"x": _noise(2, 3, 4)}
    if in_branch:
        node = branch(node)
        inputs["c"], feeds["c"] = ([], onnx.TensorProto.BOOL), np.array(True)
    model = make_model([node], inputs, {"y": [2, 3, 4]}, opset=11)
    [wanted] = run_onnx(model, feeds)
    np.testing.assert_allclose(run_onnx(import_onnx(model).onnx, feeds)[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("mode", "scale"), [("linear", 2), ("nearest", 1.5), ("nearest", 0.6)])
def test_the_half_pixels_of_tensorflow(
    make_model: ModelMaker, run_onnx: Any, mode: str, scale: float
) -> None:
    options = {
        "mode": mode,
        "coordinate_transformation_mode": "tf_half_pixel_for_nn",
        "nearest_mode": "floor",
    }
    node = helper.make_node("Resize", ["x", "roi", "s"], ["y"], **options)
    weights = {"s": np.array([1, 1, scale, scale], np.float32), "roi": np.zeros(0, np.float32)}
    model = make_model([node], {"x": [1, 2, 6, 10]}, {"y": [None] * 4}, weights, opset=11)
    feeds = {"x": _noise(1, 2, 6, 10)}
    [wanted] = run_onnx(model, feeds)
    np.testing.assert_allclose(run_onnx(import_onnx(model).onnx, feeds)[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_one_hot(make_model: ModelMaker, run_onnx: Any, run_relax: Any, axis: int) -> None:
    # A depth with one dimension, as tf2onnx writes it; indices that count from the end, or hit nothing.
    node = helper.make_node("OneHot", ["x", "d", "v"], ["y"], axis=axis)
    weights = {"d": np.array([4]), "v": np.array([2, 5], np.float32)}
    model = make_model([node], {"x": ([5], onnx.TensorProto.INT64)}, {"y": [None, None]}, weights, opset=11)
    x = np.array([0, 3, -1, 4, -9])
    [wanted] = run_onnx(model, {"x": x})
    imported = import_onnx(model)
    assert np.array_equal(run_onnx(imported.onnx, {"x": x})[0], wanted)
    assert np.array_equal(run_relax(imported.mod, [x])[0], wanted)


# ONNX Runtime has no kernels for these opsets: they are compared with what the specification says.


@pytest.mark.parametrize("opset", [1, 6])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(
    ("shape", "axis", "form"),
    [([3], 1, (3, 1, 1)), ([3, 3], 1, (3, 3, 1)), ([3, 3], 2, (3, 3)), ([3], 3, (3,))],
)
def test_the_second_operand_begins_at_an_axis(
    make_model: ModelMaker, run_onnx: Any, opset: int, constant: bool, shape: list[int], axis: int, form: Any
) -> None:
    node = helper.make_node("Sub", ["x", "b"], ["y"], broadcast=1, axis=axis)
    x, b = _noise(2, 3, 3, 3), _noise(*shape)
    inputs = {"x": [2, 3, 3, 3]} if constant else {"x": [2, 3, 3, 3], "b": shape}
    weights = {"b": b} if constant else {}
    model = make_model([node], inputs, {"y": [2, 3, 3, 3]}, weights, opset=opset)
    feeds = {"x": x} if constant else {"x": x, "b": b}
    np.testing.assert_array_equal(run_onnx(import_onnx(model).onnx, feeds)[0], x - b.reshape(form))


def test_a_slope_stands_for_a_channel(make_model: ModelMaker, run_onnx: Any) -> None:
    node = helper.make_node("PRelu", ["x", "s"], ["y"])
    x, slope = _noise(2, 3, 3, 3), _noise(3)
    model = make_model([node], {"x": [2, 3, 3, 3]}, {"y": [2, 3, 3, 3]}, {"s": slope}, opset=6)
    wanted = np.where(x < 0, x * slope.reshape(3, 1, 1), x)
    np.testing.assert_array_equal(run_onnx(import_onnx(model).onnx, {"x": x})[0], wanted)


@pytest.mark.parametrize("opset", [6, 7])
def test_a_batch_norm_for_each_place(make_model: ModelMaker, run_onnx: Any, opset: int) -> None:
    names = ["scale", "bias", "mean", "variance"]
    weights = {name: np.abs(_noise(3, 4)) + place for place, name in enumerate(names)}
    node = helper.make_node("BatchNormalization", ["x", *names], ["y"], spatial=0, epsilon=0.01)
    model = make_model([node], {"x": [2, 3, 4]}, {"y": [2, 3, 4]}, weights, opset=opset)
    x = _noise(2, 3, 4)
    scale, bias, mean, variance = weights.values()
    wanted = (x - mean) / np.sqrt(variance + 0.01) * scale + bias
    np.testing.assert_allclose(run_onnx(import_onnx(model).onnx, {"x": x})[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("node", "weights", "now", "opset"),
    [
        (helper.make_node("Cast", ["x"], ["y"], to="INT32"), {}, lambda x: x.astype(np.int32), 1),
        (helper.make_node("Cast", ["x"], ["y"], to="INT64"), {}, lambda x: x.astype(np.int64), 5),
        (
            helper.make_node("Tile", ["x", "t", "a"], ["y"]),
            {"t": np.array([3], np.float32), "a": np.array([1], np.float32)},
            lambda x: np.tile(x, (1, 3)),
            1,
        ),
        (
            helper.make_node("Pad", ["x"], ["y"], paddings=[1, 0, 2, 1], value=1.5),
            {},
            lambda x: np.pad(x, [(1, 2), (0, 1)], constant_values=1.5),
            1,
        ),
        (
            helper.make_node("Pad", ["x"], ["y"], paddings=[1, 0, 2, 1], mode="reflect"),
            {},
            lambda x: np.pad(x, [(1, 2), (0, 1)], mode="reflect"),
            1,
        ),
        (
            helper.make_node("Split", ["x"], ["y", "z"], axis=1, split=[2, 4]),
            {},
            lambda x: x[:, :2],
            1,
        ),
        (helper.make_node("Split", ["x"], ["y", "z"], axis=1), {}, lambda x: x[:, :3], 1),
    ],
    ids=["cast", "cast 5", "tile", "pad", "reflect", "split", "halves"],
)
def test_forms_that_the_converter_lacks(
    make_model: ModelMaker, run_onnx: Any, node: onnx.NodeProto, weights: Any, now: Any, opset: int
) -> None:
    x = _noise(4, 6) * 5
    wanted = now(x)
    kind = helper.np_dtype_to_tensor_dtype(wanted.dtype)
    outputs: dict[str, Any] = {"y": (list(wanted.shape), kind)}
    if len(node.output) > 1:
        outputs["z"] = [4, 6 - wanted.shape[1]]
    model = make_model([node], {"x": [4, 6]}, outputs, weights, opset=opset)
    np.testing.assert_array_equal(run_onnx(import_onnx(model).onnx, {"x": x})[0], wanted)


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("opset", [1, 6])
def test_old_recurrent_layers(
    make_model: ModelMaker, run_onnx: Any, kind: str, gates: int, opset: int
) -> None:
    weights = {"w": _noise(1, 3 * gates, 4), "r": _noise(1, 3 * gates, 3)}
    results = []
    for version in (opset, 17):
        options = {"output_sequence": 1} if version < 7 else {}
        node = helper.make_node(kind, ["x", "w", "r"], ["y", "h"], hidden_size=3, **options)
        model = make_model(
            [node], {"x": [5, 1, 4]}, {"y": [5, 1, 1, 3], "h": [1, 1, 3]}, weights, opset=version
        )
        results.append(run_onnx(import_onnx(model).onnx, {"x": _noise(5, 1, 4)})[0])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 12, 13])
def test_the_mask_of_a_dropout(make_model: ModelMaker, run_onnx: Any, opset: int) -> None:
    node = helper.make_node("Dropout", ["x"], ["y", "mask"])
    dtype = np.float32 if opset < 10 else np.bool_
    model = make_model([node], {"x": [2, 3]}, {"y": [2, 3], "mask": [2, 3]}, opset=opset)
    model.graph.output[1].type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    feeds = {"x": np.array([[1, -0.0, np.nan], [np.inf, 0, -2]], np.float32)}
    wanted = run_onnx(model, feeds)
    assert (wanted[1] == (opset >= 12)).all()
    for value, expected in zip(run_onnx(import_onnx(model).onnx, feeds), wanted, strict=True):
        np.testing.assert_array_equal(value, expected)
        assert value.dtype == expected.dtype
