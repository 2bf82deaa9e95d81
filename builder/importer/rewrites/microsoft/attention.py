"""Attention of com.microsoft: Attention, MultiHeadAttention and GroupQueryAttention.

Each becomes two matrix products with a softmax between them. Heads that share keys are multiplied together,
so keys and values are not repeated. Source: ONNX Runtime's operator documentation, ContribOperators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto

from builder.importer.onnx_graph import OnnxGraph, ValueType, attributes
from builder.importer.rewrites.microsoft.norms import rms
from builder.importer.rewrites.microsoft.rotary import rotate
from builder.importer.rewrites.replacement import Replacement, constant_integer, input_name, output_name

_MASK_FILTER: Final = -10000.0
_QK_NORM_EPSILON: Final = 1e-6
_QK_BEFORE_SOFTMAX: Final = 1
_LOWEST_HALF: Final = -65504.0


@dataclass(slots=True)
class _Scores:
    """How the products of queries and keys become weights of the values.

    Attributes
    ----------
    scale
        Multiplies the products.
    softcap
        Limits them to this magnitude, by tanh; 0 for no limit.
    biases
        Values to add, each broadcast to [batch, heads, queries, keys].
    sink
        A score [heads, 1, 1] of a key without value, or empty.
    """

    scale: float
    softcap: float = 0.0
    biases: list[str] = field(default_factory=list)
    sink: str = ""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The extents of an attention.

    Attributes
    ----------
    batch, heads, groups, queries, keys
        `groups` counts the heads of keys and values; each serves `heads / groups` heads of queries.
    width, value_width
        Numbers in a head's query and key, and in its value.
    """

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    width: int
    value_width: int


@dataclass(frozen=True, slots=True)
class _Result:
    """Names of what an attention makes.

    Attributes
    ----------
    output
        [batch, queries, heads * value_width].
    products, weights
        [batch, heads, queries, keys]: the scaled products, and what the softmax makes of them.
    """

    output: str
    products: str
    weights: str


