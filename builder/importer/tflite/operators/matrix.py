"""Products of matrices: FULLY_CONNECTED, BATCH_MATMUL."""

from __future__ import annotations

import math

import tflite

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.tensor import Tensor


def fully_connected(op: Operation) -> None:
    """FULLY_CONNECTED of x [..., k], weight [n, k] and an optional bias [n]."""
    options = op.options("FullyConnectedOptions")
    if options.WeightsFormat() != tflite.FullyConnectedOptionsWeightsFormat.DEFAULT:
        raise RefusalError("its weights are shuffled for one kind of processor")
    weight = op.input(1)
    outputs, inputs = _two(op.scope.shape(weight))
    shape = op.shape(0)
    count = math.prod(shape)
    if count % inputs if inputs else shape[-1:] != (0,):
        raise RefusalError(f"expected rows of {inputs}, got {list(shape)}")
    if options.KeepNumDims() and (not shape or shape[-1] != inputs):
        raise RefusalError(f"expected rows of {inputs}, got {list(shape)}")
    rows = count // inputs if inputs else math.prod(shape[:-1])
    tensors = [op.reshape(op.real(0), (rows, inputs)), op.scope.real(weight)]
    if (bias := op.optional(2)) is not None:
        tensors.append(op.reshape(op.bias(bias, op.input(0), weight), (outputs,)))
    product = op.graph.node("Gemm", *tensors, transB=1)
    product = op.activate(product, options.FusedActivationFunction())
    result = (*shape[:-1], outputs) if options.KeepNumDims() else (rows, outputs)
    if op.output.is_quantised:
        # Quantise before the shape changes: what is between the two is one kernel.
        inner = op.scope.quantise(product, op.output)
        op.put(op.reshape(inner, result))
    else:
        op.put_real(op.reshape(product, result))


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2:
        raise RefusalError(f"expected a weight of 2 dimensions, got {list(shape)}")
    return shape[0], shape[1]


def batch_matmul(op: Operation) -> None:
    """BATCH_MATMUL of x [..., m, k] and y [..., k, n], either with its last two axes swapped."""
    options = op.options("BatchMatMulOptions")
    x = _swapped(op, op.input(0), swap=options.AdjX())
    y = _swapped(op, op.input(1), swap=options.AdjY())
    op.put_real(op.graph.node("MatMul", x, y))


def _swapped(op: Operation, tensor: Tensor, *, swap: bool) -> str:
    rank = op.scope.rank(tensor)
    if rank < 2:
        raise RefusalError(f"expected matrices, got {list(op.scope.shape(tensor))}")
    order = [*range(rank - 2), rank - 1, rank - 2] if swap else list(range(rank))
    if tensor.data is not None or swap:
        return op.weight(tensor, order)
    return op.scope.real(tensor)
