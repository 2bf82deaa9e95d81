"""Prepare LSTM, GRU and RNN: one kernel runs what common exporters write, and the rest is unrolled.

The kernel (`builder.calls.recurrent`) has constant weights, the usual activations and no options; a
GRU's reset gate is applied after the product, as in PyTorch and Keras.
Formulas and the order of the gates: ONNX operator specification, LSTM-14, GRU-14 and RNN-14. Products with
the inputs do not depend on the state, so they are computed for all steps at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import ArrayLike

from builder.errors import ModelError
from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.recurrent_call import KERNEL_ATTRIBUTES
from builder.importer.rewrites.replacement import Nodes, Replacement, input_name, output_name

# A step is a dozen kernels: with more steps, compiling takes minutes and the code outgrows the caches.
MAX_STEPS: Final = 512
# Activations of the specification, and the defaults of their parameters, alpha and beta: ONNX Runtime's, 0
# where it has none. As there, a layer's lists of parameters have values only for activations that take them.
_PARAMETERS: Final[Mapping[str, tuple[float | None, float | None]]] = {
    "Affine": (0.0, 0.0),
    "Elu": (1.0, None),
    "HardSigmoid": (0.2, 0.5),
    "LeakyRelu": (0.01, None),
    "Relu": (None, None),
    "ScaledTanh": (0.0, 0.0),
    "Sigmoid": (None, None),
    "Softplus": (None, None),
    "Softsign": (None, None),
    "Tanh": (None, None),
    "ThresholdedRelu": (0.0, None),
}
_GATES: Final[Mapping[str, int]] = {"LSTM": 4, "GRU": 3, "RNN": 1}
_ACTIVATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}


@dataclass(frozen=True, slots=True)
class _Activation:
    """An activation and its parameters, of which some activations have none."""

    name: str
    alpha: float | None = None
    beta: float | None = None

    def emit(self, new: Replacement, x: str, dtype: np.dtype[Any]) -> str:
        alpha, beta = (new.constant(value or 0.0, dtype) for value in (self.alpha, self.beta))
        match self.name:
            case "Affine":
                return new.op("Add", new.op("Mul", x, alpha), beta)
            case "ScaledTanh":
                return new.op("Mul", new.op("Tanh", new.op("Mul", x, beta)), alpha)
        given: dict[str, Any] = {"alpha": self.alpha, "beta": self.beta}
        return new.op(self.name, x, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class _Layer:
    """A recurrent node, its sizes and attributes, and the nodes that will replace it.

    `node`: the LSTM, GRU or RNN.
    `dtype`: of the input, the weights and the states.
    """

    node: onnx.NodeProto
    graph: OnnxGraph
    new: Replacement
    options: Mapping[str, Any]
    batch: int
    steps: int
    hidden: int
    dtype: np.dtype[Any]

    @property
    def kind(self) -> str:
        return str(self.node.op_type)

    @property
    def batch_first(self) -> bool:
        return bool(self.options.get("layout", 0))

    def constant(self, values: ArrayLike) -> str:
        return self.new.constant(values, self.dtype)

    def of_direction(self, tensor: str, direction: int, axis: int = 0) -> str:
        """One direction's part of a weight or state."""
        return self.new.op("Gather", tensor, self.new.constant(direction, np.int64), axis=axis)

    def split(self, x: str, sizes: Sequence[int], axis: int) -> list[str]:
        return self.new.op_many("Split", len(sizes), x, self.new.ints(*sizes), axis=axis)

    def activate(self, cell: _Cell, index: int, x: str) -> str:
        if clip := float(self.options.get("clip", 0.0)):
            x = self.new.op("Clip", x, self.constant(-clip), self.constant(clip))
        return cell.activations[index].emit(self.new, x, self.dtype)

    def running(self, step: int) -> str | None:
        """Which sequences have a step, [batch, 1]; empty if all have it, None if none has it."""
        name = input_name(self.node, 4)
        if not name:
            return ""
        lengths = self.graph.constant(name)
        if lengths is None:
            mask = self.new.op("Greater", name, self.new.constant(step, np.int32))
            return self.new.op("Unsqueeze", mask, self.new.ints(1))
        if np.all(lengths > step):
            return ""
        return self.new.constant(lengths.reshape(-1, 1) > step, np.bool_) if np.any(lengths > step) else None