def attention(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Attention of x, weights, bias, mask, past and additive bias: it projects queries, keys and values."""
    options = attributes(node)
    found, shape = graph.type_of(node.input[0]), graph.shape_of(node.input[0])
    projection = graph.shape_of(node.input[1])
    unsupported = options.get("do_rotary", 0) or options.get("past_present_share_buffer", 0)
    if found is None or shape is None or len(shape) != 3 or projection is None or unsupported:
        return None
    heads = int(options["num_heads"])
    sizes = [int(size) for size in options.get("qkv_hidden_sizes", [])] or [projection[1] // 3] * 3
    batch, steps, _ = shape
    new = Replacement(node, graph)
    projected = new.op("MatMul", node.input[0], node.input[1])
    if bias := input_name(node, 2):
        projected = new.op("Add", projected, bias)
    parts = new.op_many("Split", 3, projected, new.ints(*sizes), axis=-1)
    q, k, v = (_heads(new, part, batch, steps, heads) for part in parts)
    before = 0
    if past := input_name(node, 4):
        past_shape = graph.shape_of(past)
        if past_shape is None:
            return None
        before = past_shape[3]
        k, v = (
            new.op("Concat", new.op("Gather", past, new.constant(index, np.int64), axis=0), each, axis=2)
            for index, each in ((0, k), (1, v))
        )
    if present := output_name(node, 1):
        new.op("Concat", *(new.op("Unsqueeze", each, new.ints(0)) for each in (k, v)), to=present, axis=0)
    extents = _Shape(batch, heads, heads, steps, before + steps, sizes[0] // heads, sizes[2] // heads)
    scores = _scores(options, extents.width)
    if not _mask(new, scores, graph, input_name(node, 3), found, extents, options):
        return None
    if options.get("unidirectional", 0):
        scores.biases.append(_causal(new, extents, before, found))
    if added := input_name(node, 5):
        scores.biases.append(added)
    new.op("Identity", _attend(new, q, k, v, extents, scores, found).output, to=node.output[0])
    return new.nodes


def multi_head_attention(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """MultiHeadAttention of queries, keys, values, bias, mask, additive bias and past keys and values."""
    options = attributes(node)
    found = graph.type_of(node.input[0])
    shapes = [graph.shape_of(name) if (name := input_name(node, index)) else () for index in range(8)]
    if found is None or any(shape is None for shape in shapes) or input_name(node, 8) or input_name(node, 9):
        return None
    heads = int(options["num_heads"])
    new = Replacement(node, graph)
    parts = _separate(new, node, [shape or () for shape in shapes], heads)
    if parts is None:
        return None
    q, k, v = parts.names
    before = 0
    if past_key := input_name(node, 6):
        before = (shapes[6] or ())[2]
        k = new.op("Concat", past_key, k, axis=2)
        v = new.op("Concat", input_name(node, 7), v, axis=2)
    for index, each in ((1, k), (2, v)):
        if present := output_name(node, index):
            new.op("Identity", each, to=present)
    batch, queries, keys = parts.batch, parts.queries, before + parts.keys
    extents = _Shape(batch, heads, heads, queries, keys, parts.width, parts.value_width)
    scores = _scores(options, extents.width)
    if not _mask(new, scores, graph, input_name(node, 4), found, extents, options):
        return None
    if options.get("unidirectional", 0):
        scores.biases.append(_causal(new, extents, keys - queries, found))
    if added := input_name(node, 5):
        scores.biases.append(added)
    result = _attend(new, q, k, v, extents, scores, found)
    new.op("Identity", result.output, to=node.output[0])
    if wanted := output_name(node, 3):
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


def _separate(
    new: Replacement, node: onnx.NodeProto, shapes: Sequence[Sequence[int]], heads: int
) -> _Parts | None:
    """Bring the forms in which MultiHeadAttention takes its operands to one."""
    query, key, value, bias = (input_name(node, index) for index in range(4))
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
    q = _heads(new, query, batch, queries, heads)
    match len(shapes[1]):
        case 3 if value and len(shapes[2]) == 3:
            keys, value_width = shapes[1][1], shapes[2][2] // heads
            k = _heads(new, key, batch, keys, heads)
            v = _heads(new, value, batch, keys, heads)
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


def group_query_attention(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """GroupQueryAttention, for a prompt, or for further steps after a cache of keys and values.

    Inputs: queries, keys, values, past keys, past values, lengths of the sequences less one, the longest
    length, cosines, sines, positions, additive bias, sinks, scales of a quantised cache (2), norms of queries
    and keys, lengths of padded chunks.
    """
    options = attributes(node)
    found, shape = graph.type_of(node.input[0]), graph.shape_of(node.input[0])
    quantised = any(input_name(node, index) for index in (12, 13, 16)) or options.get(
        "sliding_window_cache", 0
    )
    if found is None or shape is None or len(shape) != 3 or quantised:
        return None
    batch, steps, hidden = shape
    heads, groups = int(options["num_heads"]), int(options["kv_num_heads"])
    new = Replacement(node, graph)
    query, key, value = (input_name(node, index) for index in range(3))
    if key:
        key_shape = graph.shape_of(key)
        if key_shape is None or len(key_shape) != 3 or key_shape[1] != steps:
            return None
        width = hidden // heads
    else:
        width = hidden // (heads + 2 * groups)
        sizes = new.ints(heads * width, groups * width, groups * width)
        query, key, value = new.op_many("Split", 3, query, sizes, axis=-1)
    q = _heads(new, query, batch, steps, heads)
    k, v = (_heads(new, each, batch, steps, groups) for each in (key, value))
    if weight := input_name(node, 14):
        epsilon = float(options.get("qk_norm_epsilon", _QK_NORM_EPSILON))
        q_epsilon, k_epsilon = (float(options.get(f"{side}_norm_epsilon", epsilon)) for side in "qk")
        q = rms(new, q, weight, [-1], q_epsilon, found.dtype)
        k = rms(new, k, input_name(node, 15), [-1], k_epsilon, found.dtype)
    cache = _cache(new, node, graph, batch, steps)
    if cache is None:
        return None
    if options.get("do_rotary", 0):
        q, k = _turn(new, node, graph, (q, k), (heads, groups), (batch, steps, width), cache.first, options)
    k, v = (cache.extend(new, graph, each, index, found) for each, index in ((k, 3), (v, 4)))
    for index, each in ((1, k), (2, v)):
        if present := output_name(node, index):
            new.op("Identity", each, to=present)
    extents = _Shape(batch, heads, groups, steps, cache.keys, width, width)
    scores = _scores(options, width)
    scores.softcap = float(options.get("softcap", 0.0))
    if (mask := _window(new, cache, extents, options, found)) != "":
        scores.biases.append(mask)
    if added := input_name(node, 10):
        scores.biases.append(added)
    if sink := input_name(node, 11):
        scores.sink = new.op("Reshape", sink, new.ints(1, heads, 1, 1))
    elif options.get("smooth_softmax", 0) == 1:
        scores.sink = new.constant(np.zeros((1, heads, 1, 1)), found.dtype)
    result = _attend(new, q, k, v, extents, scores, found)
    new.op("Identity", result.output, to=node.output[0])
    if wanted := output_name(node, 3):
        if options.get("qk_output", 0) == _QK_BEFORE_SOFTMAX:
            return None
        new.op("Identity", result.weights, to=wanted)
    return new.nodes


@dataclass(frozen=True, slots=True)
class _Cache:
    """The cache of a GroupQueryAttention.

    Attributes
    ----------
    node
        The node.
    steps
        How many steps are added.
    keys
        How many steps the cache has afterwards.
    first
        The position of the first added step: a number, or the name of a value [batch] of INT64.
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
        stays = new.op("Less", places, begin)
        if self.keys > shape[2]:
            room = np.zeros((shape[0], shape[1], self.keys - shape[2], shape[3]))
            past = new.op("Concat", past, new.constant(room, found.dtype), axis=2)
        return new.op("Where", stays, past, placed)


def _cache(new: Replacement, node: onnx.NodeProto, graph: OnnxGraph, batch: int, steps: int) -> _Cache | None:
    """Where the steps of a GroupQueryAttention stand; None if its extents are not known."""
    longest = constant_integer(node, graph, 6, None)
    past_shape = graph.shape_of(past) if (past := input_name(node, 3)) else (0, 0, 0, 0)
    lengths = graph.constant(node.input[5])
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
        return _Cache(node, steps, max(held, steps), 0)
    if not held or longest > held + steps:
        return None
    keys = max(held, longest)
    if batch == 1 or (lengths is not None and len(set(lengths.reshape(-1).tolist())) == 1):
        return _Cache(node, steps, keys, longest - steps)
    total = new.op("Add", new.cast(node.input[5], TensorProto.INT64), new.ints(1 - steps))
    return _Cache(node, steps, keys, new.op("Reshape", total, new.ints(-1)))


def _turn(
    new: Replacement,
    node: onnx.NodeProto,
    graph: OnnxGraph,
    operands: tuple[str, str],
    heads: tuple[int, int],
    extents: tuple[int, int, int],
    first: int | str,
    options: dict[str, Any],
) -> tuple[str, str]:
    """Rotate queries and keys by their positions."""
    batch, steps, width = extents
    cosines, sines = input_name(node, 7), input_name(node, 8)
    table = graph.shape_of(cosines)
    if table is None:
        raise ValueError("expected the cosines of the positions, got none")
    if positions := input_name(node, 9):
        places = graph.shape_of(positions)
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
    new: Replacement, cache: _Cache, extents: _Shape, options: dict[str, Any], found: ValueType
) -> str:
    """The mask of a GroupQueryAttention: later steps and those too old; empty if nothing is masked."""
    causal = bool(options.get("causal", 1))
    window = int(options.get("local_window_size", -1))
    rows, columns = np.arange(extents.queries)[:, None], np.arange(extents.keys)[None, :]
    lowest = _lowest(found)
    if isinstance(cache.first, int):
        places = rows + cache.first
        masked = columns > places if causal else columns >= cache.first + extents.queries
        if window > 0:
            masked = masked | (columns <= places - window)
        if not masked.any():
            return ""
        return new.constant(np.where(masked, lowest, 0.0)[None, None], found.dtype)
    first = new.op("Reshape", cache.first, new.ints(-1, 1, 1, 1))
    position = new.op("Add", first, new.constant(rows[None, None], np.int64))
    keys = new.constant(columns[None, None], np.int64)
    last = position if causal else new.op("Add", first, new.ints(extents.queries - 1))
    hidden = new.op("Greater", keys, last)
    if window > 0:
        oldest = new.op("Sub", position, new.ints(window))
        hidden = new.op("Or", hidden, new.op("Not", new.op("Greater", keys, oldest)))
    return new.op("Where", hidden, new.constant(lowest, found.dtype), new.constant(0, found.dtype))


