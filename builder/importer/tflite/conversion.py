"""Write a TFLite model as an ONNX model: the same inputs and outputs, real arithmetic between scales.

Quantised tensors become QuantizeLinear and DequantizeLinear, so that ONNX Runtime, the parity check and the
kernels see what they see in any quantised ONNX model (docs/decisions/0030-tflite-becomes-onnx.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray

from agent.bundle.state import State
from builder.errors import RefusalError, ShapeError, UnsupportedOperatorError
from builder.importer.input_shapes import SHAPES_HINT
from builder.importer.static_inputs import value_of
from builder.importer.tflite.control_flow import STATIC, Program
from builder.importer.tflite.graph_builder import GraphBuilder
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.operators import CONVERTERS, CUSTOM_CONVERTERS
from builder.importer.tflite.schema import MALFORMED, Operator, Subgraph, TfliteModel
from builder.importer.tflite.scope import Scope
from builder.importer.tflite.tensor import value_name
from builder.spelling import did_you_mean

_LISTED: Final = 8  # operators that one message names
_OTHER_HINT: Final = (
    "convert the model again, without this operator or with others: docs/importing.md says what is taken"
)
_FLEX_HINT: Final = "convert the model with only TFLite's own operators (tf.lite.OpsSet.TFLITE_BUILTINS)"
Observer = Callable[[Scope, Operator], None]


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted file.

    `model`: a model with static shapes, whose last inputs and outputs are those of the states.
    `states`: what the model leaves from one run to the next.
    `given`: values of inputs that the user made constants, by tensor index.
    """

    model: onnx.ModelProto
    states: tuple[State, ...]
    given: Mapping[int, NDArray[Any]]


def convert(
    model: TfliteModel,
    name: str,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    progress: Callable[[str], None] | None = None,
    observe: Observer | None = None,
    input_values: Mapping[str, ArrayLike] | None = None,
) -> Converted:
    """Convert a model.

    `input_shapes`: input name -> shape, for inputs that shall have another shape than in the file.
    `observe`: called after each operator of the main subgraph.
    `input_values`: input name -> value, for inputs that shall be constants. They stay inputs, which nothing
        reads.
    Raises `UnsupportedOperatorError` if operators cannot be converted; the message names them.
    Raises `ShapeError` if `input_shapes` or `input_values` do not fit the inputs.
    """
    shapes = _input_shapes(model, input_shapes or {})
    given = _input_values(model, shapes, input_values or {})
    keeps: frozenset[str] = frozenset()
    # A variable is a state if it is written after it was read, which only the end of the graph tells.
    while any(operator.name == "ASSIGN_VARIABLE" for operator in _all_operators(model)):
        _, program = _written(model, shapes, given, keeps, None)
        if program.kept <= keeps:
            break
        keeps |= program.kept
    graph, _ = _written(model, shapes, given, keeps, observe)
    states = graph.add_states()
    if progress is not None:
        for text in graph.notes:
            progress(text)
    return Converted(graph.model(name), states, given)


