"""Fourier transforms of known length as products with constant matrices.

Source: ONNX operator specification, DFT-20 and STFT-17.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.rewrites.replacement import Replacement, constant_integer, input_name

# A matrix of 2048 x 2048 floats has 16 MiB; for longer transforms a product is too slow and too large.
MAX_LENGTH: Final = 2048
_AXIS_IS_INPUT: Final = 20


def dft(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """DFT of [..., n, ..., 1 or 2] along an axis."""
    options = attributes(node)
    found = graph.type_of(node.input[0])
    shape = graph.shape_of(node.input[0])
    inverse, onesided = bool(options.get("inverse", 0)), bool(options.get("onesided", 0))
    axis = (
        constant_integer(node, graph, 2, -2) if graph.opset >= _AXIS_IS_INPUT else int(options.get("axis", 1))
    )
    if found is None or shape is None or axis is None:
        return None
    axis %= len(shape)
    if inverse and onesided:
        return _real_inverse(node, graph, shape, axis, found.dtype)
    length = constant_integer(node, graph, 1, shape[axis])
    if length is None or not 0 < length <= MAX_LENGTH or axis == len(shape) - 1:
        return None
    new = Replacement(node, graph)
    parts = [
        new.op("Gather", node.input[0], new.constant(part, np.int64), axis=len(shape) - 1)
        for part in range(shape[-1])
    ]
    rank = len(shape) - 1
    order = [place for place in range(rank) if place != axis] + [axis]
    if axis != rank - 1:
        parts = [new.op("Transpose", part, perm=order) for part in parts]
    if length < shape[axis]:
        bounds = [new.ints(value) for value in (0, length, -1)]
        parts = [new.op("Slice", part, *bounds) for part in parts]
    rows = min(length, shape[axis])
    pair = _transform(new, parts, rows, length, found.dtype, onesided=onesided, inverse=inverse)
    if axis != rank - 1:
        back = [order.index(place) for place in range(rank)]
        pair = [new.op("Transpose", part, perm=back) for part in pair]
    pair = [new.op("Unsqueeze", part, new.ints(-1)) for part in pair]
    new.op("Concat", *pair, to=node.output[0], axis=-1)
    return new.nodes


def _real_inverse(
    node: onnx.NodeProto, graph: OnnxGraph, shape: Sequence[int], axis: int, dtype: np.dtype[Any]
) -> Sequence[onnx.NodeProto] | None:
    """DFT of half a spectrum [..., m, ..., 2] to a real signal of known length."""
    length = constant_integer(node, graph, 1, 2 * (shape[axis] - 1))
    if length is None or not 0 < length <= MAX_LENGTH or axis == len(shape) - 1 or shape[-1] != 2:
        return None
    rows = min(shape[axis], length // 2 + 1)
    angle = 2 * np.pi * np.outer(np.arange(rows), np.arange(length)) / length
    # All but the first and the middle frequency stand for two.
    twice = np.full((rows, 1), 2.0)
    twice[0] = 1
    if length % 2 == 0 and rows == length // 2 + 1:
        twice[-1] = 1
    new = Replacement(node, graph)
    rank = len(shape) - 1
    order = [place for place in range(rank) if place != axis] + [axis]
    total = ""
    for part, matrix in enumerate((np.cos(angle), -np.sin(angle))):
        x = new.op("Gather", node.input[0], new.constant(part, np.int64), axis=rank)
        x = new.op("Slice", x, new.ints(0), new.ints(rows), new.ints(axis))
        x = new.op("Transpose", x, perm=order)
        product = new.op("MatMul", x, new.constant(twice * matrix / length, dtype))
        total = new.op("Add", total, product) if total else product
    back = [order.index(place) for place in range(rank)]
    new.op("Unsqueeze", new.op("Transpose", total, perm=back), new.ints(-1), to=node.output[0])
    return new.nodes


def stft(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """STFT of a signal [batch, length] or [batch, length, 1 or 2] in frames of known length."""
    found = graph.type_of(node.input[0])
    shape = graph.shape_of(node.input[0])
    step = constant_integer(node, graph, 1, None)
    window = input_name(node, 2)
    window_shape = graph.shape_of(window) if window else None
    length = constant_integer(node, graph, 3, window_shape[0] if window_shape else None)
    if (
        found is None
        or shape is None
        or not step
        or not length
        or not 0 < length <= min(shape[1], MAX_LENGTH)
    ):
        return None
    onesided = bool(attributes(node).get("onesided", 1))
    frames = (shape[1] - length) // step + 1
    where = np.arange(length)[None, :] + step * np.arange(frames)[:, None]
    new = Replacement(node, graph)
    signals = [node.input[0]]
    if len(shape) == 3:
        signals = [
            new.op("Gather", node.input[0], new.constant(part, np.int64), axis=2) for part in range(shape[2])
        ]
    parts = [new.op("Gather", signal, new.constant(where, np.int64), axis=1) for signal in signals]
    if window:
        parts = [new.op("Mul", part, window) for part in parts]
    pair = _transform(new, parts, length, length, found.dtype, onesided=onesided, inverse=False)
    pair = [new.op("Unsqueeze", part, new.ints(-1)) for part in pair]
    new.op("Concat", *pair, to=node.output[0], axis=-1)
    return new.nodes


def _transform(
    new: Replacement,
    parts: list[str],
    rows: int,
    length: int,
    dtype: np.dtype[Any],
    *,
    onesided: bool,
    inverse: bool,
) -> list[str]:
    """Transform along the last axis.

    Parameters
    ----------
    new
        Collects the new nodes.
    parts
        Values of the input's real part, or of its real and imaginary parts, [..., rows].
    rows
        Number of samples of the input.
    length
        Length of the transform, at least `rows`.
    dtype
        Of the input.
    onesided
        Whether to compute only the first `length // 2 + 1` frequencies.
    inverse
        Whether to compute the inverse transform.

    Returns
    -------
    list
        Values of the real and the imaginary part.
    """
    columns = length // 2 + 1 if onesided else length
    # Reduce the product of indices before computing the angle: the cosine of a large number loses digits.
    turns: NDArray[np.float64] = np.outer(np.arange(rows), np.arange(columns)) % length / length
    scale = 1 / length if inverse else 1.0
    cosine = new.constant(np.cos(2 * np.pi * turns) * scale, dtype)
    sine = new.constant(np.sin(2 * np.pi * turns) * (scale if inverse else -scale), dtype)
    real, imaginary = new.op("MatMul", parts[0], cosine), new.op("MatMul", parts[0], sine)
    if len(parts) == 2:
        real = new.op("Sub", real, new.op("MatMul", parts[1], sine))
        imaginary = new.op("Add", imaginary, new.op("MatMul", parts[1], cosine))
    return [real, imaginary]