def _heads(new: Replacement, x: str, batch: int, steps: int, heads: int) -> str:
    """[batch, steps, heads * width] as [batch, heads, steps, width]."""
    split = new.op("Reshape", x, new.ints(batch, steps, heads, -1))
    return new.op("Transpose", split, perm=[0, 2, 1, 3])


def _scores(options: dict[str, Any], width: int) -> _Scores:
    return _Scores(float(options.get("scale", 0.0)) or 1 / float(np.sqrt(width)))


def _lowest(found: ValueType) -> float:
    """A score that no softmax notices. Half of the lowest number, so that two of them can be added."""
    if found.elem_type == TensorProto.FLOAT16:
        return -30000.0
    return -1e38


def _mask(
    new: Replacement,
    scores: _Scores,
    graph: OnnxGraph,
    mask: str,
    found: ValueType,
    extents: _Shape,
    options: dict[str, Any],
) -> bool:
    """Add the bias for a padding mask, if there is one; whether its form is known."""
    if not mask:
        return True
    shape = graph.shape_of(mask)
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


def _causal(new: Replacement, extents: _Shape, before: int, found: ValueType) -> str:
    """The bias that hides later steps."""
    rows, columns = np.arange(extents.queries)[:, None], np.arange(extents.keys)[None, :]
    return new.constant(np.where(columns > rows + before, _lowest(found), 0.0)[None, None], found.dtype)


