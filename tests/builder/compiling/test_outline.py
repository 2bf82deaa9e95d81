"""What a model file says about itself before it is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.outline import Outline, fixed_outline, read_outline
from builder.compiling.recognition import recognise
from builder.errors import ShapeError
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write


def model(shape: tuple[int | str, ...], names: str | None = None) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    w = helper.make_tensor("w", TensorProto.FLOAT, (1,), [1.0])
    weight = helper.make_tensor_value_info("w", TensorProto.FLOAT, (1,))
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x, weight], [y], [w])
    made = helper.make_model(graph)
    if names is not None:
        made.metadata_props.add(key="names", value=names)
    return made


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1, 3, 8), (1, 3, 8)), (("batch", 3, 8), (1, 3, 8)), ((1, 3, "width"), None), ((1, 0, 8), None)],
)
def test_fixed_shapes_are_read(
    tmp_path: Path, shape: tuple[int | str, ...], expected: tuple[int, ...] | None
) -> None:
    onnx.save(model(shape), tmp_path / "m.onnx")
    x, y = (TensorSpec(name, "FP32", expected or ()) for name in "xy")
    assert read_outline(tmp_path / "m.onnx") == (Outline((x,), (y,)) if expected else None)


def test_what_is_no_model_has_no_outline(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\x08\x07not a model")
    (tmp_path / "m.pt2").write_bytes(b"")
    for name in ("m.onnx", "m.pt2", "absent.onnx"):
        assert read_outline(tmp_path / name) is None


def test_shapes_that_the_user_gives_decide_those_of_the_results(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "to"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3, side, side])
        for name, side in (("x", "side"), ("y", "?"))
    ]
    del values[1].type.tensor_type.shape.dim[2:]
    weights = [
        helper.make_tensor("to", TensorProto.INT64, [2], [1, -1]),
        helper.make_tensor("w", TensorProto.FLOAT, [3072, 5], [0.0] * 15360),  # too large to be a shape
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    onnx.save(helper.make_model(graph, producer_name="pytorch"), tmp_path / "m.onnx")
    found = fixed_outline(tmp_path / "m.onnx", {"x": (1, 3, 32, 32)}, None)
    assert found == Outline((TensorSpec("x", "FP32", (1, 3, 32, 32)),), (TensorSpec("y", "FP32", (1, 5)),))
    with pytest.raises(ShapeError, match=r"expected a shape for each of these inputs: 'x' \[n,3,side,side\]"):
        fixed_outline(tmp_path / "m.onnx", None, None)
    with pytest.raises(ShapeError, match="dimension 1 is fixed at 3"):
        fixed_outline(tmp_path / "m.onnx", {"x": (1, 1, 32, 32)}, None)


def test_an_input_with_a_value_is_left_out(tmp_path: Path) -> None:
    onnx.save(model((1, 3)), tmp_path / "m.onnx")
    assert fixed_outline(tmp_path / "m.onnx", None, {"x": 1.0}) is None  # a model without inputs
    assert read_outline(tmp_path / "m.onnx") == fixed_outline(tmp_path / "m.onnx", None, None)


@pytest.mark.parametrize(
    ("signature", "expected"), [((), True), ((-1, 4), True), ((-1, -1), False), ((1, -1), False)]
)
def test_tensors_of_tensorflow_lite(tmp_path: Path, signature: tuple[int, ...], expected: bool) -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 4), name="x", signature=signature)]
    graph.outputs = [graph.tensor((1, 4), name="y;fused", signature=signature)]
    graph.op("SOFTMAX", graph.inputs, graph.outputs, "SoftmaxOptions", Beta=1.0)
    path = tmp_path / "m.tflite"
    path.write_bytes(write(graph))
    x, y = (TensorSpec(name, "FP32", (1, 4)) for name in "xy")
    assert read_outline(path) == (Outline((x,), (y,)) if expected else None)
    if expected:
        assert read_outline(path).hints.ends_in_softmax("y")  # type: ignore[union-attr]
        assert fixed_outline(path, {"x": (1, 4)}, None) == Outline((x,), (y,))
        assert fixed_outline(path, {"x": (2, 4)}, None) is None
        with pytest.raises(ShapeError, match="no input 'z'; its inputs are x"):
            fixed_outline(path, {"z": (1, 4)}, None)
    path.write_bytes(b"\x1c\0\0\0TFL3 and no more")
    assert read_outline(path) is None


def test_hints_are_the_operators_behind_the_outputs(tmp_path: Path) -> None:
    made = model((1, 4))
    graph = made.graph
    graph.node[0].output[0] = "sum"
    graph.node.append(helper.make_node("Softmax", ["sum"], ["soft"]))
    graph.node.append(helper.make_node("Identity", ["soft"], ["y"]))
    made.metadata_props.add(key="task", value="classify")
    onnx.save(made, tmp_path / "m.onnx")
    found = read_outline(tmp_path / "m.onnx")
    assert found is not None
    assert (found.hints.task, dict(found.hints.makers)) == ("classify", {"y": "Softmax"})
    assert found.hints.operators == {"Add", "Softmax", "Identity"}


@pytest.mark.parametrize("kinds", [("QuantizeLinear",), ("QuantizeLinear", "DequantizeLinear")])
def test_a_softmax_whose_result_is_rounded_is_one(tmp_path: Path, kinds: Sequence[str]) -> None:
    """As ONNX Runtime's quantizer writes it: a second softmax would make all scores alike."""
    made = model((1, 4))
    graph = made.graph
    graph.node[0].output[0] = "sum"
    nodes = [helper.make_node("Softmax", ["sum"], ["soft"])]
    for kind in kinds:
        nodes.append(helper.make_node(kind, [nodes[-1].output[0], "scale", "zero"], [kind]))
    nodes[-1].output[0] = "y"
    graph.node.extend(nodes)
    graph.initializer.append(helper.make_tensor("scale", TensorProto.FLOAT, [], [1 / 256]))
    graph.initializer.append(helper.make_tensor("zero", TensorProto.INT8, [], [-128]))
    if len(kinds) == 1:
        graph.output[0].type.tensor_type.elem_type = TensorProto.INT8
    onnx.save(made, tmp_path / "m.onnx")
    found = read_outline(tmp_path / "m.onnx")
    assert found is not None and found.hints.ends_in_softmax("y")
    proposal = recognise([TensorSpec("x", "FP32", (1, 3, 8, 8))], found.outputs, found.hints)
    assert proposal is not None and proposal.postprocess == "top4"


