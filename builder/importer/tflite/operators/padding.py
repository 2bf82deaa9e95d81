"""PAD, PADV2 and MIRROR_PAD."""

from __future__ import annotations

import tflite

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.operators.shaping import pad_with, pad_with_zero
from builder.importer.tflite.scope import Layout, to_first


def _edges(op: Operation) -> tuple[list[int], list[int]]:
    """What is added before and after each axis."""
    edges = op.integers(1, "padding")
    rank = op.scope.rank(op.input(0))
    if len(edges) != 2 * rank or min((*edges, 0)) < 0:
        raise RefusalError(f"expected two numbers for each of {rank} axes, got {edges}")
    return edges[0::2], edges[1::2]


def pad(op: Operation) -> None:
    """PAD with zeros. A convolution without padding of its own takes it over."""
    before, after = _edges(op)
    rank = len(before)
    layout = op.layout()
    order = to_first(rank) if layout is Layout.FIRST else range(rank)
    pads = [before[axis] for axis in order] + [after[axis] for axis in order]
    x = op.input(0)
    op.move(lambda value, _: pad_with_zero(op, value, op.output, pads), layout=layout)
    if rank == 4 and not (before[0] or after[0] or before[3] or after[3]) and op.is_move():
        op.scope.padded[op.output.index] = (x, [*before[1:3], *after[1:3]])


def pad_v2(op: Operation) -> None:
    """PADV2 with a value, which has the same scale as the input."""
    before, after = _edges(op)
    pads = before + after
    if op.is_move():
        op.put(pad_with(op, op.value(0), pads, op.reshape(op.value(2), ())))
    else:
        op.put_real(pad_with(op, op.real(0), pads, op.reshape(op.real(2), ())))


def mirror_pad(op: Operation) -> None:
    """MIRROR_PAD: the elements near the edge, with it (symmetric) or without it (reflect)."""
    before, after = _edges(op)
    shape = op.shape(0)
    edge = 1 if op.options("MirrorPadOptions").Mode() == tflite.MirrorPadMode.SYMMETRIC else 0
    layout = op.layout()
    order = to_first(len(shape)) if layout is Layout.FIRST else range(len(shape))

    def change(value: str, _: Layout) -> str:
        for place, axis in enumerate(order):
            extent = shape[axis]
            if max(before[axis], after[axis]) > extent - 1 + edge:
                raise RefusalError(f"expected a padding of less than {extent} elements")
            op.graph.check_made(extent)
            first = [index - edge for index in range(before[axis], 0, -1)]
            last = [extent - 2 + edge - index for index in range(after[axis])]
            value = op.gather(value, [*first, *range(extent), *last], place)
        return value

    op.move(change, layout=layout)
