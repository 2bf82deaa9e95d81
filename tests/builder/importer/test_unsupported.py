"""All operators that cannot be imported are listed with their nodes, and nothing else is printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.errors import ModelError, UnsupportedOperatorError
from builder.importer import import_onnx

ModelMaker = Callable[..., onnx.ModelProto]
INT64 = TensorProto.INT64


@pytest.fixture
def hopeless(make_model: ModelMaker) -> onnx.ModelProto:
    """A model with three kinds of unsupported nodes among supported ones."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="fine"),
        # No converter.
        helper.make_node("RandomUniformLike", ["a"], ["d1"], name="random_1"),
        helper.make_node("RandomUniformLike", ["a"], ["d2"], name="random_2"),
        # A converter that refuses this rank.
        helper.make_node("LRN", ["v"], ["t"], name="deep", size=3),
        helper.make_node("LRN", ["f"], ["u"], name="flat", size=3),
        # An output whose length depends on values, and that nothing bounds.
        helper.make_node("Range", ["start", "limit", "delta"], ["n"], name="count"),
    ]
    outputs = {
        "d1": [2, 3, 3],
        "d2": [2, 3, 3],
        "t": [1, 2, 3, 3, 3],
        "u": [1, 2, 3, 3],
        "n": ([None], INT64),
    }
    inputs: dict[str, Any] = {"x": [2, 3, 3], "v": [1, 2, 3, 3, 3], "f": [1, 2, 3, 3], "limit": ([], INT64)}
    weights = {"start": np.array(0), "delta": np.array(1)}
    return make_model(nodes, inputs, outputs, weights)


def test_every_obstacle_is_named_in_one_pass(hopeless: onnx.ModelProto) -> None:
    with pytest.raises(UnsupportedOperatorError) as caught:
        import_onnx(hopeless)
    message = str(caught.value)
    assert "\n" not in message
    assert "3 operators cannot be imported" in message
    assert "RandomUniformLike (random_1, random_2): there is no converter" in message
    assert "LRN (deep)" in message
    assert "Range (count): its length depends on values" in message
    assert "fine" not in message
    assert "flat" not in message


def test_a_converters_own_reason_is_given(make_model: ModelMaker) -> None:
    node = helper.make_node("LRN", ["x"], ["y"], name="deep", size=3)
    model = make_model([node], {"x": [1, 2, 3, 3, 3]}, {"y": [1, 2, 3, 3, 3]})
    with pytest.raises(UnsupportedOperatorError, match=r"LRN \(deep\): LRN only supports 3D or 4D input"):
        import_onnx(model)


def test_a_shape_that_is_an_input_is_explained_and_can_be_fixed(make_model: ModelMaker) -> None:
    node = helper.make_node("Reshape", ["x", "shape"], ["y"], name="fold")
    model = make_model([node], {"x": [2, 6], "shape": ([2], INT64)}, {"y": [None, None]})
    with pytest.raises(UnsupportedOperatorError) as caught:
        import_onnx(model)
    assert "Reshape (fold)" in str(caught.value)
    assert "--input-values" in (caught.value.hint or "")
    fixed = import_onnx(model, input_values={"shape": [3, 4]})
    assert fixed.outputs[0].shape == (3, 4)


def test_many_nodes_are_counted_and_not_all_listed(make_model: ModelMaker) -> None:
    nodes = [helper.make_node("RandomUniformLike", ["x"], [f"y{i}"], name=f"random_{i}") for i in range(9)]
    model = make_model(nodes, {"x": [2, 3, 3]}, {f"y{i}": [2, 3, 3] for i in range(9)})
    with pytest.raises(UnsupportedOperatorError, match="random_0, random_1, random_2 and 6 more"):
        import_onnx(model)


def test_exporting_without_non_max_suppression_is_suggested(make_model: ModelMaker) -> None:
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "n"], ["y"], name="nms")
    boxes = 20_000
    model = make_model(
        [node],
        {"boxes": [1, boxes, 4], "scores": [1, 80, boxes]},
        {"y": ([None, 3], INT64)},
        {"n": np.array([boxes])},
    )
    with pytest.raises(UnsupportedOperatorError, match="max_output_boxes_per_class") as caught:
        import_onnx(model)
    assert "--postprocess" in (caught.value.hint or "")


