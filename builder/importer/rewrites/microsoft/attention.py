"""Attention and MultiHeadAttention of com.microsoft.

Each becomes two matrix products with a softmax between them (`scores`).
Source: ONNX Runtime's operator documentation, ContribOperators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from onnx import TensorProto

from builder.importer.onnx_graph import ValueType
from builder.importer.rewrites.microsoft.scores import Extents, Scores, attend, lowest, scores_of, split_heads
from builder.importer.rewrites.replacement import Nodes, Replacement

_MASK_FILTER: Final = -10000.0
_LOWEST_HALF: Final = -65504.0


@dataclass(frozen=True, slots=True)
class Places:
    """Which inputs of a node are its mask, its past keys and values, and its additive bias."""

    mask: int
    past: int
    added: int


def attention(new: Replacement) -> Nodes | None:
    """Attention of x, weights, bias, mask, past and additive bias: it projects queries, keys and values."""
    found = new.type_of(new.inputs[0])
    projected = new.op("MatMul", new.inputs[0], new.inputs[1])
    if bias := new.input(2):
        projected = new.op("Add", projected, bias)
    return attend_to(new, projected, found, Places(mask=3, past=4, added=5))


def attend_to(new: Replacement, projected: str, found: ValueType, places: Places) -> Nodes | None:
    """Add the rest of Attention: `projected` has queries, keys and values, of the type `found`."""
    options = new.attributes
    shape, projection = new.graph.shape_of(new.inputs[0]), new.graph.shape_of(new.inputs[1])
    unsupported = options.get("do_rotary", 0) or options.get("past_present_share_buffer", 0)
    if shape is None or len(shape) != 3 or projection is None or unsupported:
        return None
    heads = int(options["num_heads"])
    sizes = [int(size) for size in options.get("qkv_hidden_sizes", [])] or [projection[1] // 3] * 3
    batch, steps, _ = shape
    parts = new.op_many("Split", 3, projected, new.ints(*sizes), axis=-1)
    q, k, v = (split_heads(new, part, batch, steps, heads) for part in parts)
    before = 0
    if past := new.input(places.past):
        past_shape = new.graph.shape_of(past)
        if past_shape is None:
            return None
        before = past_shape[3]
        k, v = (
            new.op("Concat", new.op("Gather", past, new.constant(index, np.int64), axis=0), each, axis=2)
            for index, each in ((0, k), (1, v))
        )
    if present := new.output(1):
        new.op("Concat", *(new.op("Unsqueeze", each, new.ints(0)) for each in (k, v)), to=present, axis=0)
    extents = Extents(batch, heads, heads, steps, before + steps, sizes[0] // heads, sizes[2] // heads)
    scores = scores_of(options, extents.width)
    if not _mask(new, scores, new.input(places.mask), found, extents, options):
        return None
    if options.get("unidirectional", 0):
        scores.biases.append(_causal(new, extents, before, found))
    if added := new.input(places.added):
        scores.biases.append(added)
    return new.result("Identity", attend(new, q, k, v, extents, scores, found).output)


def multi_head_attention(new: Replacement) -> Nodes | None:
    """MultiHeadAttention of queries, keys, values, bias, mask, additive bias and past keys and values."""
    options = new.attributes
    found = new.type_of(new.inputs[0])
    shapes = [new.graph.shape_of(name) if (name := new.input(index)) else () for index in range(8)]
    if any(shape is None for shape in shapes) or new.input(8) or new.input(9):
        return None
    heads = int(options["num_heads"])
    parts = _separate(new, [shape or () for shape in shapes], heads)
    if parts is None:
        return None
    q, k, v = parts.names
    before = 0
    if past_key := new.input(6):
        before = (shapes[6] or ())[2]
        k = new.op("Concat", past_key, k, axis=2)
        v = new.op("Concat", new.input(7), v, axis=2)
    for index, each in ((1, k), (2, v)):
        if present := new.output(index):
            new.op("Identity", each, to=present)
    batch, queries, keys = parts.batch, parts.queries, before + parts.keys
    extents = Extents(batch, heads, heads, queries, keys, parts.width, parts.value_width)
    scores = scores_of(options, extents.width)
    if not _mask(new, scores, new.input(4), found, extents, options):
        return None
    if options.get("unidirectional", 0):
        scores.biases.append(_causal(new, extents, keys - queries, found))
    if added := new.input(5):
        scores.biases.append(added)
    result = attend(new, q, k, v, extents, scores, found)
    new.op("Identity", result.output, to=new.outputs[0])
    if wanted := new.output(3):
        new.op("Identity", result.products, to=wanted)
    return new.nodes


@dataclass(frozen=True, slots=True)
class _Parts:
    """Queries, keys and values, each [batch, heads, steps, width], and their extents."""

    names: tuple[str, str, str]
    batch: int
    queries: int
    keys: int
    width: int
    value_width: int


def _separate(new: Replacement, shapes: Sequence[Sequence[int]], heads: int) -> _Parts | None:
    """Bring the forms in which MultiHeadAttention takes its operands to one."""
    query, key, value, bias = (new.input(index) for index in range(4))
    if len(shapes[0]) == 5:  # [batch, steps, heads, 3, width]
        batch, steps, _, _, width = shapes[0]
        parts = _unpack(new, query, 3)
        if bias:
            return None
        q, k, v = parts
        return _Parts((q, k, v), batch, steps, steps, width, width)
    if len(shapes[0]) != 3:
        return None
    batch, queries, hidden = shapes[0]
    width = hidden // heads
    if bias and len(shapes[1]) != 3:
        q_bias = new.op("Slice", bias, new.ints(0), new.ints(hidden))
        query = new.op("Add", query, q_bias)
    elif bias:
        sizes = new.ints(hidden, hidden, shapes[3][0] - 2 * hidden)
        biases = new.op_many("Split", 3, bias, sizes, axis=0)
        query, key, value = (
            new.op("Add", each, added) for each, added in zip((query, key, value), biases, strict=True)
        )
    q = split_heads(new, query, batch, queries, heads)
    match len(shapes[1]):
        case 3 if value and len(shapes[2]) == 3:
            keys, value_width = shapes[1][1], shapes[2][2] // heads
            k = split_heads(new, key, batch, keys, heads)
            v = split_heads(new, value, batch, keys, heads)
        case 4 if len(shapes[2]) == 4:  # [batch, heads, steps, width], of another node's cache
            keys, value_width = shapes[1][2], shapes[2][3]
            k, v = key, value
        case 5 if not value and not bias:  # [batch, steps, heads, 2, width]
            keys, value_width = shapes[1][1], width
            k, v = _unpack(new, key, 2)
        case _:
            return None
    return _Parts((q, k, v), batch, queries, keys, width, value_width)


def _unpack(new: Replacement, packed: str, count: int) -> list[str]:
    """The `count` parts of [batch, steps, heads, count, width], each as [batch, heads, steps, width]."""
    parts = [new.op("Gather", packed, new.constant(index, np.int64), axis=3) for index in range(count)]
    return [new.op("Transpose", part, perm=[0, 2, 1, 3]) for part in parts]


def _mask(
    new: Replacement, scores: Scores, mask: str, found: ValueType, extents: Extents, options: dict[str, Any]
) -> bool:
    """Add the bias for a padding mask, if there is one; whether its form is known."""
    if not mask:
        return True
    shape = new.graph.shape_of(mask)
    batch, queries, keys = extents.batch, extents.queries, extents.keys
    filter_value = float(options.get("mask_filter_value", _MASK_FILTER))
    if found.elem_type == TensorProto.FLOAT16:
        # Not minus infinity: a row that is masked completely would become NaN.
        filter_value = max(filter_value, _LOWEST_HALF)
    filled = new.constant(filter_value, found.dtype)
    zero = new.constant(0, found.dtype)
    if shape in ((batch,), (2 * batch,)):
        # How many keys each row has; and then, where they begin.
        places = new.constant(np.arange(keys).reshape(1, 1, 1, -1), np.int32)
        ends = new.op("Slice", mask, new.ints(0), new.ints(batch)) if shape == (2 * batch,) else mask
        kept = new.op("Less", places, new.op("Reshape", ends, new.ints(batch, 1, 1, 1)))
        if shape == (2 * batch,):
            begins = new.op("Slice", mask, new.ints(batch), new.ints(2 * batch))
            early = new.op("Less", places, new.op("Reshape", begins, new.ints(batch, 1, 1, 1)))
            kept = new.op("And", kept, new.op("Not", early))
    elif shape in ((batch, keys), (batch, queries, keys)):
        form = (batch, 1, 1, keys) if shape == (batch, keys) else (batch, 1, queries, keys)
        kept = new.op("Reshape", new.op("Greater", mask, new.constant(0, np.int32)), new.ints(*form))
    else:
        return False
    scores.biases.append(new.op("Where", kept, zero, filled))
    return True


def _causal(new: Replacement, extents: Extents, before: int, found: ValueType) -> str:
    """The bias that hides later steps."""
    rows, columns = np.arange(extents.queries)[:, None], np.arange(extents.keys)[None, :]
    return new.constant(np.where(columns > rows + before, lowest(found), 0.0)[None, None], found.dtype)
