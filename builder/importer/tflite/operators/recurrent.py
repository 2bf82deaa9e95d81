"""Recurrent layers: sequences of LSTM and RNN in one or both directions, single steps of them, and SVDF.

TensorFlow Lite keeps the state of these operators from one inference to the next, until it is reset. Here,
every inference starts with zeros, as after a reset, and a note says so; only the state of SVDF, which has no
steps of its own, is a state of the bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tflite
from numpy.typing import NDArray

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.operators.integer_lstm import integer_lstm, is_integer
from builder.importer.tflite.tensor import Tensor, value_name

# As many as `rewrites.recurrent` unrolls.
MAX_STEPS: Final = 512
_ACTIVATION: Final = tflite.ActivationFunctionType
# lstm_eval.cc, layer norm: added to the variance.
_EPSILON: Final = 1e-8


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights of an LSTM in one direction, as float32 arrays; gates are input, forget, cell and output.

    `peephole`: for the gates input, forget and output, or None.
    `projection`, `projection_bias`: applied to the result of each step, or None.
    `norm`: coefficients of a layer norm for each gate, or None.
    """

    data: Sequence[NDArray[np.float32]]
    recurrent: Sequence[NDArray[np.float32]]
    bias: Sequence[NDArray[np.float32]]
    peephole: Sequence[NDArray[np.float32]] | None
    projection: NDArray[np.float32] | None
    projection_bias: NDArray[np.float32] | None
    norm: Sequence[NDArray[np.float32]] | None


def unidirectional_sequence_lstm(op: Operation) -> None:
    """UNIDIRECTIONAL_SEQUENCE_LSTM of x [batch, steps, n], or with the steps first."""
    options = op.options("UnidirectionalSequenceLSTMOptions")
    whole = is_integer(op)
    _check(op, diagonal=bool(options.DiagonalRecurrentTensors()), quantised=whole)
    x, time_major = _steps_first(op, 0, time_major=options.TimeMajor())
    activation, clips = options.FusedActivationFunction(), (options.CellClip(), options.ProjClip())
    if whole:
        _check_steps(op, x)
        result = integer_lstm(op, x, activation, clips)
    else:
        result = _lstm(op, x, _weights(op, 1, 20), activation, clips)
    _put(op, op.output, result, time_major=time_major)


def bidirectional_sequence_lstm(op: Operation) -> None:
    """BIDIRECTIONAL_SEQUENCE_LSTM: one over the steps, one over them in reverse."""
    options = op.options("BidirectionalSequenceLSTMOptions")
    _check(op)
    if any(op.optional(index) is not None for index in range(39, 48)):
        raise RefusalError("it has an auxiliary input")
    x, time_major = _steps_first(op, 0, time_major=options.TimeMajor())
    clips = (options.CellClip(), options.ProjClip())
    activation = options.FusedActivationFunction()
    forward = _lstm(op, x, _weights(op, 1, None), activation, clips)
    backward = _reverse(op, _lstm(op, _reverse(op, x), _weights(op, 18, None), activation, clips))
    _put_both(op, forward, backward, merge=options.MergeOutputs(), time_major=time_major)


def lstm(op: Operation) -> None:
    """LSTM: one step."""
    options = op.options("LSTMOptions")
    if options.KernelType() != tflite.LSTMKernelType.FULL:
        _basic_lstm(op)
        return
    _check(op)
    x = op.real(0)
    x = op.reshape(x, (1, *op.graph.shape_of(x)))
    clips = (options.CellClip(), options.ProjClip())
    result = _lstm(op, x, _weights(op, 1, 20), options.FusedActivationFunction(), clips)
    op.put_real(op.reshape(result, op.graph.shape_of(result)[1:]))


def _basic_lstm(op: Operation) -> None:
    """LSTM of the kind BASIC: x, its own last output, weights, bias and state are all inputs."""
    x, last, state = op.real(0), op.real(1), op.real(4)
    if op.input(0).is_quantised or len(op.outputs) != 4:
        raise RefusalError("it is quantised")
    both = op.graph.node("Concat", x, last, axis=1)
    gates = op.graph.node("Gemm", both, op.real(2), op.real(3), transB=1)
    count = op.graph.shape_of(gates)[1] // 4
    parts = op.graph.nodes("Split", [gates, op.graph.constant([count] * 4)], 4, axis=1)
    first, new, forget, output = parts
    kept = op.graph.node("Mul", op.graph.node("Sigmoid", forget), state)
    added = op.graph.node("Mul", op.graph.node("Sigmoid", first), op.graph.node("Tanh", new))
    cell = op.graph.node("Add", kept, added)
    result = op.graph.node("Mul", op.graph.node("Sigmoid", output), op.graph.node("Tanh", cell))
    for tensor, value in zip(op.outputs, (result, cell, both, gates), strict=True):
        op.scope.put_real(tensor, value)


