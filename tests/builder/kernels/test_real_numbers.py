"""NaN, infinities, zeros of both signs, ties and extremes pass through arithmetic as ONNX Runtime has them.

Each value is computed in a kernel of its own, without outputs in between, so that all of its operators are
fused: then TVM sees one expression, and could simplify it as one of real numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.builder.compiling.test_any_operator import run_as_shipped
from tests.builder.kernels.machines import machine

_LARGE = (1e18, 8388609.0, 1e-18)  # quotients of larger ones are denormal: devices make them 0
_SMALL = (0.0, 1.0, 0.5, 1.5, 2.5, 3.0, 7.25, np.inf)
NUMBERS = np.array([np.nan, *_LARGE, *_SMALL, *(-number for number in _SMALL)], "f4")
PAIRS = dict(zip("xy", (each.ravel() for each in np.meshgrid(NUMBERS, NUMBERS)), strict=True))
CONSTANTS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e18, 1e-18, np.inf, 12582912.0, -3.0)
BINARY = ("Add", "Sub", "Sub", "Mul", "Div", "Max", "Min")
UNARY = ("Neg", "Abs", "Sqrt", "Reciprocal", "Floor", "Ceil", "Round", "Relu", "Sign")
COMPARISONS = ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
LOGIC = ("And", "Or", "Xor")


class Graph:
    """A graph of float32 numbers and booleans with an output for each value under test."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []
        self.outputs: dict[str, str] = {}  # name -> what is computed
        self.booleans: set[str] = set()
        self._written: dict[str, str] = {}

    def node(self, op: str, *inputs: str | float, **attributes: float) -> str:
        names = [each if isinstance(each, str) else self.constant(each) for each in inputs]
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, names, [name], **attributes))
        if op in (*COMPARISONS, *LOGIC, "Not", "IsNaN", "IsInf"):
            self.booleans.add(name)
        written = ", ".join(self._written.get(each, each) for each in names)
        self._written[name] = f"{op}({written})"
        return name

    def constant(self, number: float) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(number, "f4"), name))
        self._written[name] = str(number)
        return name

    def output(self, name: str) -> None:
        self.outputs[name] = self._written[name]

    def model(self) -> onnx.ModelProto:
        size = [len(PAIRS["x"])]
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name in PAIRS]
        outputs = [
            helper.make_tensor_value_info(
                name, TensorProto.BOOL if name in self.booleans else TensorProto.FLOAT, size
            )
            for name in self.outputs
        ]
        graph = helper.make_graph(self.nodes, "numbers", inputs, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def differences(graph: Graph, lanes: int, *, signs: bool = True) -> list[str]:
    """Return a line for each output that is not ONNX Runtime's; with `signs`, -0 is not 0."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = graph.model()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    wanted = session.run(None, PAIRS)
    found = []
    for text, got, want in zip(
        graph.outputs.values(), run_as_shipped(model, PAIRS, machine(lanes)), wanted, strict=True
    ):
        g, w = (np.asarray(each, "f8") for each in (got, want))
        with np.errstate(invalid="ignore"):
            same = (g == w) | (np.isnan(g) & np.isnan(w)) | (np.abs(g - w) <= 1e-6 * np.abs(w))
        if signs:
            same &= np.isnan(w) | (np.signbit(g) == np.signbit(w))
        if not same.all():
            at = int(np.flatnonzero(~same)[0])
            x, y = (each[at] for each in PAIRS.values())
            found.append(f"{text}: expected {w[at]} for x={x}, y={y}, got {g[at]}")
    return found


def test_a_number_and_itself() -> None:
    graph = Graph()
    for op in ("Sub", "Div", "Equal", "Less", "LessOrEqual", "Max", "Min"):
        value = graph.node(op, "x", "x")
        graph.output(graph.node("Not", value) if value in graph.booleans else value)
    graph.output(graph.node("Where", graph.node("Not", graph.node("Equal", "x", "x")), 444.0, "x"))
    graph.output(graph.node("Where", graph.node("Equal", graph.node("Sub", "x", "x"), 0.0), "x", 444.0))
    graph.output(graph.node("Mul", graph.node("Sqrt", "x"), graph.node("Sqrt", "x")))
    assert not differences(graph, 8, signs=False)  # ONNX Runtime's Where drops them


def test_terms_that_would_cancel() -> None:
    graph = Graph()
    for other in ("y", 12582912.0, 1e-3):
        added = [graph.node("Add", "x", other) for _ in range(3)]
        graph.output(graph.node("Sub", added[0], other))
        graph.output(graph.node("Sub", added[1], "x"))
        graph.output(graph.node("Sub", "x", added[2]))
        graph.output(graph.node("Add", graph.node("Sub", "x", other), other))
    graph.output(graph.node("Div", graph.node("Mul", "x", 1e30), 1e30))
    graph.output(graph.node("Mul", graph.node("Reciprocal", "y"), "x"))
    chosen = [graph.node("Where", graph.node("Less", "x", "y"), "x", "y") for _ in range(2)]
    graph.output(graph.node("Sub", chosen[0], "y"))
    graph.output(graph.node("Sub", chosen[1], "x"))
    assert not differences(graph, 8, signs=False)


@pytest.mark.parametrize("number", [0.0, -0.0])
def test_zeros(number: float) -> None:
    graph = Graph()
    for op in ("Add", "Sub", "Mul", "Div"):
        graph.output(graph.node(op, number, "x"))
        if op != "Add" or np.signbit(number):  # x + 0 is left out: only -0 would become 0
            graph.output(graph.node(op, "x", number))
    graph.output(graph.node("Neg", "x"))
    graph.output(graph.node("Sign", "x"))
    graph.output(graph.node("Pow", "x", 0.5))
    for alpha in (0.0, 0.5):
        graph.output(graph.node("LeakyRelu", "x", alpha=alpha))
    assert not differences(graph, 8)


def test_negated_and_joined_comparisons() -> None:
    graph = Graph()

    def compare(op: str, *operands: str) -> str:
        return graph.node(op, *operands)

    for op in COMPARISONS:
        graph.output(graph.node("Not", compare(op, "x", "y")))
        graph.output(graph.node("Not", graph.node("Or", compare(op, "x", "y"), compare(op, "y", "x"))))
        for other in COMPARISONS:
            for joined in ("And", "Or"):
                graph.output(graph.node(joined, compare(op, "x", "y"), compare(other, "y", "x")))
    inner = graph.node("Where", graph.node("GreaterOrEqual", "x", 0.0), 2.0, 3.0)
    graph.output(graph.node("Where", graph.node("Less", "x", 0.0), 1.0, inner))
    assert not differences(graph, 8)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_any_expression(lanes: int) -> None:
    rng = random.Random(lanes)
    graph = Graph()
    for _ in range(40):
        graph.output(_expression(graph, rng))
    assert not differences(graph, lanes, signs=False)  # ONNX says nothing about max(-0, 0)


@pytest.mark.parametrize("slopes", [[np.nan], [np.inf], [np.nan, np.inf, 2.0, -np.inf]], ids=str)
def test_zero_and_nan_have_no_slope(slopes: list[float]) -> None:
    x = np.array([[0.0, -0.0, 1.0, np.nan], [-1.0, np.inf, -3.0, 0.0]], np.float32)
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[2,4] x, float[{len(slopes)}] s)
        => (float[2,4] y) {{ y = PRelu(x, s) }}"""
    )
    feeds = {"x": x, "s": np.array(slopes, np.float32)}
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(run_as_shipped(model, feeds, machine(8))[0], wanted)


