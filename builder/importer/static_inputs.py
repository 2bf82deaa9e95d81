"""The model's inputs, made static: shapes given, symbols solved, a batch of one chosen, values folded in.

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
from builder.importer.input_shapes import MAX_DIM, MAX_RANK
from builder.importer.onnx_graph import is_known_type

Dim = int | str | None
Shapes = Mapping[str, Sequence[int]]
Values = Mapping[str, ArrayLike]

# A model that reads pictures in a batch of symbolic size, and nothing else symbolic, is meant for one
# picture.
CHOSEN_BATCH: Final = 1


def fix_inputs(
    model: onnx.ModelProto, shapes: Shapes, values: Values, progress: Callable[[str], None]
) -> None:
    """Give every input a static shape, in place.

    Parameters
    ----------
    model
        The model, its weights not among its inputs.
    shapes
        What the user gave for some inputs, or for all.
    values
        Inputs that become constants.
    progress
        Called with a line for each choice that the user was not asked about.

    Raises
    ------
    ShapeError
        If a name is no input's, a shape or value does not fit, or a dimension is left unknown.
    ModelError
        If an input is no tensor.
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
    dims = {name: _substitute(given.get(name), declared[name], solved) for name in remaining}
    _choose_batch(dims, declared, progress)
    _refuse_unknown(dims, declared)
    for value in graph.input:
        found = dims[value.name]
        assert found is not None
        elem_type = value.type.tensor_type.elem_type
        value.CopyFrom(helper.make_tensor_value_info(value.name, elem_type, list(found)))
    forget_shapes(graph)


def forget_shapes(graph: onnx.GraphProto) -> None:
    """Drop recorded shapes of all but the inputs: they may be stale, or name what is a number now."""
    del graph.value_info[:]
    for output in graph.output:
        if output.type.WhichOneof("value") == "tensor_type":
            output.type.tensor_type.ClearField("shape")


