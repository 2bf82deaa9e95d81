"""Fourier transforms of known length as products with constant matrices.

Source: ONNX operator specification, DFT-20 and STFT-17.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from builder.importer.rewrites.replacement import Nodes, Replacement

# A matrix of 2048 x 2048 floats has 16 MiB. Longer transforms are products with two smaller matrices.
MAX_LENGTH: Final = 2048
_AXIS_IS_INPUT: Final = 20


def dft(new: Replacement) -> Nodes | None:
    """DFT of [..., n, ..., 1 or 2] along an axis."""
    options = new.attributes
    found = new.type_of(new.inputs[0])
    shape = new.shape_of(new.inputs[0])
    inverse, onesided = bool(options.get("inverse", 0)), bool(options.get("onesided", 0))
    axis = new.integer(2, -2) if new.graph.opset >= _AXIS_IS_INPUT else int(options.get("axis", 1))
    if axis is None:
        return None
    axis %= len(shape)
    is_half = inverse and onesided
    length = new.integer(1, 2 * (shape[axis] - 1) if is_half else shape[axis])
    if length is None or _factors(length) is None or axis == len(shape) - 1:
        return None
    parts = [
        new.op("Gather", new.inputs[0], new.constant(part, np.int64), axis=len(shape) - 1)
        for part in range(shape[-1])
    ]
    rank = len(shape) - 1
    order = [place for place in range(rank) if place != axis] + [axis]
    if axis != rank - 1:
        parts = [new.op("Transpose", part, perm=order) for part in parts]
    rows = min(length // 2 + 1 if is_half else length, shape[axis])
    if rows < shape[axis]:
        bounds = [new.ints(value) for value in (0, rows, -1)]
        parts = [new.op("Slice", part, *bounds) for part in parts]
    if is_half:
        # All but the first and the middle frequency stand for two.
        twice = np.full(rows, 2.0)
        twice[0] = 1
        if 2 * (rows - 1) == length:
            twice[-1] = 1
        parts = [new.op("Mul", part, new.constant(twice, found.dtype)) for part in parts]
    others = [shape[place] for place in order[:-1]]
    pair = _transform(
        new, parts, (*others, rows), length, found.dtype, onesided=onesided and not inverse, inverse=inverse
    )
    if is_half:
        pair = pair[:1]
    if axis != rank - 1:
        back = [order.index(place) for place in range(rank)]
        pair = [new.op("Transpose", part, perm=back) for part in pair]
    pair = [new.op("Unsqueeze", part, new.ints(-1)) for part in pair]
    return new.result("Concat", *pair, axis=-1)


def stft(new: Replacement) -> Nodes | None:
    """STFT of a signal [batch, length] or [batch, length, 1 or 2] in frames of known length."""
    found = new.type_of(new.inputs[0])
    shape = new.shape_of(new.inputs[0])
    step = new.integer(1, None)
    window = new.input(2)
    window_shape = new.graph.shape_of(window) if window else None
    length = new.integer(3, window_shape[0] if window_shape else None)
    if not step or not length or _factors(length) is None or length > shape[1]:
        return None
    onesided = bool(new.attributes.get("onesided", 1))
    frames = (shape[1] - length) // step + 1
    where = np.arange(length)[None, :] + step * np.arange(frames)[:, None]
    signals = [new.inputs[0]]
    if len(shape) == 3:
        signals = [
            new.op("Gather", new.inputs[0], new.constant(part, np.int64), axis=2) for part in range(shape[2])
        ]
    parts = [new.op("Gather", signal, new.constant(where, np.int64), axis=1) for signal in signals]
    if window:
        parts = [new.op("Mul", part, window) for part in parts]
    frame = (shape[0], frames, length)
    pair = _transform(new, parts, frame, length, found.dtype, onesided=onesided, inverse=False)
    pair = [new.op("Unsqueeze", part, new.ints(-1)) for part in pair]
    return new.result("Concat", *pair, axis=-1)


def _factors(length: int) -> tuple[int, int] | None:
    """Split a length into two factors of at most `MAX_LENGTH`, as near to each other as possible.

    A length that needs no split is 1 times itself; None if there is no such pair.
    """
    if 0 < length <= MAX_LENGTH:
        return 1, length
    if not 0 < length <= MAX_LENGTH**2:
        return None
    first = next(factor for factor in range(math.isqrt(length), 0, -1) if length % factor == 0)
    return (first, length // first) if length // first <= MAX_LENGTH else None


def _transform(
    new: Replacement,
    parts: list[str],
    shape: Sequence[int],
    length: int,
    dtype: np.dtype[Any],
    *,
    onesided: bool,
    inverse: bool,
) -> list[str]:
    """Transform along the last axis.

    `parts`: values of the input's real part, or of its real and imaginary parts.
    `shape`: of each part; the last axis has at most `length` samples.
    `length`: length of the transform, which has `_factors`.
    `onesided`: whether to compute only the first `length // 2 + 1` frequencies.
    Result: values of the real and the imaginary part.
    """
    columns = length // 2 + 1 if onesided else length
    turn = 1 if inverse else -1
    scale = 1 / length if inverse else 1.0
    if length <= MAX_LENGTH:
        return _times(new, parts, _turns(shape[-1], columns, length), dtype, turn, scale)
    return _in_two(new, parts, shape, length, columns, dtype, turn, scale)


def _in_two(
    new: Replacement,
    parts: list[str],
    shape: Sequence[int],
    length: int,
    columns: int,
    dtype: np.dtype[Any],
    turn: int,
    scale: float,
) -> list[str]:
    """Transform of a length a * b: b transforms of length a, turned, then a transforms of length b.

    Source: J. W. Cooley and J. W. Tukey, An Algorithm for the Machine Calculation of Complex Fourier Series.
    """
    factors = _factors(length)
    assert factors is not None
    a, b = factors
    others = list(shape[:-1])
    rank = len(others) + 2
    swap = [*range(rank - 2), rank - 1, rank - 2]
    if shape[-1] < length:
        pads = new.ints(*[0] * (2 * rank - 3), length - shape[-1])
        parts = [new.op("Pad", part, pads) for part in parts]
    parts = [new.op("Reshape", part, new.ints(*others, a, b)) for part in parts]
    parts = [new.op("Transpose", part, perm=swap) for part in parts]
    real, imaginary = _times(new, parts, _turns(a, a, a), dtype, turn, scale)
    angle = 2 * np.pi * _turns(b, a, length)
    cosine, sine = new.constant(np.cos(angle), dtype), new.constant(turn * np.sin(angle), dtype)
    parts = [
        new.op("Sub", new.op("Mul", real, cosine), new.op("Mul", imaginary, sine)),
        new.op("Add", new.op("Mul", real, sine), new.op("Mul", imaginary, cosine)),
    ]
    parts = [new.op("Transpose", part, perm=swap) for part in parts]
    parts = _times(new, parts, _turns(b, b, b), dtype, turn, 1.0)
    parts = [new.op("Transpose", part, perm=swap) for part in parts]
    parts = [new.op("Reshape", part, new.ints(*others, length)) for part in parts]
    if columns == length:
        return parts
    return [new.op("Slice", part, new.ints(0), new.ints(columns), new.ints(-1)) for part in parts]


def _turns(rows: int, columns: int, length: int) -> NDArray[np.float64]:
    """Angles in turns, less than one: the cosine of a large number loses digits."""
    turns: NDArray[np.float64] = np.outer(np.arange(rows), np.arange(columns)) % length / length
    return turns


def _times(
    new: Replacement,
    parts: list[str],
    turns: NDArray[np.float64],
    dtype: np.dtype[Any],
    turn: int,
    scale: float,
) -> list[str]:
    """Multiply rows, which are real or complex, by a matrix of complex numbers of magnitude `scale`."""
    cosine = new.constant(np.cos(2 * np.pi * turns) * scale, dtype)
    sine = new.constant(np.sin(2 * np.pi * turns) * (turn * scale), dtype)
    real, imaginary = new.op("MatMul", parts[0], cosine), new.op("MatMul", parts[0], sine)
    if len(parts) == 2:
        real = new.op("Sub", real, new.op("MatMul", parts[1], sine))
        imaginary = new.op("Add", imaginary, new.op("MatMul", parts[1], cosine))
    return [real, imaginary]