def _expression(graph: Graph, rng: random.Random) -> str:
    """Write an expression of three to eight operators that share their operands; return its value."""
    floats: list[str | float] = ["x", "y"]
    booleans: list[str] = []
    value = ""

    def operand(known: Sequence[str | float]) -> str | float:
        return rng.choice(known) if rng.random() < 0.8 else rng.choice(CONSTANTS)

    for _ in range(rng.randint(3, 8)):
        a, b = operand(floats), operand(floats)
        kind = rng.choice(["binary", "binary", "same", "unary", "compare", "logic", "choose", "clip"])
        if kind == "compare":
            value = graph.node(rng.choice(COMPARISONS), a, rng.choice([a, b]))
        elif kind == "logic" and booleans:
            pair = rng.choice(booleans), rng.choice(booleans)
            value = graph.node("Not", pair[0]) if rng.random() < 0.5 else graph.node(rng.choice(LOGIC), *pair)
        elif kind == "choose" and booleans:
            value = graph.node("Where", rng.choice(booleans), a, b)
        elif kind == "unary":
            value = graph.node(rng.choice(UNARY), rng.choice(floats))
        elif kind == "clip":
            value = graph.node("Clip", rng.choice(floats), rng.choice(CONSTANTS), rng.choice(CONSTANTS))
        else:
            value = graph.node(rng.choice(BINARY), a, a if kind == "same" else b)
        (booleans if value in graph.booleans else floats).append(value)
    return value
