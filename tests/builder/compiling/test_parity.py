"""The error of outputs against the reference, and when it is too large."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from builder.compiling import tolerances
from builder.compiling.parity import Distances, Parity, check, compare, distances, reference_outputs
from builder.compiling.truth import exact_outputs
from builder.errors import ModelError, ParityError


def error_of(ours: object, theirs: object, dtype: str = "float32") -> float:
    return compare(["y"], [np.array(ours, dtype)], [np.array(theirs, dtype)]).error


def test_the_error_is_relative_to_the_largest_value() -> None:
    assert error_of([10.0, 0.001], [10.0, 0.002]) == pytest.approx(1e-4, rel=1e-3)


def test_equal_outputs_have_no_error_even_infinities_and_nans() -> None:
    assert error_of([1, np.inf, np.nan], [1, np.inf, np.nan]) == 0


@pytest.mark.parametrize(("ours", "theirs"), [([np.nan], [1.0]), ([1.0], [np.nan]), ([np.inf], [-np.inf])])
def test_a_nan_or_a_wrong_infinity_never_passes(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ParityError):
        check(Parity(error_of(ours, theirs), "y", "reference"), 1e9)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_a_nan_of_one_output_is_not_forgotten_for_the_next(dtype: str) -> None:
    """A comparison with NaN is false either way, so the next error used to take its place."""
    one, nan = np.ones(3, dtype), np.array([1, np.nan, 1], dtype)
    for ours, theirs in (([nan, one], [one, one]), ([one, one], [nan, one])):
        found = compare(["bad", "good"], ours, theirs)
        assert found.worst_output == "bad"
        with pytest.raises(ParityError):
            check(found, 1e9)


def test_a_nan_is_no_rounding_in_double_precision_either() -> None:
    one, nan = np.ones(3, "float32"), np.array([1, np.nan, 1], "float32")
    exact = [one.astype("float64")] * 2
    assert not distances(["a", "b"], [nan, one], [one, one], exact).is_rounding
    # Nor does a NaN of the reference explain a difference of ours.
    assert not distances(["a", "b"], [one + 0.001, one], [nan, one], exact).is_rounding


def test_an_output_that_is_tiny_throughout_is_measured_against_the_floor() -> None:
    assert error_of([1.1e-5], [1.0e-5]) == pytest.approx(1e-4, rel=1e-3)


def test_integers_must_agree_exactly() -> None:
    assert error_of([1, 2], [1, 2], "int64") == 0
    assert error_of([1, 2], [1, 3], "int64") == np.inf


def after(value: float, steps: int) -> np.float16:
    """Return the float16 that follows a value by some steps of rounding."""
    found = np.float16(value)
    with np.errstate(over="ignore"):
        for _ in range(steps):
            found = np.nextafter(found, np.float16(np.inf))
    return found


@pytest.mark.parametrize("value", [1, 1.5, 1 - 2**-11, -1, 0.1, 1000, 65504, 2**-14, -(2.0**-20), 0])
def test_one_step_of_rounding_is_granted_to_a_float16_output(value: float) -> None:
    assert error_of([after(value, 1)], [value], "float16") == 0
    assert error_of([value], [after(value, 1)], "float16") == 0


@pytest.mark.parametrize("value", [1, 1.5, 1 - 2**-11, 1 - 2**-10, -1, 0.1, 1000])
def test_two_steps_of_rounding_are_an_error_of_one(value: float) -> None:
    """The error is that of float32 numbers that round to such float16s."""
    for ours, theirs in ((after(value, 2), value), (value, after(value, 2))):
        assert 2**-13 < error_of([ours], [theirs], "float16") <= 2**-10 * (1 + 2**-9)
        with pytest.raises(ParityError):
            check(Parity(error_of([ours], [theirs], "float16"), "y", "reference"), tolerances.PARITY)


def test_an_infinity_in_float16_is_one_step_beyond_the_largest_number_and_no_less() -> None:
    assert error_of([np.inf], [65504], "float16") == 0
    assert error_of([65504], [np.inf], "float16") == 0
    assert error_of([np.inf], [65472], "float16") > tolerances.PARITY
    assert error_of([np.inf, 1], [1, 1], "float16") > 1000
    assert error_of([np.inf], [-np.inf], "float16") > 1


def test_float32_is_granted_no_step() -> None:
    assert error_of([1 + 2**-10], [1]) == pytest.approx(2**-10)


def test_a_device_may_be_one_step_further_off_in_float16() -> None:
    assert tolerances.self_test_rtol(0.0, half=True) == tolerances.self_test_rtol(0.0) + 2**-10


def test_the_distance_of_a_float16_output_leaves_out_its_rounding() -> None:
    exact = np.array([1.0001, 0.5])
    near, far = exact.astype("float16"), np.array([1.0001, 0.51], "float16")
    measured = distances(["y"], [far], [near], [exact])
    assert measured.reference == 0
    assert measured.ours == pytest.approx(0.01, rel=0.05)


def test_the_exact_result_of_a_float16_model_is_not_rounded() -> None:
    half, x = onnx.TensorProto.FLOAT16, np.array([1 / 3], "float16")
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Exp", ["wide"], ["e"]),
        helper.make_node("Cast", ["e"], ["y"], to=half),
    ]
    ends = [helper.make_tensor_value_info(name, half, [1]) for name in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]))
    exact = exact_outputs(model, {"x": x})
    assert exact is not None
    np.testing.assert_allclose(exact[0].astype("f8"), np.exp(x.astype("f8")), rtol=1e-14)
    assert exact[0].dtype == np.float64


def test_the_worst_output_is_named() -> None:
    a, b = np.ones(2, "float32"), np.zeros(2, "float32")
    assert compare(["good", "bad"], [a, a], [a, b]).worst_output == "bad"


def test_another_shape_or_dtype_is_refused() -> None:
    with pytest.raises(ParityError, match=r"expected float32\[2\], got float32\[1, 2\]"):
        compare(["y"], [np.ones((1, 2), "float32")], [np.ones(2, "float32")])


def test_an_error_beyond_the_tolerance_is_refused_with_figures() -> None:
    with pytest.raises(ParityError, match=r"at most 0.0001 against onnxruntime 1, got 0.1") as caught:
        check(Parity(0.1, "y", "onnxruntime 1"), 1e-4)
    assert caught.value.hint is not None


def test_a_model_that_the_reference_refuses_is_a_model_error() -> None:
    graph = helper.make_graph(
        [helper.make_node("Nonsense", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])],
    )
    with pytest.raises(ModelError, match="ONNX Runtime refused"):
        reference_outputs(helper.make_model(graph), {"x": np.ones(1, "float32")})


TERMS = 4000


def amplifying() -> onnx.ModelProto:
    """Return y = sum(x * w) - 0.9999 * sum(w): for x near 1, rounding is a large part of what is left."""
    weights = np.random.RandomState(3).rand(TERMS, 1).astype("f4") * 1000
    nodes = [helper.make_node("MatMul", ["x", "w"], ["s"]), helper.make_node("Sub", ["s", "t"], ["y"])]
    tensors = [
        numpy_helper.from_array(weights, "w"),
        numpy_helper.from_array(np.array([weights.astype("f8").sum() * 0.9999], "f4"), "t"),
    ]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, TERMS])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 1])
    graph = helper.make_graph(nodes, "amplifying", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def in_another_order(model: onnx.ModelProto, x: np.ndarray, *, fault: float = 0.0) -> np.ndarray:
    """Return the model's output in float32, summed in another order, with one product off by `fault`."""
    w, t = (numpy_helper.to_array(tensor) for tensor in model.graph.initializer)
    products = (x[0] * w[:, 0])[::-1].reshape(8, -1)
    products[3, 7] *= 1 + fault
    total = np.float32(0)
    for part in products:
        total += part.sum(dtype="f4")
    return np.array([[total - t[0]]], "f4")