def unidirectional_sequence_rnn(op: Operation) -> None:
    """UNIDIRECTIONAL_SEQUENCE_RNN of x, weight, recurrent weight, bias and state."""
    options = op.options("SequenceRNNOptions")
    _check(op)
    x, time_major = _steps_first(op, 0, time_major=options.TimeMajor())
    result = _rnn(op, x, (1, 2, 3), options.FusedActivationFunction())
    _put(op, op.output, result, time_major=time_major)


def bidirectional_sequence_rnn(op: Operation) -> None:
    """BIDIRECTIONAL_SEQUENCE_RNN: weights of both directions, each with a bias and a state."""
    options = op.options("BidirectionalSequenceRNNOptions")
    _check(op)
    if any(op.optional(index) is not None for index in range(9, 12)):
        raise RefusalError("it has an auxiliary input")
    x, time_major = _steps_first(op, 0, time_major=options.TimeMajor())
    activation = options.FusedActivationFunction()
    forward = _rnn(op, x, (1, 2, 3), activation)
    backward = _reverse(op, _rnn(op, _reverse(op, x), (5, 6, 7), activation))
    _put_both(op, forward, backward, merge=options.MergeOutputs(), time_major=time_major)


def rnn(op: Operation) -> None:
    """RNN: one step."""
    _check(op)
    x = op.real(0)
    x = op.reshape(x, (1, *op.graph.shape_of(x)))
    result = _rnn(op, x, (1, 2, 3), op.options("RNNOptions").FusedActivationFunction())
    op.put_real(op.reshape(result, op.graph.shape_of(result)[1:]))