@dataclass(frozen=True, slots=True)
class _Cell:
    """The weights of one direction, as names of values, and its activations.

    `recurrent`: R^T, [hidden, gates * hidden]. For a GRU, the update and reset gates, then the candidate.
    `candidate_bias`: a GRU's Rbh, [hidden], if it is applied before the reset gate; else empty.
    `peepholes`: an LSTM's weights for i, o and f, [hidden] each; empty if it has none.
    `activations`: in the order of the specification.
    """

    recurrent: tuple[str, ...]
    candidate_bias: str
    peepholes: tuple[str, ...]
    activations: tuple[_Activation, ...]


def prepare(new: Replacement) -> Nodes | None:
    """Unroll a recurrent layer, or bring it into the form of the kernel.

    None if it has that form already, its length is unknown, or it has an activation of its own.
    Raises `ModelError` if the sequence has no steps: ONNX does not say what the last output is then.
    """
    shape = new.graph.shape_of(new.inputs[0])
    if shape is not None and not shape[1 if new.attributes.get("layout", 0) else 0]:
        raise ModelError(
            f"{new.node.op_type} ({new.node.name}): expected a sequence of at least one step, got none",
            hint="give its input another length: --input-shapes",
        )
    return _in_kernel_form(new) if _fits_kernel(new.node, new.graph) else _unroll(new)


def _fits_kernel(node: onnx.NodeProto, graph: OnnxGraph) -> bool:
    """Whether one kernel can run the layer."""
    options = attributes(node)
    shape, found = graph.shape_of(node.input[0]), graph.type_of(node.input[0])
    directions = 2 if options.get("direction") == "bidirectional" else 1
    if shape is None or found is None or found.dtype != np.float32 or 0 in shape:
        return False
    weights = [input_name(node, index) for index in (1, 2, 3)]
    if any(name and graph.constant(name) is None for name in weights) or input_name(node, 7):
        return False
    if _activations(node, options, directions) != _usual(node) * directions:
        return False
    if options.get("clip", 0.0) or options.get("input_forget", 0):
        return False
    if node.op_type == "GRU" and not options.get("linear_before_reset", 0):
        return False
    return _runs_to_the_end(node, graph, shape[1] if options.get("layout", 0) else shape[0])


def _in_kernel_form(new: Replacement) -> Nodes | None:
    """Put the steps first, and drop what does not change the result; None if the node is so already."""
    options = new.attributes
    kept = {name: value for name, value in options.items() if name in KERNEL_ATTRIBUTES}
    lengths = new.input(4)
    if kept == options and not lengths:
        return None
    inputs = list(new.inputs)
    if lengths:
        inputs[4] = ""
    batch_first = bool(options.get("layout", 0))
    if batch_first:
        inputs[0] = new.op("Transpose", inputs[0], perm=[1, 0, 2])
        for index in (5, 6):
            if new.input(index):
                inputs[index] = new.op("Transpose", inputs[index], perm=[1, 0, 2])
    while not inputs[-1]:
        inputs.pop()
    outputs = new.op_many(new.node.op_type, len(new.outputs), *inputs, **kept)
    for index, (name, output) in enumerate(zip(new.outputs, outputs, strict=True)):
        if name and batch_first:
            new.op("Transpose", output, to=name, perm=[2, 0, 1, 3] if index == 0 else [1, 0, 2])
        elif name:
            new.op("Identity", output, to=name)
    return new.nodes


def _unroll(new: Replacement) -> Nodes | None:
    """Unroll a recurrent layer; None if its length is unknown, or it has an activation of its own."""
    options = new.attributes
    shape, weights = new.shape_of(new.inputs[0]), new.shape_of(new.inputs[2])
    found = new.type_of(new.inputs[0])
    directions = 2 if options.get("direction") == "bidirectional" else 1
    chosen = _activations(new.node, options, directions)
    if chosen is None:
        return None
    batch, steps = (shape[0], shape[1]) if options.get("layout", 0) else (shape[1], shape[0])
    if steps * directions > MAX_STEPS:
        return None
    layer = _Layer(new.node, new.graph, new, options, batch, steps, weights[-1], found.dtype)
    x = new.op("Transpose", new.inputs[0], perm=[1, 0, 2]) if layer.batch_first else new.inputs[0]
    sequences, finals, cells = [], [], []
    count = len(_ACTIVATIONS[new.node.op_type])
    for direction in range(directions):
        cell, projected = _prepare(layer, x, direction, chosen[direction * count : (direction + 1) * count])
        backwards = options.get("direction") == "reverse" or direction == 1
        outputs, (state, memory) = _run(layer, cell, projected, direction, backwards=backwards)
        sequences.append(new.op("Concat", *outputs, axis=0))
        finals.append(state)
        cells.append(memory)
    _join(layer, sequences, finals, cells)
    return new.nodes


