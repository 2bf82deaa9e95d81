"""The functions behind the calls of recurrent layers, in NumPy: what TVM's own executor calls in tests.

Formulas: ONNX operator specification, LSTM-14, GRU-14 (with `linear_before_reset`) and RNN-14.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm

from builder.calls.recurrent import DIRECTIONS, GATES, RecurrentCall

Array = np.ndarray[Any, Any]


def register() -> None:
    """Register a function for each kind and direction, in place of earlier ones."""
    for name in RecurrentCall.NAMES:
        _, _, kind, direction = name.split(".")
        tvm.register_global_func(name, _function(kind, direction), override=True)


def _function(kind: str, direction: str) -> Any:
    def function(*tensors: Any) -> None:
        results = 2 if kind == "LSTM" else 1
        arrays = [tensor.numpy() for tensor in tensors[:-results]]
        for tensor, values in zip(tensors[-results:], run(kind, direction, *arrays), strict=True):
            tensor.copyfrom(values)

    return function


def run(kind: str, direction: str, products: Array, *rest: Array) -> list[Array]:
    """Return all states, and the last cells of an LSTM, computed in double precision."""
    *given, weights = rest
    gates, backwards = GATES[kind], DIRECTIONS[direction]
    directions, batch, hidden = given[0].shape
    steps = len(products)
    inward = products.reshape(steps, batch, directions, gates, hidden).astype(np.float64)
    states = np.zeros((steps, directions, batch, hidden))
    cells = np.zeros((directions, batch, hidden))
    for d in range(directions):
        state, cell = given[0][d].astype(np.float64), given[-1][d].astype(np.float64)
        recurrent = weights[d].reshape(gates, hidden, hidden).astype(np.float64)
        for t in reversed(range(steps)) if backwards[d] else range(steps):
            x, r = inward[t, :, d].transpose(1, 0, 2), state @ recurrent.transpose(0, 2, 1)
            if kind == "LSTM":
                i, o, f = _sigmoid(x[:3] + r[:3])
                cell = f * cell + i * np.tanh(x[3] + r[3])
                state = o * np.tanh(cell)
            elif kind == "GRU":
                update, reset = _sigmoid(x[:2] + r[:2])
                candidate = np.tanh(x[2] + reset * (r[2] + given[-1][d]))
                state = (1 - update) * candidate + update * state
            else:
                state = np.tanh(x[0] + r[0])
            states[t, d] = state
        cells[d] = cell if kind == "LSTM" else 0
    found = [states, cells] if kind == "LSTM" else [states]
    return [array.astype(np.float32) for array in found]


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))