def svdf(op: Operation) -> None:
    """SVDF of x [batch, n]: each filter looks at the newest results of its features, which are a state.

    Source: tensorflow/lite/kernels/internal/reference/svdf.h.
    """
    options = op.options("SVDFOptions")
    graph, rank = op.graph, options.Rank()
    feature, state, time = op.input(1), op.input(4), _array(op, op.input(2))
    if time.ndim != 2 or rank < 1 or time.shape[0] % rank or feature.shape[:1] != time.shape[:1]:
        raise RefusalError(f"expected a multiple of the rank {rank}, got {list(time.shape)}")
    filters, memory = time.shape
    x = op.real(0)
    newest = graph.node("MatMul", x, op.weight(feature, (1, 0)))
    if state.is_quantised and state.quantisation is not None:
        stored = op.scope.quantise(newest, state)
        newest = op.scope.dequantise(stored, state.quantisation, np.dtype(state.dtype))
    batch = graph.shape_of(newest)[0]
    columns = op.reshape(newest, (batch, filters, 1))
    if memory > 1:
        zeros = graph.constant(np.zeros((batch, filters, memory - 1), np.float32))
        entry, before = graph.add_state(value_name(state), zeros)
        columns = graph.node("Concat", before, columns, axis=2)
        graph.set_state(entry, graph.node("Slice", columns, *(graph.constant([v]) for v in (1, memory, 2))))
    parts = op.reshape(
        graph.node("Mul", columns, graph.constant(time)), (batch, filters // rank, rank * memory)
    )
    result = graph.node("ReduceSum", parts, graph.constant([2]), keepdims=0)
    if (bias := op.optional(3)) is not None:
        result = graph.node("Add", result, op.bias(bias, state, op.input(2)))
    op.put_real(_activate(op, options.FusedActivationFunction())(result))


def _check(op: Operation, *, diagonal: bool = False, quantised: bool = False) -> None:
    """Refuse what is not supported, and note that the state starts with zeros."""
    if diagonal:
        raise RefusalError("its recurrent weights are diagonal")
    if op.input(0).is_quantised and not quantised:
        raise RefusalError("its data is quantised")
    op.graph.note(
        f"{op.operator.name} keeps its state between inferences in LiteRT; here, each starts with zeros"
    )


def _array(op: Operation, tensor: Tensor) -> NDArray[np.float32]:
    """Real numbers of a weight, which must be constant."""
    numbers = op.scope.known(tensor, "weight")
    quantisation = tensor.quantisation
    if not tensor.is_quantised or quantisation is None:
        return np.asarray(numbers, np.float32)
    shape = [-1 if axis == quantisation.axis else 1 for axis in range(numbers.ndim)]
    scales = quantisation.scales.reshape(shape if quantisation.is_per_axis else ())
    zeros = quantisation.zero_points.reshape(shape if quantisation.is_per_axis else ())
    return np.asarray((numbers - zeros) * scales, np.float32)


def _optional(op: Operation, index: int) -> NDArray[np.float32] | None:
    tensor = op.optional(index)
    return None if tensor is None else _array(op, tensor)


def _weights(op: Operation, first: int, norm: int | None) -> _Weights:
    """The weights of an LSTM whose inputs begin at `first`; without an input gate it is 1 - forget."""

    def four(start: int) -> list[NDArray[np.float32]]:
        found = [_optional(op, start + gate) for gate in range(4)]
        forget = found[1]
        if forget is None or found[2] is None or found[3] is None:
            raise RefusalError("expected weights of the gates, got none")
        # 1 - sigmoid(x) = sigmoid(-x)
        return [-forget if array is None else array for array in found]

    data = four(first)
    recurrent = four(first + 4)
    bias = four(first + 11)
    coupled = op.optional(first) is None
    peepholes = [_optional(op, first + 8 + gate) for gate in range(3)]
    peephole = None
    if peepholes[1] is not None and peepholes[2] is not None:
        peephole = [-peepholes[1] if peepholes[0] is None else peepholes[0], peepholes[1], peepholes[2]]
    coefficients = None
    if norm is not None and op.optional(norm + 1) is not None:
        if coupled:
            raise RefusalError("it has a layer norm and no input gate")
        coefficients = four(norm)
    return _Weights(
        data, recurrent, bias, peephole, _optional(op, first + 15), _optional(op, first + 16), coefficients
    )


def _lstm(op: Operation, x: str, weights: _Weights, activation: int, clips: tuple[float, float]) -> str:
    """An LSTM over x [steps, batch, n]; the result is [steps, batch, m]."""
    if (
        weights.projection is None
        and weights.norm is None
        and activation == _ACTIVATION.TANH
        and not clips[0]
    ):
        return _whole_lstm(op, x, weights)
    return _unrolled_lstm(op, x, weights, activation, clips)


def _whole_lstm(op: Operation, x: str, weights: _Weights) -> str:
    """ONNX's LSTM, whose gates are in the order input, output, forget, cell."""
    order = (0, 3, 1, 2)

    def joined(arrays: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        return np.concatenate([arrays[gate] for gate in order])[np.newaxis]

    bias = joined(weights.bias)
    inputs = [joined(weights.data), joined(weights.recurrent), np.concatenate([bias, np.zeros_like(bias)], 1)]
    names = [op.graph.constant(array) for array in inputs]
    if weights.peephole is not None:
        first, forget, output = weights.peephole
        peephole = np.concatenate([first, output, forget])[np.newaxis]
        names += ["", "", "", op.graph.constant(peephole)]
    units = weights.recurrent[0].shape[0]
    [result] = op.graph.nodes("LSTM", [x, *names], 1, hidden_size=units)
    steps, batch, _ = op.graph.shape_of(x)
    return op.reshape(result, (steps, batch, units))


def _unrolled_lstm(
    op: Operation, x: str, weights: _Weights, activation: int, clips: tuple[float, float]
) -> str:
    graph = op.graph
    steps, batch, _ = graph.shape_of(x)
    function = _activate(op, activation)
    cells = weights.recurrent[0].shape[0]
    units = weights.recurrent[0].shape[1]
    data = graph.constant(np.concatenate(weights.data).T.copy())
    recurrent = graph.constant(np.concatenate(weights.recurrent).T.copy())
    sizes = graph.constant([cells] * 4)
    biases = [graph.constant(array) for array in weights.bias]
    norms = None if weights.norm is None else [graph.constant(array) for array in weights.norm]
    peephole = None if weights.peephole is None else [graph.constant(array) for array in weights.peephole]
    state = graph.constant(np.zeros((batch, cells), np.float32))
    last = graph.constant(np.zeros((batch, units), np.float32))

    def gate(value: str, index: int, cell: str, hole: int | None) -> str:
        if peephole is not None and hole is not None:
            value = graph.node("Add", value, graph.node("Mul", cell, peephole[hole]))
        if norms is not None:
            value = graph.node("Mul", _normalised(op, value), norms[index])
        return graph.node("Add", value, biases[index])

    results = []
    for step in _steps(op, x, steps):
        sums = graph.node("Add", graph.node("MatMul", step, data), graph.node("MatMul", last, recurrent))
        first, forget, new, output = graph.nodes("Split", [sums, sizes], 4, axis=1)
        taken = graph.node("Sigmoid", gate(first, 0, state, 0))
        kept = graph.node("Sigmoid", gate(forget, 1, state, 1))
        added = graph.node("Mul", taken, function(gate(new, 2, state, None)))
        state = graph.node("Add", graph.node("Mul", kept, state), added)
        if clips[0] > 0:
            state = op.clamp(state, -float(clips[0]), float(clips[0]))
        shown = graph.node("Sigmoid", gate(output, 3, state, 2))
        last = graph.node("Mul", shown, function(state))
        if weights.projection is not None:
            last = graph.node("MatMul", last, graph.constant(weights.projection.T.copy()))
            if weights.projection_bias is not None:
                last = graph.node("Add", last, graph.constant(weights.projection_bias))
            if clips[1] > 0:
                last = op.clamp(last, -float(clips[1]), float(clips[1]))
        results.append(op.reshape(last, (1, batch, units)))
    return graph.node("Concat", *results, axis=0)


def _rnn(op: Operation, x: str, places: tuple[int, int, int], activation: int) -> str:
    graph = op.graph
    weight, recurrent, bias = (_array(op, op.input(place)) for place in places)
    steps, batch, _ = graph.shape_of(x)
    units = weight.shape[0]
    if activation in (_ACTIVATION.TANH, _ACTIVATION.RELU):
        both = np.concatenate([bias, np.zeros_like(bias)])[np.newaxis]
        names = [graph.constant(array) for array in (weight[np.newaxis], recurrent[np.newaxis], both)]
        kind = "Tanh" if activation == _ACTIVATION.TANH else "Relu"
        [result] = graph.nodes("RNN", [x, *names], 1, hidden_size=units, activations=[kind])
        return op.reshape(result, (steps, batch, units))
    function = _activate(op, activation)
    last = graph.constant(np.zeros((batch, units), np.float32))
    results = []
    for step in _steps(op, x, steps):
        moved = graph.node("Gemm", step, graph.constant(weight), graph.constant(bias), transB=1)
        last = function(
            graph.node("Add", moved, graph.node("MatMul", last, graph.constant(recurrent.T.copy())))
        )
        results.append(op.reshape(last, (1, batch, units)))
    return graph.node("Concat", *results, axis=0)


def _check_steps(op: Operation, x: str) -> None:
    """Refuse a sequence that is too long to be unrolled."""
    steps = op.graph.shape_of(x)[0]
    if not 1 <= steps <= MAX_STEPS:
        raise RefusalError(f"expected 1 to {MAX_STEPS} steps, got {steps}")


def _steps(op: Operation, x: str, steps: int) -> list[str]:
    _check_steps(op, x)
    shape = op.graph.shape_of(x)
    parts = op.graph.nodes("Split", [x, op.graph.constant([1] * steps)], steps, axis=0)
    return [op.reshape(part, shape[1:]) for part in parts]


def _normalised(op: Operation, value: str) -> str:
    """A row minus its mean, over its standard deviation."""
    graph = op.graph
    axes = graph.constant([1])
    centred = graph.node("Sub", value, graph.node("ReduceMean", value, axes, keepdims=1))
    variance = graph.node("ReduceMean", graph.node("Mul", centred, centred), axes, keepdims=1)
    spread = graph.node("Sqrt", graph.node("Add", variance, graph.constant(_EPSILON, "float32")))
    return graph.node("Div", centred, spread)


def _activate(op: Operation, activation: int) -> Callable[[str], str]:
    def apply(value: str) -> str:
        if activation == _ACTIVATION.TANH:
            return op.graph.node("Tanh", value)
        return op.activate(value, activation)

    return apply


def _steps_first(op: Operation, index: int, *, time_major: Any) -> tuple[str, bool]:  # noqa: ANN401
    x = op.real(index)
    if len(op.graph.shape_of(x)) != 3:
        raise RefusalError(f"expected a sequence of 3 dimensions, got {list(op.graph.shape_of(x))}")
    return (x if time_major else op.graph.node("Transpose", x, perm=[1, 0, 2])), bool(time_major)


def _reverse(op: Operation, value: str) -> str:
    steps = op.graph.shape_of(value)[0]
    return op.gather(value, range(steps - 1, -1, -1), 0)


def _put(op: Operation, tensor: Tensor, value: str, *, time_major: bool) -> None:
    op.scope.put_real(tensor, value if time_major else op.graph.node("Transpose", value, perm=[1, 0, 2]))


def _put_both(op: Operation, forward: str, backward: str, *, merge: bool, time_major: bool) -> None:
    if merge:
        _put(op, op.output, op.graph.node("Concat", forward, backward, axis=2), time_major=time_major)
        return
    if len(op.outputs) != 2:
        raise RefusalError(f"expected two outputs, got {len(op.outputs)}")
    for tensor, value in zip(op.outputs, (forward, backward), strict=True):
        _put(op, tensor, value, time_major=time_major)