def test_a_loop_of_unknown_length_is_named(make_model: ModelMaker) -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["s", "s"], ["t"])],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, [3]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("t", TensorProto.FLOAT, [3]),
        ],
    )
    node = helper.make_node("Loop", ["count", "", "x"], ["y"], name="repeat", body=body)
    model = make_model([node], {"x": [3], "count": ([], INT64)}, {"y": [3]})
    with pytest.raises(UnsupportedOperatorError, match=r"Loop \(repeat\)"):
        import_onnx(model)
    assert len(import_onnx(model, input_values={"count": 3}).onnx.graph.node) == 3


def test_a_refused_model_prints_nothing(hopeless: onnx.ModelProto, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError):
        import_onnx(hopeless)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_native_output_is_restored_afterwards(
    hopeless: onnx.ModelProto, capfd: pytest.CaptureFixture[str]
) -> None:
    import os

    with pytest.raises(ModelError):
        import_onnx(hopeless)
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"


@pytest.mark.parametrize(
    ("node", "numbers"),
    [
        (helper.make_node("MaxPool", ["x"], ["y"], name="p", kernel_shape=[3, 6]), "3 places, got 6 (axis 3"),
        (
            helper.make_node("AveragePool", ["x"], ["y"], name="p", kernel_shape=[9, 1], pads=[1, 0, 1, 0]),
            "6 places, got 9 (axis 2",
        ),
        (helper.make_node("LpPool", ["x"], ["y"], name="p", kernel_shape=[8, 1]), "4 places, got 8 (axis 2"),
        (
            helper.make_node("Conv", ["x", "w"], ["y"], name="p", dilations=[1, 4]),
            "3 places, got 5 (axis 3",
        ),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)
def test_a_window_that_does_not_fit_is_told_with_its_numbers(
    make_model: ModelMaker, node: onnx.NodeProto, numbers: str
) -> None:
    """It has nothing to do with values that are only known at run time."""
    weights = {"w": np.ones((2, 2, 2, 2), np.float32)} if node.op_type == "Conv" else {}
    model = make_model([node], {"x": [1, 2, 4, 3]}, {"y": [None] * 4}, weights)
    with pytest.raises(UnsupportedOperatorError) as caught:
        import_onnx(model)
    assert f"{node.op_type} (p): expected a window of at most {numbers} of 'x'" in str(caught.value)
    assert "run time" not in str(caught.value)
    assert "a larger input (--input-shapes)" in str(caught.value.hint)


@pytest.mark.parametrize("ratio", [0.5, None])
def test_dropout_in_training_is_refused(make_model: ModelMaker, ratio: float | None) -> None:
    """It would be an identity, which is not what was asked for; the default ratio is a half."""
    weights = {"t": np.array(True)} | ({} if ratio is None else {"r": np.float32(ratio)})
    node = helper.make_node("Dropout", ["x", "" if ratio is None else "r", "t"], ["y"], name="d")
    with pytest.raises(UnsupportedOperatorError) as caught:
        import_onnx(make_model([node], {"x": [2, 3]}, {"y": [2, 3]}, weights))
    assert "Dropout (d): expected training_mode to be false" in str(caught.value)
    assert caught.value.hint == "call model.eval() before the export"


def test_dropout_in_training_between_others_is_refused(make_model: ModelMaker) -> None:
    nodes = [
        helper.make_node("Exp", ["x"], ["e"]),
        helper.make_node("Dropout", ["e", "r", "t"], ["d"], name="d"),
        helper.make_node("Sin", ["d"], ["y"]),
    ]
    weights = {"r": np.float32(0.01), "t": np.array(True)}
    with pytest.raises(UnsupportedOperatorError, match="expected training_mode to be false"):
        import_onnx(make_model(nodes, {"x": [2, 3]}, {"y": [2, 3]}, weights))
