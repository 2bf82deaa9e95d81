"""Sample inputs: parity is measured on them, and a device tests itself with them.

The generator is seeded, so two builds make the same inputs. Floating-point inputs are normally distributed;
the input that takes a picture gets random pixels, prepared as declared. An integer input that selects rows of
a table (token ids) stays below the table's size, which is read from the ONNX graph. Other integer inputs are
mostly 1 and sometimes 0, like a mask.
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
# Operators that leave an index's value unchanged on its way to the table it selects from.
_TRANSPARENT: Final = frozenset(
    {"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand", "Max", "Min"}
)

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
    """Input name -> rows of the smallest table that it selects from, directly or cast and reshaped."""
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
