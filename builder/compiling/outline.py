"""What a model file says about its own tensors, before the compiler is loaded.

Promises an answer in well under a second, or None: mistakes in declarations can then be told at once. Shapes
that the file leaves open follow from those that the user gives, as far as ONNX infers them. What then remains
unknown (PyTorch exports, damaged files) is left to the importer, which checks all of it again and has the
better messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import onnx
from google.protobuf.message import DecodeError

from agent.bundle.output_length import OutputLength
from agent.bundle.processing import Preprocess
from agent.bundle.quantisation import by_name
from agent.bundle.state import State
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.channel_axes import Made, channel_axis
from builder.compiling.hints import NO_HINTS, Hints
from builder.compiling.missing_values import takes_nan
from builder.errors import ModelError, NativeError, ShapeError
from builder.importer import advice, native
from builder.importer.edge_scales import NO_SCALES, EdgeScales, onnx_scales
from builder.importer.ultralytics_metadata import Exported, from_onnx
from builder.spelling import did_you_mean

if TYPE_CHECKING:  # which load a compiler
    from builder.importer.classic.string_inputs import Texts
    from builder.importer.onnx_import import ImportedModel
    from builder.importer.tflite.schema import Subgraph

# Larger files take seconds to read.
MAX_OUTLINED_BYTES: Final = 256 << 20
# Shapes follow from small weights, such as the target of a Reshape; ONNX copies a model to infer them.
_MAX_SHAPE_VALUES: Final = 1024
# Operators that only move or round values, and the most of them behind the one that computes an output.
_MOVES: Final = frozenset(
    {
        "Cast", "DequantizeLinear", "Flatten", "Identity", "QuantizeLinear", "Reshape", "Squeeze",
        "Transpose", "Unsqueeze",
    }
)  # fmt: skip
_MOST_MOVES: Final = 16
_LAST_BY_DEFAULT: Final = 13  # the opset since which a Softmax without an axis takes the last one
_MAP: Final = 4  # dimensions
# What TensorFlow Lite calls the operators that hints tell apart.
_TFLITE_MAKERS: Final = {"SOFTMAX": "Softmax", "LOGISTIC": "Sigmoid"}


@dataclass(frozen=True, slots=True)
class Outline:
    """A model's tensors.

    Attributes
    ----------
    inputs, outputs
        Their names, datatypes and shapes; a symbolic batch counts as 1.
    labels
        The class names that exports of Ultralytics, or the metadata of TensorFlow Lite, carry; else empty.
    hints
        What else the file says about the outputs.
    scales
        The scales of quantised inputs and outputs.
    class_counts
        Outputs that are numbers of classes -> how many classes there are.
    states, lengths, preprocess, columns, texts
        As in `ImportedModel`; empty before the model is imported.
    takes_nan
        Whether NaN in an input is a missing value.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    labels: tuple[str, ...] = ()
    hints: Hints = field(default=NO_HINTS, compare=False)
    scales: EdgeScales = field(default=NO_SCALES, compare=False)
    class_counts: Mapping[str, int] = field(default_factory=dict, compare=False)
    states: tuple[State, ...] = ()
    lengths: tuple[OutputLength, ...] = ()
    preprocess: Preprocess | None = None
    columns: tuple[str, ...] = ()
    texts: Mapping[str, tuple[Texts, ...]] = field(default_factory=dict, compare=False)
    takes_nan: Callable[[str], bool] = field(default=lambda _: False, compare=False)

    @classmethod
    def of(cls, model: ImportedModel) -> Outline:
        """Return what an imported model says, which is more than its file says by itself."""
        return cls(
            model.inputs,
            model.outputs,
            model.labels,
            _said(
                model.exported,
                channels_last=_channels_of_onnx(model.onnx, model.outputs),
                is_prepared=model.preprocess is not None,
                scales=by_name(model.scales.quantisation.inputs),
            ),
            scales=model.scales,
            class_counts=model.class_counts,
            states=model.states,
            lengths=model.lengths,
            preprocess=model.preprocess,
            columns=model.columns,
            texts=model.texts,
            takes_nan=lambda name: name in model.nan_inputs or takes_nan(model.onnx, name),
        )


def read_outline(path: str | Path) -> Outline | None:
    """Read a model's tensors from a file of ONNX or TensorFlow Lite; None if not all are known."""
    path = Path(path)
    if path.suffix.lower() == ".tflite":
        return _read_tflite(path)
    model = _read_onnx(path)
    return None if model is None else _declared(model)


