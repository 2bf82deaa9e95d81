"""Small graphs with lengths that are only known at run time, as exporters write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import compose, parser

INPUTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "x": "float[4,6]",
        "v": "float[12]",
        "i": "int64[12]",
        "k": "int64[1]",
        "m": "bool[4]",
        "b": "float[1,20,4]",
        "s": "float[1,2,20]",
    }
)

# Name -> (outputs, nodes). Outputs have the type FLOAT unless they say otherwise.
GRAPHS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "coordinates": (
            "int64[2,n] at, float[n] y",
            "z = Relu(x) at = NonZero(z) t = Transpose(at) y = GatherND(x, t)",
        ),
        "rows of a mask": (
            "float[n,6] y, float[n] mean, float[6] most, float[6] total, float[n,6] soft, float[6,n] over",
            """
            at = NonZero(m) rows = Squeeze(at, zero) y = Gather(x, rows)
            mean = ReduceMean<keepdims=0, axes=[1]>(y)
            most = ReduceMax<keepdims=0, axes=[0]>(y) total = ReduceSum<keepdims=0>(y, zero)
            soft = Softmax<axis=1>(y) turned = Transpose(y) over = Softmax<axis=1>(turned)
            """,
        ),
        "compress": (
            "float[n,6] rows, float[n] flat",
            """
            rows = Compress<axis=0>(x, m) all = Greater(v, v) high = Greater(v, half)
            flat = Compress(v, high)
            """,
        ),
        "compress what is compressed": (
            "float[n] y",
            """
            high = Greater(v, half) some = Compress(v, high) low = Less(some, two) y = Compress(some, low)
            """,
        ),
        "parts put together": (
            "float[n] y, float[2,n] pair",
            """
            high = Greater(v, half) some = Compress(v, high) low = Less(v, half) others = Compress(v, low)
            y = Concat<axis=0>(some, three, others) left = Unsqueeze(y, zero) other = Neg(y)
            right = Unsqueeze(other, zero) pair = Concat<axis=0>(left, right)
            """,
        ),
        "sizes": (
            "int64[2] dims, float[n] ones, float[n,3] wide, int64 count, int64[n] numbers",
            """
            rows = Compress<axis=0>(x, m) dims = Shape(rows) first = Gather(dims, zero)
            ones = ConstantOfShape(first)
            scalar = Gather(dims, zero_scalar) numbers = Range(zero_scalar, scalar, one_scalar)
            shape = Concat<axis=0>(first, three_int) column = Slice(rows, zero, one, one)
            wide = Expand(column, shape)
            count = Size(rows)
            """,
        ),
        "slices": (
            "float[n] head, float[p] tail, float[q] last, float[r] some, float[t] upto, float[u] shorter",
            """
            high = Greater(v, half) y = Compress(v, high) head = Slice(y, zero, three_int)
            tail = Slice(y, two_int, far)
            last = Slice(y, minus_two, far) count = Min(k, three_int) some = Slice(y, zero, count)
            upto = Slice(v, zero, k) shorter = Slice(y, zero, minus_two)
            """,
        ),
        "reshapes": (
            "float[n] flat, float[p,6] again, float[q,2,3] split, float[2,r] pair, float[t] mixed",
            """
            rows = Compress<axis=0>(x, m) flat = Reshape(rows, minus_one) again = Reshape(flat, by_six)
            split = Reshape(rows, by_two_three) part = Reshape(x, four_six)
            top = Slice(x, zero, two_int, zero)
            high = Greater(v, half) cut = Reshape(x, two_twelve) pair = Compress<axis=1>(cut, high)
            mixed = Reshape(pair, minus_one)
            """,
        ),
        "best": (
            "float[n] y, int64[n] at, float[p] some, int64[p] where",
            """
            high = Greater(v, half) some_v = Compress(v, high) dims = Shape(some_v)
            count = Min(dims, three_int)
            y, at = TopK(some_v, count) some, where = TopK<largest=0>(v, k)
            """,
        ),
        "distinct": (
            "int64[n] y, int64[n] first, int64[12] kind, int64[n] often",
            "y, first, kind, often = Unique(i)",
        ),
        "distinct in order": (
            "int64[n] y, int64[n] first, int64[12] kind, int64[n] often",
            "y, first, kind, often = Unique<sorted=0>(i)",
        ),
        "distinct rows": (
            "int64[n,3] y, int64[n] first, int64[4] kind, int64[n] often",
            "rows = Reshape(i, by_three) y, first, kind, often = Unique<axis=0>(rows)",
        ),
        "distinct of some": (
            "int64[n] y, int64[n] first, int64[p] kind, int64[n] often",
            "high = Greater(v, half) some = Compress(i, high) y, first, kind, often = Unique(some)",
        ),
        "a detector with its own suppression": (
            "float[n,7] y",
            """
            sel = NonMaxSuppression(b, s, ten, most_overlap, least_score) batch = Slice(sel, zero, one, one)
            kind = Slice(sel, one, two_int, one) at = Slice(sel, two_int, three_int, one)
            place = Squeeze(at, one) boxes = Squeeze(b, zero) chosen = Gather(boxes, place)
            pair = Concat<axis=1>(kind, at) scores = Squeeze(s, zero) score = GatherND(scores, pair)
            column = Unsqueeze(score, one) f_batch = Cast<to=1>(batch) f_kind = Cast<to=1>(kind)
            y = Concat<axis=1>(f_batch, chosen, f_kind, column)
            """,
        ),
        "suppression of some": (
            "int64[n,3] y, int64[p,3] z",
            """
            row = Slice(s, zero, one, one) flat = Reshape(row, minus_one) high = Greater(flat, half)
            boxes = Compress<axis=1>(b, high) scores = Compress<axis=2>(s, high)
            y = NonMaxSuppression(boxes, scores, far, most_overlap)
            z = NonMaxSuppression<center_point_box=1>(b, s, ten, most_overlap)
            """,
        ),
        "nothing found": (
            "int64[n] y",
            """
            high = Greater(v, half) some = Compress(v, high) dims = Shape(some)
            total = ReduceProd<keepdims=0>(dims)
            none = Equal(total, zero_scalar)
            y = If(none) <
                then_branch = t () => (int64[n] a) { a = Constant<value = int64[0] {}>() },
                else_branch = e () => (int64[p] c) { top, c = TopK(some, one) }
            >
            """,
        ),
        "scattered": (
            "float[12] y, float[12] z",
            """
            high = Greater(v, half) at = NonZero(high) places = Transpose(at) found = GatherND(v, places)
            twice = Add(found, found) y = ScatterND(v, places, twice) flat = Squeeze(at, zero)
            z = ScatterElements<axis=0>(v, flat, twice)
            """,
        ),
        "scattered as many as a mask has": (
            "float[2,6] y, int64 n",
            """
            rows = Reshape(v, by_six) high = Greater(rows, half) at = NonZero(high) places = Transpose(at)
            flat = Reshape(high, minus_one) ones = Cast<to=7>(flat) count = ReduceSum(ones)
            same = Expand(half, count) y = ScatterND(rows, places, same)
            whole = Cast<to=7>(high) n = ReduceSum<keepdims=0>(whole)
            """,
        ),
        "scattered backwards": (
            "float[12] y, float[12] z",
            """
            high = Greater(v, half) at = NonZero(high) flat = Squeeze(at, zero) found = Gather(v, flat)
            twice = Add(found, found) back = Sub(flat, twelve) z = ScatterElements<axis=0>(v, back, twice)
            rows = Transpose(at) places = Sub(rows, twelve) y = ScatterND(v, places, twice)
            """,
        ),
        "a row of some": (
            "float[1,n] row, float[1,n] named, float[n,1] column, float[p] pairs",
            """
            high = Greater(v, half) some = Compress(v, high) row = Reshape(some, one_minus_one)
            size = Shape(some) wide = Concat<axis=0>(one, size) named = Reshape(some, wide)
            tall = Concat<axis=0>(size, one) column = Reshape(some, tall)
            turned = Transpose(column) both = Concat<axis=1>(row, turned) pairs = Reshape(both, minus_one)
            """,
        ),
        "sums of lengths": (
            "int64[3] after, float[n] sum, float[3] between, int64[p] fewer, float[q] upto, float[3] last",
            """
            high = Greater(v, half) some = Compress(v, high) size = Shape(some) count = Squeeze(size)
            next = Add(count, three_scalar) after = Range(count, next, one_scalar)
            more = Concat<axis=0>(some, three) longer = Add(three_int, size) two_and = Expand(two, longer)
            sum = Add(more, two_and) width = Sub(next, count) begin = Range(zero_scalar, width, one_scalar)
            between = Gather(v, begin)
            less = Sub(size, two_int) end = Squeeze(less) fewer = Range(zero_scalar, end, one_scalar)
            upto = Slice(v, zero, less) places = Range(count, next, one_scalar) last = Gather(more, places)
            """,
        ),
        "axes that a branch computes": (
            "float[n,6] y",
            """
            high = Greater(v, half) some = Compress(v, high) dims = Shape(some) none = Equal(dims, zero)
            is_none = Squeeze(none, zero) rows = Compress<axis=0>(x, m)
            y = If(is_none) <
                then_branch = taken () => (float[n,6] low) { low = Neg(rows) },
                else_branch = other () => (float[n,6] part) {
                    axis = Squeeze(zero, zero) axes = Unsqueeze(axis, zero) step = Squeeze(one, zero)
                    steps = Unsqueeze(step, zero) part = Slice(rows, zero, far, axes, steps)
                }
            >
            """,
        ),
        "filled up to a number": (
            "float[n,6] some, float[24] flat, float[4,6] rows, float[8] line",
            """
            some = Compress<axis=0>(x, m) dims = Shape(some) count = Gather(dims, zero)
            left = Sub(four_int, count) six = Slice(four_six, one, two_int) more = Mul(left, six)
            values = Reshape(some, minus_one) ends = Concat<axis=0>(zero, more) flat = Pad(values, ends)
            pairs = Concat<axis=0>(zero, zero, zero, left) by_two = Reshape(pairs, minus_one_two)
            turned = Slice(by_two, minus_one, minus_far, zero, minus_one) starts_first = Transpose(turned)
            below = Reshape(starts_first, minus_one) rows = Pad(some, below)
            column = Slice(some, zero, one, one) high = Reshape(column, minus_one)
            eight = Add(four_int, four_int) lacking = Sub(eight, count)
            behind = Concat<axis=0>(zero, lacking) line = Pad(high, behind)
            """,
        ),
        "products": (
            "float[n,4] y, float[6,6] gram, float[n,p] square",
            """
            rows = Compress<axis=0>(x, m) turned = Transpose(x) y = MatMul(rows, turned) t = Transpose(rows)
            gram = MatMul(t, rows) column = Slice(rows, zero, one, one) line = Transpose(column)
            square = Sub(column, line)
            """,
        ),
        "a loop that ends early": (
            "float[3] y, float[n,3] all, int64 steps",
            """
            start = Constant<value = float[3] {1, 1, 1}>() trips = Constant<value_int = 7>()
            first = Slice(v, zero, three_int) go = Constant<value = bool {1}>()
            y, steps, all = Loop(trips, go, start, zero_scalar) <
                body = step (int64 place, bool on, float[3] state, int64 done)
                    => (bool more, float[3] next, int64 count, float[3] seen) {
                    next = Add(state, first) top = ReduceMax<keepdims = 0>(next)
                    limit = Constant<value_float = 3.5>()
                    more = Less(top, limit) seen = Neg(next) one_more = Constant<value_int = 1>()
                    count = Add(done, one_more)
                }
            >
            """,
        ),
        "the last one": (
            "float[6] y, float[n,6] sums, int64[6] best",
            """
            high = Compress<axis=0>(x, m) y = Gather(high, minus_one_scalar)
            sums = CumSum(high, zero_scalar) best = ArgMax<keepdims=0>(high)
            """,
        ),
    }
)  # fmt: skip

# These take the last of what was selected: nothing is no case for them.
NEED_SOME: Final = frozenset({"the last one"})

_CONSTANTS: Final = """
    zero = Constant<value = int64[1] {0}>() one = Constant<value = int64[1] {1}>()
    two_int = Constant<value = int64[1] {2}>() three_int = Constant<value = int64[1] {3}>()
    minus_one = Constant<value = int64[1] {-1}>() minus_two = Constant<value = int64[1] {-2}>()
    minus_far = Constant<value = int64[1] {-9223372036854775807}>()
    minus_one_two = Constant<value = int64[2] {-1, 2}>() four_int = Constant<value = int64[1] {4}>()
    far = Constant<value = int64[1] {9223372036854775807}>() ten = Constant<value = int64[1] {10}>()
    zero_scalar = Constant<value_int = 0>() one_scalar = Constant<value_int = 1>()
    minus_one_scalar = Constant<value_int = -1>() half = Constant<value_float = 0.5>()
    two = Constant<value_float = 1.2>() three = Constant<value = float[3] {1, 2, 3}>()
    by_six = Constant<value = int64[2] {-1, 6}>() by_three = Constant<value = int64[2] {4, 3}>()
    by_two_three = Constant<value = int64[3] {-1, 2, 3}>() four_six = Constant<value = int64[2] {4, 6}>()
    two_twelve = Constant<value = int64[2] {2, 12}>()
    twelve = Constant<value = int64[1] {12}>() one_minus_one = Constant<value = int64[2] {1, -1}>()
    three_scalar = Constant<value_int = 3>()
    most_overlap = Constant<value = float[1] {0.4}>() least_score = Constant<value = float[1] {0.3}>()
