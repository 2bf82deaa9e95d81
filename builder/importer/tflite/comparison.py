"""Compare an import with LiteRT, TensorFlow Lite's own interpreter, if it is installed.

Every operator is given the interpreter's own inputs, so that a difference is that operator's. The limits:

- real numbers: `REAL` of the largest magnitude, as rounding in another order makes;
- 8-bit and 16-bit numbers: `QUANTA` steps, because the interpreter multiplies by rounded integers; for
  16-bit functions that it interpolates in tables, `INTERPOLATED` steps of 65536;
- integer weights with real data: the interpreter rounds the data to 8 bits at run time, we do not, so the
  mean square error may be `ROUNDED_DATA` of the mean square, or what rounding this data costs;
- all else, such as indices and booleans: equal.

Reference: the kernels of `OpResolverType.BUILTIN_REF`, and the optimised ones for `NOT_REFERENCE`.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from numpy.typing import ArrayLike, NDArray

from agent.array_file import damage, read_arrays, reason_of, write_arrays
from builder.errors import ModelError, ParityError
from builder.importer.large_models import open_session
from builder.importer.silence import FOREIGN_FAILURES, first_line
from builder.importer.tflite import litert_process
from builder.importer.tflite.conversion import Converted, convert, describe
from builder.importer.tflite.operators.detection import POST_PROCESS, SUPPRESSIONS, places_filled
from builder.importer.tflite.schema import Operator, Subgraph, TfliteModel
from builder.importer.tflite.scope import Layout, Scope, to_first
from builder.importer.tflite.tensor import Tensor, value_name

_NOT_COMPARED: Final = "the import is not compared with LiteRT"

REAL: Final = 1e-4
QUANTA: Final = 1
INTERPOLATED: Final = 128
# 20 dB: rounding the data to 8 bits costs 35 to 45 dB, and more where a few numbers are far larger than the
# others. A swapped axis or a wrong scale costs all.
ROUNDED_DATA: Final = 1e-2
# How much more noise the result may have than the data, in which it may cancel, and the most in all.
_MORE_ROUNDING: Final = 4.0
_MOST_ROUNDING: Final = 0.2
# Below this magnitude, differences of real numbers mean nothing.
SCALE_FLOOR: Final = 1e-2
TIMEOUT_S: Final = 300
SEED: Final = 0
# Of all inputs: a picture has some megabytes. Of much larger ones, the reference kernels take minutes.
MAX_INPUT_BYTES: Final = 64 << 20
_WEIGHTED: Final = frozenset(
    {
        "BATCH_MATMUL",
        "BIDIRECTIONAL_SEQUENCE_LSTM",
        "BIDIRECTIONAL_SEQUENCE_RNN",
        "CONV_2D",
        "DEPTHWISE_CONV_2D",
        "EMBEDDING_LOOKUP",
        "FULLY_CONNECTED",
        "LSTM",
        "RNN",
        "SVDF",
        "TRANSPOSE_CONV",
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        "UNIDIRECTIONAL_SEQUENCE_RNN",
    }
)
# Below this number of 16 bits, the interpreter's table of LOG, which has every 128th, is too coarse.
_COARSE: Final = 2048
# It shifts the quotient of a dividend of so few steps by more bits than an integer has.
_SMALL_DIVIDEND: Final = 4
_INTERPOLATED: Final = frozenset({"EXP", "GELU", "LOG", "LOGISTIC", "RSQRT", "SOFTMAX", "TANH"})
# Operators whose reference kernel is missing or differs from the optimised one and from TensorFlow:
# LOCAL_RESPONSE_NORMALIZATION leaves out the last channel of each window, SUM of int8 ignores the scales.
NOT_REFERENCE: Final = frozenset(
    {"BROADCAST_TO", "CEIL", "ELU", "LOCAL_RESPONSE_NORMALIZATION", "ROUND", "SEGMENT_SUM", "SUM"}
)

# Of no numbers, our mean is 0, as in ONNX Runtime, and extremes are infinite, as in TensorFlow. The
# interpreter has another mean, and the largest finite numbers.
_OF_NOTHING: Final = frozenset({"MEAN", "REDUCE_MAX", "REDUCE_MIN"})

# Of these it leaves out results that nothing reads, or has zeros there: in a loop of a recurrent layer, the
# sequence that each step reads.
_CALLS: Final = frozenset({"IF", "WHILE"})

Arrays = Mapping[str, NDArray[Any]]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Made:
    """What an operator makes in the graph where each operator gets the interpreter's inputs."""

    operator: Operator
    tensor: Tensor
    output: str


