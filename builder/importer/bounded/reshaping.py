"""Reshape and Flatten of values whose lengths are only known at run time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

import onnx

from builder.importer.bounded.length import Length
from builder.importer.bounded.moves import pass_on
from builder.importer.bounded.padded_graph import PaddedGraph
from builder.importer.bounded.sources import extents, multiplied
from builder.importer.onnx_graph import attributes


def flatten(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Flatten: a Reshape to two axes."""
    dims = g.shape(node.input[0])
    axis = int(attributes(node).get("axis", 1))
    axis = axis + len(dims) if axis < 0 else axis
    _reshape(g, node.input[0], node.output[0], [math.prod(dims[:axis]), math.prod(dims[axis:])])


def reshape(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Reshape: a padded axis may be split or merged with those after it."""
    x, to = node.input[0], node.output[0]
    target = g.entries(node.input[1])
    if target is None:
        g.refuse("its shape depends on values that are only known at run time, and nothing bounds it")
    dims = g.shape(x)
    zero = bool(attributes(node).get("allowzero", 0))
    wanted = [
        dims[axis] if entry == 0 and not zero and axis < len(dims) else entry
        for axis, entry in enumerate(target)
    ]
    padded = extents(tuple(wanted))
    if -1 in padded:
        rest = math.prod(extent for extent in padded if extent != -1)
        if rest < 1 or math.prod(dims) % rest:
            _compacted(g, x, to, padded)
            return
        padded[padded.index(-1)] = math.prod(dims) // rest
    if math.prod(padded) != math.prod(dims):
        g.refuse("its shape does not follow from that of its input")
    changing = {axis for axis, entry in enumerate(target) if entry in (-1, 0) or isinstance(entry, Length)}
    _reshape(g, x, to, padded, changing)


def _reshape(g: PaddedGraph, x: str, to: str, padded: list[int], changing: Set[int] = frozenset()) -> None:
    found = reshaped_lengths(g, x, padded, sorted(changing) or range(len(padded)))
    if found is None:
        _compacted(g, x, to, [-1 if i == 0 else extent for i, extent in enumerate(padded)])
        return
    g.op("Reshape", x, g.ints(*padded), to=to)
    g.bound(to, found)
    pass_on(g, x, to)


def reshaped_lengths(
    g: PaddedGraph, x: str, padded: Sequence[int], changing: Iterable[int]
) -> dict[int, Length] | None:
    """Where the lengths of a value go in a Reshape; None if a padded axis would be torn apart.

    `changing`: axes after the Reshape whose extents are not given as numbers: [n] as [1, -1] has its length
        on the second axis.
    """
    dims, lengths = g.shape(x), g.lengths.get(x, {})
    found: dict[int, Length] = {}
    for axis, length in lengths.items():
        before, inner = math.prod(dims[:axis]), math.prod(dims[axis + 1 :])
        for place in changing:
            rest = math.prod(padded[place + 1 :])
            if math.prod(padded[:place]) != before or place in found:
                continue
            if inner % rest == 0 and padded[place] == length.capacity * (inner // rest):
                found[place] = multiplied(g, length, inner // rest)
                break
            if rest % inner == 0 and padded[place] * (rest // inner) == length.capacity:
                found[place] = g.quotient(length, rest // inner)
                break
        else:
            return None
    return found


def _compacted(g: PaddedGraph, x: str, to: str, padded: list[int]) -> None:
    """Reshape of the real elements, not adjacent in memory: as a vector, or as rows [-1, ...] of it."""
    mask = g.mask(x)
    rows = padded[1:]
    if not mask or not padded or padded[0] != -1 or any(extent < 1 for extent in rows):
        g.refuse("it would tear apart an axis whose length is only known at run time")
    dims, inner = g.shape(x), math.prod(rows)
    # Whole rows are moved if rows do not cross what is real.
    lengths = g.lengths[x]
    tail = math.prod(dims[max(lengths) + 1 :])
    if tail % inner:
        g.refuse("it would tear apart an axis whose length is only known at run time")
    lead = [*dims[: max(lengths) + 1], tail // inner]
    real = g.op("Expand", g.op("Reshape", mask, g.ints(*g.shape(mask)[: max(lengths) + 1], 1)), g.ints(*lead))
    places, count = g.positions(g.op("Reshape", real, g.ints(-1)))
    flat = g.op("Reshape", x, g.ints(-1, *rows))
    g.op("Gather", flat, places, to=to, axis=0)
    g.bound(to, {0: count})