def fixed_outline(
    path: str | Path, input_shapes: Mapping[str, Sequence[int]] | None, input_values: Mapping[str, Any] | None
) -> Outline | None:
    """Read a model's tensors as they are with the shapes and values that the user gives.

    Parameters
    ----------
    path
        A file of ONNX or TensorFlow Lite.
    input_shapes, input_values
        As in `builder.importer.import_onnx`. Inputs that get a value are left out.

    Returns
    -------
    Outline or None
        None if not all shapes follow.

    Raises
    ------
    ShapeError
        If shapes or values do not fit the model's inputs, or some are missing.
    """
    path = Path(path)
    if path.suffix.lower() == ".tflite":
        found = None if input_values else _read_tflite(path)
        return None if found is None else _with_shapes(found, input_shapes or {})
    if not input_shapes and not input_values and (found := read_outline(path)) is not None:
        return found
    model = _read_onnx(path)
    if model is None:
        return None
    _fix(model, input_shapes or {}, input_values or {})
    return _declared(_inferred(model))


def tensor_names(path: str | Path) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Read the names of a model's inputs and outputs from an ONNX file; None if it is not one or damaged."""
    model = _read_onnx(Path(path))
    if model is None:
        return None
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = tuple(value.name for value in graph.input if value.name not in weights)
    return inputs, tuple(value.name for value in graph.output)


def _read_onnx(path: Path) -> onnx.ModelProto | None:
    try:
        if path.suffix.lower() != ".onnx" or path.stat().st_size > MAX_OUTLINED_BYTES:
            return None
        return onnx.load(str(path), load_external_data=False)
    except (OSError, DecodeError, ValueError):
        return None


def _read_tflite(path: Path) -> Outline | None:
    try:
        from builder.importer.tflite.metadata import (
            class_counts_of,
            detections_of,
            makers_of,
            read_metadata,
            scales_of,
            steps_of,
        )
        from builder.importer.tflite.schema import read
        from builder.importer.tflite.tensor import value_name

        if path.stat().st_size > MAX_OUTLINED_BYTES:
            return None
        raw = path.read_bytes()
        model = read(raw, str(path))
    except (ImportError, OSError, ModelError):
        return None
    main = model.subgraphs[0]
    inputs, outputs = ([main.tensors[index] for index in each] for each in (main.inputs, main.outputs))
    # An unknown dimension counts as 1, which is right for a batch; other results may follow from it.
    if not inputs or not outputs or any(tensor.open_axes not in ((), (0,)) for tensor in (*inputs, *outputs)):
        return None
    try:
        specs = [
            TensorSpec.from_dtype(value_name(tensor), tensor.dtype, tensor.shape)
            for tensor in (*inputs, *outputs)
        ]
    except (KeyError, TypeError, ValueError):
        return None
    found = {
        name: _TFLITE_MAKERS.get(operator.name, operator.name)
        for name, (operator, _) in makers_of(model).items()
    }
    declared, scales = read_metadata(raw, model), scales_of(model)
    return Outline(
        tuple(specs[: len(inputs)]),
        tuple(specs[len(inputs) :]),
        declared.labels,
        _said(
            declared.exported,
            makers=found,
            operators=frozenset(operator.name.capitalize() for operator in main.operators),
            normalised=declared.normalised,
            roles=detections_of(model),
            steps=steps_of(model),
            channels_last=_channels_last(specs[len(inputs) :], partial(_made_by_tflite, main)),
            is_prepared=declared.preprocess is not None,
            scales=by_name(scales.quantisation.inputs),
        ),
        scales,
        class_counts_of(model),
    )


def _with_shapes(outline: Outline, shapes: Mapping[str, Sequence[int]]) -> Outline | None:
    """Return a TensorFlow Lite model's tensors if the shapes are those of its file, else None."""
    known = {spec.name: spec.shape for spec in outline.inputs}
    for name in shapes:
        if name not in known:
            raise ShapeError(
                f"the model has no input {name[:80]!r}; its inputs are {', '.join(known)[:300]}",
                hint=did_you_mean(name, known, otherwise="give the shape of one of them"),
            )
    return outline if all(known[name] == tuple(shape) for name, shape in shapes.items()) else None


def _declared(model: onnx.ModelProto) -> Outline | None:
    """Return the tensors whose shapes the graph declares, or None if some have none."""
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [_spec(value) for value in graph.input if value.name not in weights]
    outputs = [_spec(value) for value in graph.output]
    known = [spec for spec in (*inputs, *outputs) if spec is not None]
    if len(known) != len(inputs) + len(outputs) or not inputs or not outputs:
        return None
    specs = tuple(known[: len(inputs)]), tuple(known[len(inputs) :])
    said = from_onnx(model)
    scales = onnx_scales(model)
    hints = _said(
        said,
        makers=_makers(model),
        operators=frozenset(node.op_type for node in model.graph.node),
        steps=_steps(scales),
        channels_last=_channels_of_onnx(model, specs[1]),
        scales=by_name(scales.quantisation.inputs),
    )
    return Outline(*specs, said.labels, hints, scales)


