"""The error of outputs against the reference, and when it is too large."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, shape_inference

from builder.compiling import tolerances
from builder.compiling.noise import compare_with_noise, noise_of
from builder.compiling.parity import Noise, Parity, check, compare, run_as_defined
from builder.errors import ModelError, ParityError


def error_of(ours: object, theirs: object, dtype: str = "float32") -> float:
    return compare(["y"], [np.array(ours, dtype)], [np.array(theirs, dtype)]).error


def test_the_error_is_relative_to_the_largest_value() -> None:
    assert error_of([10.0, 0.001], [10.0, 0.002]) == pytest.approx(1e-4, rel=1e-3)


def test_equal_outputs_have_no_error_even_infinities_and_nans() -> None:
    assert error_of([1, np.inf, np.nan], [1, np.inf, np.nan]) == 0


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([np.nan], [1.0]),
        ([1.0], [np.nan]),
        ([np.inf], [-np.inf]),
        ([-np.inf], [np.finfo("f4").min]),
        ([np.finfo("f4").max], [np.inf]),
    ],
)
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


def test_a_nan_is_never_rounding() -> None:
    one, nan, loud = np.ones(3, "f4"), np.array([1, np.nan, 1], "f4"), np.ones(3)
    assert not compare_with_noise([nan, one], [one, one], [loud, loud], 1e-4).is_rounding
    assert not compare_with_noise([one + 0.001, one], [nan, one], [loud, loud], 1e-4).is_rounding


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
        run_as_defined(helper.make_model(graph), {"x": np.ones(1, "float32")})


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


def explained(model: onnx.ModelProto, x: np.ndarray, ours: list[np.ndarray]) -> tuple[Parity, Noise]:
    reference = run_as_defined(model, {"x": x})
    noise = noise_of(model, {"x": x}, reference)
    assert noise is not None
    return compare(["y"], ours, reference), compare_with_noise(ours, reference, noise, tolerances.PARITY)


def test_rounding_that_a_model_amplifies_is_no_error() -> None:
    model = shape_inference.infer_shapes(amplifying())
    x = (1 + np.random.RandomState(5).randn(1, TERMS) * 1e-4).astype("f4")
    for fault, passes in ((0.0, True), (0.05, False)):
        found, noise = explained(model, x, [in_another_order(model, x, fault=fault)])
        assert found.error > 1e-4, "more than rounding does elsewhere"
        if passes:
            check(found, 1e-4, noise)
        else:
            with pytest.raises(ParityError):
                check(found, 1e-4, noise)
        with pytest.raises(ParityError):
            check(found, 1e-4)


@pytest.mark.parametrize(("shift", "is_rounding"), [(0, True), (1e-5, False)])
def test_steps_that_depend_on_the_ones_before_amplify_rounding(shift: float, is_rounding: bool) -> None:
    """Thirty steps of tanh(2 W h): another order of sums is off by 3e-4, a bias of 1e-5 by ten times that."""
    weights = (np.random.RandomState(0).randn(128, 128) / np.sqrt(128) * 2).astype("f4")
    nodes, source = [], "x"
    for step in range(30):
        target = "y" if step == 29 else f"h{step}"
        nodes += [helper.make_node("MatMul", [source, "w"], [f"m{step}"])]
        nodes += [helper.make_node("Tanh", [f"m{step}"], [target])]
        source = target
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 128]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(weights, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    x = np.random.RandomState(1).randn(4, 128).astype("f4")
    order, ours = np.random.RandomState(3).permutation(128), x
    for _ in range(30):
        ours = np.tanh(ours[:, order] @ weights[order] + np.float32(shift))
    found, noise = explained(shape_inference.infer_shapes(model), x, [ours])
    assert found.error > 1e-4
    assert noise.is_rounding == is_rounding


@pytest.mark.parametrize("c", [1.5 * 2**23, 1e6])
@pytest.mark.parametrize("before", [[], ["Exp"], ["Tanh"]])
def test_a_sum_that_rounds_may_not_be_left_out(c: float, before: list[str]) -> None:
    """For real numbers (x + c) - c is x; in float32 it rounds. Both are right in double precision."""
    nodes = [helper.make_node(operator, ["x"], ["e"]) for operator in before]
    source = "e" if before else "x"
    nodes += [helper.make_node("Add", [source, "c"], ["s"]), helper.make_node("Sub", ["s", "c"], ["y"])]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1000]) for name in "xy"]
    weights = [numpy_helper.from_array(np.float32(c), "c")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    x = np.random.RandomState(5).randn(1000).astype("f4")
    unrounded = {"Exp": np.exp, "Tanh": np.tanh}[before[0]](x) if before else x
    found, noise = explained(shape_inference.infer_shapes(model), x, [unrounded])
    assert found.error > 1e-4
    assert not noise.is_rounding


@pytest.mark.parametrize(
    ("noise", "passes"),
    [
        (Noise(2e-4, 1.0, 0.0), True),
        (Noise(2e-4, 3.9, 0.005), True),
        (Noise(2e-4, 4.1, 0.0), False),
        (Noise(2e-4, 1.0, 0.02), False),
        (Noise(2e-2, 1.0, 0.0), False),
        (Noise(2e-4, float("nan"), 0.0), False),
        (Noise(float("inf"), 1.0, 0.0), False),
    ],
)
def test_only_the_noise_of_the_reference_excuses_an_error(noise: Noise, passes: bool) -> None:
    found = Parity(1.5e-4, "y", "reference")
    if passes:
        check(found, 1e-4, noise)
    else:
        with pytest.raises(ParityError, match="times what rounding explains"):
            check(found, 1e-4, noise)


def test_an_integer_is_excused_only_where_rounding_changes_the_reference_s() -> None:
    ours, theirs, noise = np.array([1, 2]), np.array([1, 3]), np.array([0, np.inf])
    assert compare_with_noise([ours], [theirs], [noise], 1e-4).is_rounding
    assert not compare_with_noise([ours], [theirs], [noise[::-1]], 1e-4).is_rounding


def test_rounding_explains_the_label_of_classes_that_tie() -> None:
    node = helper.make_node(
        "LinearClassifier",
        ["x"],
        ["label", "scores"],
        domain="ai.onnx.ml",
        classlabels_ints=[10, 20, 30],
        coefficients=[0.1, 0.7, 0.3, 0.3, 0.1, 0.7, -1.0, -1.0, -1.0],
        intercepts=[0.0, 0.0, 0.0],
    )
    x = np.array([[0.9, 0.9, 0.9], [3, 0, 0]], "f4")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [2]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, [2, 3]),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    noise = noise_of(model, {"x": x}, run_as_defined(model, {"x": x}))
    assert noise is not None
    assert noise[0].tolist() == [np.inf, 0]


def test_the_noise_of_a_model_that_cannot_run_is_unknown() -> None:
    node = helper.make_node("Unknown", ["x"], ["y"], domain="somebody")
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("somebody", 1)]
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets)
    assert noise_of(model, {"x": np.ones(1, "f4")}, [np.ones(1, "f4")]) is None


def test_what_was_granted_passes_the_self_test() -> None:
    assert tolerances.self_test_rtol(1e-6) == tolerances.SELF_TEST_RTOL
    assert tolerances.self_test_rtol(0.004) == pytest.approx(0.04)
