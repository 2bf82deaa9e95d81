"""Whole files as ONNX graphs: names, shapes, layouts, refusals."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from builder.errors import ShapeError, UnsupportedOperatorError
from builder.importer.tflite.conversion import convert
from builder.importer.tflite.schema import read
from tests.builder.importer.tflite.litert import distance, run_converted, run_litert
from tests.builder.importer.tflite.operator_cases import SAME, VALID
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write

CONV = {"StrideH": 1, "StrideW": 1, "Padding": SAME}


def converted(graph: FileSubgraph) -> onnx.ModelProto:
    model = convert(read(write(graph), "file"), "graph").model
    onnx.checker.check_model(model, full_check=True)
    return model


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def network() -> FileSubgraph:
    """Convolutions, a residual sum with a constant, padding, a concatenation, a mean and a product."""
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 8, 8, 3), name="picture")]
    a, b, c, d, e, f, g, h = (graph.tensor() for _ in range(8))
    graph.op(
        "CONV_2D",
        [0, graph.constant(weights(4, 3, 3, 3)), graph.constant(weights(4))],
        [a],
        "Conv2DOptions",
        **CONV,
    )
    graph.op("LOGISTIC", [a], [b])
    graph.op("MUL", [a, b], [c], "MulOptions")
    graph.op("ADD", [c, graph.constant(weights(4))], [d], "AddOptions")
    graph.op("PAD", [d, graph.constant([[0, 0], [1, 1], [1, 0], [0, 0]])], [e])
    graph.op(
        "CONV_2D",
        [e, graph.constant(weights(4, 3, 2, 4)), graph.constant(weights(4))],
        [f],
        "Conv2DOptions",
        **(CONV | {"Padding": VALID}),
    )
    graph.op("CONCATENATION", [d, f], [g], "ConcatenationOptions", Axis=3)
    graph.op("MEAN", [g, graph.constant([1, 2])], [h], "ReducerOptions", KeepDims=False)
    out = graph.tensor(name="answer;fused/BiasAdd")
    graph.op("FULLY_CONNECTED", [h, graph.constant(weights(5, 8)), -1], [out], "FullyConnectedOptions")
    graph.outputs = [out]
    return graph


def test_a_network_has_transposes_only_at_its_edges() -> None:
    model = converted(network())
    counts = Counter(node.op_type for node in model.graph.node)
    assert counts["Transpose"] == 1
    assert counts["Pad"] == 0
    assert [i.name for i in model.graph.input] == ["picture"]
    assert [o.name for o in model.graph.output] == ["answer"]
    raw, feed = write(network()), [weights(1, 8, 8, 3)]
    theirs = run_litert(raw, feed)
    assert not isinstance(theirs, str)
    assert distance(run_converted(raw, feed), theirs) < 1e-5


def test_inputs_get_other_shapes() -> None:
    model = convert(read(write(network()), "file"), "graph", {"picture": (2, 6, 5, 3)}).model
    [output] = model.graph.output
    assert [dim.dim_value for dim in output.type.tensor_type.shape.dim] == [2, 5]
    with pytest.raises(ShapeError, match="expected 4 dimensions"):
        convert(read(write(network()), "file"), "graph", {"picture": (2, 6, 5)})
    with pytest.raises(ShapeError, match="inputs picture, got one of 'image'"):
        convert(read(write(network()), "file"), "graph", {"image": (1, 8, 8, 3)})


def test_shapes_that_the_graph_computes_are_known() -> None:
    """What Keras's Flatten becomes: the batch is read from the shape and packed into a new one."""
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((2, 3, 4))]
    one, two, three = (graph.tensor((), "int32") for _ in range(3))
    graph.op("SHAPE", [0], [one], "ShapeOptions", OutType=2)
    first = [graph.constant([value]) for value in (0, 1, 1)]
    graph.op("STRIDED_SLICE", [one, *first], [two], "StridedSliceOptions", ShrinkAxisMask=1)
    graph.op("PACK", [two, graph.constant(12)], [three], "PackOptions", ValuesCount=2)
    last = graph.tensor()
    graph.op("RESHAPE", [0, three], [last])
    graph.outputs = [last]
    model = converted(graph)
    assert [node.op_type for node in model.graph.node] == ["Reshape", "Identity"]


