"""LSTM, GRU and RNN in a Relax module: one call of a function that runs all steps.

Only what common exporters write is kept as a call, see `builder.importer.rewrites.recurrent`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, cast

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from builder.calls.recurrent import DIRECTIONS, RecurrentCall
from builder.importer.converters import Attributes, Converter, Inputs

# What the kernel asks of a node; all else must have its default.
KERNEL_ATTRIBUTES: Final = frozenset({"direction", "hidden_size", "linear_before_reset"})


def _shape(tensor: relax.Expr) -> tuple[int, ...]:
    return tuple(int(dim) for dim in tensor.ty.shape)


def converter(kind: str) -> Converter:
    """Return the converter of recurrent layers of a kind to calls."""
    return Converter(functools.partial(_convert, kind))


def _convert(kind: str, bb: relax.BlockBuilder, inputs: Inputs, attrs: Attributes) -> relax.Expr:
    direction = attrs.get("direction", b"forward")
    direction = direction.decode() if isinstance(direction, bytes) else str(direction)
    backwards = DIRECTIONS[direction]

    def given(index: int) -> relax.Expr | None:
        return inputs[index] if index < len(inputs) else None

    why = _refusal(kind, given, attrs)
    if why:
        raise ValueError(f"expected a layer in the form of the kernel, or one to unroll, got {why}")
    x, weights, recurrent = (cast(relax.Expr, inputs[index]) for index in range(3))
    steps, batch, _ = _shape(x)
    directions, size, hidden = _shape(recurrent)
    inward = weights.value.numpy().reshape(directions * size, -1)
    bias = np.zeros((directions, 2, size), "float32")
    if (given_bias := given(3)) is not None:
        bias = given_bias.value.numpy().reshape(directions, 2, size)
    added = bias[:, 0] + bias[:, 1]
    zeros = np.zeros((directions, batch, hidden), "float32")
    state, cell = given(5), given(6)
    rest = [relax.const(zeros) if state is None else state]
    if kind == "LSTM":
        rest.append(relax.const(zeros) if cell is None else cell)
    elif kind == "GRU":
        # The candidate's own bias is multiplied by the reset gate.
        added[:, 2 * hidden :] = bias[:, 0, 2 * hidden :]
        rest.append(relax.const(np.ascontiguousarray(bias[:, 1, 2 * hidden :])))
    product = bb.emit(relax.op.matmul(x, relax.const(np.ascontiguousarray(inward.T))))
    product = bb.emit(relax.op.add(product, relax.const(added.reshape(-1))))
    result = RecurrentCall(kind, direction, (product, *rest), recurrent).emit(bb)
    states = bb.emit(relax.TupleGetItem(result, 0)) if kind == "LSTM" else result
    parts = []
    for index, is_backwards in enumerate(backwards):
        last = 0 if is_backwards else steps - 1
        begin, end = [last, index, 0, 0], [last + 1, index + 1, batch, hidden]
        part = bb.emit(relax.op.strided_slice(states, [0, 1, 2, 3], begin, end))
        parts.append(bb.emit(relax.op.reshape(part, (1, batch, hidden))))
    final = parts[0] if len(parts) == 1 else bb.emit(relax.op.concat(parts, 0))
    outputs = [states, final]
    if kind == "LSTM":
        outputs.append(bb.emit(relax.TupleGetItem(result, 1)))
    return relax.Tuple(outputs)


def _refusal(kind: str, given: Callable[[int], relax.Expr | None], attrs: Attributes) -> str:
    """Return what keeps the kernel from running the layer; such a layer should have been unrolled."""
    if given(4) is not None:
        return "sequences of different lengths"
    if given(7) is not None:
        return "peepholes"
    if any(value is not None and not isinstance(value, GenericConst) for value in map(given, (1, 2, 3))):
        return "weights that are not constant"
    others = sorted(set(attrs) - KERNEL_ATTRIBUTES - {"tvm_custom"})
    if others:
        return ", ".join(others)
    if kind == "GRU" and not attrs.get("linear_before_reset", 0):
        return "a reset gate before the product"
    dtype = str(cast(relax.Expr, given(0)).ty.dtype)
    return "" if dtype == "float32" else dtype
