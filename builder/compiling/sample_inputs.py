"""Recorded inputs: what parity is measured on, and what a device tests itself with.

Seeded, so that two builds record the same. Floating point inputs get a normal distribution, or pixels where
a preprocess says what an image becomes. An integer input that selects rows of a table (token ids) stays
below the table's size, which is found in the ONNX graph; any other integer input is 0 or 1, mostly 1, as
masks are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx

from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec

SEED: Final = 0
# Operators through which an index keeps its value on its way to the table it selects from.
_TRANSPARENT: Final = frozenset(
    {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand", "Max", "Min"}
)

Arrays = Mapping[str, npt.NDArray[np.generic]]


def record(
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
        The normalised ONNX model, searched for the tables that integer inputs select from.
    preprocess
        What an image becomes before the model; its input then gets noise in that range.
    seed
        Seed of the generator.

    Returns
    -------
    dict
        An array for each input, of its spec's shape and dtype.
    """
    rng = np.random.default_rng(seed)
    bounds = _table_sizes(model)
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for spec in inputs:
        dtype = np.dtype(spec.dtype)
        if dtype.kind == "f":
            if preprocess is not None and preprocess.input == spec.name:
                arrays[spec.name] = _pixels(spec, preprocess, rng).astype(dtype)
            else:
                arrays[spec.name] = rng.standard_normal(spec.shape).astype(dtype)
        elif spec.name in bounds:
            arrays[spec.name] = rng.integers(0, max(1, bounds[spec.name]), spec.shape).astype(dtype)
        else:
            arrays[spec.name] = (rng.random(spec.shape) < 0.9).astype(dtype)
    return arrays


def _pixels(spec: TensorSpec, preprocess: Preprocess, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    pixels = rng.integers(0, 256, spec.shape).astype(np.float64) * preprocess.scale
    channels = (1, -1, 1, 1) if preprocess.layout == "NCHW" else (1, 1, 1, -1)
    mean = np.array(preprocess.mean).reshape(channels)
    std = np.array(preprocess.std).reshape(channels)
    values: npt.NDArray[np.float64] = (pixels - mean) / std
    return values


def _table_sizes(model: onnx.ModelProto) -> dict[str, int]:
    """Input name -> rows of the smallest table that it, cast or reshaped, selects from."""
    graph = model.graph
    shapes = {t.name: tuple(t.dims) for t in graph.initializer}
    origin = {value.name: value.name for value in graph.input}
    sizes: dict[str, int] = {}
    for node in graph.node:
        if node.op_type in _TRANSPARENT and node.input and node.input[0] in origin:
            origin[node.output[0]] = origin[node.input[0]]
        elif node.op_type == "Gather" and node.input[0] in shapes and node.input[1] in origin:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            name = origin[node.input[1]]
            rows = shapes[node.input[0]][axis]
            sizes[name] = min(rows, sizes.get(name, rows))
    return sizes
