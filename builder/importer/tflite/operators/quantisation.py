"""How numbers are stored: QUANTIZE, DEQUANTIZE, FAKE_QUANT and DENSIFY."""

from __future__ import annotations

import numpy as np

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation


def requantise(op: Operation) -> None:
    """QUANTIZE real numbers, or numbers of another scale."""
    layout = op.layout()
    if not op.output.is_quantised:
        raise RefusalError("expected a result with a scale, got none")
    op.put_real(op.real(0, layout), layout)


def dequantise(op: Operation) -> None:
    """DEQUANTIZE to real numbers."""
    layout = op.layout()
    if op.output.is_quantised:
        raise RefusalError("expected a result of real numbers, got one with a scale")
    op.put(op.real(0, layout), layout)


def densify(op: Operation) -> None:
    """DENSIFY of a sparse constant, which was unpacked when it was read."""
    op.put(op.value(0))


def fake_quant(op: Operation) -> None:
    """FAKE_QUANT: numbers as they were after quantising (fake_quant.cc, with nudged bounds)."""
    options = op.options("FakeQuantOptions")
    bits = options.NumBits()
    if not 2 <= bits <= 16:
        raise RefusalError(f"expected 2 to 16 bits, got {bits}")
    least = np.float32(1 if options.NarrowRange() else 0)
    most = np.float32((1 << bits) - 1)
    low, high = np.float32(options.Min()), np.float32(options.Max())
    if not low < high:
        raise RefusalError(f"expected a range, got {low} to {high}")
    scale = np.float32((high - low) / (most - least))
    zero = np.clip(np.round(least - low / scale), least, most).astype(np.float32)
    low, high = np.float32((least - zero) * scale), np.float32((most - zero) * scale)
    layout = op.layout()

    def number(value: np.float32) -> str:
        return op.graph.constant(np.asarray(value, np.float32))

    x = op.graph.node("Clip", op.real(0, layout), number(low), number(high))
    steps = op.graph.node("Mul", op.graph.node("Sub", x, number(low)), number(np.float32(1) / scale))
    steps = op.graph.node("Floor", op.graph.node("Add", steps, number(np.float32(0.5))))
    op.put_real(op.graph.node("Add", op.graph.node("Mul", steps, number(scale)), number(low)), layout)
