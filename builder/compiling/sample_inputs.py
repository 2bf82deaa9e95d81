"""Sample inputs: parity is measured on them, and a device tests itself with them.

The generator is seeded, so two builds make the same inputs. Floating-point inputs are normally distributed;
the input that takes a picture gets random pixels, prepared as declared. An input of integers that has a
picture's shape gets all bytes of its datatype. An integer input that selects rows of
a table (token ids) stays below the table's size, which is read from the ONNX graph; one that is compared with
several constants (the steps of a loop) is drawn from among them; one that divides another is not 0. Other
integer inputs are mostly 1 and sometimes 0, like a mask. A feature that trees compare is drawn from around
their thresholds: numbers that are all small would always take the same branches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec
from builder.importer.cache_length import capacity_of
from builder.importer.classic import ensemble
from builder.importer.classic.kept import is_kept

SEED: Final = 0
# Operators that leave an index's value unchanged on its way to the table it selects from.
_TRANSPARENT: Final = frozenset(
    {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand", "Max", "Min"}
)

_INTEGERS: Final = frozenset(
    getattr(onnx.TensorProto, f"{sign}INT{bits}") for bits in (8, 16, 32, 64) for sign in ("", "U")
)
_BYTES: Final = ("UINT8", "INT8")
_OF_INTEGERS: Final = frozenset({"DequantizeLinear", "MatMulInteger", "ConvInteger"})
_COMPARISONS: Final = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual"})

Arrays = Mapping[str, npt.NDArray[np.generic]]


def make_inputs(
    inputs: Sequence[TensorSpec],
    model: onnx.ModelProto,
    preprocess: Preprocess | None = None,
    seed: int = SEED,
) -> dict[str, npt.NDArray[np.generic]]:
    """Make one set of inputs.

    Parameters
    ----------
    inputs
        Specs of the model's inputs.
    model
        The normalised ONNX model, which is searched for the tables that integer inputs select from.
    preprocess
        How a picture becomes an input, or None; that input gets random pixels, prepared in this way.
    seed
        Seed of the generator.

    Returns
    -------
    dict
        Input name -> array of that input's shape and dtype.
    """
    rng = np.random.default_rng(seed)
    bounds = _table_sizes(model)
    compared = _compared(model)
    quantised = _quantised(model)
    counts = _counts(model)
    parts = _parts_of_quotients(model)
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for spec in inputs:
        dtype = np.dtype(spec.dtype)
        if dtype.kind == "f":
            if preprocess is not None and preprocess.input == spec.name:
                arrays[spec.name] = _pixels(spec, preprocess, rng).astype(dtype)
            elif spec.name in compared:
                arrays[spec.name] = _features(spec, compared[spec.name], rng).astype(dtype)
            else:
                arrays[spec.name] = rng.standard_normal(spec.shape).astype(dtype)
        elif spec.name in quantised:
            info = np.iinfo(spec.dtype)
            arrays[spec.name] = rng.integers(int(info.min), int(info.max) + 1, spec.shape).astype(dtype)
        elif (levels := _levels(spec)) is not None:
            arrays[spec.name] = rng.integers(*levels, spec.shape, endpoint=True).astype(dtype)
        elif (capacity := capacity_of(spec.name)) is not None:
            # Caches that are neither empty nor full.
            arrays[spec.name] = np.full(spec.shape, 2 * capacity // 3, dtype)
        elif spec.name in bounds:
            arrays[spec.name] = rng.integers(0, max(1, bounds[spec.name]), spec.shape).astype(dtype)
        elif spec.name in counts:
            arrays[spec.name] = rng.integers(*counts[spec.name], spec.shape, endpoint=True).astype(dtype)
        elif spec.name in parts:
            arrays[spec.name] = rng.integers(parts[spec.name], 10, spec.shape).astype(dtype)
        else:
            # Without axes, NumPy returns a scalar instead of an array.
            arrays[spec.name] = np.asarray(rng.random(spec.shape) < 0.9, dtype)
    return arrays


def samples(
    inputs: Sequence[TensorSpec], model: onnx.ModelProto, preprocess: Preprocess | None = None
) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
    """Yield sets of inputs, each for models that may not be defined on the one before.

    The first is that of `make_inputs`. Then all masks are 1; then floats are positive, between 0 and 1, and
    at least 1, too. A picture stays as it is. The parameters are those of `make_inputs`.
    """
    first = make_inputs(inputs, model, preprocess)
    yield first
    filled = dict(first)
    for name in masks(inputs, model):
        filled[name] = np.ones_like(first[name])
    if masks(inputs, model):
        yield filled
    drawn = [
        name
        for name, array in first.items()
        if array.dtype.kind == "f" and (preprocess is None or preprocess.input != name)
    ]
    if not drawn:
        return
    for change in (np.abs, lambda x: np.abs(np.sin(x)), lambda x: 1 + np.abs(x)):
        yield filled | {
            name: np.asarray(change(first[name].astype(np.float64)), first[name].dtype) for name in drawn
        }


def masks(inputs: Sequence[TensorSpec], model: onnx.ModelProto) -> list[str]:
    """Return the integer and boolean inputs that `make_inputs` fills like a mask: mostly 1, sometimes 0."""
    others = _table_sizes(model).keys() | _quantised(model) | _counts(model).keys()
    others |= _parts_of_quotients(model).keys() | {spec.name for spec in inputs if _levels(spec) is not None}
    return [spec.name for spec in inputs if np.dtype(spec.dtype).kind != "f" and spec.name not in others]


def _levels(spec: TensorSpec) -> tuple[int, int] | None:
    """Return the smallest and largest value of an input of integers that takes a picture; None for others."""
    if len(spec.shape) != 4 or spec.datatype not in (*_BYTES, "INT16", "UINT16", "INT32"):
        return None
    # Masks have one channel too, and wider integers.
    channels = (1, 3) if spec.datatype in _BYTES else (3,)
    sides = [spec.shape[2:]] * (spec.shape[1] in channels) + [spec.shape[1:3]] * (spec.shape[3] in channels)
    if not any(min(each) > 1 for each in sides):
        return None
    return (-128, 127) if spec.datatype == "INT8" else (0, 255)


def _pixels(spec: TensorSpec, preprocess: Preprocess, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    pixels = rng.integers(0, 256, spec.shape).astype(np.float64) * preprocess.scale
    channels = (1, -1, 1, 1) if preprocess.layout == "NCHW" else (1, 1, 1, -1)
    mean = np.array(preprocess.mean).reshape(channels)
    std = np.array(preprocess.std).reshape(channels)
    values: npt.NDArray[np.float64] = (pixels - mean) / std
    return values


def _features(
    spec: TensorSpec,
    thresholds: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]],
    rng: np.random.Generator,
) -> npt.NDArray[np.float64]:
    """Draw samples whose features are near thresholds of trees: one of the feature's, plus some noise."""
    feature, threshold = thresholds
    samples: npt.NDArray[np.float64] = rng.standard_normal(spec.shape)
    for place in np.unique(feature):
        values = threshold[feature == place]
        spread = max(float(values.std()), float(np.abs(values).max()) * 1e-3) * 0.25
        drawn = samples[..., place]
        samples[..., place] = rng.choice(values, drawn.shape) + spread * drawn
    return samples