def _attend(
    new: Replacement, q: str, k: str, v: str, extents: _Shape, scores: _Scores, found: ValueType
) -> _Result:
    """softmax(q k' scale + biases) v, with q [batch, heads, ...] and k, v [batch, groups, ...]."""
    e = extents
    shared = e.heads // e.groups
    q = new.op("Mul", q, new.constant(scores.scale, found.dtype))
    if shared > 1:
        q = new.op("Reshape", q, new.ints(e.batch, e.groups, shared * e.queries, e.width))
    product = new.op("MatMul", q, new.op("Transpose", k, perm=[0, 1, 3, 2]))
    if shared > 1:
        product = new.op("Reshape", product, new.ints(e.batch, e.heads, e.queries, e.keys))
    scaled = product
    if scores.softcap > 0:
        cap = new.constant(scores.softcap, found.dtype)
        product = new.op("Mul", new.op("Tanh", new.op("Div", product, cap)), cap)
    for bias in scores.biases:
        product = new.op("Add", product, bias)
    if scores.sink:
        column = new.op("Expand", scores.sink, new.ints(e.batch, e.heads, e.queries, 1))
        widened = new.op("Softmax", new.op("Concat", product, column, axis=-1), axis=-1)
        weights = new.op("Slice", widened, new.ints(0), new.ints(e.keys), new.ints(3))
    else:
        weights = new.op("Softmax", product, axis=-1)
    flat = weights
    if shared > 1:
        flat = new.op("Reshape", weights, new.ints(e.batch, e.groups, shared * e.queries, e.keys))
    context = new.op("MatMul", flat, v)
    if shared > 1:
        context = new.op("Reshape", context, new.ints(e.batch, e.heads, e.queries, e.value_width))
    together = new.op("Transpose", context, perm=[0, 2, 1, 3])
    output = new.op("Reshape", together, new.ints(e.batch, e.queries, e.heads * e.value_width))
    return _Result(output, scaled, weights)
