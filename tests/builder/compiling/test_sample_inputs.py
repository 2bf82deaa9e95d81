from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.sample_inputs import make_inputs, masks

IMAGE = TensorSpec("image", "FP32", (1, 3, 8, 8))
TOKENS = TensorSpec("tokens", "INT64", (4, 16))
MASK = TensorSpec("mask", "INT64", (4, 64))


def lookup(*tables: int) -> onnx.ModelProto:
    """A model whose `tokens` are cast and select from tables of the given numbers of rows."""
    nodes = [helper.make_node("Cast", ["tokens"], ["cast"], to=TensorProto.INT32)]
    nodes += [helper.make_node("Gather", [f"table{i}", "cast"], [f"y{i}"]) for i in range(len(tables))]
    graph = helper.make_graph(
        nodes,
        "lookup",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, [4, 16])],
        [],
        [numpy_helper.from_array(np.zeros((rows, 2), "f4"), f"table{i}") for i, rows in enumerate(tables)],
    )
    return helper.make_model(graph)


def test_inputs_have_their_shapes_and_dtypes() -> None:
    specs = [IMAGE, TOKENS, MASK]
    made = make_inputs(specs, lookup(10))
    assert [(name, array.shape, str(array.dtype)) for name, array in made.items()] == [
        (spec.name, spec.shape, spec.dtype) for spec in specs
    ]


def test_two_builds_make_the_same_inputs() -> None:
    one, two = (make_inputs([IMAGE, TOKENS], lookup(10)) for _ in range(2))
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert not np.array_equal(one["image"], make_inputs([IMAGE], lookup(10), seed=1)["image"])


def test_indices_stay_within_the_smallest_table() -> None:
    tokens = make_inputs([TOKENS], lookup(100, 7))["tokens"]
    assert tokens.min() >= 0
    assert 1 < tokens.max() < 7


def test_other_integers_are_mostly_ones() -> None:
    mask = make_inputs([MASK], lookup(10))["mask"]
    assert set(np.unique(mask)) == {0, 1}
    assert mask.mean() > 0.75


def test_an_integer_that_divides_is_not_zero() -> None:
    specs = [TensorSpec(name, "INT32", (4, 64)) for name in ("a", "b")]
    nodes = [
        helper.make_node("Cast", ["b"], ["wide"], to=TensorProto.INT64),
        helper.make_node("Cast", ["a"], ["dividend"], to=TensorProto.INT64),
        helper.make_node("Mod", ["dividend", "wide"], ["c"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.INT32, [4, 64]) for name in ("a", "b")]
    made = make_inputs(specs, helper.make_model(helper.make_graph(nodes, "quotient", values, [])))
    assert (made["b"].min(), made["b"].max()) == (1, 9)
    assert (made["a"].min(), made["a"].max()) == (0, 9)


def test_an_image_is_prepared_pixels() -> None:
    declared = Preprocess(
        input="image", colour="RGB", resize=(8, 8), resize_mode="stretch", interpolation="bilinear",
        crop=None, scale=1 / 255, mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 0.5), layout="NCHW",
    )  # fmt: skip
    image = make_inputs([IMAGE], lookup(10), declared)["image"]
    assert -2 <= image[:, 0].min() < -1 < 1 < image[:, 0].max() <= 2
    assert -1 <= image[:, 1:].min() < -0.5 < 0.5 < image[:, 1:].max() <= 1


def test_a_feature_of_trees_is_drawn_from_around_their_thresholds() -> None:
    node = helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        nodes_featureids=[1, 1, 0, 0, 0],
        nodes_modes=["BRANCH_LEQ", "BRANCH_LEQ", "LEAF", "LEAF", "LEAF"],
        nodes_values=[1000.0, 1400.0, 0.0, 0.0, 0.0],
    )
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [400, 3])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [400, 1])]
    model = helper.make_model(helper.make_graph([node], "trees", inputs, outputs))
    x = make_inputs([TensorSpec("x", "FP32", (400, 3))], model)["x"].astype("f8")
    assert np.abs(x[:, [0, 2]]).max() < 6
    assert 0.2 < np.mean(x[:, 1] <= 1000) < 0.3
    assert 0.7 < np.mean(x[:, 1] <= 1400) < 0.8


def test_a_quantised_input_takes_all_values_of_its_type() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.INT8, [1, 4000])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4000])
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["flat"]),
        helper.make_node("DequantizeLinear", ["flat", "scale"], ["y"]),
    ]
    weights = [
        onnx.numpy_helper.from_array(np.array([4000]), "shape"),
        onnx.numpy_helper.from_array(np.float32(0.1), "scale"),
    ]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights))
    values = make_inputs([TensorSpec("x", "INT8", (1, 4000))], model)["x"]
    assert (values.min(), values.max()) == (-128, 127)


def test_an_input_without_axes_is_an_array() -> None:
    """ONNX Runtime refuses NumPy's scalars."""
    specs = [TensorSpec(datatype, datatype, ()) for datatype in ("UINT8", "INT64", "BOOL", "FP32")]
    for spec, made in zip(specs, make_inputs(specs, lookup(10)).values(), strict=True):
        assert type(made) is np.ndarray
        assert (made.shape, str(made.dtype)) == ((), spec.dtype)


def test_a_picture_of_integers_takes_all_levels() -> None:
    shapes = {"UINT8": (1, 32, 32, 3), "INT8": (1, 1, 32, 32), "INT32": (1, 3, 32, 32)}
    specs = [TensorSpec(f"x{i}", datatype, shape) for i, (datatype, shape) in enumerate(shapes.items())]
    made = make_inputs([*specs, TensorSpec("mask", "INT32", (1, 1, 32, 32))], lookup(10))
    limits = [(int(array.min()), int(array.max())) for array in made.values()]
    assert limits == [(0, 255), (-128, 127), (0, 255), (0, 1)]
    assert masks([*specs, TensorSpec("mask", "INT32", (1, 1, 32, 32))], lookup(10)) == ["mask"]