def _usual(node: onnx.NodeProto) -> tuple[_Activation, ...]:
    return tuple(map(_Activation, _ACTIVATIONS[node.op_type]))


def _activations(
    node: onnx.NodeProto, options: Mapping[str, Any], directions: int
) -> tuple[_Activation, ...] | None:
    """The activations of all directions; None if there are too few, or one is not of the specification."""
    usual = _usual(node) * directions
    names = [name.decode() for name in options.get("activations", ())]
    alphas, betas = (iter(options.get(f"activation_{name}", ())) for name in ("alpha", "beta"))
    chosen = []
    for name in names:
        if name not in _PARAMETERS:
            return None
        alpha, beta = (
            None if default is None else float(next(values, default))
            for default, values in zip(_PARAMETERS[name], (alphas, betas), strict=True)
        )
        chosen.append(_Activation(name, alpha, beta))
    if not chosen:
        return usual
    return tuple(chosen) if len(chosen) == len(usual) else None


def _runs_to_the_end(node: onnx.NodeProto, graph: OnnxGraph, steps: int) -> bool:
    """Whether every sequence in the batch has the full length."""
    lengths = input_name(node, 4)
    if not lengths:
        return True
    value = graph.constant(lengths)
    return value is not None and bool(np.all(value == steps))


def _prepare(
    layer: _Layer, x: str, direction: int, activations: tuple[_Activation, ...]
) -> tuple[_Cell, str]:
    """The weights of one direction, and its inputs' share of all gates, [steps, batch, gates * hidden]."""
    node, new, hidden = layer.node, layer.new, layer.hidden
    size = _GATES[layer.kind] * hidden
    weight = new.op("Transpose", layer.of_direction(node.input[1], direction), perm=[1, 0])
    whole = new.op("Transpose", layer.of_direction(node.input[2], direction), perm=[1, 0])
    recurrent = layer.split(whole, [2 * hidden, hidden], 1) if layer.kind == "GRU" else [whole]
    projected = new.op("MatMul", x, weight)
    candidate_bias = ""
    if bias := input_name(node, 3):
        inward, recurring = layer.split(layer.of_direction(bias, direction), [size, size], 0)
        if layer.kind == "GRU" and layer.options.get("linear_before_reset", 0):
            gates, candidate_bias = layer.split(recurring, [2 * hidden, hidden], 0)
            recurring = new.op("Concat", gates, layer.constant(np.zeros(hidden)), axis=0)
        projected = new.op("Add", projected, new.op("Add", inward, recurring))
    peepholes: list[str] = []
    if layer.kind == "LSTM" and (weights := input_name(node, 7)):
        peepholes = layer.split(layer.of_direction(weights, direction), [hidden] * 3, 0)
    return _Cell(tuple(recurrent), candidate_bias, tuple(peepholes), activations), projected


def _run(
    layer: _Layer, cell: _Cell, projected: str, direction: int, *, backwards: bool
) -> tuple[list[str], tuple[str, str]]:
    """Run all steps: outputs in the order of time, [1, batch, hidden] each, and the final states."""
    new = layer.new
    state, memory = (_initial_state(layer, index, direction) for index in (5, 6))
    zeros = layer.constant(np.zeros((layer.batch, layer.hidden)))
    outputs = [""] * layer.steps
    for step in range(layer.steps - 1, -1, -1) if backwards else range(layer.steps):
        running = layer.running(step)
        if running is None:
            outputs[step] = new.op("Unsqueeze", zeros, new.ints(0))
            continue
        before, remembered = state, memory
        gates = new.op("Gather", projected, new.constant(step, np.int64), axis=0)
        if layer.kind == "LSTM":
            state, memory = _lstm_step(layer, cell, gates, state, memory)
        elif layer.kind == "GRU":
            state = _gru_step(layer, cell, gates, state)
        else:
            total = new.op("Add", gates, new.op("MatMul", state, cell.recurrent[0]))
            state = layer.activate(cell, 0, total)
        output = state
        if running:
            output = new.op("Where", running, state, zeros)
            state = new.op("Where", running, state, before)
            memory = new.op("Where", running, memory, remembered) if layer.kind == "LSTM" else memory
        outputs[step] = new.op("Unsqueeze", output, new.ints(0))
    return outputs, (state, memory)


