"""GroupQueryAttention of com.microsoft, with its cache of keys and values.

Source: ONNX Runtime's operator documentation, ContribOperators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto

from builder.importer.onnx_graph import OnnxGraph, ValueType
from builder.importer.rewrites.microsoft.norms import rms
from builder.importer.rewrites.microsoft.rotary import rotate
from builder.importer.rewrites.microsoft.scores import Extents, attend, lowest, scores_of, split_heads
from builder.importer.rewrites.replacement import Nodes, Replacement, input_name

_QK_NORM_EPSILON: Final = 1e-6
_QK_BEFORE_SOFTMAX: Final = 1


def group_query_attention(new: Replacement) -> Nodes | None:
    """GroupQueryAttention, for a prompt, or for further steps after a cache of keys and values.

    Inputs: queries, keys, values, past keys, past values, lengths of the sequences less one, the longest
    length, cosines, sines, positions, additive bias, sinks, scales of a quantised cache (2), norms of queries
    and keys, lengths of padded chunks.
    """
    options = new.attributes
    found, shape = new.type_of(new.inputs[0]), new.shape_of(new.inputs[0])
    quantised = any(new.input(index) for index in (12, 13, 16)) or options.get("sliding_window_cache", 0)
    if len(shape) != 3 or quantised:
        return None
    batch, steps, hidden = shape
    heads, groups = int(options["num_heads"]), int(options["kv_num_heads"])
    query, key, value = (new.input(index) for index in range(3))
    if key:
        key_shape = new.graph.shape_of(key)
        if key_shape is None or len(key_shape) != 3 or key_shape[1] != steps:
            return None
        width = hidden // heads
    else:
        width = hidden // (heads + 2 * groups)
        sizes = new.ints(heads * width, groups * width, groups * width)
        query, key, value = new.op_many("Split", 3, query, sizes, axis=-1)
    q = split_heads(new, query, batch, steps, heads)
    k, v = (split_heads(new, each, batch, steps, groups) for each in (key, value))
    if weight := new.input(14):
        epsilon = float(options.get("qk_norm_epsilon", _QK_NORM_EPSILON))
        q_epsilon, k_epsilon = (float(options.get(f"{side}_norm_epsilon", epsilon)) for side in "qk")
        q = rms(new, q, weight, [-1], q_epsilon, found.dtype)
        k = rms(new, k, new.input(15), [-1], k_epsilon, found.dtype)
    cache = _cache(new, steps)
    if cache is None:
        return None
    if options.get("do_rotary", 0):
        q, k = _turn(new, (q, k), (heads, groups), (batch, steps, width), cache.first, options)
    k, v = (cache.extend(new, new.graph, each, index, found) for each, index in ((k, 3), (v, 4)))
    for index, each in ((1, k), (2, v)):
        if present := new.output(index):
            new.op("Identity", each, to=present)
    extents = Extents(batch, heads, groups, steps, cache.keys, width, width)
    scores = scores_of(options, width)
    scores.softcap = float(options.get("softcap", 0.0))
    if (mask := _window(new, cache, extents, options, found)) != "":
        scores.biases.append(mask)
    if added := new.input(10):
        scores.biases.append(added)
    if sink := new.input(11):
        scores.sink = new.op("Reshape", sink, new.ints(1, heads, 1, 1))
    elif options.get("smooth_softmax", 0) == 1:
        scores.sink = new.constant(np.zeros((1, heads, 1, 1)), found.dtype)
    result = attend(new, q, k, v, extents, scores, found)
    new.op("Identity", result.output, to=new.outputs[0])
    if wanted := new.output(3):
        if options.get("qk_output", 0) == _QK_BEFORE_SOFTMAX:
            return None
        new.op("Identity", result.weights, to=wanted)
    return new.nodes


@dataclass(frozen=True, slots=True)
class _Cache:
    """The cache of a GroupQueryAttention.

    `steps`: how many steps are added.
    `keys`: how many steps the cache has afterwards.
    `first`: the position of the first added step: a number, or the name of a value [batch] of INT64.
    """

    node: onnx.NodeProto
    steps: int
    keys: int
    first: int | str

    def extend(self, new: Replacement, graph: OnnxGraph, added: str, index: int, found: ValueType) -> str:
        """Add [batch, groups, steps, width] to the past, input `index` of the node."""
        past = input_name(self.node, index)
        shape = graph.shape_of(past) if past else None
        if shape is None or not shape[2]:
            return added
        if isinstance(self.first, int):
            kept = past
            if self.first < shape[2]:
                kept = new.op("Slice", past, new.ints(0), new.ints(self.first), new.ints(2))
            joined = new.op("Concat", kept, added, axis=2) if self.first else added
            if self.first + self.steps < shape[2]:
                bounds = new.ints(self.first + self.steps), new.ints(shape[2]), new.ints(2)
                joined = new.op("Concat", joined, new.op("Slice", past, *bounds), axis=2)
            return joined
        # Where each row begins is known only at run time: select the place of each step by a product with
        # zeros and ones.
        places = new.constant(np.arange(self.keys).reshape(1, 1, -1, 1), np.int64)
        begin = new.op("Reshape", self.first, new.ints(-1, 1, 1, 1))
        offset = new.op("Sub", places, begin)
        chosen = new.op("Equal", offset, new.constant(np.arange(self.steps).reshape(1, 1, 1, -1), np.int64))
        placed = new.op("MatMul", new.cast(chosen, found.elem_type), added)
        stays = new.op("Less", offset, new.ints(0))
        if shape[0] == 1:
            # Several rows have zeros behind their ends, as ONNX Runtime makes them.
            stays = new.op("Or", stays, new.op("GreaterOrEqual", offset, new.ints(self.steps)))
        if self.keys > shape[2]:
            room = np.zeros((shape[0], shape[1], self.keys - shape[2], shape[3]))
            past = new.op("Concat", past, new.constant(room, found.dtype), axis=2)
        return new.op("Where", stays, past, placed)


def _cache(new: Replacement, steps: int) -> _Cache | None:
    """Where the steps of a GroupQueryAttention stand; None if its extents are not known."""
    longest = new.integer(6, None)
    past_shape = new.graph.shape_of(past) if (past := new.input(3)) else (0, 0, 0, 0)
    lengths = new.graph.constant(new.inputs[5])
    if past_shape is None:
        return None
    held = past_shape[2]
    if longest is None and lengths is not None:
        longest = int(lengths.max()) + 1
    if longest is None:
        # A prompt without a past has as many steps as there are; anything else depends on the value.
        if held:
            return None
        longest = steps
    if longest < steps:
        return None
    if longest == steps:
        return _Cache(new.node, steps, max(held, steps), 0)
    if not held or longest > held + steps:
        return None
    keys = max(held, longest)
    if lengths is not None and len(set(lengths.reshape(-1).tolist())) == 1:
        return _Cache(new.node, steps, keys, longest - steps)
    total = new.op("Add", new.cast(new.inputs[5], TensorProto.INT64), new.ints(1 - steps))
    return _Cache(new.node, steps, keys, new.op("Reshape", total, new.ints(-1)))


def _turn(
    new: Replacement,
    operands: tuple[str, str],
    heads: tuple[int, int],
    extents: tuple[int, int, int],
    first: int | str,
    options: dict[str, Any],
) -> tuple[str, str]:
    """Rotate queries and keys by their positions."""
    batch, steps, width = extents
    cosines, sines = new.input(7), new.input(8)
    table = new.graph.shape_of(cosines)
    if table is None:
        raise ValueError("expected the cosines of the positions, got none")
    if positions := new.input(9):
        places = new.graph.shape_of(positions)
        if places != (batch, steps):
            raise ValueError("expected a position for each step")
    elif isinstance(first, int):
        positions = new.constant([list(range(first, first + steps))], np.int64)
    else:
        row = new.constant([list(range(steps))], np.int64)
        positions = new.op("Add", new.op("Reshape", first, new.ints(-1, 1)), row)
    angles = [new.op("Gather", each, positions, axis=0) for each in (cosines, sines)]
    interleaved = bool(options.get("rotary_interleaved", 0))
    turned = [
        rotate(new, each, angles, (count, steps, width), 2 * table[1], interleaved=interleaved)
        for each, count in zip(operands, heads, strict=True)
    ]
    return turned[0], turned[1]


def _window(
    new: Replacement, cache: _Cache, extents: Extents, options: dict[str, Any], found: ValueType
) -> str:
    """The mask of a GroupQueryAttention: later steps and those too old; empty if nothing is masked."""
    causal = bool(options.get("causal", 1))
    window = int(options.get("local_window_size", -1))
    rows, columns = np.arange(extents.queries)[:, None], np.arange(extents.keys)[None, :]
    least = lowest(found)
    if isinstance(cache.first, int):
        places = rows + cache.first
        masked = columns > places if causal else columns >= cache.first + extents.queries
        if window > 0:
            masked = masked | (columns <= places - window)
        if not masked.any():
            return ""
        return new.constant(np.where(masked, least, 0.0)[None, None], found.dtype)
    first = new.op("Reshape", cache.first, new.ints(-1, 1, 1, 1))
    position = new.op("Add", first, new.constant(rows[None, None], np.int64))
    keys = new.constant(columns[None, None], np.int64)
    last = position if causal else new.op("Add", first, new.ints(extents.queries - 1))
    hidden = new.op("Greater", keys, last)
    if window > 0:
        oldest = new.op("Sub", position, new.ints(window))
        hidden = new.op("Or", hidden, new.op("Not", new.op("Greater", keys, oldest)))
    return new.op("Where", hidden, new.constant(least, found.dtype), new.constant(0, found.dtype))