def test_rounding_that_a_model_amplifies_is_no_error() -> None:
    model = amplifying()
    x = (1 + np.random.RandomState(5).randn(1, TERMS) * 1e-4).astype("f4")
    reference = reference_outputs(model, {"x": x})
    exact = exact_outputs(model, {"x": x})
    assert exact is not None
    for fault, passes in ((0.0, True), (0.05, False)):
        ours = [in_another_order(model, x, fault=fault)]
        parity, measured = compare(["y"], ours, reference), distances(["y"], ours, reference, exact)
        assert parity.error > 1e-4, "more than rounding does elsewhere"
        if passes:
            check(parity, 1e-4, measured)
        else:
            with pytest.raises(ParityError):
                check(parity, 1e-4, measured)
        with pytest.raises(ParityError):
            check(parity, 1e-4)


@pytest.mark.parametrize(
    ("measured", "passes"),
    [
        (Distances(2e-4, 1e-4), True),
        (Distances(3.9e-4, 1e-4), True),
        (Distances(4.1e-4, 1e-4), False),
        (Distances(1e-3, 1e-6), False),
        (Distances(2e-2, 1e-2), False),
        (Distances(float("nan"), 1e-4), False),
        (Distances(float("inf"), float("inf")), False),
        (Distances(1e-4, float("nan")), False),
    ],
)
def test_only_the_reference_s_own_distance_excuses_an_error(measured: Distances, passes: bool) -> None:
    parity = Parity(1.5e-4, "y", "reference")
    if passes:
        check(parity, 1e-4, measured)
    else:
        with pytest.raises(ParityError, match="in double precision"):
            check(parity, 1e-4, measured)


def test_a_model_without_an_exact_result_keeps_the_tolerance() -> None:
    node = helper.make_node("Unknown", ["x"], ["y"], domain="somebody")
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("somebody", 1)]
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets)
    assert exact_outputs(model, {"x": np.ones(1, "f4")}) is None


def test_constants_casts_and_branches_are_widened_too() -> None:
    third = helper.make_node("Constant", [], ["c"], value_float=1 / 3)
    cast = helper.make_node("Cast", ["n"], ["f"], to=onnx.TensorProto.FLOAT)
    quotient = helper.make_node("Div", ["f", "c"], ["q"])
    branch = helper.make_graph(
        [helper.make_node("Mul", ["q", "q"], ["z"])],
        "branch",
        [],
        [helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [1])],
    )
    choose = helper.make_node("If", ["b"], ["y"], then_branch=branch, else_branch=branch)
    graph = helper.make_graph(
        [third, cast, quotient, choose],
        "g",
        [
            helper.make_tensor_value_info("n", onnx.TensorProto.INT64, [1]),
            helper.make_tensor_value_info("b", onnx.TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    exact = exact_outputs(model, {"n": np.array([7]), "b": np.array(True)})
    assert exact is not None
    assert exact[0].dtype == np.float64
    assert exact[0][0] == (7 / np.float64(np.float32(1 / 3))) ** 2


def test_what_was_granted_passes_the_self_test() -> None:
    assert tolerances.self_test_rtol(1e-6) == tolerances.SELF_TEST_RTOL
    assert tolerances.self_test_rtol(0.004) == pytest.approx(0.04)
