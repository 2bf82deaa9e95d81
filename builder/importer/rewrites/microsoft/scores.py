"""The products of queries and keys, their softmax, and the values that it weighs.

Heads that share keys are multiplied together, so keys and values are not repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto

from builder.importer.onnx_graph import ValueType
from builder.importer.rewrites.replacement import Replacement


@dataclass(slots=True)
class Scores:
    """How the products of queries and keys become weights of the values.

    `scale`: multiplies the products.
    `softcap`: limits them to this magnitude, by tanh; 0 for no limit.
    `biases`: values to add, each broadcast to [batch, heads, queries, keys].
    `sink`: a score [heads, 1, 1] of a key without value, or empty.
    """

    scale: float
    softcap: float = 0.0
    biases: list[str] = field(default_factory=list)
    sink: str = ""


@dataclass(frozen=True, slots=True)
class Extents:
    """The extents of an attention.

    `batch`, `heads`, `groups`, `queries`, `keys`: `groups` counts the heads of keys and values; each serves
        `heads / groups` heads of queries.
    `width`, `value_width`: numbers in a head's query and key, and in its value.
    """

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    width: int
    value_width: int


@dataclass(frozen=True, slots=True)
class Attended:
    """Names of what an attention makes.

    `output`: [batch, queries, heads * value_width].
    `products`, `weights`: [batch, heads, queries, keys]: the scaled products, and what the softmax makes of
        them.
    """

    output: str
    products: str
    weights: str


def split_heads(new: Replacement, x: str, batch: int, steps: int, heads: int) -> str:
    """[batch, steps, heads * width] as [batch, heads, steps, width]."""
    split = new.op("Reshape", x, new.ints(batch, steps, heads, -1))
    return new.op("Transpose", split, perm=[0, 2, 1, 3])


def scores_of(options: dict[str, Any], width: int) -> Scores:
    """Return what a node's attributes say about its scores; heads are `width` wide."""
    if width < 1:
        raise ValueError(f"expected heads of at least one number, got {width}")
    return Scores(float(options.get("scale", 0.0)) or 1 / float(np.sqrt(width)))


def lowest(found: ValueType) -> float:
    """A score that no softmax notices. Half of the lowest number, so that two of them can be added."""
    if found.elem_type == TensorProto.FLOAT16:
        return -30000.0
    return -1e38


def attend(
    new: Replacement, q: str, k: str, v: str, extents: Extents, scores: Scores, found: ValueType
) -> Attended:
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
    return Attended(output, scaled, weights)