def _input_shapes(
    model: TfliteModel, input_shapes: Mapping[str, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """Shapes of all inputs, by tensor index."""
    main = model.subgraphs[0]
    wanted = dict(input_shapes)
    shapes = {}
    for index in main.inputs:
        tensor = main.tensors[index]
        shape = wanted.pop(value_name(tensor), tensor.shape)
        if len(shape) != len(tensor.shape):
            raise ShapeError(
                f"input '{value_name(tensor)}': expected {len(tensor.shape)} dimensions, got {list(shape)}",
                hint=SHAPES_HINT,
            )
        shapes[index] = tuple(shape)
    if wanted:
        raise ShapeError(
            f"expected shapes of the inputs {_input_names(model)}, got one of {next(iter(wanted))!r:.80}",
            hint=SHAPES_HINT,
        )
    return shapes


def _input_values(
    model: TfliteModel, shapes: dict[int, tuple[int, ...]], input_values: Mapping[str, ArrayLike]
) -> dict[int, NDArray[Any]]:
    """Values of inputs that are constants, by tensor index; their shapes may be those of the values."""
    main = model.subgraphs[0]
    named = {value_name(main.tensors[index]): index for index in main.inputs}
    given = {}
    for name, value in input_values.items():
        if name not in named:
            raise ShapeError(
                f"the model has no input '{name}'; its inputs are {_input_names(model)}",
                hint=did_you_mean(name, named, otherwise="give the name of one of them"),
            )
        tensor = main.tensors[named[name]]
        shape = shapes[tensor.index]
        is_open = shape == tensor.shape
        declared = [
            None if is_open and axis in (tensor.open_axes or ()) else dim for axis, dim in enumerate(shape)
        ]
        array = value_of(name, value, np.dtype(tensor.dtype or "V1"), declared)
        given[tensor.index], shapes[tensor.index] = array, array.shape
    return given


def _input_names(model: TfliteModel) -> str:
    main = model.subgraphs[0]
    return ", ".join(value_name(main.tensors[index]) for index in main.inputs)[:300]


def _written(
    model: TfliteModel,
    shapes: Mapping[int, tuple[int, ...]],
    given: Mapping[int, NDArray[Any]],
    keeps: frozenset[str],
    observe: Observer | None,
) -> tuple[GraphBuilder, Program]:
    """Write the graph but for the states' outputs."""
    main = model.subgraphs[0]
    graph = GraphBuilder()
    scope = Scope(graph, main)
    for index in main.inputs:
        tensor = main.tensors[index]
        if not tensor.dtype:
            raise UnsupportedOperatorError(
                f"input '{tensor.name}' cannot be served: {tensor.obstacle}",
                hint="convert the model with inputs of float32, int8 or uint8",
            )
        value = graph.add_input(value_name(tensor), tensor.dtype, shapes[index])
        scope.put(tensor, graph.constant(given[index]) if index in given else value)
    program = Program(model, lambda inner: _run(inner, program, None), keeps)
    _run(scope, program, observe)
    for index in main.outputs:
        tensor = main.tensors[index]
        try:
            graph.add_output(scope.value(tensor), value_name(tensor))
        except RefusalError as error:
            raise UnsupportedOperatorError(
                f"output '{tensor.name}' cannot be served: {error}",
                hint=error.hint or "convert the model without this output",
            ) from error
    return graph, program


def _all_operators(model: TfliteModel) -> Iterator[Operator]:
    for subgraph in model.subgraphs:
        yield from subgraph.operators


def _run(scope: Scope, program: Program, observe: Observer | None) -> None:
    """Write all operators of a subgraph."""
    _refuse_unknown(scope.subgraph)
    for operator in scope.subgraph.operators:
        _convert_operator(scope, operator, program)
        if observe is not None:
            observe(scope, operator)


def _convert_operator(scope: Scope, operator: Operator, program: Program) -> None:
    """Write one operator."""
    try:
        if operator.is_custom:
            CUSTOM_CONVERTERS[operator.name](Operation(scope, operator))
        elif operator.name in STATIC:
            STATIC[operator.name](Operation(scope, operator), program)
        else:
            CONVERTERS[operator.name](Operation(scope, operator))
    except RefusalError as error:
        raise UnsupportedOperatorError(
            f"{describe(scope.subgraph, operator)}: {error}", hint=error.hint or _OTHER_HINT
        ) from error
    except MALFORMED as error:
        raise UnsupportedOperatorError(
            f"{describe(scope.subgraph, operator)}: its tensors or options do not fit together",
            hint="download or convert the model again: the file may be damaged",
        ) from error


def describe(subgraph: Subgraph, operator: Operator) -> str:
    """An operator in messages, such as `CONV_2D (operator 3, makes 'conv1')`."""
    made = f", makes '{value_name(subgraph.tensors[operator.outputs[0]])}'" if operator.outputs else ""
    return f"{operator.name} (operator {operator.index}{made})"


def _refuse_unknown(subgraph: Subgraph) -> None:
    """Refuse operators without a converter, all at once."""
    known = {**CONVERTERS, **STATIC}
    unknown = [o for o in subgraph.operators if o.name not in (CUSTOM_CONVERTERS if o.is_custom else known)]
    if not unknown:
        return
    kinds: dict[str, list[int]] = {}
    for operator in unknown:
        kinds.setdefault(
            f"custom operator {operator.name}" if operator.is_custom else operator.name, []
        ).append(operator.index)
    listed = "; ".join(
        f"{name} (operator {', '.join(map(str, places[:3]))}{' ...' if len(places) > 3 else ''})"
        for name, places in sorted(kinds.items())[:_LISTED]
    )
    more = f"; and {len(kinds) - _LISTED} more" if len(kinds) > _LISTED else ""
    flex = any(o.name.startswith("Flex" if o.is_custom else "STABLEHLO_") for o in unknown)
    hint = _FLEX_HINT if flex else _OTHER_HINT
    noun = "operator" if len(kinds) == 1 else "operators"
    raise UnsupportedOperatorError(f"{len(kinds)} {noun} cannot be imported: {listed}{more}", hint=hint)
