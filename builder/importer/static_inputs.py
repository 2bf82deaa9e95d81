"""Make a model's inputs static: set given shapes, solve symbols, choose a batch of one, fold in values.

Promises that each remaining input has a known type and shape, or a ShapeError that says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper, numpy_helper

from builder.errors import ModelError, ShapeError
from builder.importer.classic.feature_count import columns_needed
from builder.importer.control_flow import rename
from builder.importer.input_shapes import MAX_DIM, MAX_RANK, SHAPES_HINT, UNNAMED, VALUES_HINT
from builder.importer.model_path import EXPORT_HINT
from builder.importer.onnx_graph import is_known_type, walk_nodes
from builder.spelling import did_you_mean

Dim = int | str | None
Shapes = Mapping[str, Sequence[int]]
Values = Mapping[str, ArrayLike]

_KINDS: Final = {
    "sequence_type": "a sequence",
    "map_type": "a map",
    "optional_type": "an optional sequence",
    "sparse_tensor_type": "a sparse tensor",
}
# A device runs such a model, whose only symbolic dimension is the batch, on one picture at a time.
CHOSEN_BATCH: Final = 1


def fix_inputs(
    model: onnx.ModelProto, shapes: Shapes, values: Values, progress: Callable[[str], None]
) -> None:
    """Give every input a static shape, in place.

    Parameters
    ----------
    model
        The model, without its weights among its inputs.
    shapes
        Input name -> shape, for some or all inputs.
    values
        Input name -> value, for inputs that become constants.
    progress
        Called with a line for each choice made without asking the user.

    Raises
    ------
    ShapeError
        If an input does not exist, a shape or value does not fit, or a dimension stays unknown.
    ModelError
        If an input is not a tensor of numbers.
    """
    graph = model.graph
    declared = {value.name: _declared_dims(value) for value in graph.input}
    given = {name: tuple(shape) for name, shape in shapes.items()}
    _check_names(model, [*given, *values])
    solved: dict[str, tuple[int, str]] = {}
    for name, shape in given.items():
        _check_given(model, name, shape, declared[name])
        _solve(name, shape, declared[name], solved)
    for name, value in values.items():
        _fold_value(model, name, value, given.get(name))
    remaining = [value.name for value in graph.input]
    if not remaining:
        raise ModelError(
            "expected a model with inputs, got one whose outputs are constants",
            hint="leave out one of --input-values"
            if values
            else "run it once where you are, and send the devices its outputs",
        )
    dims = {name: _substitute(given.get(name), declared[name], solved) for name in remaining}
    _choose_batch(dims, declared, progress)
    _refuse_unknown(graph, dims, declared)
    for value in graph.input:
        found = dims[value.name]
        assert found is not None
        elem_type = value.type.tensor_type.elem_type
        value.CopyFrom(helper.make_tensor_value_info(value.name, elem_type, list(found)))
        if 0 in found:
            _fold_empty(graph, value.name, elem_type, found)
    forget_shapes(graph)


def _fold_empty(graph: onnx.GraphProto, name: str, elem_type: int, shape: Sequence[Dim]) -> None:
    """Let what reads an input without elements read a weight instead: its value is known."""
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    weight = f"{name}/empty"
    while any(weight in (*node.input, *node.output) for node in walk_nodes(graph)):
        weight += "_"
    for node in graph.node:
        rename(node, {name: weight})
    nothing = np.zeros([int(dim or 0) for dim in shape], dtype)
    graph.initializer.append(numpy_helper.from_array(nothing, weight))


def forget_shapes(graph: onnx.GraphProto) -> None:
    """Drop all recorded shapes but the inputs': they may be stale, or name symbols that are now numbers."""
    del graph.value_info[:]
    for output in graph.output:
        if output.type.WhichOneof("value") == "tensor_type":
            output.type.tensor_type.ClearField("shape")


