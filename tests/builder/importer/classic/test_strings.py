"""Labels that are strings become numbers and a table; ZipMap is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.errors import ModelError
from builder.importer import import_onnx
from tests.builder.importer.classic.conftest import model_of

X = np.array([[1, 2], [3, -4], [-1, 0.5]], "f4")
STRING, FLOAT = TensorProto.STRING, TensorProto.FLOAT


def classifier(labels: list[str], **more: Any) -> onnx.NodeProto:
    return helper.make_node(
        "LinearClassifier",
        ["x"],
        ["label", "scores"],
        name="classifier",
        domain="ai.onnx.ml",
        coefficients=[1.0, 0.0, 0.0, 1.0, -1.0, -1.0],
        intercepts=[0.0, 0.1, 0.2],
        **(more or {"classlabels_strings": labels}),
    )


def names_of(model: onnx.ModelProto, run_onnx: Any, output: str) -> list[str]:
    imported = import_onnx(model, input_shapes={"x": X.shape})
    place = [spec.name for spec in imported.outputs].index(output)
    assert imported.outputs[place].datatype == "INT64"
    numbers = run_onnx(imported.onnx, {"x": X})[place]
    return [imported.labels[number] for number in numbers.reshape(-1)]


def test_a_classifier_with_names_and_a_zip_map(run_onnx: Any) -> None:
    zipped = helper.make_node(
        "ZipMap", ["scores"], ["chances"], domain="ai.onnx.ml", classlabels_strings=["a", "b", "ü c"]
    )
    model = model_of([classifier(["a", "b", "ü c"]), zipped], X, {"label": STRING, "chances": FLOAT})
    value = helper.make_map_type_proto(STRING, helper.make_tensor_type_proto(FLOAT, []))
    model.graph.output[1].type.CopyFrom(helper.make_sequence_type_proto(value))
    expected = run_onnx(model, {"x": X})
    assert names_of(model, run_onnx, "label") == expected[0].tolist()
    imported = import_onnx(model, input_shapes={"x": X.shape})
    assert [spec.shape for spec in imported.outputs] == [(3,), (3, 3)]
    found = run_onnx(imported.onnx, {"x": X})[1]
    np.testing.assert_allclose(found, [list(row.values()) for row in expected[1]], rtol=1e-6)


def test_names_that_come_from_a_table_of_weights(run_onnx: Any) -> None:
    nodes = [
        classifier([], classlabels_ints=[2, 0, 1]),
        helper.make_node("ArrayFeatureExtractor", ["names", "label"], ["row"], domain="ai.onnx.ml"),
        helper.make_node("Reshape", ["row", "flat"], ["named"]),
    ]
    model = model_of(nodes, X, {"named": STRING})
    model.graph.initializer.append(numpy_helper.from_array(np.array(["x", "y", "z"], object), "names"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "flat"))
    assert names_of(model, run_onnx, "named") == run_onnx(model, {"x": X})[0].tolist()


def test_names_that_an_encoder_makes_or_translates(run_onnx: Any) -> None:
    nodes = [
        classifier(["p", "q", "r"]),
        helper.make_node(
            "LabelEncoder",
            ["label"],
            ["named"],
            domain="ai.onnx.ml",
            keys_strings=["q", "p", "s"],
            values_strings=["Q", "P", "S"],
            default_string="other",
        ),
    ]
    model = model_of(nodes, X, {"named": STRING}, ml=2)
    assert names_of(model, run_onnx, "named") == run_onnx(model, {"x": X})[0].tolist()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([b"a", b"b\nc", b"d"], "control characters"),
        ([b"a", b"\xff\xfe", b"d"], "UTF-8"),
        ([b"a", b"b" * 300, b"d"], "at most 256 bytes"),
    ],
)
def test_labels_that_are_no_text_are_refused(labels: list[bytes], message: str) -> None:
    model = model_of([classifier(["a", "b", "c"])], X, {"label": STRING})
    attribute = next(one for one in model.graph.node[0].attribute if one.name == "classlabels_strings")
    attribute.strings[:] = labels
    with pytest.raises(ModelError, match=message):
        import_onnx(model)