def _quantised(model: onnx.ModelProto) -> set[str]:
    """Return the inputs of one byte or two that are dequantised, multiplied as integers, or resized."""
    small = (onnx.TensorProto.UINT8, onnx.TensorProto.INT8, onnx.TensorProto.UINT16, onnx.TensorProto.INT16)
    origin = {
        value.name: value.name for value in model.graph.input if value.type.tensor_type.elem_type in small
    }
    cast: set[str] = set()
    found: set[str] = set()
    for node in model.graph.node:
        if not node.input or node.input[0] not in origin:
            continue
        if node.op_type in _TRANSPARENT:
            origin[node.output[0]] = origin[node.input[0]]
            if node.op_type == "Cast" or node.input[0] in cast:
                cast.add(node.output[0])
        elif node.op_type == "Resize" or (node.input[0] not in cast and node.op_type in _OF_INTEGERS):
            found.add(origin[node.input[0]])
    return found


def _compared(
    model: onnx.ModelProto,
) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
    """Input -> the features and thresholds of trees that compare it as it comes."""
    inputs = {value.name: value for value in model.graph.input}
    found = {}
    for node in model.graph.node:
        if not is_kept(node) or node.op_type not in ensemble.OPERATORS or node.input[0] not in inputs:
            continue
        newest = node.op_type == "TreeEnsemble"
        feature = ensemble.ints(node, "nodes_featureids")
        threshold = ensemble.floats(node, "nodes_splits" if newest else "nodes_values").astype(np.float64)
        if newest:
            branch = ensemble.ints(node, "nodes_modes") != ensemble.MEMBER_NUMBER
        else:
            modes = ensemble.attribute(node, "nodes_modes")
            branch = np.array([mode != b"LEAF" for mode in modes.strings] if modes is not None else [], bool)
        usable = branch & np.isfinite(threshold)
        if usable.any():
            found[node.input[0]] = (feature[usable], threshold[usable])
    return found


