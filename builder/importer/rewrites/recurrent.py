"""LSTM, GRU and RNN over a sequence of known length, unrolled.

Formulas and the order of the gates: ONNX operator specification, LSTM-14, GRU-14 and RNN-14. The products with the
inputs do not depend on the state and are made for all steps at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx

from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.rewrites.replacement import Replacement, input_name, output_name

# A step is a dozen kernels: beyond this, compiling takes minutes and the code outgrows caches.
MAX_STEPS: Final = 512
_PLAIN_ACTIVATIONS: Final = frozenset({"Sigmoid", "Tanh", "Relu", "Softsign", "Softplus"})
_GATES: Final[Mapping[str, int]] = {"LSTM": 4, "GRU": 3, "RNN": 1}
_ACTIVATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}


@dataclass(frozen=True, slots=True)
class _Cell:
    """What a step needs, for one direction: names of values, and the node's attributes."""

    recurrent: str  # R^T [hidden, gates * hidden]
    recurrent_bias: str  # GRU's Rbh [hidden] where it is inside the reset; else empty
    peepholes: tuple[str, ...]  # LSTM's for i, o, f; else empty
    activations: tuple[str, ...]
    hidden: int
    clip: float
    couple_input_forget: bool
    reset_after: bool


def unroll(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Unroll a recurrent layer; None where its length is unknown or its activations are uncommon."""
    options = attributes(node)
    shape = graph.shape_of(node.input[0])
    directions = 2 if options.get("direction") == "bidirectional" else 1
    chosen = [str(name) for name in _decoded(options.get("activations", ()))]
    chosen = chosen or list(_ACTIVATIONS[node.op_type]) * directions
    batch_first = bool(options.get("layout", 0))
    if shape is None or "activation_alpha" in options or "activation_beta" in options:
        return None
    if not set(chosen) <= _PLAIN_ACTIVATIONS or len(chosen) != directions * len(_ACTIVATIONS[node.op_type]):
        return None
    batch, steps = (shape[0], shape[1]) if batch_first else (shape[1], shape[0])
    if steps * directions > MAX_STEPS or not _runs_to_the_end(node, graph, steps):
        return None
    found = graph.type_of(node.input[0])
    dtype = found.dtype if found else np.dtype(np.float32)

    new = Replacement(node, graph)
    x = new.op("Transpose", node.input[0], perm=[1, 0, 2]) if batch_first else node.input[0]
    sequences, finals, cells = [], [], []
    for direction in range(directions):
        backwards = options.get("direction") == "reverse" or direction == 1
        cell, projected = _prepare(node, graph, new, x, direction, chosen, options)
        states = _initial_states(node, new, direction, batch, cell.hidden, dtype, batch_first=batch_first)
        outputs, states = _run(node.op_type, new, cell, projected, states, steps, backwards=backwards)
        sequences.append(new.op("Concat", *outputs, axis=0))
        finals.append(states[0])
        cells.append(states[1])
    _join(node, new, sequences, finals, cells, batch_first=batch_first)
    return new.nodes


def _decoded(names: Sequence[bytes | str]) -> list[str]:
    return [name.decode() if isinstance(name, bytes) else name for name in names]


def _runs_to_the_end(node: onnx.NodeProto, graph: OnnxGraph, steps: int) -> bool:
    """Whether every sequence of the batch has the full length."""
    lengths = input_name(node, 4)
    if not lengths:
        return True
    value = graph.constant(lengths)
    return value is not None and bool(np.all(value == steps))


def _take(new: Replacement, tensor: str, direction: int) -> str:
    """One direction of a weight [directions, ...]."""
    return new.op("Gather", tensor, new.constant(direction, np.int64), axis=0)


def _prepare(
    node: onnx.NodeProto,
    graph: OnnxGraph,
    new: Replacement,
    x: str,
    direction: int,
    activations: list[str],
    options: Mapping[str, Any],
) -> tuple[_Cell, str]:
    """Weights of a direction, and the inputs' part of all gates, [steps, batch, gates * hidden]."""
    kind = node.op_type
    shape = graph.shape_of(node.input[2])
    hidden = int(options.get("hidden_size") or (shape[-1] if shape else 0))
    size = _GATES[kind] * hidden
    weight = new.op("Transpose", _take(new, node.input[1], direction), perm=[1, 0])
    recurrent = new.op("Transpose", _take(new, node.input[2], direction), perm=[1, 0])
    projected = new.op("MatMul", x, weight)
    recurrent_bias = ""
    reset_after = kind == "GRU" and bool(options.get("linear_before_reset", 0))
    if bias := input_name(node, 3):
        inward, recurring = new.op_many("Split", 2, _take(new, bias, direction), new.ints(size, size), axis=0)
        if reset_after:
            # The candidate's recurrent bias lies inside the product with the reset gate.
            gates, recurrent_bias = new.op_many("Split", 2, recurring, new.ints(2 * hidden, hidden), axis=0)
            kind_of = graph.type_of(bias)
            zeros = new.constant(np.zeros(hidden), kind_of.dtype if kind_of else np.float32)
            recurring = new.op("Concat", gates, zeros, axis=0)
        projected = new.op("Add", projected, new.op("Add", inward, recurring))
    peepholes: tuple[str, ...] = ()
    if kind == "LSTM" and (weights := input_name(node, 7)):
        sizes = new.ints(hidden, hidden, hidden)
        peepholes = tuple(new.op_many("Split", 3, _take(new, weights, direction), sizes, axis=0))
    count = len(_ACTIVATIONS[kind])
    cell = _Cell(
        recurrent=recurrent,
        recurrent_bias=recurrent_bias,
        peepholes=peepholes,
        activations=tuple(activations[direction * count : (direction + 1) * count]),
        hidden=hidden,
        clip=float(options.get("clip", 0.0)),
        couple_input_forget=bool(options.get("input_forget", 0)),
        reset_after=reset_after,
    )
    return cell, projected


def _initial_states(
    node: onnx.NodeProto,
    new: Replacement,
    direction: int,
    batch: int,
    hidden: int,
    dtype: np.dtype[Any],
    *,
    batch_first: bool,
) -> tuple[str, str]:
    """Hidden and cell state [batch, hidden] before the first step."""
    states = []
    for index in (5, 6):
        given = input_name(node, index) if index == 5 or node.op_type == "LSTM" else ""
        if not given:
            states.append(new.constant(np.zeros((batch, hidden)), dtype))
            continue
        index_of_direction = new.constant(direction, np.int64)
        states.append(new.op("Gather", given, index_of_direction, axis=1 if batch_first else 0))
    return states[0], states[1]


def _run(
    kind: str,
    new: Replacement,
    cell: _Cell,
    projected: str,
    states: tuple[str, str],
    steps: int,
    *,
    backwards: bool,
) -> tuple[list[str], tuple[str, str]]:
    """All steps; the outputs are [1, batch, hidden] each, in the order of time."""
    step_function: Callable[[Replacement, _Cell, str, str, str], tuple[str, str]] = {
        "LSTM": _lstm_step,
        "GRU": _gru_step,
        "RNN": _rnn_step,
    }[kind]
    outputs = [""] * steps
    order = range(steps - 1, -1, -1) if backwards else range(steps)
    for step in order:
        gates = new.op("Gather", projected, new.constant(step, np.int64), axis=0)
        states = step_function(new, cell, gates, *states)
        outputs[step] = new.op("Unsqueeze", states[0], new.ints(0))
    return outputs, states


def _activate(new: Replacement, cell: _Cell, index: int, x: str) -> str:
    if cell.clip:
        low, high = new.constant(-cell.clip, np.float32), new.constant(cell.clip, np.float32)
        x = new.op("Clip", x, low, high)
    return new.op(cell.activations[index], x)


def _rnn_step(new: Replacement, cell: _Cell, gates: str, state: str, memory: str) -> tuple[str, str]:
    total = new.op("Add", gates, new.op("MatMul", state, cell.recurrent))
    return _activate(new, cell, 0, total), memory


def _gru_step(new: Replacement, cell: _Cell, gates: str, state: str, memory: str) -> tuple[str, str]:
    hidden = cell.hidden
    sizes = new.ints(2 * hidden, hidden)
    inward_gates, inward_candidate = new.op_many("Split", 2, gates, sizes, axis=1)
    weight_gates, weight_candidate = new.op_many("Split", 2, cell.recurrent, sizes, axis=1)
    both = new.op("Add", inward_gates, new.op("MatMul", state, weight_gates))
    update, reset = new.op_many("Split", 2, _activate(new, cell, 0, both), new.ints(hidden, hidden), axis=1)
    if cell.reset_after:
        recurring = new.op("MatMul", state, weight_candidate)
        if cell.recurrent_bias:
            recurring = new.op("Add", recurring, cell.recurrent_bias)
        recurring = new.op("Mul", reset, recurring)
    else:
        recurring = new.op("MatMul", new.op("Mul", reset, state), weight_candidate)
    candidate = _activate(new, cell, 1, new.op("Add", inward_candidate, recurring))
    # (1 - z) * candidate + z * state, with one product less.
    change = new.op("Mul", update, new.op("Sub", state, candidate))
    return new.op("Add", candidate, change), memory


def _lstm_step(new: Replacement, cell: _Cell, gates: str, state: str, memory: str) -> tuple[str, str]:
    hidden = cell.hidden
    total = new.op("Add", gates, new.op("MatMul", state, cell.recurrent))
    inward, outward, forget, candidate = new.op_many(
        "Split", 4, total, new.ints(hidden, hidden, hidden, hidden), axis=1
    )
    if cell.peepholes:
        inward = new.op("Add", inward, new.op("Mul", cell.peepholes[0], memory))
        forget = new.op("Add", forget, new.op("Mul", cell.peepholes[2], memory))
    inward = _activate(new, cell, 0, inward)
    forget = (
        new.op("Sub", new.constant(1, np.float32), inward)
        if cell.couple_input_forget
        else _activate(new, cell, 0, forget)
    )
    candidate = _activate(new, cell, 1, candidate)
    memory = new.op("Add", new.op("Mul", forget, memory), new.op("Mul", inward, candidate))
    if cell.peepholes:
        outward = new.op("Add", outward, new.op("Mul", cell.peepholes[1], memory))
    outward = _activate(new, cell, 0, outward)
    return new.op("Mul", outward, _activate_output(new, cell, memory)), memory


def _activate_output(new: Replacement, cell: _Cell, memory: str) -> str:
    # The specification clips the input of activations; its `h` of the cell state is not among them.
    return new.op(cell.activations[2], memory)


def _join(
    node: onnx.NodeProto,
    new: Replacement,
    sequences: list[str],
    finals: list[str],
    cells: list[str],
    *,
    batch_first: bool,
) -> None:
    """Y [steps, directions, batch, hidden], Y_h and Y_c [directions, batch, hidden]; batch first with layout 1."""
    if name := output_name(node, 0):
        axis, perm = 1, [2, 0, 1, 3]
        parts = [new.op("Unsqueeze", sequence, new.ints(axis)) for sequence in sequences]
        if batch_first:
            new.op("Transpose", new.op("Concat", *parts, axis=axis), to=name, perm=perm)
        else:
            new.op("Concat", *parts, to=name, axis=axis)
    for index, states in ((1, finals), (2, cells)):
        if name := output_name(node, index):
            axis = 1 if batch_first else 0
            parts = [new.op("Unsqueeze", state, new.ints(axis)) for state in states]
            new.op("Concat", *parts, to=name, axis=axis)