def _declared_dims(value: onnx.ValueInfoProto) -> tuple[Dim, ...] | None:
    """Dimensions as the file has them: a number, a symbol, or None; None for all where there is no rank."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        raise ModelError(
            f"expected tensors as inputs, '{value.name}' is a {(kind or 'value without a type')}"
        )
    tensor = value.type.tensor_type
    if tensor.elem_type == TensorProto.STRING:
        raise ModelError(
            f"expected numbers as inputs, '{value.name}' is a tensor of strings",
            hint="export the model from behind its tokenizer or vocabulary",
        )
    if not is_known_type(tensor.elem_type):
        raise ModelError(f"input '{value.name}' has no known datatype")
    if not tensor.HasField("shape"):
        return None
    # Exporters also write an unknown dimension as 0 or -1.
    return tuple(
        (dim.dim_value if dim.dim_value > 0 else None)
        if dim.HasField("dim_value")
        else (dim.dim_param or None)
        for dim in tensor.shape.dim
    )


def _text(dims: Sequence[Dim] | None) -> str:
    if dims is None:
        return "of unknown rank"
    return "[" + ",".join("?" if dim is None else str(dim) for dim in dims) + "]"


def signature(model: onnx.ModelProto) -> str:
    """The inputs as they stand in a message: `data [N,3,224,224] float32`."""
    parts = []
    for value in model.graph.input:
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        parts.append(f"{value.name} {_text(_declared_dims(value))} {dtype}")
    return ", ".join(parts) or "none"


def _check_names(model: onnx.ModelProto, names: Sequence[str]) -> None:
    known = {value.name for value in model.graph.input}
    twice = next((name for name in names if names.count(name) > 1), None)
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None:
        raise ShapeError(f"the model has no input '{wrong}'; its inputs are {signature(model)}")
    if twice is not None and twice not in known:
        raise ShapeError(f"expected one shape or value for input '{twice}', got both")


def _check_given(
    model: onnx.ModelProto, name: str, shape: tuple[int, ...], declared: tuple[Dim, ...] | None
) -> None:
    if len(shape) > MAX_RANK or any(type(dim) is not int or not 0 < dim <= MAX_DIM for dim in shape):
        raise ShapeError(f"expected positive integers as the shape of input '{name}', got {_text(shape)}")
    if declared is None:
        return
    if len(shape) != len(declared):
        raise ShapeError(
            f"input '{name}' expects {len(declared)} dimensions, {_text(declared)}, "
            f"got {len(shape)}, {_text(shape)}",
            hint=f"the model's inputs are {signature(model)}",
        )
    for axis, (expected, came) in enumerate(zip(declared, shape, strict=True)):
        if isinstance(expected, int) and expected != came:
            raise ShapeError(
                f"input '{name}' expects {_text(declared)}, got {_text(shape)}: "
                f"dimension {axis} is fixed at {expected}",
                hint="dimensions that the file fixes cannot be changed; export the model with them dynamic",
            )


def _solve(
    name: str, shape: tuple[int, ...], declared: tuple[Dim, ...] | None, solved: dict[str, tuple[int, str]]
) -> None:
    """Learn what the symbols stand for, and that they stand for one number each."""
    for symbol, size in zip(declared or (), shape, strict=declared is not None):
        if not isinstance(symbol, str):
            continue
        known, source = solved.setdefault(symbol, (size, name))
        if known != size:
            raise ShapeError(
                f"dimension '{symbol}' expects one size, "
                f"got {known} from input '{source}' and {size} from '{name}'"
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
    """A batch of one, where the first dimension alone is unknown."""
    open_inputs = {name: found for name, found in dims.items() if found is None or not _is_static(found)}
    if not open_inputs or not all(found and _is_static(found[1:]) for found in open_inputs.values()):
        return
    # A vector's only dimension may as well be a length, unless it is the same symbol as a batch.
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
            f"input '{name}' {_text(declared[name])}: the batch is symbolic, {CHOSEN_BATCH} chosen "
            f"(another with --input-shapes)"
        )


def _is_static(dims: Sequence[Dim]) -> bool:
    return all(isinstance(dim, int) for dim in dims)


def _refuse_unknown(
    dims: Mapping[str, tuple[Dim, ...] | None],
    declared: Mapping[str, tuple[Dim, ...] | None],
) -> None:
    unknown = [name for name, found in dims.items() if found is None or not _is_static(found)]
    if not unknown:
        return
    listed = ", ".join(f"'{name}' {_text(declared[name])}" for name in unknown)
    # What is known stands as a number, so that the example is only wrong where the user must decide.
    example = " ".join(
        f"{name}:{_text(dims[name]) if dims[name] is not None else '[...]'}" for name in unknown
    )
    raise ShapeError(
        f"the shapes of these inputs are needed: {listed}",
        hint=f'give --input-shapes "{example}" with numbers',
    )


def _fold_value(model: onnx.ModelProto, name: str, value: ArrayLike, shape: tuple[int, ...] | None) -> None:
    """Turn an input into a weight."""
    graph = model.graph
    index = next(i for i, info in enumerate(graph.input) if info.name == name)
    info = graph.input[index]
    declared = shape if shape is not None else _declared_dims(info)
    array = _as_dtype(name, value, helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))
    if declared is not None:
        array = _as_shape(name, array, declared)
    del graph.input[index]
    graph.initializer.append(numpy_helper.from_array(array, name))


def _as_dtype(name: str, value: ArrayLike, dtype: np.dtype[Any]) -> NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ShapeError(f"input '{name}' expects {dtype}, got {value!r:.60}")
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        # Integers must arrive exactly; a float may be rounded to the model's precision.
        same = np.isclose(cast.astype(np.float64), array.astype(np.float64), rtol=1e-2, equal_nan=True)
        exact = cast.astype(np.float64) == array.astype(np.float64)
    if not np.all(same if dtype.kind not in "biu" else exact):
        raise ShapeError(f"input '{name}' expects {dtype}, got {value!r:.60}")
    return np.asarray(cast)


def _as_shape(name: str, array: NDArray[Any], declared: Sequence[Dim]) -> NDArray[Any]:
    if array.ndim == 0:
        # One number for a tensor of one element, whatever its rank; of several, for each of them.
        known = [dim if isinstance(dim, int) else 1 for dim in declared]
        return np.full(known, array)
    fits = array.ndim == len(declared) and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(declared, array.shape, strict=False)
    )
    if not fits:
        raise ShapeError(f"input '{name}' expects {_text(declared)}, got a value of {_text(array.shape)}")
    return array
