"""Spectra of real signals: RFFT2D, and COMPLEX_ABS, REAL and IMAG of what it makes."""

from __future__ import annotations

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation


def rfft2d(op: Operation) -> None:
    """RFFT2D of the last two axes, which are cut or padded with zeros to the lengths of the second input."""
    shape = op.shape(0)
    lengths = op.integers(1, "length")
    if len(shape) < 2 or len(lengths) != 2 or min(lengths) < 1:
        raise RefusalError(f"expected two axes and two lengths, got {list(shape)} and {lengths}")
    graph = op.graph
    height, width = lengths
    x = op.reshape(op.real(0), (*shape, 1))
    x = graph.node("DFT", x, graph.constant(width), graph.constant(-2), onesided=1)
    if (shape[-2], height) != (1, 1):
        x = graph.node("DFT", x, graph.constant(height), graph.constant(-3))
    parts = graph.nodes("Split", [x, graph.constant([1, 1])], 2, axis=-1)
    real, imaginary = (op.reshape(part, graph.shape_of(part)[:-1]) for part in parts)
    op.scope.put_pair(op.output, real, imaginary)


def complex_abs(op: Operation) -> None:
    """COMPLEX_ABS: magnitudes."""
    squares = [op.graph.node("Mul", part, part) for part in op.scope.pair(op.input(0))]
    op.put_real(op.graph.node("Sqrt", op.graph.node("Add", *squares)))


def real(op: Operation) -> None:
    """REAL parts."""
    op.put_real(op.scope.pair(op.input(0))[0])


def imaginary(op: Operation) -> None:
    """IMAG: imaginary parts."""
    op.put_real(op.scope.pair(op.input(0))[1])