def test_weights_stay_whole_numbers() -> None:
    graph = FileSubgraph()
    x = graph.tensor((1, 4, 4, 2), "int8", scales=[0.1], zeros=[-3])
    w = graph.constant(np.ones((3, 1, 1, 2), np.int8), scales=[0.1, 0.2, 0.3], zeros=[0, 0, 0])
    b = graph.constant(np.ones(3, np.int32), scales=[0.01, 0.02, 0.03], zeros=[0, 0, 0])
    y = graph.tensor((), "int8", scales=[0.2], zeros=[4])
    graph.op("CONV_2D", [x, w, b], [y], "Conv2DOptions", **CONV)
    graph.inputs, graph.outputs = [x], [y]
    model = converted(graph)
    kinds = {tuple(t.dims): t.data_type for t in model.graph.initializer}
    assert kinds[3, 2, 1, 1] == onnx.TensorProto.INT8
    counts = Counter(node.op_type for node in model.graph.node)
    assert (counts["DequantizeLinear"], counts["QuantizeLinear"]) == (3, 1)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(
    ("operator", "second", "options"),
    [
        ("RESHAPE", [1, 8, 8], ""),
        ("TRANSPOSE", [0, 2, 1, 3], ""),
        ("TILE", [1, 1, 2, 1], ""),
        ("PAD", [[0, 0], [1, 0], [0, 2], [0, 0]], ""),
        ("GATHER", [1, 0, 1], "GatherOptions"),
    ],
)
def test_integers_are_moved_as_they_are_to_an_output_of_another_scale(
    operator: str, second: object, options: str, dtype: str
) -> None:
    """As LiteRT does: the file of a detector of Google's AutoML has such an output."""
    graph = FileSubgraph()
    zero = 20 if dtype == "int8" else 130
    x = graph.tensor((1, 4, 4, 4), dtype, scales=[0.176], zeros=[zero])
    y = graph.tensor((), dtype, scales=[0.15], zeros=[zero - 3])
    graph.op(
        operator,
        [x, graph.constant(second)],
        [y],
        options,
        **({"Axis": 1} if options == "GatherOptions" else {}),
    )
    graph.inputs, graph.outputs = [x], [y]
    limits = np.iinfo(dtype)
    feed = [np.random.default_rng(2).integers(limits.min, limits.max, (1, 4, 4, 4), dtype, endpoint=True)]
    theirs = run_litert(write(graph), feed)
    assert not isinstance(theirs, str)
    np.testing.assert_array_equal(run_converted(write(graph), feed)[0], theirs[0])


def test_unknown_operators_are_refused_together() -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 4))]
    a, b, c = (graph.tensor() for _ in range(3))
    graph.op("FlexErf", [0], [a])
    graph.op("MyOperator", [a], [b])
    graph.op("HASHTABLE_LOOKUP", [b], [c])
    graph.outputs = [c]
    with pytest.raises(UnsupportedOperatorError) as caught:
        converted(graph)
    assert str(caught.value) == (
        "3 operators cannot be imported: HASHTABLE_LOOKUP (operator 2); "
        "custom operator FlexErf (operator 0); "
        "custom operator MyOperator (operator 1)"
    )
    assert "TFLITE_BUILTINS" in (caught.value.hint or "")


def test_stablehlo_is_refused_with_what_to_change() -> None:
    graph = FileSubgraph()
    graph.inputs, graph.outputs = [graph.tensor((1, 4))], [graph.tensor()]
    graph.op("STABLEHLO_CONVOLUTION", graph.inputs, graph.outputs)
    with pytest.raises(UnsupportedOperatorError) as caught:
        converted(graph)
    assert "TFLITE_BUILTINS" in (caught.value.hint or "")


def test_a_refusal_names_the_operator_and_the_reason() -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 4)), graph.tensor((2,), "int32")]
    graph.outputs = [graph.tensor(name="flat")]
    graph.op("RESHAPE", graph.inputs, graph.outputs)
    with pytest.raises(UnsupportedOperatorError) as caught:
        converted(graph)
    assert str(caught.value) == (
        "RESHAPE (operator 0, makes 'flat'): its shape 't1' depends on values that are only known at run time"
    )


@pytest.mark.parametrize(
    ("dtype", "reason"), [("string", "STRING"), ("complex64", "COMPLEX64"), ("resource", "RESOURCE")]
)
def test_a_datatype_that_cannot_be_used_is_named(dtype: str, reason: str) -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 4), dtype, name="words")]
    graph.outputs = [graph.tensor()]
    graph.op("RESHAPE", [0, graph.constant([4])], graph.outputs)
    with pytest.raises(UnsupportedOperatorError, match=f"'words'.*{reason}"):
        converted(graph)


def test_weights_with_a_scale_for_each_block_are_refused_with_what_to_do() -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 64))]
    graph.outputs = [graph.tensor((1, 2), name="y")]
    weight = graph.constant(np.zeros((2, 64), np.int8), block=32, name="w")
    graph.op("FULLY_CONNECTED", [0, weight], graph.outputs, "FullyConnectedOptions")
    with pytest.raises(UnsupportedOperatorError) as caught:
        converted(graph)
    assert str(caught.value) == (
        "FULLY_CONNECTED (operator 0, makes 'y'): its input 'w' cannot be read: "
        "it has a scale for each block of 32 numbers"
    )
    assert caught.value.hint == "quantise the model again, with a scale per channel or per tensor"


def test_options_of_another_operator_are_refused() -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 4))]
    graph.outputs = [graph.tensor()]
    graph.op("SOFTMAX", [0], graph.outputs, "Conv2DOptions", StrideH=1)
    with pytest.raises(UnsupportedOperatorError, match="expected SoftmaxOptions, got Conv2DOptions"):
        converted(graph)


def test_more_parts_than_shapes_have_dimensions() -> None:
    graph = FileSubgraph()
    x = graph.tensor((300, 2))
    parts, last = [graph.tensor((1, 2)) for _ in range(300)], graph.tensor((1, 2))
    graph.op("SPLIT", [graph.constant(np.int32(0)), x], parts, "SplitOptions", NumSplits=300)
    graph.op("SUB", [parts[0], parts[-1]], [last], "SubOptions")
    graph.inputs, graph.outputs = [x], [last]
    feed = [np.arange(600, dtype=np.float32).reshape(300, 2)]
    [result] = run_converted(write(graph), feed)
    assert result.tolist() == [[-598.0, -598.0]]
