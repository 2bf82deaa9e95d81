"""LSTM of 8-bit data and weights with 16-bit gates, as TensorFlow Lite's converter quantises Keras' LSTM.

Gates and cells are rounded where the interpreter rounds them, because what is rounded comes back in the next
step. The rounding is by powers of two, so it is exact in float32. It begins with zeros.

Source: tensorflow/lite/kernels/lstm_eval.cc, EvalInteger8x8_16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import tflite

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.tensor import Quantisation, Tensor

# Gates before their function have 12 bits behind the point, what a sigmoid or a tanh gives has 15.
_GATE: Final = 2.0**-12
_UNIT: Final = 2.0**-15
_INTERMEDIATES: Final = 5


@dataclass(frozen=True, slots=True)
class _Constants:
    """Values of the graph that each step reads.

    `recurrent`: weight of the last output, real numbers [m, gates * cells].
    `projection`, `projection_bias`: applied to the hidden state, or empty.
    `hidden`: the scale of the hidden state.
    """

    recurrent: str
    projection: str
    projection_bias: str
    hidden: Quantisation


def is_integer(op: Operation) -> bool:
    """Whether data and weights are bytes with a scale."""
    weight = op.optional(2)
    return op.input(0).is_quantised and weight is not None and weight.is_quantised


def integer_lstm(op: Operation, x: str, activation: int, clips: tuple[float, float]) -> str:
    """An LSTM over real numbers x [steps, batch, n]; the result is [steps, batch, m].

    Raises `RefusalError` if it is quantised in another way.
    """
    graph = op.graph
    cell_state, output_state = op.input(19), op.input(18)
    if op.input(0).dtype != "int8" or op.optional(21) is not None or op.optional(10) is not None:
        raise RefusalError("it is quantised and has a layer norm, peepholes, or data of 16 bits")
    scales = [op.scope.subgraph.tensors[i].quantisation for i in op.operator.intermediates if i >= 0]
    if len(scales) != _INTERMEDIATES or cell_state.quantisation is None or output_state.quantisation is None:
        raise RefusalError("expected 16-bit cells and scales of its five intermediate tensors")
    hidden, cell_scale = scales[4], float(cell_state.quantisation.scales[0])
    if hidden is None or activation != tflite.ActivationFunctionType.TANH:
        raise RefusalError("expected a scale of its hidden state, and tanh")
    # Input, forget and output lie side by side, then the cell; a coupled input gate is 1 - forget.
    gates = [gate for gate in (0, 1, 3, 2) if op.optional(1 + gate) is not None]
    steps, batch, _ = graph.shape_of(x)
    cells = op.input(2).shape[0]
    sums = graph.node("MatMul", x, _joined(op, [op.input(1 + gate) for gate in gates]))
    bias = np.concatenate([_bias(op, gate) for gate in gates])
    moved = _rounded(op, graph.node("Add", sums, graph.constant(bias)), _GATE)
    parts = graph.nodes("Split", [moved, graph.constant([1] * steps)], steps, axis=0)
    projection, projection_bias = op.optional(16), op.optional(17)
    real_bias = ""
    if projection is not None and projection_bias is not None:
        held = Tensor(-1, "hidden", tflite.TensorType.INT8, (), None, hidden, None, ())
        real_bias = op.bias(projection_bias, held, projection)
    constants = _Constants(
        _joined(op, [op.input(5 + gate) for gate in gates]),
        "" if projection is None else op.weight(projection, (1, 0)),
        real_bias,
        hidden,
    )
    cell = graph.constant(np.zeros((batch, cells), np.float32))
    units = op.input(6).shape[1]
    last = graph.constant(np.zeros((batch, units), np.float32))
    results = []
    for part in parts:
        step = op.reshape(part, (batch, len(gates) * cells))
        last, cell = _step(op, step, last, cell, constants, cell_scale, clips)
        results.append(op.reshape(last, (1, batch, units)))
    return graph.node("Concat", *results, axis=0)


def _step(
    op: Operation,
    moved: str,
    last: str,
    cell: str,
    constants: _Constants,
    cell_scale: float,
    clips: tuple[float, float],
) -> tuple[str, str]:
    """One step: the output and the cells, both real numbers as they are stored."""
    graph = op.graph
    cells = graph.shape_of(cell)[1]
    recurrent = _rounded(op, graph.node("MatMul", last, constants.recurrent), _GATE)
    sums = _limited(op, graph.node("Add", moved, recurrent), _GATE)
    count = graph.shape_of(sums)[1] // cells
    gates, new = graph.nodes("Split", [sums, graph.constant([cells * (count - 1), cells])], 2, axis=1)
    gates = _rounded(op, graph.node("Sigmoid", gates), _UNIT)
    opened = graph.nodes("Split", [gates, graph.constant([cells] * (count - 1))], count - 1, axis=1)
    forget, output = opened[-2:]
    coupled = graph.node("Sub", graph.constant(1 - _UNIT, "float32"), forget)
    taken = opened[0] if count == 4 else coupled
    added = graph.node("Mul", taken, _rounded(op, graph.node("Tanh", new), _UNIT))
    kept = graph.node("Mul", forget, cell)
    cell = graph.node("Add", _rounded(op, kept, cell_scale), _rounded(op, added, cell_scale))
    cell = _limited(op, cell, cell_scale)
    if clips[0] > 0:
        cell = op.clamp(cell, -float(clips[0]), float(clips[0]))
    shown = graph.node("Mul", output, _rounded(op, graph.node("Tanh", cell), _UNIT))
    result = _stored(op, shown, constants.hidden)
    if constants.projection:
        result = graph.node("MatMul", result, constants.projection)
        if constants.projection_bias:
            result = graph.node("Add", result, constants.projection_bias)
        quantisation = op.input(18).quantisation
        assert quantisation is not None
        result = _stored(op, result, quantisation)
        if clips[1] > 0:
            # The interpreter clips the bytes, as if their zero point were 0.
            scale, zero = float(quantisation.scales[0]), int(quantisation.zero_points[0])
            most = min(int(clips[1] / scale), 127)
            result = op.clamp(result, (-most - zero) * scale, (most - zero) * scale)
    return result, cell


def _joined(op: Operation, weights: Sequence[Tensor]) -> str:
    """Real numbers of several weights [rows, n], transposed and side by side."""
    numbers, scales, zeros = [], [], []
    for weight in weights:
        quantisation = weight.quantisation
        data = op.scope.known(weight, "weight")
        if quantisation is None or data.ndim != 2 or weight.dtype != "int8":
            raise RefusalError("expected all its weights in int8")
        numbers.append(data.T)
        ones = np.ones(data.shape[0], np.float32)
        scales.append(quantisation.scales * ones)
        zeros.append((quantisation.zero_points * ones).astype(np.int64))
    joined = Quantisation(np.concatenate(scales), np.concatenate(zeros), 1)
    constant = op.graph.constant(np.concatenate(numbers, axis=1))
    return op.scope.dequantise(constant, joined, np.dtype(np.int8), 1)


def _bias(op: Operation, gate: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    data, weight, bias = op.input(0).quantisation, op.input(1 + gate).quantisation, op.input(12 + gate)
    assert data is not None and weight is not None
    numbers = op.scope.known(bias, "bias")
    return np.asarray(numbers * (data.scales[0] * weight.scales.astype(np.float64)), np.float32)


def _rounded(op: Operation, value: str, scale: float) -> str:
    """Real numbers rounded to what 16 bits of this scale hold."""
    graph = op.graph
    steps = graph.node("Round", graph.node("Mul", value, graph.constant(1 / scale, "float32")))
    steps = graph.node("Clip", steps, *(graph.constant(v, "float32") for v in (-32768.0, 32767.0)))
    return graph.node("Mul", steps, graph.constant(scale, "float32"))


def _limited(op: Operation, value: str, scale: float) -> str:
    return op.clamp(value, -32768.0 * scale, 32767.0 * scale)


def _stored(op: Operation, value: str, quantisation: Quantisation) -> str:
    """Real numbers rounded to bytes, as integer products take them."""
    tensor = Tensor(-1, "", tflite.TensorType.INT8, (), None, quantisation, None, ())
    return op.scope.dequantise(op.scope.quantise(value, tensor), quantisation, np.dtype(np.int8))