def is_installed() -> bool:
    """Whether the interpreter's package is there."""
    return importlib.util.find_spec("ai_edge_litert") is not None


def sample_inputs(model: TfliteModel, shapes: Mapping[int, tuple[int, ...]]) -> dict[int, NDArray[Any]]:
    """Random inputs by tensor index: normal real numbers, any quantised numbers, else zeros and ones."""
    rng = np.random.default_rng(SEED)
    inputs: dict[int, NDArray[Any]] = {}
    for index in model.subgraphs[0].inputs:
        tensor = model.subgraphs[0].tensors[index]
        dtype = np.dtype(tensor.dtype)
        shape = shapes[index]
        if dtype.kind == "f":
            inputs[index] = rng.standard_normal(shape).astype(dtype)
        elif tensor.is_quantised:
            limits = np.iinfo(dtype)
            inputs[index] = rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
        else:
            inputs[index] = (rng.random(shape) < 0.9).astype(dtype)
    return inputs


def compare(raw: bytes, model: TfliteModel, converted: Converted, progress: Progress) -> None:
    """Compare each operator of a converted model with the interpreter.

    `converted`: the result of `convert`, whose inputs have the final shapes.
    `progress`: called with a note if the comparison is not possible.
    Raises `ParityError` if an operator gives other numbers than the interpreter.
    """
    if not is_installed():
        progress(
            "the import was not compared with LiteRT, which is not installed: pip install ai-edge-litert"
        )
        return
    inputs = model.subgraphs[0].inputs
    shapes = {
        index: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for index, value in zip(inputs, converted.model.graph.input, strict=False)  # the rest are states
    }
    tensors_of = model.subgraphs[0].tensors
    size = sum(  # an extent of 0 does not make the others small: NumPy refuses them, too
        math.prod(max(1, dim) for dim in shapes[index]) * np.dtype(tensors_of[index].dtype).itemsize
        for index in inputs
    )
    if size > MAX_INPUT_BYTES:
        progress(
            f"the import was not compared with LiteRT: its inputs have {size} bytes, "
            f"and at most {MAX_INPUT_BYTES} are compared"
        )
        return
    names = {operator.name for graph in model.subgraphs for operator in graph.operators}
    tensors, reason = run_interpreter(
        raw, {**sample_inputs(model, shapes), **converted.given}, reference=names.isdisjoint(NOT_REFERENCE)
    )
    if tensors is None:
        progress(f"the import was not compared with LiteRT, {reason}")
        return
    try:
        worst = differences(model, shapes, tensors, converted.given, progress)
    except ModelError as error:
        progress(f"the import was not compared with LiteRT: {error}")
        return
    if worst is not None:
        raise ParityError(
            f"{worst}, which is not what LiteRT gives",
            hint="please report it with the model: the importer and LiteRT compute this operator differently",
        )


def run_interpreter(
    raw: bytes, inputs: Mapping[int, NDArray[Any]], *, reference: bool
) -> tuple[dict[int, NDArray[Any]] | None, str]:
    """Run the interpreter in a process of its own, with its reference kernels or its optimised ones.

    Result: the tensors by index, or None and the reason, such as "which refused the model: ...".
    """
    with tempfile.TemporaryDirectory(prefix="edgebundle-") as name:
        folder = Path(name)
        (folder / "model.tflite").write_bytes(raw)
        write_arrays(folder / "inputs.npz", {str(index): values for index, values in inputs.items()})
        try:
            status, said = start_interpreter(folder, "reference" if reference else "optimised")
        except subprocess.TimeoutExpired:
            return None, f"which took longer than {TIMEOUT_S} s"
        if status < 0:
            return None, f"which crashed (signal {-status})"
        if status:
            lines = said.strip().splitlines() or ["no reason"]
            return None, f"which {lines[-1][-300:]}"
        try:
            found = read_arrays(folder / "tensors.npz")
            return {int(index): values for index, values in found.items()}, ""
        except damage() as error:
            return None, f"whose tensors cannot be read ({reason_of(error)})"


def start_interpreter(folder: Path, kernels: str) -> tuple[int, str]:
    """Run `litert_process` on a folder; return its exit code (negative for a signal) and its standard error.

    Raises `subprocess.TimeoutExpired` if it takes longer than `TIMEOUT_S`.
    """
    ended = subprocess.run(  # noqa: S603 - this program with a folder of its own
        [sys.executable, "-P", litert_process.__file__, str(folder), kernels],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=False,
    )
    return ended.returncode, ended.stderr.decode(errors="replace")


