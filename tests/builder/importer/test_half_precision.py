"""Models in float16 and bfloat16 become float32 models that agree with them within their rounding."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, defs, helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from builder.errors import ModelError, UnsupportedOperatorError
from builder.importer import half_precision, import_onnx
from builder.importer.half_precision import HALVES, TYPE_ATTRIBUTES

FLOAT, F16, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
DTYPES = {F16: np.dtype("float16"), BF16: np.dtype(ml_dtypes.bfloat16)}
# One unit in the last place, relative.
STEP = {F16: 2.0**-10, BF16: 2.0**-7}


def info(name: str, shape: list[int] | None, kind: int = F16) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: dict[str, Any] | None = None,
    opset: int = 22,
    **more: Any,
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, **more)


def halves_inside(model: onnx.ModelProto) -> list[str]:
    """Return the names of half-precision values between the edges of a model."""
    edge = {value.name for value in (*model.graph.input, *model.graph.output)}
    named = [v.name for v in model.graph.value_info if v.type.tensor_type.elem_type in HALVES]
    return [name for name in named if name not in edge] + [
        tensor.name for tensor in model.graph.initializer if tensor.data_type in HALVES
    ]


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def run_reference(model: onnx.ModelProto, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
    return [np.asarray(result) for result in ReferenceEvaluator(model).run(None, feeds)]


def noise(*shape: int, seed: int = 0) -> NDArray[np.float16]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def conv_net(kind: int) -> onnx.ModelProto:
    weights = {
        "w": noise(8, 3, 3, 3).astype(DTYPES[kind]),
        "b": noise(8).astype(DTYPES[kind]),
        "v": noise(200, 5).astype(DTYPES[kind]),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("HardSwish", ["c"], ["h"]),
        helper.make_node("Flatten", ["h"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    return model_of(nodes, [info("x", [1, 3, 10, 10], kind)], [info("y", [1, 5], kind)], weights)


# Each computes y from x, of shape [2, 3, 4] and between -3 and 3, and from weights.
ONE: NDArray[np.float16] = np.float16(1) + np.abs(noise(4))
OPERATORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        op: ({}, {}) for op in ("Abs", "Neg", "Exp", "Tanh", "Sigmoid", "Erf", "Relu", "Sin", "Floor", "Sign")
    },
    **{
        op: ({}, {})
        for op in ("Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Selu", "Softplus")
    },
    **{op: ({"w": ONE}, {}) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu")},
    **{op: ({}, {"axis": 1}) for op in ("Softmax", "LogSoftmax", "Hardmax")},
    **{op: ({"axes": np.array([1])}, {}) for op in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2")},
    "CumSum": ({"axis": np.array(2)}, {}),
    "Clip": ({"low": np.float16(-1), "high": np.float16(1.5)}, {}),
    "Conv": ({"w": noise(5, 3, 3), "b": noise(5)}, {}),
    "ConvTranspose": ({"w": noise(3, 5, 3), "b": noise(5)}, {}),
    "Concat": ({"w": noise(2, 1, 4)}, {"axis": 1}),
    "Gather": ({"i": np.array([2, 0])}, {"axis": 1}),
    "InstanceNormalization": ({"s": noise(3), "b": noise(3)}, {"epsilon": 1e-3}),
    "LayerNormalization": ({"s": ONE, "b": noise(4)}, {"epsilon": 1e-3}),
    "RMSNormalization": ({"s": ONE}, {"epsilon": 1e-3, "stash_type": F16}),
    "LpNormalization": ({}, {"axis": 1}),
    "MatMul": ({"w": noise(4, 6)}, {}),
    "MaxPool": ({}, {"kernel_shape": [2]}),
    "AveragePool": ({}, {"kernel_shape": [3], "pads": [1, 1]}),
    "Pad": ({"pads": np.array([0, 0, 1, 0, 0, 2]), "value": np.float16(0.1)}, {}),
    "Pow": ({"w": np.float16(2)}, {}),
    "Resize": ({"": np.empty(0), "scales": np.array([1, 1, 2], np.float32)}, {"mode": "linear"}),
    "Slice": ({"from": np.array([1]), "to": np.array([3]), "axes": np.array([2])}, {}),
    "Tile": ({"repeats": np.array([1, 2, 1])}, {}),
    "Transpose": ({}, {"perm": [2, 0, 1]}),
    "Trilu": ({}, {"upper": 0}),
}


def single(op: str, kind: int) -> onnx.ModelProto:
    weights, options = OPERATORS[op]
    stored = {
        name: value.astype(DTYPES[kind]) if value.dtype == np.float16 else value
        for name, value in ((n, np.asarray(v)) for n, v in weights.items())
        if name
    }
    options = {name: kind if name == "stash_type" else value for name, value in options.items()}
    node = helper.make_node(op, ["x", *weights], ["y"], **options)
    opset = 23 if op == "RMSNormalization" else 22
    model = model_of([node], [info("x", [2, 3, 4], kind)], [info("y", None, kind)], stored, opset)
    return shape_inference.infer_shapes(model, data_prop=True)


@pytest.mark.parametrize("op", OPERATORS)
def test_an_operator_in_float16_agrees_with_onnx_runtime(op: str, run_onnx: Any, run_relax: Any) -> None:
    model = single(op, F16)
    imported = import_onnx(model)
    x = np.clip(noise(2, 3, 4, seed=1), -3, 3)
    [expected] = run_onnx(model, {"x": x})
    assert not halves_inside(imported.onnx)
    for [got] in (run_onnx(imported.onnx, {"x": x}), run_relax(imported.mod, [x])):
        assert got.dtype == expected.dtype == np.float16
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(
            got.astype("f8"), expected.astype("f8"), rtol=2 * STEP[F16], atol=scale * STEP[F16]
        )


@pytest.mark.parametrize("op", sorted(OPERATORS.keys() - {"Trilu", "CumSum"}))
def test_an_operator_in_bfloat16_agrees_with_its_float32_form(op: str, run_onnx: Any) -> None:
    imported = import_onnx(single(op, BF16))
    exact = single(op, F16)  # the same numbers, rounded to bfloat16 below
    for tensor in exact.graph.initializer:
        if tensor.data_type == F16:
            value = numpy_helper.to_array(tensor).astype(DTYPES[BF16]).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    for value in (*exact.graph.input, *exact.graph.output):
        value.type.tensor_type.elem_type = FLOAT
    for attribute in exact.graph.node[0].attribute:
        if attribute.name == "stash_type":
            attribute.i = FLOAT
    x = np.clip(noise(2, 3, 4, seed=1), -3, 3).astype(np.float32)
    assert not halves_inside(imported.onnx)
    np.testing.assert_allclose(
        run_onnx(imported.onnx, {"x": x})[0], run_onnx(exact, {"x": x})[0], rtol=1e-5, atol=1e-5
    )


UNARY = ("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Softmax", "HardSwish", "Identity", "ToFloat", "Through")
BINARY = ("Add", "Sub", "Max", "Min")
# The steepest slope of these operators: by how much one can enlarge the error of an input.
STEEPEST = 1.5  # HardSwish


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """Draw a graph of [3, 4] values in float16, with Casts to float32 and back; any may be outputs."""
    nodes: list[onnx.NodeProto] = []
    values = ["x"]
    weights: dict[str, Any] = {}
    for index in range(draw(st.integers(1, 8))):
        name = f"v{index}"
        source = draw(st.sampled_from(values))
        op = draw(st.sampled_from([*UNARY, *BINARY, "Weight"]))
        if op == "ToFloat":  # a blocked operator of a mixed-precision model
            nodes += [
                helper.make_node("Cast", [source], [f"{name}/a"], to=FLOAT),
                helper.make_node("Softplus", [f"{name}/a"], [f"{name}/b"]),
                helper.make_node("Cast", [f"{name}/b"], [name], to=F16),
            ]
        elif op == "Through":
            nodes += [
                helper.make_node("Cast", [source], [f"{name}/a"], to=FLOAT),
                helper.make_node("Mul", [f"{name}/a", "third"], [f"{name}/b"]),
                helper.make_node("Cast", [f"{name}/b"], [f"{name}/c"], to=F16),
                helper.make_node("Cast", [f"{name}/c"], [f"{name}/d"], to=FLOAT),
                helper.make_node("Cast", [f"{name}/d"], [name], to=F16),
            ]
            weights["third"] = np.float32(1 / 3)
        elif op == "Weight":
            weights[f"w{index}"] = noise(4, seed=index)
            nodes.append(helper.make_node("Mul", [source, f"w{index}"], [name]))
        elif op in BINARY:
            nodes.append(helper.make_node(op, [source, draw(st.sampled_from(values))], [name]))
        else:
            nodes.append(helper.make_node(op, [source], [name]))
        values.append(name)
    chosen = draw(st.lists(st.sampled_from(values[1:]), min_size=1, max_size=3, unique=True))
    return model_of(nodes, [info("x", [3, 4])], [info(name, [3, 4]) for name in chosen], weights)


def with_bounds(model: onnx.ModelProto, x: NDArray[Any]) -> tuple[dict[str, NDArray[Any]], dict[str, float]]:
    """Return every value of a float16 model, and how far rounding may have taken it from the exact one."""
    told = onnx.ModelProto()
    told.CopyFrom(model)
    made = [name for node in model.graph.node for name in node.output]
    told.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    results = run_reference(told, {"x": x})[len(model.graph.output) :]
    values = dict(zip(made, results, strict=True))
    bounds: dict[str, float] = {}
    for node in model.graph.node:
        [name] = node.output
        inherited = STEEPEST * sum(bounds.get(source, 0.0) for source in node.input)
        bounds[name] = inherited + STEP[F16] * float(np.abs(values[name].astype("f8")).max())
    return values, bounds


@given(graphs(), st.integers(0, 100))
@settings(deadline=None, max_examples=60)
def test_a_random_graph_in_float16_agrees_with_onnx_s_reference(model: onnx.ModelProto, seed: int) -> None:
    x = np.clip(noise(3, 4, seed=seed), -1, 1)
    imported = import_onnx(model)
    assert not halves_inside(imported.onnx) or "Cast" in operators(imported.onnx)
    values, bounds = with_bounds(model, x)
    results = run_reference(imported.onnx, {"x": x})
    for output, found in zip(model.graph.output, results, strict=True):
        assert found.dtype == np.float16
        difference = np.abs(found.astype("f8") - values[output.name].astype("f8")).max()
        assert difference <= bounds[output.name]


def test_a_float16_model_keeps_its_interface_and_is_computed_in_float32() -> None:
    notes: list[str] = []
    imported = import_onnx(conv_net(F16), progress=notes.append)
    assert [spec.datatype for spec in (*imported.inputs, *imported.outputs)] == ["FP16", "FP16"]
    assert operators(imported.onnx).count("Cast") == 2
    assert not halves_inside(imported.onnx)
    assert notes == ["computed in float32: the model is in float16"]


def test_a_bfloat16_interface_becomes_float32_and_the_user_is_told() -> None:
    imported = import_onnx(conv_net(BF16))
    assert [spec.datatype for spec in (*imported.inputs, *imported.outputs)] == ["FP32", "FP32"]
    assert "Cast" not in operators(imported.onnx)
    assert imported.notes == (
        "computed in float32: the model is in bfloat16",
        "input 'x': bfloat16 becomes float32, which holds all of its values",
        "output 'y': bfloat16 becomes float32, which holds all of its values",
    )


def test_the_note_says_that_weights_double() -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = model_of(nodes, [info("x", [1, 300])], [info("y", [1, 300])], {"w": noise(300, 300)})
    assert import_onnx(model).notes == (
        "computed in float32: the model is in float16; its weights: 0.2 MB become 0.4 MB in memory",
    )


@pytest.mark.parametrize("kind", [F16, BF16])
def test_weights_stored_in_half_precision_are_folded_however_large(kind: int) -> None:
    weights = {"w": noise(1000, 700).astype(DTYPES[kind])}
    nodes = [
        helper.make_node("Cast", ["w"], ["wide"], to=FLOAT),
        helper.make_node("MatMul", ["x", "wide"], ["y"]),
    ]
    model = model_of(nodes, [info("x", [1, 1000], FLOAT)], [info("y", [1, 700], FLOAT)], weights)
    imported = import_onnx(model)
    assert operators(imported.onnx) == ["MatMul"]
    assert imported.notes[0].startswith("computed in float32: weights in ")
    [tensor] = imported.onnx.graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), weights["w"].astype(np.float32))


@pytest.mark.parametrize("kind", [F16, BF16])
def test_scales_in_half_precision_leave_weights_in_int8(kind: int, run_onnx: Any) -> None:
    codes = np.random.default_rng(0).integers(-127, 127, (4, 6)).astype(np.int8)
    weights = {"q": codes, "s": np.abs(noise(6)).astype(DTYPES[kind])}
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=1),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    imported = import_onnx(model_of(nodes, [info("x", [2, 4], kind)], [info("y", [2, 6], kind)], weights))
    assert {t.data_type for t in imported.onnx.graph.initializer} == {TensorProto.INT8, FLOAT}
    x = noise(2, 4).astype(imported.inputs[0].dtype)
    [got] = run_onnx(imported.onnx, {"x": x})
    np.testing.assert_allclose(got, x @ (codes * weights["s"].astype("f4")), rtol=2e-3, atol=0.1)


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        (F16, -3.4e38, -np.inf),
        (F16, 1e-9, 0.0),
        (F16, np.finfo(np.float16).min, -65504.0),
        (F16, 1 / 3, float(np.float16(1 / 3))),
        (BF16, 1 / 3, 0.333984375),
        (BF16, 1e-9, float(np.float32(ml_dtypes.bfloat16(1e-9)))),
    ],
)
def test_a_constant_keeps_the_value_that_it_has_in_half_precision(
    kind: int, value: float, kept: float, run_onnx: Any
) -> None:
    """As masks have it: a wide constant that the model casts, and adds where nothing is masked."""
    nodes = [helper.make_node("Cast", ["c"], ["h"], to=kind), helper.make_node("Add", ["x", "h"], ["y"])]
    model = model_of(nodes, [info("x", [1], kind)], [info("y", [1], kind)], {"c": np.float32(value)})
    imported = import_onnx(model)
    [got] = run_onnx(imported.onnx, {"x": np.zeros(1, imported.inputs[0].dtype)})
    assert got[0] == kept


def test_a_mask_in_float16_masks(run_onnx: Any, run_relax: Any) -> None:
    lowest = np.finfo(np.float16).min
    weights = {"low": lowest, "zero": np.float16(0), "wide": np.float32(-1e38), "one": np.float32(1)}
    nodes = [
        helper.make_node("Where", ["keep", "zero", "low"], ["chosen"]),
        helper.make_node("Cast", ["keep"], ["k"], to=FLOAT),
        helper.make_node("Sub", ["one", "k"], ["inverse"]),
        helper.make_node("Mul", ["inverse", "wide"], ["far"]),
        helper.make_node("Cast", ["far"], ["overflows"], to=F16),
        helper.make_node("Add", ["x", "chosen"], ["a"]),
        helper.make_node("Add", ["a", "overflows"], ["b"]),
        helper.make_node("Softmax", ["b"], ["y"]),
    ]
    model = model_of(
        nodes, [info("x", [2, 4]), info("keep", [2, 4], TensorProto.BOOL)], [info("y", [2, 4])], weights
    )
    imported = import_onnx(model)
    x, keep = noise(2, 4), np.array([[1, 1, 0, 0], [0, 1, 0, 0]], bool)
    [expected] = run_onnx(model, {"x": x, "keep": keep})
    for [got] in (run_onnx(imported.onnx, {"x": x, "keep": keep}), run_relax(imported.mod, [x, keep])):
        np.testing.assert_array_equal(got == 0, ~keep)
        np.testing.assert_allclose(got, expected, rtol=2 * STEP[F16])


def test_a_cast_to_float16_that_only_rounds_still_rounds_and_overflows(run_onnx: Any, run_relax: Any) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=F16),
        helper.make_node("Cast", ["h"], ["wide"], to=FLOAT),
        helper.make_node("Cast", ["h"], ["whole"], to=TensorProto.INT32),
        helper.make_node("Neg", ["wide"], ["y"]),
    ]
    model = model_of(
        nodes, [info("x", [4], FLOAT)], [info("y", [4], FLOAT), info("whole", [4], TensorProto.INT32)]
    )
    imported = import_onnx(model)
    assert imported.notes == ()
    x = np.array([1 / 3, 2049, 7, -1000.3], np.float32)
    expected = run_onnx(model, {"x": x})
    assert expected[0][1] == -2048
    for results in (run_onnx(imported.onnx, {"x": x}), run_relax(imported.mod, [x])):
        for got, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
    large = np.array([7e4, -7e4, 65519, 65520], np.float32)
    for results in (run_onnx(imported.onnx, {"x": large}), run_relax(imported.mod, [large])):
        np.testing.assert_array_equal(results[0], [-np.inf, np.inf, -65504, -np.inf])


def decomposed_norm(*, eps: float = 1e-5, leaves: bool = False) -> onnx.ModelProto:
    """Return a layer norm as PyTorch exports it for float16 and opset 13, with most of it in float64."""
    double = TensorProto.DOUBLE
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[-1]),
        helper.make_node("Sub", ["x", "mean"], ["centred"]),
        helper.make_node("Cast", ["centred"], ["wide"], to=double),
        helper.make_node("Pow", ["wide", "two"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["variance"], axes=[-1]),
        helper.make_node("Add", ["variance", "eps"], ["safe"]),
        helper.make_node("Sqrt", ["safe"], ["root"]),
        helper.make_node("Div", ["wide", "root"], ["normal"]),
        helper.make_node("Cast", ["normal"], ["narrow"], to=F16),
        helper.make_node("Mul", ["narrow", "w"], ["y"]),
    ]
    outputs = [info("y", [3, 4])] + ([info("safe", [3, 1], double)] if leaves else [])
    weights = {"two": np.float64(2), "eps": np.float64(eps), "w": ONE}
    return model_of(nodes, [info("x", [3, 4])], outputs, weights, opset=13)


def test_what_is_float64_between_casts_of_float16_is_computed_in_float32(run_onnx: Any) -> None:
    model = decomposed_norm()
    imported = import_onnx(model)
    types = {value.type.tensor_type.elem_type for value in imported.onnx.graph.value_info}
    assert types == {FLOAT}
    assert operators(imported.onnx).count("Cast") == 2
    x = noise(3, 4)
    [expected], [got] = run_onnx(model, {"x": x}), run_onnx(imported.onnx, {"x": x})
    np.testing.assert_allclose(got, expected, rtol=4 * STEP[F16], atol=4 * STEP[F16])


@pytest.mark.parametrize(
    "model", [decomposed_norm(eps=1e-300), decomposed_norm(eps=1e300), decomposed_norm(leaves=True)]
)
def test_float64_that_float32_cannot_hold_or_that_is_an_output_stays(model: onnx.ModelProto) -> None:
    imported = import_onnx(model)
    types = {value.type.tensor_type.elem_type for value in imported.onnx.graph.value_info}
    assert TensorProto.DOUBLE in types


def test_a_cast_to_bfloat16_that_only_rounds_is_named() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=BF16, name="round"),
        helper.make_node("Cast", ["h"], ["y"], to=FLOAT),
    ]
    imported = import_onnx(model_of(nodes, [info("x", [4], FLOAT)], [info("y", [4], FLOAT)]))
    assert imported.notes == ("casts to bfloat16 that only round are left out: round",)
    assert operators(imported.onnx) == ["Identity"]


def test_a_model_that_computes_what_overflows_in_float16_does_not_overflow(run_onnx: Any) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"]),
        helper.make_node("Sqrt", ["square"], ["y"]),
    ]
    imported = import_onnx(model_of(nodes, [info("x", [1])], [info("y", [1])]))
    assert run_onnx(imported.onnx, {"x": np.array([1000], np.float16)})[0][0] == 1000


def test_inputs_and_outputs_that_are_used_in_every_way(run_onnx: Any, run_relax: Any) -> None:
    """Here an output is read again, is an input, a constant, or twice the same value."""
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["a"]),
        helper.make_node("Identity", ["a"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Identity", ["w"], ["constant"]),
        helper.make_node("Cast", ["c"], ["wide"], to=FLOAT),
    ]
    names = ["a", "b", "c", "same", "constant"]
    outputs = [info(name, [4]) for name in names] + [info("wide", [4], FLOAT)]
    model = model_of(nodes, [info("x", [4])], outputs, {"w": ONE})
    imported = import_onnx(model)
    assert [spec.name for spec in imported.outputs] == [*names, "wide"]
    x = noise(4)
    expected = run_onnx(model, {"x": x})
    for results in (run_onnx(imported.onnx, {"x": x}), run_relax(imported.mod, [x])):
        for got, wanted in zip(results, expected, strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_allclose(got, wanted, rtol=2 * STEP[F16])


def test_a_weight_and_an_input_that_are_outputs_keep_float16(run_onnx: Any) -> None:
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    model = model_of(nodes, [info("x", [4])], [info("y", [4]), info("w", [4]), info("x", [4])], {"w": ONE})
    widened = shape_inference.infer_shapes(model)
    half_precision.widen_halves(widened, lambda _: None)
    onnx.checker.check_model(widened, full_check=True)
    x = noise(4)
    for got, wanted in zip(run_onnx(widened, {"x": x}), (x * ONE, ONE, x), strict=True):
        np.testing.assert_array_equal(got, wanted)


def body(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any]) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", inputs, outputs)


def loop() -> onnx.NodeProto:
    """Double a value three times with a Loop, and collect what it was; reads `x` from around it."""
    nodes = [
        helper.make_node("Constant", [], ["half"], value=numpy_helper.from_array(np.float16(0.5))),
        helper.make_node("Cast", ["i"], ["count"], to=F16),
        helper.make_node("Mul", ["count", "half"], ["scaled"]),
        helper.make_node("Add", ["state", "scaled"], ["more"]),
        helper.make_node("Add", ["more", "x"], ["next"]),
        helper.make_node("Identity", ["go"], ["still"]),
        helper.make_node("Identity", ["next"], ["seen"]),
    ]
    int64, boolean = TensorProto.INT64, TensorProto.BOOL
    graph = body(
        nodes,
        [info("i", [], int64), info("go", [], boolean), info("state", [4])],
        [info("still", [], boolean), info("next", [4]), info("seen", [4])],
    )
    return helper.make_node("Loop", ["n", "", "x"], ["y", "all"], body=graph)


def scan() -> onnx.NodeProto:
    nodes = [
        helper.make_node("Add", ["state", "row"], ["next"]),
        helper.make_node("Mul", ["next", "x"], ["seen"]),
    ]
    graph = body(nodes, [info("state", [4]), info("row", [4])], [info("next", [4]), info("seen", [4])])
    return helper.make_node("Scan", ["x", "table"], ["y", "all"], body=graph, num_scan_inputs=1)


def branch() -> onnx.NodeProto:
    """An If on a constant that only folding finds."""
    yes = body([helper.make_node("Mul", ["x", "x"], ["then"])], [], [info("then", [4])])
    no = body([helper.make_node("Neg", ["x"], ["else"])], [], [info("else", [4])])
    return helper.make_node("If", ["yes"], ["y"], then_branch=yes, else_branch=no)


@pytest.mark.parametrize(
    ("node", "weights"),
    [
        (loop(), {"n": np.array(3)}),
        (scan(), {"table": noise(3, 4)}),
        (branch(), {"yes": np.array(True)}),
    ],
    ids=["Loop", "Scan", "If"],
)
def test_control_flow_in_float16(
    node: onnx.NodeProto, weights: dict[str, Any], run_onnx: Any, run_relax: Any
) -> None:
    outputs = [info("y", [4])] + [info(name, [3, 4]) for name in node.output[1:]]
    model = model_of([node], [info("x", [4])], outputs, weights)
    imported = import_onnx(model)
    x = noise(4)
    expected = run_onnx(model, {"x": x})
    for results in (run_onnx(imported.onnx, {"x": x}), run_relax(imported.mod, [x])):
        for got, wanted in zip(results, expected, strict=True):
            assert got.dtype == np.float16
            np.testing.assert_allclose(got, wanted, rtol=4 * STEP[F16], atol=4 * STEP[F16])


def test_a_sequence_of_float16_tensors(run_onnx: Any) -> None:
    nodes = [
        helper.make_node("SequenceEmpty", [], ["none"], dtype=F16),
        helper.make_node("SequenceInsert", ["none", "x"], ["one"]),
        helper.make_node("SequenceInsert", ["one", "w"], ["two"]),
        helper.make_node("ConcatFromSequence", ["two"], ["y"], axis=0),
    ]
    model = model_of(nodes, [info("x", [1, 4])], [info("y", [2, 4])], {"w": noise(1, 4)})
    imported = import_onnx(model)
    x = noise(1, 4, seed=3)
    np.testing.assert_array_equal(run_onnx(imported.onnx, {"x": x})[0], run_onnx(model, {"x": x})[0])


@pytest.mark.parametrize("kind", [F16, BF16])
def test_functions_and_constants_with_types_in_attributes(kind: int, run_onnx: Any) -> None:
    value = numpy_helper.from_array(np.array([2], DTYPES[kind]))
    double = helper.make_function(
        "local",
        "Double",
        ["a"],
        ["b"],
        [
            helper.make_node("Shape", ["a"], ["s"]),
            helper.make_node("ConstantOfShape", ["s"], ["two"], value=value),
            helper.make_node("EyeLike", ["two"], ["eye"], dtype=kind),
            helper.make_node("Add", ["two", "eye"], ["sum"]),
            helper.make_node("Mul", ["a", "sum"], ["b"]),
        ],
        [helper.make_opsetid("", 22)],
    )
    node = helper.make_node("Double", ["x"], ["y"], domain="local")
    model = model_of([node], [info("x", [2, 2], kind)], [info("y", [2, 2], kind)], functions=[double])
    model.opset_import.append(helper.make_opsetid("local", 1))
    imported = import_onnx(model)
    x = noise(2, 2).astype(imported.inputs[0].dtype)
    np.testing.assert_allclose(run_onnx(imported.onnx, {"x": x})[0], x * (2 + np.eye(2)), rtol=2 * STEP[F16])


def test_a_float16_input_can_be_fixed_to_a_value(run_onnx: Any) -> None:
    for kind in HALVES:
        model = model_of(
            [helper.make_node("Mul", ["x", "k"], ["y"])],
            [info("x", [2], kind), info("k", [1], kind)],
            [info("y", [2], kind)],
        )
        imported = import_onnx(model, input_values={"k": 1 / 3})
        kept = np.array(1 / 3).astype(DTYPES[kind]).astype(np.float32)
        [got] = run_onnx(imported.onnx, {"x": np.ones(2, imported.inputs[0].dtype)})
        np.testing.assert_array_equal(got.astype(np.float32), [kept, kept])


def test_weights_that_would_not_fit_as_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_precision, "MAX_WEIGHT_BYTES", 3000)
    with pytest.raises(ModelError, match=r"at most 3000 bytes when its weights are float32, got \d+$"):
        import_onnx(conv_net(F16))


def test_bits_of_float16_are_refused_by_name_and_never_misread() -> None:
    node = helper.make_node("BitCast", ["x"], ["y"], to=F16, name="bits")
    model = model_of([node], [info("x", [4], TensorProto.INT16)], [info("y", [4])], opset=26)
    with pytest.raises(UnsupportedOperatorError, match="BitCast"):
        import_onnx(model)


def test_every_attribute_that_holds_an_element_type_is_known() -> None:
    named = {
        name
        for schema in defs.get_all_schemas_with_history()
        if not schema.domain
        for name, attribute in schema.attributes.items()
        if attribute.type == defs.OpSchema.AttrType.INT
        and (name in ("to", "precision") or name.endswith(("type", "_precision")))
    }
    assert named == TYPE_ATTRIBUTES


@pytest.mark.parametrize("opset", [13, 15, 17, 18, 21, 23])
def test_old_and_new_opsets(opset: int, run_onnx: Any) -> None:
    model = conv_net(F16)
    model.graph.node[1].op_type = "Relu"
    model.opset_import[0].version = opset
    imported = import_onnx(model)
    x = noise(1, 3, 10, 10)
    [expected], [got] = run_onnx(model, {"x": x}), run_onnx(imported.onnx, {"x": x})
    np.testing.assert_allclose(got, expected, rtol=4 * STEP[F16], atol=0.02)
