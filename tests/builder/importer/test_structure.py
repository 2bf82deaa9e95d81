"""Invalid graphs are refused with a message that names the fault; harmless faults are repaired."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.errors import ModelError, ShapeError, UnsupportedOperatorError
from builder.importer.onnx_import import import_onnx
from builder.importer.structure import prepare

ModelMaker = Callable[..., onnx.ModelProto]
VECTOR = {"x": [3]}


def node(
    op: str, inputs: list[str], outputs: list[str], name: str = "", **attributes: object
) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, name=name, **attributes)


def refused(model: onnx.ModelProto, kind: type[ModelError] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        import_onnx(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_cycle_is_named_by_its_nodes(make_model: ModelMaker) -> None:
    nodes = [node("Add", ["x", "b"], ["a"], "first"), node("Relu", ["a"], ["b"], "second")]
    message = refused(make_model(nodes, VECTOR, {"b": [3]}))
    assert "cycle" in message
    assert "first" in message
    assert "second" in message


def test_a_missing_weight_is_named(make_model: ModelMaker) -> None:
    message = refused(make_model([node("Add", ["x", "w"], ["y"], "sum")], VECTOR, {"y": [3]}))
    assert "'sum'" in message
    assert "'w'" in message


def test_a_value_made_twice_is_refused(make_model: ModelMaker) -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("Abs", ["x"], ["y"])]
    assert "'y' made 2 times" in refused(make_model(nodes, VECTOR, {"y": [3]}))


def test_an_output_that_no_node_makes_is_refused(make_model: ModelMaker) -> None:
    assert "'z'" in refused(make_model([node("Relu", ["x"], ["y"])], VECTOR, {"z": [3]}))


def test_an_empty_graph_is_refused(make_model: ModelMaker) -> None:
    refused(make_model([], VECTOR, {"y": [3]}))


def test_unknown_operators_are_all_named_with_their_nodes(make_model: ModelMaker) -> None:
    nodes = [
        node("Frobnicate", ["x"], ["a"], "one"),
        node("Relu", ["a"], ["b"], "fine"),
        node("Frobnicate", ["b"], ["c"], "two"),
        node("Twiddle", ["c"], ["y"], "three"),
    ]
    message = refused(make_model(nodes, VECTOR, {"y": [3]}), UnsupportedOperatorError)
    assert "Frobnicate (one, two)" in message
    assert "Twiddle (three)" in message
    assert "fine" not in message


def test_an_operator_newer_than_the_opset_is_named(make_model: ModelMaker) -> None:
    model = make_model([node("Gelu", ["x"], ["y"], "gelu")], VECTOR, {"y": [3]}, opset=17)
    assert "opset 17: Gelu (gelu)" in refused(model, UnsupportedOperatorError)


def test_an_unknown_domain_is_named(make_model: ModelMaker) -> None:
    model = make_model([node("Magic", ["x"], ["y"], "spell", domain="my.own")], VECTOR, {"y": [3]})
    model.opset_import.append(helper.make_opsetid("my.own", 1))
    message = refused(model, UnsupportedOperatorError)
    assert "my.own.Magic (spell)" in message


def test_an_unknown_domain_without_an_opset_is_refused(make_model: ModelMaker) -> None:
    refused(make_model([node("Magic", ["x"], ["y"], domain="my.own")], VECTOR, {"y": [3]}))


@pytest.mark.parametrize("opset", [0, -1, 10_000])
def test_an_impossible_opset_is_refused(relu: onnx.ModelProto, opset: int) -> None:
    relu.opset_import[0].version = opset
    assert f"got {opset}" in refused(relu)


@pytest.mark.parametrize("version", [0, 1, 2, 99])
def test_an_impossible_ir_version_is_refused(relu: onnx.ModelProto, version: int) -> None:
    relu.ir_version = version
    assert f"got {version}" in refused(relu)


def test_a_model_without_opset_is_refused(relu: onnx.ModelProto) -> None:
    del relu.opset_import[:]
    refused(relu)


def test_strings_as_inputs_are_refused(make_model: ModelMaker) -> None:
    model = make_model(
        [node("Identity", ["x"], ["y"])], {"x": ([3], TensorProto.STRING)}, {"y": ([3], TensorProto.STRING)}
    )
    assert "tensor of strings" in refused(model)


def test_a_sequence_as_an_input_is_refused(relu: onnx.ModelProto) -> None:
    relu.graph.input[0].type.sequence_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    assert "'x', a sequence" in refused(relu)


def test_an_input_without_a_datatype_is_refused(relu: onnx.ModelProto) -> None:
    relu.graph.input[0].type.tensor_type.elem_type = 0
    refused(relu)


@pytest.mark.parametrize("dtype", [99, -1])
def test_an_unknown_datatype_is_refused(relu: onnx.ModelProto, dtype: int) -> None:
    relu.graph.input[0].type.tensor_type.elem_type = dtype
    refused(relu)


def test_a_truncated_weight_is_named(make_model: ModelMaker) -> None:
    model = make_model([node("Add", ["x", "w"], ["y"])], VECTOR, {"y": [3]}, {"w": np.ones(3, np.float32)})
    model.graph.initializer[0].raw_data = bytes(8)
    assert "weight 'w' of shape [3]: expected 12 bytes, got 8" in refused(model)


@pytest.mark.parametrize("dims", [[-3], [2**62, 2**62], [4]])
def test_a_weight_of_another_size_is_refused(make_model: ModelMaker, dims: list[int]) -> None:
    model = make_model([node("Add", ["x", "w"], ["y"])], VECTOR, {"y": [3]}, {"w": np.ones(3, np.float32)})
    model.graph.initializer[0].dims[:] = dims
    assert "'w'" in refused(model)


@pytest.mark.parametrize(
    ("dims", "dtype"), [([], TensorProto.FLOAT), ([4], TensorProto.COMPLEX64), ([9], TensorProto.INT4)]
)
def test_values_that_do_not_fit_the_shape_are_refused(
    make_model: ModelMaker, dims: list[int], dtype: int
) -> None:
    model = make_model([node("Add", ["x", "w"], ["y"])], VECTOR, {"y": [3]}, {"w": np.ones(3, np.float32)})
    field = helper.tensor_dtype_to_field(dtype)
    weight = TensorProto(name="w", dims=dims, data_type=dtype, **{field: [1, 1, 1, 1]})
    model.graph.initializer[0].CopyFrom(weight)
    assert "weight 'w' of shape" in refused(model)


def test_the_values_of_a_constant_are_checked_in_subgraphs_too(make_model: ModelMaker) -> None:
    wrong = TensorProto(name="c", dims=[2], data_type=TensorProto.FLOAT, float_data=[1.0])
    branch = helper.make_graph([node("Constant", [], ["c"], value=wrong)], "b", [], [])
    chosen = node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    assert "expected 2 values, got 1" in refused(make_model([chosen], VECTOR, {"y": [2]}))


def test_a_wrong_attribute_is_refused(make_model: ModelMaker) -> None:
    model = make_model([node("Softmax", ["x"], ["y"], "soft", axis="last")], VECTOR, {"y": [3]})
    refused(model)


def test_a_missing_attribute_is_refused(make_model: ModelMaker) -> None:
    refused(make_model([node("Concat", ["x", "x"], ["y"], "join")], VECTOR, {"y": [6]}))


def test_shapes_that_contradict_each_other_are_refused(make_model: ModelMaker) -> None:
    model = make_model(
        [node("MatMul", ["x", "w"], ["y"], "product")],
        {"x": [2, 3]},
        {"y": [2, 4]},
        {"w": np.ones((5, 4), np.float32)},
    )
    assert "product" in refused(model)


def test_a_reshape_to_another_size_is_refused(make_model: ModelMaker) -> None:
    model = make_model(
        [node("Reshape", ["x", "s"], ["y"], "re")], {"x": [2, 3]}, {"y": [7]}, {"s": np.array([7])}
    )
    refused(model)


def test_graphs_nested_too_deep_are_refused(make_model: ModelMaker) -> None:
    body = helper.make_graph(
        [node("Identity", ["x"], ["y"])],
        "leaf",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
    )
    for _ in range(20):
        inner = node("If", ["c"], ["y"], then_branch=body, else_branch=body)
        # Both branches share one message: otherwise its size doubles with each level.
        inner.attribute[1].g.CopyFrom(
            helper.make_graph([node("Identity", ["x"], ["y"])], "leaf", [], body.output)
        )
        body = helper.make_graph([inner], "branch", [], body.output)
    model = make_model(
        [node("If", ["c"], ["y"], then_branch=body, else_branch=body)],
        {"x": [3], "c": ([], TensorProto.BOOL)},
        {"y": [3]},
    )
    assert "levels of nested graphs" in refused(model)


def test_nodes_out_of_order_are_sorted(make_model: ModelMaker) -> None:
    nodes = [node("Relu", ["a"], ["y"], "last"), node("Abs", ["x"], ["a"], "first")]
    prepared = prepare(make_model(nodes, VECTOR, {"y": [3]}))
    assert [n.name for n in prepared.graph.node] == ["first", "last"]


def test_nodes_without_a_name_get_a_unique_one(make_model: ModelMaker) -> None:
    nodes = [node("Relu", ["x"], ["a"]), node("Relu", ["a"], ["y"])]
    names = [n.name for n in prepare(make_model(nodes, VECTOR, {"y": [3]})).graph.node]
    assert all(names)
    assert len(set(names)) == 2


def test_weights_listed_as_inputs_are_removed_from_the_inputs(make_model: ModelMaker) -> None:
    model = make_model(
        [node("Add", ["x", "w"], ["y"])],
        {"x": [3], "w": [3]},
        {"y": [3]},
        {"w": np.ones(3, np.float32)},
        ir_version=3,
    )
    assert [spec.name for spec in import_onnx(model).inputs] == ["x"]


def test_weights_not_listed_as_inputs_in_an_old_file_are_accepted(make_model: ModelMaker) -> None:
    model = make_model(
        [node("Add", ["x", "w"], ["y"])], VECTOR, {"y": [3]}, {"w": np.ones(3, np.float32)}, ir_version=3
    )
    assert [spec.name for spec in import_onnx(model).inputs] == ["x"]


def test_functions_of_the_file_are_inlined(make_model: ModelMaker) -> None:
    model = make_model([node("Twice", ["x"], ["y"], domain="local")], VECTOR, {"y": [3]})
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.functions.append(
        helper.make_function(
            "local", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
        )
    )
    assert [n.op_type for n in prepare(model).graph.node] == ["Add"]


@pytest.mark.parametrize("given", [None, 3.0])
@pytest.mark.parametrize("outer", [False, True])
def test_a_call_without_an_attribute_gets_its_default(
    make_model: ModelMaker, run_onnx: Any, given: float | None, outer: bool
) -> None:
    inner = node("Elu", ["a"], ["b"])
    inner.attribute.append(
        onnx.AttributeProto(name="alpha", ref_attr_name="alpha", type=onnx.AttributeProto.FLOAT)
    )
    standard = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    default = [helper.make_attribute("alpha", 0.25)]
    functions = [helper.make_function("local", "Bent", ["a"], ["b"], [inner], standard, [], default)]
    if outer:
        call = node("Bent", ["a"], ["b"], domain="local")
        functions.append(helper.make_function("local", "Around", ["a"], ["b"], [call], standard))
    name = "Around" if outer else "Bent"
    call = node(name, ["x"], ["y"], domain="local")
    if given is not None and not outer:
        call.attribute.append(helper.make_attribute("alpha", given))
    model = make_model([call], VECTOR, {"y": [3]}, ir_version=9)
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.functions.extend(functions)
    x = np.array([-1.0, -2.0, 1.0], np.float32)
    alpha = 0.25 if given is None or outer else given
    (got,) = run_onnx(prepare(model), {"x": x})
    np.testing.assert_allclose(got, np.where(x < 0, alpha * np.expm1(x), x), rtol=1e-6)


def test_the_model_that_was_given_is_not_changed(relu: onnx.ModelProto) -> None:
    before = relu.SerializeToString(deterministic=True)
    import_onnx(relu)
    assert relu.SerializeToString(deterministic=True) == before


def test_a_name_that_no_tensor_may_have_is_refused(make_model: ModelMaker) -> None:
    model = make_model([node("Relu", ["a;b"], ["y"])], {"a;b": [3]}, {"y": [3]})
    assert "a;b" in refused(model)


def test_a_datatype_that_no_tensor_may_have_is_refused(make_model: ModelMaker) -> None:
    kind = TensorProto.COMPLEX64
    refused(make_model([node("Identity", ["x"], ["y"])], {"x": ([3], kind)}, {"y": ([3], kind)}, opset=19))


def test_a_shape_error_is_a_model_error() -> None:
    assert issubclass(ShapeError, ModelError)


def test_a_weight_that_is_an_output_is_made_by_a_node(make_model: ModelMaker, run_onnx: Any) -> None:
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    weights = {"w": np.array([1.0, 2.0], np.float32)}
    model = make_model(nodes, {"x": [2]}, {"y": [2], "w": [2]}, weights)
    x = np.array([3.0, 4.0], np.float32)
    imported = import_onnx(model)
    assert [spec.name for spec in imported.outputs] == ["y", "w"]
    for found, wanted in zip(run_onnx(imported.onnx, {"x": x}), ([4, 6], [1, 2]), strict=True):
        np.testing.assert_array_equal(found, wanted)


def outputs_of(model: onnx.ModelProto) -> list[str]:
    return [output.name for output in import_onnx(model).outputs]


def test_an_input_that_is_an_output_gets_a_new_name(make_model: ModelMaker) -> None:
    model = make_model([helper.make_node("Relu", ["x"], ["y"])], {"x": [2]}, {"y": [2], "x": [2]})
    assert outputs_of(model) == ["y", "x_2"]


def test_an_output_that_is_listed_twice_gets_a_new_name(make_model: ModelMaker) -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("Neg", ["y"], ["y_2"])]
    model = make_model(nodes, VECTOR, {"y": [3], "y_2": [3]})
    model.graph.output.extend([model.graph.output[0], model.graph.output[0]])
    assert outputs_of(model) == ["y", "y_2", "y_3", "y_4"]


def test_an_output_without_a_type_gets_the_one_that_follows(make_model: ModelMaker) -> None:
    model = make_model([node("Shape", ["x"], ["s"]), node("Cast", ["x"], ["y"], to=7)], VECTOR, {"y": [3]})
    del model.graph.output[:]
    model.graph.output.add().name = "y"
    assert [(o.name, o.dtype, o.shape) for o in import_onnx(model).outputs] == [("y", "int64", (3,))]


@pytest.mark.parametrize("shape", [[2, 3], [3], ["batch", 3], [1]])
def test_the_shape_that_an_output_declares_does_not_count(make_model: ModelMaker, shape: list[Any]) -> None:
    imported = import_onnx(make_model([node("Relu", ["x"], ["y"])], VECTOR, {"y": shape}))
    assert [output.shape for output in imported.outputs] == [(3,)]


def test_an_input_without_a_shape_takes_the_given_one(make_model: ModelMaker) -> None:
    model = make_model([node("Relu", ["x"], ["y"])], {"x": None}, {"y": None})
    assert import_onnx(model, input_shapes={"x": [2, 3]}).outputs[0].shape == (2, 3)
    assert "'x' of unknown rank" in refused(model, ShapeError)


def test_a_graph_without_a_name_is_taken(make_model: ModelMaker) -> None:
    model = make_model([node("Relu", ["x"], ["y"])], VECTOR, {"y": [3]})
    model.graph.ClearField("name")
    assert import_onnx(model).name == "model"


def test_a_model_without_inputs_is_refused_as_constant(make_model: ModelMaker) -> None:
    model = make_model([node("Constant", [], ["y"], value_floats=[1.0, 2.0])], {}, {"y": [2]})
    assert "whose outputs are constants" in refused(model)


def test_a_weight_of_an_unknown_datatype_in_memory_is_refused(make_model: ModelMaker) -> None:
    model = make_model([node("Add", ["x", "w"], ["y"])], VECTOR, {"y": [3]}, {"w": np.ones(3, np.float32)})
    model.graph.initializer[0].data_type = 29
    assert "weight 'w' has no known datatype" in refused(model)


def test_an_empty_message_is_refused() -> None:
    assert "expected an ONNX model with a graph" in refused(onnx.ModelProto())


def test_an_optional_tensor_as_an_input_is_a_tensor(make_model: ModelMaker) -> None:
    nodes = [node("OptionalGetElement", ["x"], ["e"]), node("Relu", ["e"], ["y"])]
    model = make_model(nodes, VECTOR, {"y": [3]}, opset=18)
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [3])
    model.graph.input[0].type.CopyFrom(helper.make_optional_type_proto(tensor))
    assert [(i.name, i.shape) for i in import_onnx(model).inputs] == [("x", (3,))]


def test_an_optional_that_is_known_decides_a_branch(make_model: ModelMaker) -> None:
    nothing = helper.make_node(
        "Optional", [], ["o"], type=helper.make_tensor_type_proto(TensorProto.FLOAT, [3])
    )
    for maker, expected in ((node("Optional", ["x"], ["o"]), "Neg"), (nothing, "Abs")):
        branches = {
            "then_branch": graph_of(
                [node("OptionalGetElement", ["o"], ["e"]), node("Neg", ["e"], ["n"])], "n"
            ),
            "else_branch": graph_of([node("Abs", ["x"], ["a"])], "a"),
        }
        nodes = [
            maker,
            node("Identity", ["o"], ["p"]),
            node("OptionalHasElement", ["p"], ["h"]),
            node("If", ["h"], ["y"], **branches),
        ]
        imported = import_onnx(make_model(nodes, VECTOR, {"y": [3]}, opset=18))
        assert [made.op_type for made in imported.onnx.graph.node] == [expected]


def test_nodes_of_a_branch_are_sorted(make_model: ModelMaker) -> None:
    branches = {
        "then_branch": graph_of([node("Neg", ["p"], ["n"]), node("Relu", ["x"], ["p"])], "n"),
        "else_branch": graph_of([node("Abs", ["x"], ["a"])], "a"),
    }
    nodes = [node("If", ["c"], ["y"], **branches)]
    import_onnx(make_model(nodes, {**VECTOR, "c": ([], TensorProto.BOOL)}, {"y": [3]}))


def graph_of(nodes: list[onnx.NodeProto], output: str) -> onnx.GraphProto:
    made = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, "branch", [], [made])
