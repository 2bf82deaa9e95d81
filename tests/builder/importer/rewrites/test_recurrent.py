"""LSTM, GRU and RNN: kept for the kernel, or unrolled."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from builder.errors import ModelError
from builder.importer import import_onnx
from tests.builder.importer.rewrites.cases import ModelMaker, operators

pytestmark = pytest.mark.slow

STEPS, BATCH, WIDTH, HIDDEN = 4, 2, 3, 5


def recurrent(make_model: ModelMaker, noise: Any, kind: str, **options: Any) -> onnx.ModelProto:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    directions = 2 if options.get("direction") == "bidirectional" else 1
    with_bias, with_state = options.pop("bias", True), options.pop("state", False)
    peephole, lengths = options.pop("peephole", False), options.pop("lengths", None)
    outputs = options.pop("outputs", ["Y", "Y_h", "Y_c"])[: 3 if kind == "LSTM" else 2]
    weights = {
        "W": noise(directions, gates * HIDDEN, WIDTH) * 0.5,
        "R": noise(directions, gates * HIDDEN, HIDDEN) * 0.5,
    }
    inputs = ["X", "W", "R", "", "", "", "", ""]
    if with_bias:
        weights["B"] = noise(directions, 2 * gates * HIDDEN) * 0.5
        inputs[3] = "B"
    if lengths is not None:
        weights["lengths"] = np.array(lengths, np.int32)
        inputs[4] = "lengths"
    state_shape = (directions, BATCH, HIDDEN)
    if with_state:
        weights["h0"] = noise(*state_shape)
        inputs[5] = "h0"
        if kind == "LSTM":
            weights["c0"] = noise(*state_shape)
            inputs[6] = "c0"
    if peephole:
        weights["P"] = noise(directions, 3 * HIDDEN) * 0.5
        inputs[7] = "P"
    while not inputs[-1]:
        inputs.pop()
    node = helper.make_node(kind, inputs, outputs, name="layer", hidden_size=HIDDEN, **options)
    shapes = {"Y": [STEPS, directions, BATCH, HIDDEN], "Y_h": list(state_shape), "Y_c": list(state_shape)}
    return make_model([node], {"X": [STEPS, BATCH, WIDTH]}, {n: shapes[n] for n in outputs if n}, weights)


ONE_KERNEL = [
    ("LSTM", {}),
    ("LSTM", {"bias": False, "direction": "reverse"}),
    ("LSTM", {"direction": "bidirectional", "state": True}),
    ("LSTM", {"outputs": ["", "Y_h"]}),
    ("LSTM", {"outputs": ["Y"]}),
    ("LSTM", {"lengths": [STEPS, STEPS]}),
    ("LSTM", {"activations": ["Sigmoid", "Tanh", "Tanh"]}),
    # As PyTorch's newer exporter writes it: defaults, and only the output that is used.
    ("LSTM", {"input_forget": 0, "layout": 0, "direction": "bidirectional", "outputs": ["Y"]}),
    ("LSTM", {"activation_alpha": [0.1, 0.1, 0.1], "outputs": ["", "", "Y_c"]}),
    ("GRU", {"linear_before_reset": 1, "state": True}),
    ("GRU", {"linear_before_reset": 1, "layout": 0, "outputs": ["", "Y_h"]}),
    ("GRU", {"linear_before_reset": 1, "bias": False, "direction": "bidirectional"}),
    ("RNN", {}),
    ("RNN", {"direction": "bidirectional", "state": True}),
]
UNROLLED = [
    ("LSTM", {"peephole": True, "state": True}),
    ("LSTM", {"clip": 0.3}),
    ("LSTM", {"input_forget": 1}),
    ("LSTM", {"activations": ["Sigmoid", "Relu", "Softsign"]}),
    ("GRU", {}),
    ("GRU", {"direction": "reverse", "clip": 0.5}),
    ("RNN", {"direction": "bidirectional", "state": True, "activations": ["Relu", "Tanh"]}),
]


@pytest.mark.parametrize(("kind", "options"), [*ONE_KERNEL, *UNROLLED])
def test_recurrent_layers(
    make_model: ModelMaker, noise: Any, agrees: Any, kind: str, options: dict[str, Any]
) -> None:
    normal = agrees(recurrent(make_model, noise, kind, **options), noise(STEPS, BATCH, WIDTH))
    assert (kind in operators(normal)) == ((kind, options) in ONE_KERNEL)
    assert not [node.name for node in normal.graph.node if node.name.count(f"{kind}_0") > 1], (
        "rewritten twice"
    )


SHORTER = [
    (kind, {"lengths": lengths, "direction": direction, "state": state})
    for kind in ("LSTM", "GRU", "RNN")
    for lengths, direction, state in (
        ([STEPS, STEPS - 1], "forward", False),
        ([STEPS - 2, STEPS - 1], "reverse", True),
        ([1, STEPS - 1], "bidirectional", True),
    )
]


@pytest.mark.parametrize(("kind", "options"), SHORTER)
def test_sequences_of_different_lengths(
    make_model: ModelMaker, noise: Any, agrees: Any, kind: str, options: dict[str, Any]
) -> None:
    agrees(recurrent(make_model, noise, kind, **options), noise(STEPS, BATCH, WIDTH))


def test_lengths_of_the_request(make_model: ModelMaker, noise: Any, run_onnx: Any) -> None:
    model = recurrent(make_model, noise, "GRU", lengths=[STEPS, 1], direction="bidirectional")
    (lengths,) = (tensor for tensor in model.graph.initializer if tensor.name == "lengths")
    model.graph.initializer.remove(lengths)
    model.graph.input.append(helper.make_tensor_value_info("lengths", lengths.data_type, [BATCH]))
    normal = import_onnx(model).onnx
    for each in ([STEPS, STEPS], [2, STEPS - 1], [1, 1]):
        feeds = {"X": noise(STEPS, BATCH, WIDTH), "lengths": np.array(each, np.int32)}
        for found, wanted in zip(run_onnx(normal, feeds), run_onnx(model, feeds), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


PARAMETERS = {
    "Affine": (0.7, 0.2),
    "Elu": (0.7, None),
    "HardSigmoid": (0.3, 0.4),
    "LeakyRelu": (0.2, None),
    "ScaledTanh": (0.8, 0.6),
    "Softplus": (None, None),
    "Softsign": (None, None),
    "ThresholdedRelu": (0.1, None),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_activation_with_parameters(make_model: ModelMaker, noise: Any, run_onnx: Any, name: str) -> None:
    alpha, beta = PARAMETERS[name]
    options: dict[str, Any] = {"activations": [name]}
    options |= {} if alpha is None else {"activation_alpha": [alpha]}
    options |= {} if beta is None else {"activation_beta": [beta]}
    same_after_import(recurrent(make_model, noise, "RNN", **options), noise, run_onnx)


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_activation_without_its_parameters(
    make_model: ModelMaker, noise: Any, run_onnx: Any, name: str
) -> None:
    same_after_import(recurrent(make_model, noise, "RNN", activations=[name]), noise, run_onnx)


def test_parameters_are_listed_only_for_activations_that_have_them(
    make_model: ModelMaker, noise: Any, run_onnx: Any
) -> None:
    options = {
        "activations": ["HardSigmoid", "ScaledTanh", "Tanh", "Sigmoid", "LeakyRelu", "Elu"],
        "activation_alpha": [0.3, 0.8, 0.1, 0.6],
        "activation_beta": [0.4, 0.5],
    }
    same_after_import(
        recurrent(make_model, noise, "LSTM", direction="bidirectional", **options), noise, run_onnx
    )


def same_after_import(model: onnx.ModelProto, noise: Any, run_onnx: Any) -> None:
    feeds = {"X": noise(STEPS, BATCH, WIDTH)}
    found, expected = run_onnx(import_onnx(model).onnx, feeds), run_onnx(model, feeds)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_no_steps_are_refused(make_model: ModelMaker, noise: Any, kind: str) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    nodes = [
        helper.make_node("Slice", ["x", "end", "end"], ["nothing"]),
        helper.make_node(
            kind, ["nothing", "W", "R", "", "", "h"], ["", "y"], name="layer", hidden_size=HIDDEN
        ),
    ]
    weights = {"end": np.array([2]), "W": noise(1, gates * HIDDEN, 3), "R": noise(1, gates * HIDDEN, HIDDEN)}
    model = make_model(nodes, {"x": [2, 1, 3], "h": [1, 1, HIDDEN]}, {"y": [1, 1, HIDDEN]}, weights)
    with pytest.raises(ModelError, match="expected a sequence of at least one step, got none"):
        import_onnx(model)
