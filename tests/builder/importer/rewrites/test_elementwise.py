"""Element-wise operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.compiler import compile
from builder.importer import import_onnx
from builder.importer.rewrites import apply_rewrites
from tests.builder.importer.rewrites.cases import BOOL, INT64, Case, ModelMaker, check_case, one, operators

CASES: dict[str, Case] = {
    "celu": (one("Celu", ["x"], alpha=2.0), {}, [2, 3, 4]),
    "dropout": (one("Dropout", ["x"]), {}, [2, 3, 4]),
    "dropout of nothing in training": (
        one("Dropout", ["x", "p", "t"]), {"p": np.float32(0), "t": np.array(True)}, [2, 3, 4]
    ),
    "dropout with a switch that is off": (
        one("Dropout", ["x", "p", "t"]), {"p": np.float32(0.5), "t": np.array(False)}, [2, 3, 4]
    ),
    "infinity of one sign": (one("IsInf", ["x"], detect_negative=0), {}, ([2, 3, 4], BOOL)),
    "one slope": (one("PRelu", ["x", "s"]), {"s": np.array([[0.3]], np.float32)}, [2, 3, 4]),
    "a slope for each row": (one("PRelu", ["x", "s"]), {"s": np.ones((3, 1), np.float32) / 3}, [2, 3, 4]),
    "power of another type": (one("Pow", ["x", "e"]), {"e": np.array(2, np.int64)}, [2, 3, 4]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_single_operators(make_model: ModelMaker, noise: Any, agrees: Any, case: str) -> None:
    check_case(make_model, noise, agrees, *CASES[case])


INTEGERS = np.arange(24, dtype=np.int64).reshape(2, 3, 4) % 7


def test_integer_powers(make_model: ModelMaker, agrees: Any) -> None:
    model = make_model(
        [one("Pow", ["x", "e"])], {"x": ([2, 3, 4], INT64)}, {"y": ([2, 3, 4], INT64)}, {"e": np.array(3)}
    )
    agrees(model, INTEGERS)


@pytest.mark.parametrize("right", [True, np.array([True, False, False, True])], ids=["number", "row"])
def test_equal_booleans(make_model: ModelMaker, agrees: Any, right: Any) -> None:
    model = make_model(
        [one("Equal", ["x", "w"])], {"x": ([3, 4], BOOL)}, {"y": ([3, 4], BOOL)}, {"w": np.array(right)}
    )
    agrees(model, INTEGERS[0] > 3)


def test_a_cast_to_the_same_type_disappears(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["a"], to=TensorProto.FLOAT),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("CastLike", ["b", "x"], ["y"]),
    ]
    normalised = agrees(make_model(nodes, {"x": [3]}, {"y": [3]}), noise(3))
    assert not operators(normalised) & {"Cast", "CastLike"}


@pytest.mark.parametrize(
    "kind", ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"]
)
def test_a_reduction_without_axes_changes_each_number(
    make_model: ModelMaker, noise: Any, agrees: Any, kind: str
) -> None:
    node = one(f"Reduce{kind}", ["x"], noop_with_empty_axes=1)
    x = noise(2, 3)
    agrees(make_model([node], {"x": [2, 3]}, {"y": [2, 3]}, opset=18), np.abs(x) if kind == "LogSum" else x)


@pytest.mark.parametrize("keep", [0, 1])
def test_a_mean_of_integers_is_one(make_model: ModelMaker, agrees: Any, keep: int) -> None:
    x = np.arange(-12, 12, dtype=np.int32).reshape(2, 3, 4) ** 3
    node = one("ReduceMean", ["x", "a"], keepdims=keep)
    shape = [2, 3, 1] if keep else [2, 3]
    inputs, outputs = {"x": ([2, 3, 4], TensorProto.INT32)}, {"y": (shape, TensorProto.INT32)}
    agrees(make_model([node], inputs, outputs, {"a": np.array([-1])}, opset=18), x)


def test_the_sign_of_unsigned_numbers(make_model: ModelMaker, agrees: Any) -> None:
    kind = ([4], TensorProto.UINT8)
    x = np.array([0, 1, 128, 255], np.uint8)
    agrees(make_model([one("Sign", ["x"])], {"x": kind}, {"y": kind}), x)


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("axes", [[1], [0], [0, 1], []])
def test_the_logarithm_of_a_sum_where_all_is_masked(
    make_model: ModelMaker, agrees: Any, axes: list[int], keep: int
) -> None:
    options: dict[str, Any] = {"axes": axes} if axes else {}
    inf = np.inf
    x = np.array([[1, 2, 3], [-inf, -inf, -inf], [inf, 1, 2], [-inf, 1000, 1001]], np.float32)
    agrees(
        make_model([one("ReduceLogSumExp", ["x"], keepdims=keep, **options)], {"x": [4, 3]}, {"y": None}), x
    )


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 1.0])
def test_a_threshold_below_infinity(make_model: ModelMaker, agrees: Any, alpha: float) -> None:
    x = np.array([np.nan, -np.inf, np.inf, -2, 0, 0.5, 2], np.float32)
    agrees(make_model([one("ThresholdedRelu", ["x"], alpha=alpha)], {"x": [7]}, {"y": [7]}), x)


@pytest.mark.parametrize("bounds", [[], ["two"], ["", "two"], ["two", "two"]], ids=str)
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_a_clip_without_a_bound_makes_infinity_finite(
    make_model: ModelMaker, agrees: Any, name: str, bounds: list[str]
) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(name))
    ends = {end: ([6], kind) for end in "xy"}
    model = make_model(
        [one("Clip", ["x", *bounds])], {"x": ends["x"]}, {"y": ends["y"]}, {"two": np.array(2, name)}
    )
    agrees(model, np.array([-np.inf, np.inf, -1e30, -0.0, 1, 3], name))


@pytest.mark.slow
@pytest.mark.parametrize("version", [6, 9, 11, 13])
def test_a_clip_without_a_bound_of_every_opset_is_compiled(version: int) -> None:
    bound = "Clip<min = 1.0>(x)" if version < 11 else "Clip(x, one)"
    text = f"""<ir_version: 8, opset_import: ["" : {version}]> g (float[40] x) => (float[40] y)
        <float one = {{1.0}}> {{ c = {bound} y = Log(c) }}"""
    compile(import_onnx(onnx.parser.parse_model(text)))


@pytest.mark.parametrize("shape", [[], [2, 3]])
@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMean", "ReduceLogSumExp"])
def test_a_reduction_whose_axes_are_an_empty_list_is_one_of_all(
    make_model: ModelMaker, noise: Any, agrees: Any, operator: str, shape: list[int]
) -> None:
    node = helper.make_node(operator, ["x"], ["y"], keepdims=0)
    node.attribute.append(onnx.AttributeProto(name="axes", type=onnx.AttributeProto.INTS))
    agrees(make_model([node], {"x": shape}, {"y": []}, opset=17), np.asarray(noise(*shape), np.float32))


def test_celu_of_a_scalar_is_a_scalar(make_model: ModelMaker, run_onnx: Any) -> None:
    model = make_model([one("Celu", ["x"])], {"x": []}, {"y": []})
    apply_rewrites(model)
    assert "Celu" not in operators(model)
    result = run_onnx(model, {"x": np.array(-0.7, np.float32)})[0]
    np.testing.assert_allclose(result, np.float32(-0.5034147), rtol=1e-6)
    assert np.shape(result) == ()


def test_an_eye_of_a_constants_shape(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    nodes = [
        helper.make_node("EyeLike", ["w"], ["e"], k=1, dtype=1),
        helper.make_node("Add", ["x", "e"], ["y"]),
    ]
    weights = {"w": np.zeros((3, 4), np.int32)}
    agrees(make_model(nodes, {"x": [3, 4]}, {"y": [3, 4]}, weights), noise(3, 4))


def test_an_odd_exponent_that_float32_does_not_have(make_model: ModelMaker, agrees: Any) -> None:
    inputs = {"x": [3], "z": ([3], TensorProto.INT32)}
    agrees(
        make_model([one("Pow", ["x", "z"])], inputs, {"y": [3]}),
        np.array([-1, -1, -2], np.float32),
        np.array([2**31 - 1, 2**24 + 1, -3], np.int32),
    )


def test_a_constant_exponent_needs_no_double_precision(make_model: ModelMaker) -> None:
    model = make_model([one("Pow", ["x", "p"])], {"x": [3]}, {"y": [3]}, {"p": np.int64(-2)})
    kinds = {v.type.tensor_type.elem_type for v in import_onnx(model).onnx.graph.value_info}
    assert TensorProto.DOUBLE not in kinds


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_bounds_of_a_shrink_of_integers_are_no_integers(
    make_model: ModelMaker, agrees: Any, dtype: type[np.integer[Any]]
) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = make_model([one("Shrink", ["x"], bias=1.5, lambd=1.5)], {"x": ([8], kind)}, {"y": ([8], kind)})
    agrees(model, np.array([0, 1, 2, 3, 4, 7, 100, 50], dtype))


@pytest.mark.parametrize("lambd", [0.5, -5.0])
def test_shrink_tries_the_lower_bound_first(make_model: ModelMaker, agrees: Any, lambd: float) -> None:
    model = make_model([one("Shrink", ["x"], bias=1.0, lambd=lambd)], {"x": [8]}, {"y": [8]})
    agrees(model, np.array([0, -0.5, 0.5, -7, 7, np.inf, -np.inf, np.nan], np.float32))


def test_squeeze_of_no_axes_is_one_of_all(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    nodes = [helper.make_node("Squeeze", ["x", "axes"], ["y"])]
    model = make_model(nodes, {"x": [3, 1, 5, 1]}, {"y": [3, 5]}, {"axes": np.zeros(0, np.int64)})
    agrees(model, noise(3, 1, 5, 1))