def _initial_state(layer: _Layer, index: int, direction: int) -> str:
    """Hidden state (input 5) or cell state (input 6) before the first step, [batch, hidden]."""
    given = input_name(layer.node, index) if index == 5 or layer.kind == "LSTM" else ""
    if not given:
        return layer.constant(np.zeros((layer.batch, layer.hidden)))
    return layer.of_direction(given, direction, axis=1 if layer.batch_first else 0)


def _gru_step(layer: _Layer, cell: _Cell, gates: str, state: str) -> str:
    new, hidden = layer.new, layer.hidden
    inward_gates, inward_candidate = layer.split(gates, [2 * hidden, hidden], 1)
    both = new.op("Add", inward_gates, new.op("MatMul", state, cell.recurrent[0]))
    update, reset = layer.split(layer.activate(cell, 0, both), [hidden, hidden], 1)
    if layer.options.get("linear_before_reset", 0):
        recurring = new.op("MatMul", state, cell.recurrent[1])
        if cell.candidate_bias:
            recurring = new.op("Add", recurring, cell.candidate_bias)
        recurring = new.op("Mul", reset, recurring)
    else:
        recurring = new.op("MatMul", new.op("Mul", reset, state), cell.recurrent[1])
    candidate = layer.activate(cell, 1, new.op("Add", inward_candidate, recurring))
    # (1 - z) * candidate + z * state with one product fewer.
    return new.op("Add", candidate, new.op("Mul", update, new.op("Sub", state, candidate)))


def _lstm_step(layer: _Layer, cell: _Cell, gates: str, state: str, memory: str) -> tuple[str, str]:
    new = layer.new
    total = new.op("Add", gates, new.op("MatMul", state, cell.recurrent[0]))
    inward, outward, forget, candidate = layer.split(total, [layer.hidden] * 4, 1)
    if cell.peepholes:
        inward = new.op("Add", inward, new.op("Mul", cell.peepholes[0], memory))
        forget = new.op("Add", forget, new.op("Mul", cell.peepholes[2], memory))
    inward = layer.activate(cell, 0, inward)
    if layer.options.get("input_forget", 0):
        forget = new.op("Sub", layer.constant(1), inward)
    else:
        forget = layer.activate(cell, 0, forget)
    candidate = layer.activate(cell, 1, candidate)
    memory = new.op("Add", new.op("Mul", forget, memory), new.op("Mul", inward, candidate))
    if cell.peepholes:
        outward = new.op("Add", outward, new.op("Mul", cell.peepholes[1], memory))
    outward = layer.activate(cell, 0, outward)
    # The specification clips inputs of gates; the cell state is not one.
    return new.op("Mul", outward, cell.activations[2].emit(new, memory, layer.dtype)), memory


def _join(layer: _Layer, sequences: list[str], finals: list[str], cells: list[str]) -> None:
    """Make the outputs Y [steps, directions, batch, hidden], Y_h and Y_c [directions, batch, hidden].

    With the attribute `layout` = 1 the batch is the first axis.
    """
    new, node = layer.new, layer.node
    if name := output_name(node, 0):
        parts = [new.op("Unsqueeze", sequence, new.ints(1)) for sequence in sequences]
        if layer.batch_first:
            new.op("Transpose", new.op("Concat", *parts, axis=1), to=name, perm=[2, 0, 1, 3])
        else:
            new.op("Concat", *parts, to=name, axis=1)
    for index, states in ((1, finals), (2, cells)):
        if name := output_name(node, index):
            axis = 1 if layer.batch_first else 0
            parts = [new.op("Unsqueeze", state, new.ints(axis)) for state in states]
            new.op("Concat", *parts, to=name, axis=axis)
