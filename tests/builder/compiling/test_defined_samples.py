"""Models that are not defined on any sample: which one parity takes, and what is said if there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from agent.bundle.tensor_spec import TensorSpec
from builder import compile
from builder.compiling.defined_samples import choose
from builder.compiling.sample_inputs import make_inputs, samples
from builder.errors import ParityError
from builder.importer import import_onnx
from builder.importer.onnx_import import ImportedModel
from tests.builder.quantising.networks import Network

SHAPE = [1, 6, 5, 5]


def quantised(*operators: str) -> ImportedModel:
    """Return a model that quantises a function of its input, and multiplies the bytes."""
    network = Network()
    scale, zero = network.constant(0.05), network.constant(121, np.uint8)
    y = network.input("x", SHAPE)
    for operator in operators:
        y = network.op(operator, y)
    y = network.op("DequantizeLinear", network.op("QuantizeLinear", y, scale, zero), scale, zero)
    codes = network.constant(network.rng.integers(-100, 100, (4, 6, 1, 1)), np.int8)
    weight = network.op("DequantizeLinear", codes, network.constant(0.01), network.constant(0, np.int8))
    return import_onnx(network.model(network.op("Conv", y, weight)))


def cast(kind: int, *operators: str) -> ImportedModel:
    """Return a model that casts a function of its input to integers."""
    network = Network()
    y = network.input("x", SHAPE)
    for operator in operators:
        y = network.op(operator, y)
    return import_onnx(network.model(network.op("Cast", y, to=kind)))


def chosen(model: ImportedModel) -> tuple[dict[str, Any], list[str]]:
    lines: list[str] = []
    return choose(model.onnx, samples(model.inputs, model.onnx), lines.append), lines


@pytest.mark.parametrize(
    "operators", [("Log",), ("Sqrt",), ("Abs", "Neg", "Acos", "Sqrt"), ("Acosh",)], ids=str
)
@pytest.mark.parametrize("make", [quantised, lambda *o: cast(TensorProto.INT32, *o)], ids=["bytes", "cast"])
def test_the_sample_is_one_on_which_the_model_is_defined(make: Any, operators: tuple[str, ...]) -> None:
    model = make(*operators)
    inputs, lines = chosen(model)
    assert not np.array_equal(inputs["x"], make_inputs(model.inputs, model.onnx)["x"])
    assert inputs["x"].dtype == np.float32
    assert not lines


def test_a_model_that_is_defined_keeps_the_first_sample() -> None:
    model = quantised("Abs", "Sqrt")
    np.testing.assert_array_equal(chosen(model)[0]["x"], make_inputs(model.inputs, model.onnx)["x"])


@pytest.mark.parametrize("make", [quantised, lambda *o: cast(TensorProto.UINT8, *o)], ids=["bytes", "cast"])
def test_a_model_that_is_never_defined_is_refused_by_the_name_of_the_tensor(make: Any) -> None:
    model = make("Abs", "Neg", "Log")
    with pytest.raises(
        ParityError, match=r"makes integers of log_.* 150 of 150 elements that are NaN"
    ) as caught:
        chosen(model)
    assert caught.value.hint is not None
    assert "Clip" in caught.value.hint


def test_a_number_beyond_its_type_has_no_integer() -> None:
    for kind, operators in ((TensorProto.INT8, ["Exp"] * 3), (TensorProto.INT64, ["Exp"] * 4)):
        with pytest.raises(ParityError, match="beyond it"):
            chosen(cast(kind, "Abs", *operators))


def test_masks_are_filled_before_floats_are_changed() -> None:
    """A row whose places are all masked has no softmax."""
    network = Network()
    mask = network.input("mask", [1, 4], TensorProto.INT64)
    zero = network.constant(0, np.int64)
    low = network.op(
        "Where", network.op("Equal", mask, zero), network.constant(-np.inf), network.constant(0.0)
    )
    y = network.op("Softmax", network.op("Add", network.input("x", [3, 4]), low))
    scale, point = network.constant(1 / 255), network.constant(0, np.uint8)
    model = import_onnx(network.model(network.op("QuantizeLinear", y, scale, point)))
    drawn = make_inputs(model.inputs, model.onnx) | {"mask": np.zeros((1, 4), "int64")}
    full = drawn | {"mask": np.ones((1, 4), "int64")}
    assert choose(model.onnx, [drawn, full], print)["mask"].all()
    spec = TensorSpec("mask", "INT64", (1, 400))
    sets = list(samples([spec], onnx.ModelProto()))
    assert [bool(each["mask"].all()) for each in sets] == [False, True]


def test_outputs_that_are_numbers_are_preferred() -> None:
    network = Network()
    model = import_onnx(network.model(network.op("Log", network.input("x", SHAPE))))
    inputs, lines = chosen(model)
    assert (inputs["x"] > 0).all()
    assert not lines
    network = Network()
    low = network.op("Neg", network.op("Abs", network.input("x", SHAPE)))
    model = import_onnx(network.model(network.op("Log", low)))
    inputs, lines = chosen(model)
    np.testing.assert_array_equal(inputs["x"], make_inputs(model.inputs, model.onnx)["x"])
    assert len(lines) == 1
    assert "NaN, on every sample" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["host", "rpi4"])
def test_a_quantised_model_of_logarithms_is_compiled(target: str) -> None:
    assert compile(quantised("Log"), target).manifest.samples.count == 1


def test_a_model_that_makes_bytes_of_nan_is_refused_when_it_is_compiled() -> None:
    with pytest.raises(ParityError, match=r"QuantizeLinear .* makes integers of"):
        compile(quantised("Abs", "Neg", "Log"))