def differences(
    model: TfliteModel,
    shapes: Mapping[int, tuple[int, ...]],
    tensors: Mapping[int, NDArray[Any]],
    given: Mapping[int, NDArray[Any]],
    progress: Progress = lambda _: None,
) -> str | None:
    """Find the first operator that gives other numbers than the interpreter, given its inputs.

    `shapes`: shapes of the inputs, by tensor index.
    `tensors`: the interpreter's tensors, by index.
    `given`: values of inputs that are constants, by tensor index.
    `progress`: called once with the largest noise above `ROUNDED_DATA` that rounding the data explains.
    Result: the operator and how far it is off, in words.
    Raises `ModelError` if the interpreter lacks a tensor, or ONNX Runtime refuses the graph.
    """
    made: list[_Made] = []
    feeds: dict[str, NDArray[Any]] = {}

    def observe(scope: Scope, operator: Operator) -> None:
        for index in operator.outputs:
            tensor = scope.subgraph.tensors[index]
            if not scope.is_known(tensor) or scope.constant(tensor) is not None:
                continue
            if operator.name in _CALLS and index not in read:
                continue
            if index not in tensors:
                raise ModelError(f"it does not keep the tensor '{tensor.name}'", hint=_NOT_COMPARED)
            layout = Layout.LAST if scope.has(tensor, Layout.LAST) else Layout.FIRST
            value = scope.value(tensor, layout)
            output = scope.graph.add_output(value, f"made_{index}")
            found = tensors[index]
            wanted = scope.shape(tensor)
            if found.shape != wanted or str(found.dtype) != tensor.dtype:
                raise ParityError(
                    f"{describe(scope.subgraph, operator)}: expected {found.dtype}{list(found.shape)} as "
                    f"LiteRT gives, got {tensor.dtype}{list(wanted)}",
                    hint="please report it with the model: the importer and LiteRT differ in this operator",
                )
            if layout is Layout.FIRST:
                found = found.transpose(to_first(found.ndim))
            name = scope.graph.add_input(f"given_{index}", tensor.dtype, found.shape)
            feeds[name] = np.asarray(found, order="C")  # which stays a scalar
            scope.forget(tensor)
            scope.put(tensor, name, layout)
            made.append(_Made(operator, tensor, output))

    main = model.subgraphs[0]
    read = {*main.outputs, *itertools.chain.from_iterable(each.inputs for each in main.operators)}
    named = {value_name(main.tensors[index]): shape for index, shape in shapes.items()}
    values: dict[str, ArrayLike] = {value_name(main.tensors[index]): array for index, array in given.items()}
    compared = convert(model, "compared", named, observe=observe, input_values=values)
    graph = compared.model
    inputs = {value.name: value.type.tensor_type for value in graph.graph.input}
    for state in compared.states:
        kind = inputs[state.input]
        shape = [dim.dim_value for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        feeds[state.input] = np.full(shape, state.initial or 0, dtype)
    for index, value in zip(main.inputs, graph.graph.input, strict=False):
        if index not in tensors:
            raise ModelError(f"it does not keep the tensor '{main.tensors[index].name}'", hint=_NOT_COMPARED)
        feeds[value.name] = tensors[index]
    results = _run(graph, feeds)
    unset, noises = _unset(main), [(ROUNDED_DATA, "")]
    for one in made:
        if one.tensor.index in unset:
            continue
        last = tensors.get(one.operator.outputs[-1], np.zeros(0))
        number = float(last.reshape(-1)[0]) if last.size == 1 else 0.0
        data = tensors.get(one.operator.inputs[0]) if one.operator.inputs else None
        wanted = feeds[f"given_{one.tensor.index}"]
        ours = results[one.output]
        if one.operator.name in SUPPRESSIONS and one.tensor.index == one.operator.outputs[0]:
            # Of boxes with equal scores, LiteRT takes any first.
            scores = tensors[one.operator.inputs[1]]
            ours, wanted = scores[ours], scores[wanted]
        found = _difference(main.tensors, one, ours, wanted, number, data)
        if found is not None:
            return f"{describe(main, one.operator)}: {found}"
        if one.operator.name in _WEIGHTED and wanted.dtype.kind == "f" and np.isfinite(wanted).all():
            noises.append((_noise(ours, wanted), describe(main, one.operator)))
    largest, where = max(noises)
    if where:
        progress(f"{where}: LiteRT rounds its data to 8 bits, a noise of {largest:.2g}; the bundle does not")
    return None


def _noise(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    return float(np.mean((a - b) ** 2)) / max(float(np.mean(b * b)), SCALE_FLOOR**2) if b.size else 0.0


def _unset(graph: Subgraph) -> set[int]:
    """Return what follows from a TFLite_Detection_PostProcess, whose free places may have anything."""
    found: set[int] = set()
    for operator in graph.operators:
        if found.intersection(operator.inputs):
            found.update(operator.outputs)
        elif operator.name == POST_PROCESS:
            found.update(operator.outputs[:-1])
    return found - {index for each in graph.operators if each.name == POST_PROCESS for index in each.outputs}


def _run(graph: onnx.ModelProto, feeds: Arrays) -> dict[str, NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    names = [output.name for output in graph.graph.output]
    try:
        session = open_session(graph, options)
        values = session.run(names, dict(feeds))
    except FOREIGN_FAILURES as error:
        raise ModelError(
            f"ONNX Runtime refused the graph ({first_line(error)})", hint=_NOT_COMPARED
        ) from error
    return dict(zip(names, values, strict=True))


def _rounding_of(data: NDArray[Any] | None) -> float:
    """Return the noise that an operator may have whose data LiteRT rounds to 8 bits.

    It rounds in steps of 1/127 of the largest number, so few large numbers among many small ones cost more.
    """
    if data is None or data.dtype.kind != "f" or not data.size or not np.isfinite(data).all():
        return ROUNDED_DATA
    numbers = data.astype(np.float64)
    power = float(np.mean(numbers * numbers))
    step = float(np.abs(numbers).max()) / 127
    share = step * step / 12 / power if power else 0.0
    return min(max(ROUNDED_DATA, _MORE_ROUNDING * share), _MOST_ROUNDING)


def _difference(
    tensors: Sequence[Tensor],
    one: _Made,
    ours: NDArray[Any],
    theirs: NDArray[Any],
    number: float,
    data: NDArray[Any] | None,
) -> str | None:
    """How far a result is off, in words, or None if it is within the limits.

    `number` is the operator's last output, if it is one number; `data` its first input.
    """
    if one.operator.name == POST_PROCESS and theirs.ndim > 1:
        filled = places_filled(one.operator.custom, number)
        ours, theirs = ours[:, :filled], theirs[:, :filled]
    if ours.size == 0:
        return None
    if theirs.dtype.kind != "f":
        limit = 0
        if one.tensor.is_quantised:
            ours = np.where(_is_unreliable(tensors, one, ours, data), theirs, ours)
            coarse = one.tensor.dtype == "int16" and one.operator.name in _INTERPOLATED
            limit = INTERPOLATED if coarse else QUANTA
            if one.operator.name == "REDUCE_PROD" and data is not None:
                limit = data.size // ours.size  # it rounds after each factor
        most = int(np.abs(ours.astype(np.int64) - theirs.astype(np.int64)).max())
        return None if most <= limit else f"expected a difference of at most {limit} steps, got {most}"
    if one.operator.name in _OF_NOTHING and data is not None and not data.size:
        return None
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return "expected infinities and NaN in the same places, got others"
    a, b = a[np.isfinite(a)], b[np.isfinite(b)]
    if not a.size:
        return None
    if one.operator.name in _WEIGHTED and _has_integer_weights(tensors, one.operator):
        noise = _noise(a, b)
        most_noise = _rounding_of(data)
        return (
            None if noise <= most_noise else f"expected a noise of at most {most_noise:.3g}, got {noise:.3g}"
        )
    error = float(np.abs(a - b).max()) / max(float(np.abs(b).max()), SCALE_FLOOR)
    return None if error <= REAL else f"expected a relative error of at most {REAL:g}, got {error:.3g}"


def _is_unreliable(
    tensors: Sequence[Tensor], one: _Made, ours: NDArray[Any], data: NDArray[Any] | None
) -> NDArray[np.bool_]:
    """Where the interpreter's quantised kernels are known to be far from the function; `data` as above."""
    quantisation = tensors[one.operator.inputs[0]].quantisation if data is not None else None
    if data is not None and quantisation is not None and one.operator.name == "DIV":
        steps = data.astype(np.int32) - quantisation.zero_points[0]
        return np.broadcast_to(np.abs(steps) <= _SMALL_DIVIDEND, ours.shape)
    if data is not None and one.operator.name == "LOG" and one.tensor.dtype == "int16":
        return data < _COARSE
    return np.zeros(ours.shape, bool)


def _has_integer_weights(tensors: Sequence[Tensor], operator: Operator) -> bool:
    return any(index >= 0 and tensors[index].is_quantised for index in operator.inputs)
