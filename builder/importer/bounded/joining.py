"""The value that one of two branches makes, if they may make values of different lengths."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx

from builder.importer.bounded.length import Entry, Length
from builder.importer.bounded.padded_graph import PaddedGraph
from builder.importer.bounded.sources import extents

# Domain and operator of the nodes that stand for the end of an If while its branches are padded.
JOIN: Final = "edgebundle.join"


def join(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Select a value of one of two branches, both padded to the larger capacity."""
    condition, taken, other = node.input
    to = node.output[0]
    first, second = g.dims(taken), g.dims(other)
    if len(first) != len(second) or g.elem_type(taken) != g.elem_type(other):
        g.refuse("its branches make values of different rank or type")
    scalar = condition if not g.shape(condition) else g.op("Reshape", condition, g.ints())
    lengths: dict[int, Length] = {}
    room = [max(a, b) for a, b in zip(extents(first), extents(second), strict=True)]
    for axis, (a, b) in enumerate(zip(first, second, strict=True)):
        if a != b:
            lengths[axis] = _either(g, condition, a, b, room[axis])
        elif isinstance(a, Length):
            lengths[axis] = a
    if 0 in room:
        g.refuse("its branches make nothing")
    values = [_widened(g, value, room) for value in (taken, other)]
    g.op("Where", scalar, *values, to=to)
    g.bound(to, lengths)
    if {taken, other} <= g.natural or (taken in g.natural and 0 in extents(second)):
        g.natural.add(to)


def _either(g: PaddedGraph, condition: str, a: Entry, b: Entry, capacity: int) -> Length:
    flag = g.op("Reshape", condition, g.ints(1)) if g.shape(condition) != (1,) else condition

    def make() -> Length:
        return Length(g.op("Where", flag, g.scalar(a), g.scalar(b)), capacity)

    made = g.derived(("either", condition, a, b, capacity), make)
    assert isinstance(made, Length)
    return made


def _widened(g: PaddedGraph, value: str, room: list[int]) -> str:
    """A value padded to larger extents."""
    shape = g.shape(value)
    if 0 in shape:
        return g.constant(np.zeros(room), g.dtype(value))
    for axis, extent in enumerate(room):
        missing = list(g.shape(value))
        if missing[axis] < extent:
            missing[axis] = extent - missing[axis]
            value = g.op("Concat", value, g.constant(np.zeros(missing), g.dtype(value)), axis=axis)
    return value