@pytest.mark.parametrize(
    ("axis", "opset", "order", "expected"),
    [
        (2, 17, None, True), (-1, 17, None, True), (None, 17, None, True), (1, 17, None, False),
        (None, 11, None, False), (1, 17, [0, 2, 1], True), (2, 17, [0, 2, 1], False),
        (2, 17, [1, 0, 2], True),
    ],
)  # fmt: skip
def test_only_a_softmax_along_the_last_axis_makes_scores_of_rows(
    tmp_path: Path, axis: int | None, opset: int, order: list[int] | None, expected: bool
) -> None:
    shape = (1, 40, 40)
    made = model(shape)
    made.opset_import[0].version = opset
    graph = made.graph
    graph.node[0].output[0] = "sum"
    attributes = {} if axis is None else {"axis": axis}
    graph.node.append(helper.make_node("Softmax", ["sum"], ["soft" if order else "y"], **attributes))
    if order:
        graph.node.append(helper.make_node("Transpose", ["soft"], ["y"], perm=order))
    onnx.save(made, tmp_path / "m.onnx")
    found = read_outline(tmp_path / "m.onnx")
    assert found is not None and found.hints.ends_in_softmax("y") == expected


def test_functions_are_left_to_the_importer(tmp_path: Path) -> None:
    given = model((1, "width"))
    opset = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    for name, callee in (("one", "other"), ("other", "one")):
        call = helper.make_node(callee, ["x"], ["y"], domain="local")
        given.functions.append(helper.make_function("local", name, ["x"], ["y"], [call], opset))
    given.opset_import.append(opset[1])
    given.graph.node.append(helper.make_node("one", ["y"], ["z"], domain="local"))
    given.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    onnx.save(given, tmp_path / "m.onnx")
    assert fixed_outline(tmp_path / "m.onnx", {"x": (1, 4)}, {}) is None


def test_strings_are_left_to_the_importer(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.STRING, ["n", "m"])
    y = helper.make_tensor_value_info("y", TensorProto.STRING, ["n", "m"])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    assert fixed_outline(tmp_path / "m.onnx", None, None) is None