def _table_sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Input name -> rows of the smallest table that it selects from, directly or cast and reshaped."""
    graph = model.graph
    shapes = {t.name: tuple(t.dims) for t in graph.initializer}
    origin = {value.name: value.name for value in graph.input}
    sizes: dict[str, int] = {}
    for node in graph.node:
        if node.op_type in _TRANSPARENT and node.input and node.input[0] in origin:
            origin[node.output[0]] = origin[node.input[0]]
        elif node.op_type == "DequantizeLinear" and node.input[0] in shapes:
            shapes[node.output[0]] = shapes[node.input[0]]
        elif node.op_type == "Gather" and node.input[0] in shapes and node.input[1] in origin:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            name = origin[node.input[1]]
            rows = shapes[node.input[0]][axis]
            sizes[name] = min(rows, sizes.get(name, rows))
    return sizes


def _counts(model: onnx.ModelProto) -> dict[str, tuple[int, int]]:
    """Return the smallest and largest sample of each integer input that is compared with several constants.

    A loop of at most 8 steps compares the number of its steps with 0 to 8; so samples are 1 to 8.
    """
    graph = model.graph
    integers = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    constants = {t.name: t for t in graph.initializer if t.data_type in integers and math.prod(t.dims) == 1}
    origin = {v.name: v.name for v in graph.input if v.type.tensor_type.elem_type in integers}
    found: dict[str, set[int]] = {}
    for node in graph.node:
        if node.op_type in _TRANSPARENT and node.input and node.input[0] in origin:
            origin[node.output[0]] = origin[node.input[0]]
        elif node.op_type in _COMPARISONS:
            for name, other in (node.input, node.input[::-1]):
                if name in origin and other in constants:
                    value = int(numpy_helper.to_array(constants[other]).reshape(()))
                    found.setdefault(origin[name], set()).add(value)
    return {name: (min(values) + 1, max(values)) for name, values in found.items() if len(values) > 1}


def _parts_of_quotients(model: onnx.ModelProto) -> dict[str, int]:
    """Return the smallest sample of integer inputs that divide, 1, and of those that they divide, 0."""
    graph = model.graph
    origin = {v.name: v.name for v in graph.input if v.type.tensor_type.elem_type in _INTEGERS}
    found: dict[str, int] = {}
    for node in graph.node:
        if node.op_type in _TRANSPARENT and node.input and node.input[0] in origin:
            kept = node.op_type != "Cast" or any(a.i in _INTEGERS for a in node.attribute)
            origin |= {node.output[0]: origin[node.input[0]]} if kept else {}
        elif node.op_type in ("Div", "Mod") and node.input[1] in origin:
            found[origin[node.input[1]]] = 1
            if node.input[0] in origin:
                found.setdefault(origin[node.input[0]], 0)
    return found
