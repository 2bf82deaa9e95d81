"""Einsum of two tensors as transposes and a matrix product, or as an element-wise product."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from onnx import TensorProto

from builder.importer.rewrites.replacement import Nodes, Replacement

_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
_ELLIPSIS: Final = "..."
_MORE: Final = "0123456789"  # labels of the axes that an ellipsis stands for


def einsum(new: Replacement) -> Nodes | None:
    """Rewrite Einsum of two float tensors without diagonals; as in ONNX Runtime, 1 is broadcast."""
    found = [new.graph.type_of(name) for name in new.inputs]
    shapes = [new.graph.shape_of(name) for name in new.inputs]
    if len(found) != 2 or any(each is None or each.elem_type not in _FLOATS for each in found):
        return None
    equation = new.attributes["equation"]
    text = (equation if isinstance(equation, str) else equation.decode()).replace(" ", "")
    labels = _labels(text, [len(shape) for shape in shapes if shape is not None])
    if labels is None or None in shapes:
        return None
    a, b, out = labels
    sizes: dict[str, int] = {}
    for operand, shape in zip((a, b), shapes, strict=True):
        for label, extent in zip(operand, shape or (), strict=True):
            if sizes.setdefault(label, extent) == 1:
                sizes[label] = extent
            elif extent not in (1, sizes[label]):
                return None
    if any(len(set(each)) != len(each) for each in labels) or not set(out) <= set(a + b):
        return None
    x, y = (
        name
        if shape == (whole := tuple(sizes[label] for label in operand))
        else new.op("Expand", name, new.ints(*whole))
        for name, operand, shape in zip(new.inputs, (a, b), shapes, strict=True)
    )
    x, a = _summed(new, x, a, b + out)
    y, b = _summed(new, y, b, a + out)
    if set(a) & set(b) <= set(out):
        x, y = (_aligned(new, each, own, out, sizes) for each, own in ((x, a), (y, b)))
        return new.result("Mul", x, y)
    _product(new, (x, y), (a, b, out), sizes, new.outputs[0])
    return new.nodes


def _labels(text: str, ranks: Sequence[int]) -> tuple[str, str, str] | None:
    """Return the labels of both operands and of the result, one for each axis; None if they do not fit."""
    inputs, arrow, out = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ranks) or len(ranks) != 2:
        return None
    if not arrow:  # in alphabetic order, those that occur once
        letters = inputs.replace(_ELLIPSIS, "").replace(",", "")
        out = _ELLIPSIS * (_ELLIPSIS in inputs) + "".join(sorted(c for c in letters if letters.count(c) == 1))
    most = 0
    whole = []
    for term, rank in zip(terms, ranks, strict=True):
        more = rank - len(term.replace(_ELLIPSIS, ""))
        if more < 0 or more > len(_MORE) or (more and _ELLIPSIS not in term):
            return None
        # Axes of an ellipsis are aligned at their ends.
        whole.append(term.replace(_ELLIPSIS, _MORE[len(_MORE) - more :]))
        most = max(most, more)
    return whole[0], whole[1], out.replace(_ELLIPSIS, _MORE[len(_MORE) - most :])


def _summed(new: Replacement, x: str, own: str, others: str) -> tuple[str, str]:
    """Sum over the axes whose labels occur nowhere else."""
    axes = [axis for axis, label in enumerate(own) if label not in others]
    if not axes:
        return x, own
    return new.reduce("ReduceSum", x, axes, keep=False), "".join(c for c in own if c in others)


def _ordered(new: Replacement, x: str, own: str, wanted: str, to: str = "") -> str:
    """Transpose a value from one order of labels to another."""
    if own == wanted and not to:
        return x
    return new.op("Transpose", x, to=to, perm=[own.index(label) for label in wanted])


def _aligned(new: Replacement, x: str, own: str, out: str, sizes: Mapping[str, int]) -> str:
    """Return a value that broadcasts to the result: axes in its order, missing ones with an extent of 1."""
    x = _ordered(new, x, own, "".join(label for label in out if label in own))
    if len(own) == len(out):
        return x
    return new.op("Reshape", x, new.ints(*(sizes[label] if label in own else 1 for label in out)))


def _product(
    new: Replacement, values: tuple[str, str], labels: tuple[str, str, str], sizes: Mapping[str, int], to: str
) -> None:
    """Add the matrix product of two values; it sums over their common labels that are not in the result."""
    a, b, out = labels
    batch = "".join(label for label in out if label in a and label in b)
    rows, columns = ("".join(c for c in out if c in own and c not in batch) for own in (a, b))
    depth = "".join(label for label in a if label in b and label not in out)

    def extents(text: str) -> list[int]:
        return [sizes[label] for label in text]

    lead, k = extents(batch), math.prod(extents(depth))
    x = _ordered(new, values[0], a, batch + rows + depth)
    x = new.op("Reshape", x, new.ints(*lead, math.prod(extents(rows)), k))
    y = _ordered(new, values[1], b, batch + depth + columns)
    y = new.op("Reshape", y, new.ints(*lead, k, math.prod(extents(columns))))
    product = new.op("MatMul", x, y)
    whole = batch + rows + columns
    if whole == out:
        new.op("Reshape", product, new.ints(*extents(out)), to=to)
    else:
        _ordered(new, new.op("Reshape", product, new.ints(*extents(whole))), whole, out, to)
