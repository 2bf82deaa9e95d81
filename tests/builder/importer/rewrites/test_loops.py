"""Loop and Scan, unrolled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from builder.importer import import_onnx
from tests.builder.importer.rewrites.cases import BOOL, INT64, ModelMaker, operators


def test_a_loop_that_collects_rows(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Mul", ["s", "factor"], ["scaled"]),
            helper.make_node("Gather", ["x", "i"], ["row"], axis=0),
            helper.make_node("Add", ["scaled", "row"], ["t"]),
            helper.make_node("Add", ["t", "t"], ["seen"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("go", BOOL, []),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, [3]),
        ],
        [
            helper.make_tensor_value_info("on", BOOL, []),
            helper.make_tensor_value_info("t", TensorProto.FLOAT, [3]),
            helper.make_tensor_value_info("seen", TensorProto.FLOAT, [3]),
        ],
        initializer=[numpy_helper.from_array(np.float32(0.5), "factor")],
    )
    node = helper.make_node("Loop", ["count", "go_on", "start"], ["last", "rows"], body=body)
    weights = {"count": np.array(4), "go_on": np.array(True), "start": np.ones(3, np.float32)}
    model = make_model([node], {"x": [4, 3]}, {"last": [3], "rows": [4, 3]}, weights)
    assert "Loop" not in operators(agrees(model, noise(4, 3)))


def test_a_loop_whose_number_of_the_step_is_declared_as_one_element(
    make_model: ModelMaker, noise: Any, agrees: Any
) -> None:
    ints = lambda name, shape: helper.make_tensor_value_info(name, INT64, shape)  # noqa: E731
    go = [helper.make_tensor_value_info(name, BOOL, []) for name in ("go", "on")]
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Add", ["i", "one"], ["end"]),
            helper.make_node("Slice", ["x", "i", "end"], ["row"]),
        ],
        "body",
        [ints("i", [1]), go[0]],
        [go[1], helper.make_tensor_value_info("row", TensorProto.FLOAT, [1, 3])],
    )
    node = helper.make_node("Loop", ["count", "go_on"], ["rows"], body=body)
    weights = {"count": np.array([4]), "go_on": np.array(True), "one": np.array(1)}
    model = make_model([node], {"x": [4, 3]}, {"rows": [4, 1, 3]}, weights)
    assert "Loop" not in operators(agrees(model, noise(4, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [0, 1])
def test_a_scan(make_model: ModelMaker, noise: Any, agrees: Any, backwards: int) -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Identity", ["t"], ["o"])],
        "body",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "se"],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "to"],
    )
    node = helper.make_node(
        "Scan",
        ["start", "x"],
        ["last", "rows"],
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[1],
        scan_input_directions=[backwards],
        scan_output_directions=[backwards],
    )
    model = make_model(
        [node], {"x": [3, 4]}, {"last": [3], "rows": [4, 3]}, {"start": np.zeros(3, np.float32)}
    )
    agrees(model, noise(3, 4))


CROPS = """<ir_version: 7, opset_import: ["" : 13]>
    g (float[2,9,11,3] x, float[3,4] boxes, int32[3] which) => (float[3,5,6,3] y) {
        count = Size(which) yes = Constant<value = bool {1}>()
        y = Loop(count, yes) <body = step (int64[1] i, bool c) => (bool again, float[a,b,d] crop) {
            zero = Constant<value = int32[1] {0}>() one = Constant<value = int32[1] {1}>()
            zero_long = Constant<value = int64[1] {0}>() one_long = Constant<value = int64[1] {1}>()
            low = Constant<value = float[2] {0, 0}>() high = Constant<value = float[2] {1, 1}>()
            two = Constant<value = int64[1] {2}>() four = Constant<value = int64[1] {4}>()
            size = Constant<value = int64[2] {5, 6}>() none = Constant<value = float[0] {}>()
            after = Add(i, one_long) first = Slice(which, i, after) last = Add(first, one)
            picture = Slice(x, first, last, zero) turned = Transpose<perm = [0, 3, 1, 2]>(picture)
            box = Slice(boxes, i, after, zero_long) flat = Reshape(box, four)
            begin = Slice(flat, zero_long, two) end = Slice(flat, two, four)
            roi = Concat<axis = 0>(low, begin, high, end)
            shape = Shape(turned) kept = Slice(shape, zero_long, two) sizes = Concat<axis = 0>(kept, size)
            resized = Resize<mode = "linear", extrapolation_value = 0.5,
                coordinate_transformation_mode = "tf_crop_and_resize">(turned, roi, none, sizes)
            back = Transpose<perm = [0, 2, 3, 1]>(resized)
            crop = Squeeze(back, zero_long) again = Identity(c)
        }>
    }
"""


def test_crops_of_pictures_as_tf2onnx_writes_them(run_onnx: Any) -> None:
    model = parser.parse_model(CROPS)
    boxes = np.array([[0.1, 0.2, 0.8, 0.9], [-0.2, 0.1, 1.3, 0.6], [0.9, 0.8, 0.1, 0.2]], np.float32)
    given = {
        "x": np.random.default_rng(0).standard_normal((2, 9, 11, 3)).astype(np.float32),
        "boxes": boxes,
        "which": np.array([1, 0, -2], np.int32),
    }
    [found], [wanted] = run_onnx(import_onnx(model).onnx, given), run_onnx(model, given)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