def _declared_dims(value: onnx.ValueInfoProto) -> tuple[Dim, ...] | None:
    """Dimensions as in the file: each a number, a symbol or None if unknown; None if the rank is unknown."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        what = _KINDS.get(kind, "a value without a type")
        raise ModelError(
            f"expected tensors as inputs, got '{value.name}', {what}",
            hint="export the part of the model that takes tensors",
        )
    tensor = value.type.tensor_type
    if tensor.elem_type == TensorProto.STRING:
        raise ModelError(
            f"expected numbers as inputs, got '{value.name}', a tensor of strings",
            hint="export only the part of the model after its tokenizer or vocabulary",
        )
    if not is_known_type(tensor.elem_type):
        raise ModelError(f"input '{value.name}' has no known datatype", hint=EXPORT_HINT)
    if not tensor.HasField("shape"):
        return None
    # Exporters also write an unknown dimension as 0 or -1.
    return tuple(
        (dim.dim_value if dim.dim_value > 0 else None)
        if dim.HasField("dim_value")
        else (None if dim.dim_param in UNNAMED else dim.dim_param)
        for dim in tensor.shape.dim
    )


def _text(dims: Sequence[Dim] | None) -> str:
    if dims is None:
        return "of unknown rank"
    return "[" + ",".join("?" if dim is None else str(dim) for dim in dims) + "]"


def describe_inputs(model: onnx.ModelProto) -> str:
    """The inputs as messages show them: `data [N,3,224,224] float32`."""
    parts = []
    for value in model.graph.input:
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        parts.append(f"{value.name} {_text(_declared_dims(value))} {dtype}")
    return ", ".join(parts) or "none"


def _check_names(model: onnx.ModelProto, names: Sequence[str]) -> None:
    known = {value.name for value in model.graph.input}
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None:
        raise ShapeError(
            f"the model has no input '{wrong}'; its inputs are {describe_inputs(model)}",
            hint=did_you_mean(wrong, known, otherwise="give the name of one of them"),
        )


def _check_given(
    model: onnx.ModelProto, name: str, shape: tuple[int, ...], declared: tuple[Dim, ...] | None
) -> None:
    if len(shape) > MAX_RANK or any(type(dim) is not int or not 0 <= dim <= MAX_DIM for dim in shape):
        raise ShapeError(
            f"expected integers from 0 as the shape of input '{name}', got {_text(shape)}", hint=SHAPES_HINT
        )
    if declared is None:
        return
    if len(shape) != len(declared):
        raise ShapeError(
            f"input '{name}': expected {len(declared)} dimensions, {_text(declared)}, "
            f"got {len(shape)}, {_text(shape)}",
            hint=f"the model's inputs are {describe_inputs(model)}",
        )
    for axis, (expected, got) in enumerate(zip(declared, shape, strict=True)):
        if isinstance(expected, int) and expected != got:
            raise ShapeError(
                f"input '{name}': expected {_text(declared)}, got {_text(shape)}: "
                f"dimension {axis} is fixed at {expected}",
                hint="export the model with dynamic dimensions: those fixed in the file cannot be changed",
            )


def _solve(
    name: str, shape: tuple[int, ...], declared: tuple[Dim, ...] | None, solved: dict[str, tuple[int, str]]
) -> None:
    """Record the size that each symbol stands for; refuse a symbol with two sizes."""
    for symbol, size in zip(declared or (), shape, strict=declared is not None):
        if not isinstance(symbol, str):
            continue
        known, source = solved.setdefault(symbol, (size, name))
        if known != size:
            raise ShapeError(
                f"dimension '{symbol}': expected one size, "
                f"got {known} from input '{source}' and {size} from '{name}'",
                hint="give both inputs the same size there, in --input-shapes",
            )


def _substitute(
    given: tuple[int, ...] | None, declared: tuple[Dim, ...] | None, solved: Mapping[str, tuple[int, str]]
) -> tuple[Dim, ...] | None:
    if given is not None or declared is None:
        return given
    return tuple(solved[dim][0] if isinstance(dim, str) and dim in solved else dim for dim in declared)


def _choose_batch(
    dims: dict[str, tuple[Dim, ...] | None],
    declared: Mapping[str, tuple[Dim, ...] | None],
    progress: Callable[[str], None],
) -> None:
    """Choose a batch of one if only first dimensions are unknown."""
    open_inputs = {name: found for name, found in dims.items() if found is None or not _is_static(found)}
    if not open_inputs or not all(found and _is_static(found[1:]) for found in open_inputs.values()):
        return
    # A vector's only dimension may be a length instead, unless its symbol is also a batch's.
    batches = {(declared[name] or (None,))[0] for name, found in open_inputs.items() if len(found or ()) > 1}
    for name, found in open_inputs.items():
        if len(found or ()) == 1 and (
            (symbol := (declared[name] or (None,))[0]) is None or symbol not in batches
        ):
            return
    for name, found in open_inputs.items():
        assert found is not None
        dims[name] = (CHOSEN_BATCH, *found[1:])
        progress(
            f"input '{name}' {_text(declared[name])}: the batch is symbolic and is set to {CHOSEN_BATCH} "
            f"(--input-shapes sets another)"
        )


def _is_static(dims: Sequence[Dim]) -> bool:
    return all(isinstance(dim, int) for dim in dims)


def _refuse_unknown(
    graph: onnx.GraphProto,
    dims: Mapping[str, tuple[Dim, ...] | None],
    declared: Mapping[str, tuple[Dim, ...] | None],
) -> None:
    unknown = [name for name, found in dims.items() if found is None or not _is_static(found)]
    if not unknown:
        return
    listed = ", ".join(f"'{name}' {_text(declared[name])}" for name in unknown)
    # Known dimensions are shown as numbers, so the user only has to replace the others.
    example = " ".join(
        f"{name}:{_text(dims[name]) if dims[name] is not None else '[...]'}" for name in unknown
    )
    trees = "".join(
        f"; the trees read '{name}' up to column {count}"
        for name in unknown
        if (count := columns_needed(graph, name))
    )
    raise ShapeError(
        f"expected a shape for each of these inputs: {listed}",
        hint=f'use --input-shapes "{example}" with numbers{trees}',
    )


def _fold_value(model: onnx.ModelProto, name: str, value: ArrayLike, shape: tuple[int, ...] | None) -> None:
    """Turn an input into a weight."""
    graph = model.graph
    index = next(i for i, info in enumerate(graph.input) if info.name == name)
    info = graph.input[index]
    declared = shape if shape is not None else _declared_dims(info)
    array = value_of(name, value, helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type), declared)
    del graph.input[index]
    graph.initializer.append(numpy_helper.from_array(array, name))


def value_of(
    name: str, value: ArrayLike, dtype: np.dtype[Any], declared: Sequence[Dim] | None
) -> NDArray[Any]:
    """Return the value that a user gives an input as an array of its datatype and shape.

    `value`: a number, which fills the input, or numbers of its shape.
    `declared`: its dimensions, as far as they are known; None if not even their number is.
    """
    array = _as_dtype(name, value, dtype)
    return array if declared is None else _as_shape(name, array, declared)


def _as_dtype(name: str, value: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ShapeError(f"input '{name}': expected {dtype}, got {value!r:.60}", hint=VALUES_HINT)
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        # Integers must be exact; a float may be rounded to the model's precision.
        same = np.isclose(cast.astype(np.float64), array.astype(np.float64), rtol=1e-2, equal_nan=True)
        exact = cast.astype(np.float64) == array.astype(np.float64)
    if not np.all(same if dtype.kind not in "biu" else exact):
        raise ShapeError(
            f"input '{name}': expected {dtype}, got {value!r:.60}", hint=f"give numbers that {dtype} can hold"
        )
    return np.asarray(cast)


def _as_shape(name: str, array: NDArray[Any], declared: Sequence[Dim]) -> NDArray[Any]:
    if array.ndim == 0:
        # A single number fills the tensor; unknown dimensions become 1.
        known = [dim if isinstance(dim, int) else 1 for dim in declared]
        return np.full(known, array)
    fits = array.ndim == len(declared) and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(declared, array.shape, strict=False)
    )
    if not fits:
        raise ShapeError(
            f"input '{name}': expected {_text(declared)}, got a value of {_text(array.shape)}",
            hint="write as many numbers as its shape has elements: --input-values NAME=[1,2,3]",
        )
    return array