"""


def model_of(name: str) -> onnx.ModelProto:
    """One graph as a model; its inputs are those of `INPUTS` that it reads."""
    outputs, nodes = GRAPHS[name]
    text = _CONSTANTS + nodes
    used = set(re.findall(r"\w+", nodes))
    inputs = ", ".join(f"{kind} {key}" for key, kind in INPUTS.items() if key in used)
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {{ {text} }}'
    )


def model_of_all() -> onnx.ModelProto:
    """All graphs that take nothing, too, side by side; their values are called `<place>/<name>`."""
    whole = onnx.ModelProto()
    for place, name in enumerate(name for name in GRAPHS if name not in NEED_SOME):
        model = model_of(name)
        graph = compose.add_prefix_graph(model.graph, f"{place}/", rename_inputs=False)
        whole.graph.node.extend(graph.node)
        whole.graph.output.extend(graph.output)
        known = {value.name for value in whole.graph.input}
        whole.graph.input.extend(value for value in graph.input if value.name not in known)
        whole.ir_version = model.ir_version
        del whole.opset_import[:]
        whole.opset_import.extend(model.opset_import)
    whole.graph.name = "all"
    return whole


def feeds(seed: int) -> dict[str, NDArray[Any]]:
    """Inputs; seed 0 selects nothing, seed 1 everything, others some."""
    random = np.random.default_rng(seed)
    v = random.standard_normal(12).astype(np.float32)
    mask = random.random(4) < 0.6
    if seed < 2:
        v, mask = np.abs(v) + 1 if seed else -np.abs(v), np.full(4, bool(seed))
    boxes = random.random((1, 20, 4)).astype(np.float32)
    scores = random.random((1, 2, 20)).astype(np.float32) * (0.2 if seed == 0 else 1)
    return {
        "x": random.standard_normal((4, 6)).astype(np.float32),
        "v": v,
        "i": random.integers(0, 4, 12),
        "k": np.array([seed % 5]),
        "m": mask,
        "b": boxes,
        "s": scores,
    }