def _said(exported: Exported, **more: Any) -> Hints:  # noqa: ANN401 - fields of `Hints`
    return Hints(exported.task, classes=len(exported.labels), points=exported.points, **more)


def _steps(scales: EdgeScales) -> dict[str, float]:
    return {each.name: each.scale for each in scales.quantisation.outputs}


def _channels_last(outputs: Sequence[TensorSpec], makers: Callable[[str], Made | None]) -> dict[str, bool]:
    """Return whether channels are the last axis, for each map whose graph shows it."""
    maps = [spec.name for spec in outputs if len(spec.shape) == _MAP]
    axes = {name: channel_axis(name, makers) for name in maps}
    return {name: axis == _MAP - 1 for name, axis in axes.items() if axis in (1, _MAP - 1)}


def _channels_of_onnx(model: onnx.ModelProto, outputs: Sequence[TensorSpec]) -> dict[str, bool]:
    nodes = {name: node for node in model.graph.node for name in node.output if name}
    return _channels_last(outputs, partial(_made_by_onnx, nodes))


def _made_by_onnx(nodes: Mapping[str, onnx.NodeProto], name: str) -> Made | None:
    node = nodes.get(name)
    if node is None or node.op_type == "Constant":
        return None
    permutation = next((each.ints for each in node.attribute if each.name == "perm"), ())
    return Made(node.op_type, node.input, permutation)


def _made_by_tflite(graph: Subgraph, name: str) -> Made | None:
    from builder.importer.tflite.tensor import value_name

    for operator in graph.operators:
        if name in (value_name(graph.tensors[index]) for index in operator.outputs):
            inputs = [graph.tensors[index] for index in operator.inputs if index >= 0]
            orders = [] if operator.name != "TRANSPOSE" else [each.data for each in inputs[1:]]
            permutation = [int(each) for data in orders if data is not None for each in data]
            return Made(operator.name, [value_name(each) for each in inputs], permutation)
    return None


def _makers(model: onnx.ModelProto) -> dict[str, str]:
    """Return the operator that computes each output's values; no Softmax along another axis than its last."""
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output if name}
    opset = next((each.version for each in model.opset_import if not each.domain), 1)
    found = {}
    for output in graph.output:
        name, rank = output.name, len(output.type.tensor_type.shape.dim)
        last = rank - 1 if rank else None  # where the output's last axis is; None behind another shape
        for _ in range(_MOST_MOVES):
            node = makers.get(name)
            if node is None or node.op_type not in _MOVES or not node.input:
                break
            name = node.input[0]
            if node.op_type == "Transpose" and last is not None:
                order = next((each.ints for each in node.attribute if each.name == "perm"), range(rank)[::-1])
                last = order[last] if len(order) == rank else None
            elif node.op_type in ("Flatten", "Reshape", "Squeeze", "Unsqueeze"):
                last = None
        if (node := makers.get(name)) is None:
            continue
        kind = node.op_type.removeprefix("QLinear")  # ONNX Runtime's, on integers
        default = -1 if opset >= _LAST_BY_DEFAULT or kind != node.op_type else 1
        axis = next((each.i for each in node.attribute if each.name == "axis"), default)
        if kind != "Softmax" or last is None or axis % rank == last:
            found[output.name] = kind
    return found


def _fix(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], values: Mapping[str, Any]) -> None:
    """Give the inputs static shapes, in place, or tell which are missing, as the importer does."""
    from builder.importer.static_inputs import fix_inputs

    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(inputs)
    try:
        fix_inputs(model, shapes, values, lambda _: None)
    except ShapeError as error:
        error.details = advice.explain(error, model.producer_name)
        raise
    except (ModelError, TypeError, ValueError):
        return  # inputs that are strings or no tensors, which the importer replaces or refuses


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the shapes that follow; as it is if it has functions, or no shapes follow."""
    if model.functions:  # a small file may call them more often than any time allows
        return model
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) > _MAX_SHAPE_VALUES:
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
    try:
        return native.infer_shapes(model, strict=False)
    except NativeError:
        return model


def _spec(value: onnx.ValueInfoProto) -> TensorSpec | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    shape = _shape(tensor.shape.dim)
    if shape is None:
        return None
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        return TensorSpec.from_dtype(value.name, str(dtype), shape)
    except (KeyError, TypeError, ValueError):
        return None


def _shape(dims: Sequence[onnx.TensorShapeProto.Dimension]) -> tuple[int, ...] | None:
    shape = []
    for index, dim in enumerate(dims):
        if dim.HasField("dim_value") and dim.dim_value > 0:
            shape.append(dim.dim_value)
        elif index == 0:
            shape.append(1)
        else:
            return None
    return tuple(shape)
