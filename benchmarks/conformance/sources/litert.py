"""TensorFlow Lite's operators: functions of TensorFlow in several precisions, written by its own converter.

LiteRT's reference kernels are right, or its optimised ones where the reference kernels are known to differ
from TensorFlow. Quantised answers may be a step apart, because LiteRT multiplies by rounded integers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from benchmarks.conformance.case import Array, Case
from benchmarks.conformance.sources.makers import Maker
from benchmarks.conformance.verdict import difference

# An operator, a function that becomes it, and its inputs: "2x3" is a tensor of float32; what stands before a
# a colon is one of `KINDS`.
Variant = tuple[str, Callable[..., Any], Sequence[str]]

_SEED: Final = 5
_RTOL, _ATOL = 1e-3, 1e-4
_WEIGHTED: Final = re.compile(r"conv|dense|matmul|svdf|lstm|gru|rnn|embedding")
# Of 16-bit functions that LiteRT reads from a table.
_INTERPOLATED: Final = re.compile(
    r"exp|gelu|log|sigmoid|tanh|softmax|rsqrt|swish|elu|softplus|mish|erf|lstm|gru"
)
_INTERPOLATED_STEPS: Final = 256
# Of several operators behind each other, each rounds what the one before it rounded, of 256 steps.
_SEVERAL_STEPS: Final = 16
# What rounding data to 8 bits costs where weights are integers and data is not, of the largest number.
_HYBRID: Final = 3e-2
# Operators whose reference kernels leave out a channel, ignore a scale, or are missing, as in the product.
_NOT_REFERENCE: Final = frozenset(
    {"BROADCAST_TO", "CEIL", "ELU", "LOCAL_RESPONSE_NORMALIZATION", "ROUND", "SEGMENT_SUM", "SUM"}
)
QUANTISED: Final = ("int8", "uint8", "int16")


def _floats(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    return np.asarray(rng.standard_normal(shape), np.float32)


# How an input is drawn. Integers are small, so that they are indices, shifts and divisors, too.
KINDS: Final[Mapping[str, Callable[[np.random.Generator, Sequence[int]], Array]]] = {
    "f": _floats,
    "pos": lambda rng, shape: np.abs(_floats(rng, shape)) + np.float32(0.3),
    "unit": lambda rng, shape: rng.uniform(-0.99, 0.99, shape).astype(np.float32),
    "half": lambda rng, shape: (rng.integers(-9, 10, shape) / 2).astype(np.float32),
    "picture": lambda rng, shape: rng.integers(0, 256, shape).astype(np.float32),
    "f64": lambda rng, shape: rng.standard_normal(shape),
    "f16": lambda rng, shape: rng.standard_normal(shape).astype(np.float16),
    "bool": lambda rng, shape: rng.random(shape) < 0.5,
    "index": lambda rng, shape: rng.integers(0, 3, shape).astype(np.int32),
    "shift": lambda rng, shape: rng.integers(1, 8, shape).astype(np.int32),
    "i8": lambda rng, shape: rng.integers(-128, 128, shape).astype(np.int8),
    "u8": lambda rng, shape: rng.integers(0, 256, shape).astype(np.uint8),
    "i16": lambda rng, shape: rng.integers(-300, 300, shape).astype(np.int16),
    "i32": lambda rng, shape: rng.integers(-1000, 1000, shape).astype(np.int32),
    "u32": lambda rng, shape: rng.integers(0, 2**32, shape).astype(np.uint32),
    "i64": lambda rng, shape: rng.integers(-1000, 1000, shape),
}


def drawn(spec: str, rng: np.random.Generator) -> Array:
    """Draw an input such as "2x3" or "i32:2x3"; "pos:" is a scalar."""
    kind, colon, shape = spec.rpartition(":")
    return KINDS[kind if colon else "f"](rng, [int(extent) for extent in shape.split("x") if extent])


def _c(*shape: int, seed: int = 1) -> Any:  # noqa: ANN401
    """Return a constant of normally distributed numbers."""
    return tf.constant(_floats(np.random.default_rng(seed), shape))


_SHAPES: Final = ("2x7x9x3", "5", "1x1", "3x4x5")
_UNARY: Final[Mapping[str, tuple[Callable[..., Any], str]]] = {
    "abs": (tf.abs, ""),
    "ceil": (tf.math.ceil, "half:"),
    "cos": (tf.cos, ""),
    "elu": (tf.nn.elu, ""),
    "exp": (tf.exp, "unit:"),
    "floor": (tf.floor, "half:"),
    "gelu": (lambda x: tf.nn.gelu(x, approximate=False), ""),
    "gelu_tanh": (lambda x: tf.nn.gelu(x, approximate=True), ""),
    "hard_swish": (lambda x: x * tf.nn.relu6(x + 3.0) * (1 / 6), ""),
    "identity_copy": (lambda x: tf.identity(x) + 0.0, ""),
    "leaky_relu": (tf.nn.leaky_relu, ""),
    "leaky_relu_steep": (lambda x: tf.nn.leaky_relu(x, 1.5), ""),
    "log": (tf.math.log, "pos:"),
    "log_softmax": (tf.nn.log_softmax, ""),
    "neg": (tf.negative, ""),
    "ones_like": (lambda x: tf.ones_like(x) * 2 + x, ""),
    "rank": (lambda x: tf.cast(tf.rank(x), tf.float32) + x, ""),
    "relu": (tf.nn.relu, ""),
    "relu6": (tf.nn.relu6, ""),
    "relu_0_to_1": (lambda x: tf.minimum(tf.maximum(x, 0.0), 1.0), ""),
    "relu_n1_to_1": (lambda x: tf.maximum(-1.0, tf.minimum(x, 1.0)), ""),
    "rint": (tf.math.rint, "half:"),
    "round": (tf.round, "half:"),
    "rsqrt": (tf.math.rsqrt, "pos:"),
    "selu": (tf.nn.selu, ""),
    "shape": (lambda x: tf.cast(tf.shape(x)[0], tf.float32) + x, ""),
    "sigmoid": (tf.sigmoid, ""),
    "sign": (tf.sign, ""),
    "sin": (tf.sin, ""),
    "softmax": (tf.nn.softmax, ""),
    "softmax_axis": (lambda x: tf.nn.softmax(x, axis=0), ""),
    "softplus": (tf.nn.softplus, ""),
    "softsign": (tf.nn.softsign, ""),
    "sqrt": (tf.sqrt, "pos:"),
    "square": (tf.square, ""),
    "swish": (tf.nn.silu, ""),
    "tanh": (tf.tanh, ""),
    "zeros_like": (lambda x: tf.zeros_like(x) - x, ""),
    "reciprocal": (tf.math.reciprocal, "pos:"),
    "expm1": (tf.math.expm1, "unit:"),
    "log1p": (tf.math.log1p, "pos:"),
    "is_nan": (tf.math.is_nan, ""),
    "atan2": (lambda x: tf.math.atan2(x, x + 0.5), ""),
    "l2_normalize": (lambda x: tf.nn.l2_normalize(x, axis=-1), ""),
    "cumsum": (lambda x: tf.cumsum(x, axis=-1), ""),
    "cumsum_both": (lambda x: tf.cumsum(x, axis=0, exclusive=True, reverse=True), ""),
    "reverse": (lambda x: tf.reverse(x, axis=[-1]), ""),
    "fill": (lambda x: tf.fill(tf.shape(x), 2.5) * x, ""),
}
_BINARY: Final[Mapping[str, Callable[..., Any]]] = {
    "add": tf.add,
    "sub": tf.subtract,
    "mul": tf.multiply,
    "div": lambda a, b: tf.divide(tf.abs(a) + 0.5, tf.abs(b) + 0.5),
    "maximum": tf.maximum,
    "minimum": tf.minimum,
    "squared_difference": tf.math.squared_difference,
    "floor_div": lambda a, b: tf.math.floordiv(a, tf.abs(b) + 0.5),
    "floor_mod": lambda a, b: tf.math.floormod(a, tf.abs(b) + 0.5),
    "pow": lambda a, b: tf.pow(tf.abs(a) + 0.1, b),
    "equal": tf.equal,
    "not_equal": tf.not_equal,
    "less": tf.less,
    "less_equal": tf.less_equal,
    "greater": tf.greater,
    "greater_equal": tf.greater_equal,
    "add_relu": lambda a, b: tf.nn.relu(a + b),
    "sub_relu6": lambda a, b: tf.nn.relu6(a - b),
    "mul_relu": lambda a, b: tf.nn.relu(a * b),
}
_PAIRS: Final = (
    ("2x7x9x3", "2x7x9x3"),
    ("3x4x5", "5"),
    ("1", "4x3"),
    ("2x1x3", "1x4x1"),
    ("2x3x4x5x6", "1x6"),
)
_INTEGER: Final[Mapping[str, Callable[..., Any]]] = {
    "add": tf.add,
    "sub": tf.subtract,
    "mul": tf.multiply,
    "maximum": tf.maximum,
    "minimum": tf.minimum,
    "floor_div": lambda a, b: tf.math.floordiv(a, tf.abs(b) + 1),
    "equal": tf.equal,
    "less": tf.less,
    "floor_mod": lambda a, b: tf.math.floormod(a, tf.abs(b) + 1),
    "greater_equal": tf.greater_equal,
    "div": lambda a, b: tf.truncatediv(a, tf.abs(b) + 1),
    "bitwise_xor": tf.bitwise.bitwise_xor,
    "squared_difference": tf.math.squared_difference,
    "truncatemod": lambda a, b: tf.truncatemod(a, tf.abs(b) + 1),
}
_REDUCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "reduce_sum": tf.reduce_sum,
    "reduce_mean": tf.reduce_mean,
    "reduce_max": tf.reduce_max,
    "reduce_min": tf.reduce_min,
    "reduce_prod": tf.reduce_prod,
    "reduce_logsumexp": tf.reduce_logsumexp,
    "reduce_std": tf.math.reduce_std,
}
_AXES: Final = ((None, False), (-1, False), ((1, 2), True), (0, True), ((0, 3), False))
_PLACES: Final = (("f:2x5x7x3", 1), ("f:4x6", 0), ("f:9", -1), ("i32:3x4", 1), ("i64:4x3", -1), ("u8:2x6", 1))


def _conv(
    padding: str,
    strides: int | tuple[int, int],
    dilation: int,
    kernel: tuple[int, ...],
    after: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    def call(x: Any) -> Any:  # noqa: ANN401
        step = (strides, strides) if isinstance(strides, int) else strides
        y = tf.nn.conv2d(x, _c(*kernel), step, padding, dilations=dilation) + _c(kernel[-1], seed=2)
        return after(y) if after else y

    return call


def _depthwise(padding: str, strides: int, dilation: int, kernel: tuple[int, ...]) -> Callable[..., Any]:
    return lambda x: tf.nn.depthwise_conv2d(
        x, _c(*kernel), (1, strides, strides, 1), padding, dilations=(dilation, dilation)
    )


def _transposed(
    padding: str, stride: int, kernel: tuple[int, ...], shape: Sequence[int]
) -> Callable[..., Any]:
    return lambda x: tf.nn.conv2d_transpose(x, _c(*kernel), shape, stride, padding)


def _resize(method: str, size: tuple[int, int], **options: bool) -> Callable[..., Any]:
    raw = getattr(tf.raw_ops, f"Resize{method}")
    return lambda x: raw(images=x, size=size, **options)


def _any(*rows: tuple[Any, ...]) -> Sequence[tuple[Any, ...]]:
    """Return rows of a table whose columns have different types."""
    return rows


def _while(x: Any) -> Any:  # noqa: ANN401
    return tf.while_loop(lambda i, _: i < 5, lambda i, y: (i + 1, y * 0.5 + 1.0), (0, x))[1]


def _cond(x: Any) -> Any:  # noqa: ANN401
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2.0, lambda: x - 1.0)


def variants() -> Iterator[Variant]:
    """Return all functions, each with its inputs."""
    for name, (function, kind) in _UNARY.items():
        for shape in _SHAPES:
            yield name, function, [f"{kind}{shape}"]
    for name, binary in _BINARY.items():
        for pair in _PAIRS:
            yield name, binary, pair
        yield f"{name}_constant", functools.partial(lambda f, a: f(a, _c(3)), binary), ["2x4x3"]
        yield f"{name}_scalar", functools.partial(lambda f, a: f(a, tf.constant(0.75)), binary), ["2x4x3"]
    for name, binary in _INTEGER.items():
        for kind in ("i32", "i64", "i16", "i8", "u8"):
            yield name, binary, [f"{kind}:3x4x5", f"{kind}:4x1"]
    for name, reduction in _REDUCTIONS.items():
        for axis, keep in _AXES:
            shape = "pos:2x2x3x2" if name == "reduce_prod" else "2x5x7x3"  # a product must not vanish
            yield name, functools.partial(reduction, axis=axis, keepdims=keep), [shape]
        for kind in ("i32", "i64"):
            if not name.endswith(("logsumexp", "std")):
                yield name, functools.partial(reduction, axis=-1), [f"{kind}:2x5"]
    for spec, axis in _PLACES:
        yield "arg_max", functools.partial(tf.argmax, axis=axis), [spec]
        yield "arg_min", functools.partial(tf.argmin, axis=axis, output_type=tf.int32), [spec]
        yield "split", functools.partial(tf.split, num_or_size_splits=[1, -1], axis=axis), [spec]
        yield "unstack", functools.partial(tf.unstack, axis=axis), [spec]
        yield "expand_dims", functools.partial(tf.expand_dims, axis=axis), [spec]
        yield "concat", functools.partial(lambda a, x, y: tf.concat([x, y, x], a), axis), [spec, spec]
        yield "stack", functools.partial(lambda a, x, y: tf.stack([x, y], a), axis), [spec, spec]
        yield "gather", functools.partial(lambda a, x, i: tf.gather(x, i, axis=a), axis), [spec, "index:2x2"]
        yield "top_k", functools.partial(tf.math.top_k, k=3), [spec]
        yield "reverse", functools.partial(tf.reverse, axis=[axis]), [spec]
        yield "roll", functools.partial(tf.roll, shift=2, axis=axis), [spec]
        yield "tile", lambda x: tf.tile(x, [2] * len(x.shape)), [spec]
        yield "transpose", tf.transpose, [spec]
        yield "cast", functools.partial(tf.cast, dtype=tf.float32), [spec]
        yield "cast_to_int", functools.partial(tf.cast, dtype=tf.int32), [spec]
        yield "cast_to_bool", functools.partial(tf.cast, dtype=tf.bool), [spec]
        yield "slice", lambda x: tf.strided_slice(x, [0], [-1]), [spec]
        yield "slice_backwards", lambda x: x[::-2], [spec]
        yield "new_axes", lambda x: x[tf.newaxis, ..., 0, tf.newaxis], [spec]
        yield "pad", lambda x: tf.pad(x, [[1, 2]] * len(x.shape)), [spec]
        yield "pad_value", lambda x: tf.pad(x, [[0, 1]] * len(x.shape), constant_values=3), [spec]
        yield "mirror_pad", lambda x: tf.pad(x, [[1, 1]] * len(x.shape), "REFLECT"), [spec]
        yield "symmetric_pad", lambda x: tf.pad(x, [[2, 1]] * len(x.shape), "SYMMETRIC"), [spec]
        yield "reshape", lambda x: tf.reshape(x, [-1, 3]), [spec]
        yield "broadcast_to", lambda x: tf.broadcast_to(x, [2, *x.shape]), [spec]
        yield "where_select", lambda x: tf.where(x > 0, x, x * 2), [spec]
    yield from _OTHERS


_OTHERS: Final[Sequence[Variant]] = (
    *(
        ("conv2d", _conv(*options), [shape])
        for shape, *options in _any(
            ("1x9x11x3", "SAME", 1, 1, (3, 3, 3, 8)),
            ("2x9x11x3", "VALID", 2, 1, (3, 3, 3, 5)),
            ("1x8x8x4", "SAME", 2, 1, (5, 5, 4, 7)),
            ("1x9x9x16", "SAME", 1, 1, (1, 1, 16, 24)),
            ("1x12x13x4", "SAME", 1, 2, (3, 3, 4, 6)),
            ("1x12x13x4", "VALID", 1, 3, (3, 2, 4, 6)),
            ("1x7x7x4", "SAME", (2, 1), 1, (3, 5, 4, 6)),
            ("1x7x7x4", "VALID", 1, 1, (7, 7, 4, 6)),
            ("1x6x6x8", "SAME", 1, 1, (3, 3, 2, 8)),
            ("1x6x6x8", "SAME", 1, 1, (3, 3, 4, 6)),
            ("1x9x11x3", "SAME", 3, 1, (2, 4, 3, 8), tf.nn.relu),
            ("1x9x11x3", "SAME", 1, 1, (3, 3, 3, 8), tf.nn.relu6),
            ("1x5x5x1", "SAME", 2, 1, (3, 3, 1, 1)),
            ("1x1x30x4", "SAME", 1, 1, (1, 5, 4, 6)),
            ("3x30x1x4", "VALID", 2, 1, (4, 1, 4, 6)),
        )
    ),
    *(
        ("depthwise_conv", _depthwise(*options), [shape])
        for shape, *options in _any(
            ("1x9x11x3", "SAME", 1, 1, (3, 3, 3, 1)),
            ("2x9x11x3", "VALID", 2, 1, (3, 3, 3, 1)),
            ("1x9x11x3", "SAME", 1, 1, (3, 3, 3, 2)),
            ("1x9x11x1", "SAME", 2, 1, (5, 5, 1, 8)),
            ("1x9x11x16", "SAME", 1, 2, (3, 3, 16, 1)),
            ("1x9x11x5", "VALID", 1, 3, (3, 2, 5, 3)),
            ("1x20x1x5", "SAME", 1, 1, (7, 1, 5, 1)),
        )
    ),
    *(
        ("conv2d_transpose", _transposed(*options), [shape])
        for shape, *options in _any(
            ("1x5x6x3", "SAME", 2, (3, 3, 4, 3), (1, 10, 12, 4)),
            ("1x5x6x3", "VALID", 2, (3, 3, 4, 3), (1, 11, 13, 4)),
            ("1x5x6x3", "SAME", 1, (3, 3, 4, 3), (1, 5, 6, 4)),
            ("2x4x4x3", "SAME", 3, (2, 5, 6, 3), (2, 11, 12, 6)),
            ("1x4x4x8", "VALID", 2, (2, 2, 5, 8), (1, 8, 8, 5)),
        )
    ),
    ("conv1d", lambda x: tf.nn.conv1d(x, _c(3, 4, 6), 2, "SAME"), ["1x17x4"]),
    (
        "conv1d_causal",
        lambda x: tf.nn.conv1d(tf.pad(x, [[0, 0], [4, 0], [0, 0]]), _c(3, 4, 6), 1, "VALID", dilations=2),
        ["1x17x4"],
    ),
    ("conv3d", lambda x: tf.nn.conv3d(x, _c(3, 3, 3, 2, 4), (1, 1, 1, 1, 1), "SAME"), ["1x5x6x7x2"]),
    ("conv3d", lambda x: tf.nn.conv3d(x, _c(2, 3, 3, 2, 4), (1, 2, 1, 2, 1), "VALID"), ["2x5x6x7x2"]),
    (
        "conv3d_transpose",
        lambda x: tf.nn.conv3d_transpose(x, _c(3, 3, 3, 4, 2), (1, 6, 8, 10, 4), (1, 2, 2, 2, 1), "SAME"),
        ["1x3x4x5x2"],
    ),
    ("dense", lambda x: tf.matmul(x, _c(7, 5)) + _c(5), ["3x7"]),
    ("dense_relu", lambda x: tf.nn.relu(tf.matmul(x, _c(16, 9)) + _c(9)), ["1x16"]),
    ("dense_rank_3", lambda x: tf.tensordot(x, _c(7, 5), 1), ["2x3x7"]),
    ("dense_transposed", lambda x: tf.matmul(x, _c(5, 7), transpose_b=True), ["3x7"]),
    ("matmul", tf.matmul, ["3x7", "7x5"]),
    ("matmul", tf.matmul, ["2x3x7", "2x7x5"]),
    ("matmul", tf.matmul, ["2x1x3x7", "4x7x5"]),
    ("matmul", tf.matmul, ["1x7", "7x1"]),
    ("matmul_adjoint", lambda a, b: tf.matmul(a, b, transpose_a=True, transpose_b=True), ["2x7x3", "2x5x7"]),
    ("matmul_ints", tf.matmul, ["i32:3x4", "i32:4x2"]),
    ("einsum", lambda a, b: tf.einsum("bhd,bkd->bhk", a, b), ["2x3x4", "2x5x4"]),
    ("einsum", lambda a, b: tf.einsum("bthd,bshd->bhts", a, b), ["2x3x4x5", "2x6x4x5"]),
    *(
        (name, functools.partial(function, ksize=size, strides=step, padding=padding), [shape])
        for name, function in (("avg_pool", tf.nn.avg_pool2d), ("max_pool", tf.nn.max_pool2d))
        for shape, size, step, padding in (
            ("1x8x9x3", 2, 2, "VALID"),
            ("2x8x9x3", 3, 2, "SAME"),
            ("1x8x9x3", (3, 5), 1, "SAME"),
            ("1x8x9x3", (8, 9), 1, "VALID"),
            ("1x7x7x5", 1, 3, "SAME"),
            ("1x5x5x1", 4, 3, "SAME"),
        )
    ),
    ("max_pool_argmax_free", lambda x: tf.nn.max_pool2d(tf.nn.relu(x), 2, 1, "SAME"), ["1x4x4x2"]),
    *(
        (name, _resize(method, size, **options), [shape])
        for name, method in (("resize_bilinear", "Bilinear"), ("resize_nearest", "NearestNeighbor"))
        for size in ((7, 5), (11, 17), (3, 3), (1, 1))
        for options in ({}, {"half_pixel_centers": True}, {"align_corners": True})
        for shape in ("2x5x6x3",)
    ),
    ("resize_bicubic", lambda x: tf.image.resize(x, (9, 7), "bicubic"), ["1x5x6x2"]),
    ("resize_area", lambda x: tf.image.resize(x, (3, 2), "area"), ["1x6x6x2"]),
    ("batch_to_space", lambda x: tf.batch_to_space(x, [2, 2], [[0, 1], [1, 0]]), ["4x3x4x2"]),
    ("batch_to_space_nd", lambda x: tf.batch_to_space(x, [3], [[1, 0]]), ["6x4x2"]),
    ("space_to_batch", lambda x: tf.space_to_batch(x, [2, 2], [[1, 0], [0, 1]]), ["1x3x5x2"]),
    ("space_to_batch_nd", lambda x: tf.space_to_batch(x, [3], [[1, 1]]), ["2x4x2"]),
    ("depth_to_space", lambda x: tf.nn.depth_to_space(x, 2), ["2x3x4x8"]),
    ("space_to_depth", lambda x: tf.nn.space_to_depth(x, 3), ["2x6x9x2"]),
    ("local_response", lambda x: tf.nn.lrn(x, 2, 1.5, 0.3, 0.6), ["1x3x4x7"]),
    ("prelu", lambda x: tf.nn.relu(x) - _c(3) * tf.nn.relu(-x), ["2x5x7x3"]),
    (
        "batch_norm",
        lambda x: tf.nn.batch_normalization(x, _c(3), tf.abs(_c(3)) + 1, _c(3), _c(3), 1e-3),
        ["2x5x7x3"],
    ),
    (
        "layer_norm",
        lambda x: (
            (x - tf.reduce_mean(x, -1, True)) * tf.math.rsqrt(tf.math.reduce_variance(x, -1, True) + 1e-3)
        ),
        ["2x5x16"],
    ),
    ("moments", lambda x: tf.nn.moments(x, [1, 2]), ["2x5x7x3"]),
    ("one_hot", lambda x: tf.one_hot(x, 4), ["index:2x3"]),
    ("one_hot_axis", lambda x: tf.one_hot(x, 4, 2.0, -1.0, axis=0), ["index:5"]),
    ("one_hot_ints", lambda x: tf.one_hot(x, 3, 7, 1, axis=1, dtype=tf.int32), ["index:2x3"]),
    ("gather_nd", tf.gather_nd, ["3x4x5", "index:6x2"]),
    ("gather_nd_batch", lambda x, i: tf.gather_nd(x, i, batch_dims=1), ["2x4x5", "index:2x3x1"]),
    ("gather_batch", lambda x, i: tf.gather(x, i, axis=1, batch_dims=1), ["2x4x5", "index:2x3"]),
    ("gather_constant", lambda x: tf.gather(x, [2, 0, 2], axis=-1), ["2x3x4"]),
    ("embedding", lambda i: tf.nn.embedding_lookup(_c(6, 4), i), ["index:2x5"]),
    ("scatter_nd", lambda u: tf.scatter_nd([[1], [3], [1]], u, [5, 4]), ["3x4"]),
    ("scatter_update", lambda x, u: tf.tensor_scatter_nd_update(x, [[2], [0]], u), ["4x3", "2x3"]),
    ("scatter_add", lambda x, u: tf.tensor_scatter_nd_add(x, [[2], [2]], u), ["4x3", "2x3"]),
    ("segment_sum", lambda x: tf.math.segment_sum(x, [0, 0, 1, 2]), ["4x3"]),
    ("unsorted_segment_sum", lambda x: tf.math.unsorted_segment_sum(x, [1, 0, -1, 1], 3), ["4x3"]),
    ("unsorted_segment_max", lambda x: tf.math.unsorted_segment_max(x, [1, 0, 2, 1], 3), ["4x3"]),
    ("unsorted_segment_min", lambda x: tf.math.unsorted_segment_min(x, [1, 0, 2, 1], 3), ["4x3"]),
    ("unsorted_segment_prod", lambda x: tf.math.unsorted_segment_prod(x, [1, 0, 2, 1], 4), ["4x3"]),
    (
        "sparse_to_dense",
        lambda x: tf.raw_ops.SparseToDense(
            sparse_indices=[[0, 1], [2, 0]], output_shape=[3, 4], sparse_values=x, default_value=0.5
        ),
        ["2"],
    ),
    ("matrix_diag", tf.linalg.diag, ["2x4"]),
    ("matrix_set_diag", tf.linalg.set_diag, ["2x4x4", "2x4"]),
    ("matrix_set_diag", tf.linalg.set_diag, ["2x3x5", "2x3"]),
    ("band_part", lambda x: tf.linalg.band_part(x, 1, 0), ["4x5"]),
    ("reverse_sequence", lambda x: tf.reverse_sequence(x, [2, 4, 1], seq_axis=1), ["3x5x2"]),
    ("reverse_sequence_axis", lambda x: tf.reverse_sequence(x, [2, 0], seq_axis=0, batch_axis=2), ["3x5x2"]),
    ("select", tf.where, ["bool:2x3", "2x3", "2x3"]),
    ("select_broadcast", tf.where, ["bool:3x1", "2x1x4", ""]),
    ("select_ints", tf.where, ["bool:2x3", "i32:2x3", "i32:3"]),
    ("logical_and", tf.logical_and, ["bool:2x3", "bool:3"]),
    ("logical_or", tf.logical_or, ["bool:2x3", "bool:3"]),
    ("logical_not", tf.logical_not, ["bool:2x3"]),
    ("logical_xor", tf.math.logical_xor, ["bool:2x3", "bool:3"]),
    ("reduce_any", lambda x: tf.reduce_any(x, 1), ["bool:4x2"]),
    ("reduce_all", lambda x: tf.reduce_all(x, [0], True), ["bool:4x2"]),
    ("reduce_any", tf.reduce_any, ["bool:2x3x4"]),
    ("reduce_all", tf.reduce_all, ["bool:1"]),
    ("right_shift", tf.bitwise.right_shift, ["i32:3x4", "shift:4"]),
    ("right_shift", tf.bitwise.right_shift, ["u32:5", "u32:5"]),
    ("left_shift", tf.bitwise.left_shift, ["i32:3x4", "shift:4"]),
    ("bitwise_and", tf.bitwise.bitwise_and, ["i32:3x4", "i32:4"]),
    ("bitwise_invert", tf.bitwise.invert, ["i32:3x4"]),
    ("bitcast", lambda x: tf.bitcast(x, tf.int32), ["3x4"]),
    ("bitcast", lambda x: tf.bitcast(x, tf.float32), ["i32:3x4"]),
    ("bitcast_narrow", lambda x: tf.bitcast(x, tf.uint8), ["3x4"]),
    ("cast_from_bool", lambda x: tf.cast(x, tf.float32), ["bool:3x4"]),
    ("cast_narrow", lambda x: tf.cast(x, tf.int8), ["i32:3x4"]),
    ("cast_bytes", lambda x: tf.cast(x, tf.uint8), ["i16:3x4"]),
    ("cast_wide", lambda x: tf.cast(x, tf.int64), ["i8:3x4"]),
    ("cast_double", lambda x: tf.cast(x, tf.float64), ["3x4"]),
    ("cast_half", lambda x: tf.cast(x, tf.float16), ["3x4"]),
    ("cast_from_double", lambda x: tf.cast(x, tf.float32), ["f64:3x4"]),
    ("range", lambda x: tf.range(1.0, 7.0, 1.5) * x, ["1"]),
    ("linspace", lambda x: tf.linspace(0.0, 1.0, 5) * x, ["1"]),
    ("range_input", tf.range, ["index:"]),
    ("fill_input", lambda n: tf.fill(n, 3.0), ["shift:2"]),
    ("abs_ints", tf.abs, ["i32:3x4"]),
    ("neg_ints", tf.negative, ["i32:3x4"]),
    ("neg_ints", tf.negative, ["i64:5"]),
    ("sign_ints", tf.sign, ["i32:3x4"]),
    ("square_ints", tf.square, ["i32:3x4"]),
    ("pow_ints", lambda x: tf.pow(x, 3), ["index:3x4"]),
    ("cumsum_ints", lambda x: tf.cumsum(x, 1), ["i32:3x4"]),
    ("cumprod", lambda x: tf.math.cumprod(x, 1), ["3x4"]),
    ("squeeze", lambda x: tf.squeeze(x, [0, 2]), ["1x3x1x4"]),
    ("squeeze_all", tf.squeeze, ["1x3x1x4"]),
    ("strided_slice", lambda x: x[:, 1:6:2, -3:, 1], ["2x7x9x3"]),
    ("strided_slice_mask", lambda x: x[..., ::-1, 1:], ["2x7x9x3"]),
    ("strided_slice_shrink", lambda x: x[1, 2], ["2x7x9x3"]),
    ("slice_sizes", lambda x: tf.slice(x, [0, 1, 2], [2, -1, 3]), ["2x4x6"]),
    ("slice_begin_input", lambda x, n: tf.slice(x, n, [2, 2]), ["5x6", "index:2"]),
    ("dynamic_index", lambda x, n: x[n], ["5x6", "index:"]),
    ("pad_uneven", lambda x: tf.pad(x, [[0, 0], [1, 0], [0, 3], [0, 0]]), ["2x7x9x3"]),
    ("pad_five", lambda x: tf.pad(x, [[0, 0], [1, 0], [0, 3], [0, 0], [2, 2]]), ["2x3x4x3x2"]),
    ("split_even", lambda x: tf.split(x, 3, axis=2), ["2x5x6"]),
    ("split_sizes", lambda x: tf.split(x, [1, 4, 1], axis=-1), ["2x5x6"]),
    ("transpose_axes", lambda x: tf.transpose(x, [0, 3, 1, 2]), ["2x5x6x3"]),
    ("transpose_five", lambda x: tf.transpose(x, [4, 0, 3, 1, 2]), ["2x3x4x5x2"]),
    ("tile_uneven", lambda x: tf.tile(x, [1, 3, 2]), ["2x1x3"]),
    ("broadcast_input", tf.broadcast_to, ["1", "shift:2"]),
    ("sort", tf.sort, ["3x7"]),
    ("argsort", tf.argsort, ["3x7"]),
    ("top_k_unsorted", lambda x: tf.math.top_k(x, 2, sorted=False)[0], ["3x7"]),
    ("where_indices", tf.where, ["bool:3x4"]),
    ("unique", tf.unique, ["index:6"]),
    ("add_n", lambda a, b, c: tf.add_n([a, b, c]), ["2x3", "2x3", "2x3"]),
    ("addv2_five", tf.add, ["1x2x3x4x5", "5"]),
    ("fake_quant", lambda x: tf.quantization.fake_quant_with_min_max_args(x, -2.0, 3.0, 8), ["2x5"]),
    (
        "fake_quant_narrow",
        lambda x: tf.quantization.fake_quant_with_min_max_args(x, -2.0, 3.0, 4, True),
        ["2x5"],
    ),
    ("rfft", lambda x: tf.abs(tf.signal.rfft(x)), ["2x16"]),
    ("rfft2d", lambda x: tf.abs(tf.signal.rfft2d(x)), ["2x8x16"]),
    ("rfft_parts", lambda x: (tf.math.real(tf.signal.rfft(x)), tf.math.imag(tf.signal.rfft(x))), ["16"]),
    (
        "nms",
        lambda b, s: tf.image.non_max_suppression_padded(b, s, 3, pad_to_max_output_size=True)[0],
        ["pos:6x4", "pos:6"],
    ),
    (
        "nms_v5",
        lambda b, s: tf.raw_ops.NonMaxSuppressionV5(
            boxes=b,
            scores=s,
            max_output_size=4,
            iou_threshold=0.5,
            score_threshold=0.1,
            soft_nms_sigma=0.5,
            pad_to_max_output_size=True,
        )[:3],
        ["pos:6x4", "pos:6"],
    ),
    ("while", _while, ["2x3"]),
    ("cond", _cond, ["2x3"]),
    ("cond", _cond, ["pos:2x3"]),
    (
        "dynamic_update_slice",
        lambda x, u: (
            tf.raw_ops.XlaDynamicUpdateSlice(input=x, update=u, indices=[1, 2])
            if hasattr(tf.raw_ops, "XlaDynamicUpdateSlice")
            else x
        ),
        ["4x5", "2x2"],
    ),
    ("complex_abs", lambda a, b: tf.abs(tf.complex(a, b)), ["3x4", "3x4"]),
    ("clip", lambda x: tf.clip_by_value(x, -0.5, 0.7), ["3x4"]),
    (
        "cross_entropy",
        lambda a, b: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(a), b),
        ["3x4", "3x4"],
    ),
    (
        "extract_patches",
        lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"),
        ["1x6x6x2"],
    ),
    ("meshgrid", tf.meshgrid, ["3", "4"]),
    ("bucketize", lambda x: tf.searchsorted([-1.0, 0.0, 1.0], x), ["5"]),
    ("norm", lambda x: tf.norm(x, axis=1), ["3x4"]),
    ("trace", tf.linalg.trace, ["4x4"]),
    ("diag_part", tf.linalg.diag_part, ["3x4"]),
)


def makers() -> Iterator[Maker]:
    """Return each operator's first function in all precisions, and the others in two."""
    counts: dict[str, Iterator[int]] = {}
    for operator, function, specs in variants():
        index = next(counts.setdefault(operator, itertools.count()))
        is_float = not specs[0].partition(":")[1] or specs[0].partition(":")[0] in (
            "f",
            "pos",
            "unit",
            "half",
        )
        weights = ("float16", "dynamic") if _WEIGHTED.search(operator) else ()
        others = (*weights, *QUANTISED) if is_float else ()
        for precision in (
            "float",
            *(others if index == 0 else others[index % len(others) :][:1] if others else ()),
        ):
            name = f"{operator}_{index}_{precision}"
            yield name, functools.partial(make, name, operator, function, specs, precision)


def make(
    name: str, operator: str, function: Callable[..., Any], specs: Sequence[str], precision: str, folder: Path
) -> Case:
    """Make a case of a function in one precision."""
    rng = np.random.default_rng(_SEED)
    samples = [[drawn(spec, rng) for spec in specs] for _ in range(8)]
    content = converted(function, samples, precision)
    path = folder / "model.tflite"
    path.write_bytes(content)
    inputs, outputs, count = interpreted(content, samples[0])
    rtol, atol = _RTOL, _ATOL
    if precision == "dynamic":
        atol = _HYBRID * max(
            [1.0, *(float(np.abs(each).max()) for each in outputs if each.dtype.kind == "f")]
        )
    elif precision in QUANTISED:
        is_short = precision != "int16"
        coarse = _INTERPOLATED_STEPS if _INTERPOLATED.search(operator) and not is_short else 1.0
        several = _SEVERAL_STEPS * (1 if is_short else 256)
        atol = several if count > 1 or operator == "reduce_prod" else coarse
    return Case("litert", name, operator, path, inputs, outputs, rtol, atol)


def converted(function: Callable[..., Any], samples: Sequence[Sequence[Array]], precision: str) -> bytes:
    """Write a function as a TensorFlow Lite model.

    Parameters
    ----------
    function
        Of tensors.
    samples
        Inputs, from which the ranges of quantised numbers are taken.
    precision
        "float", "float16" (weights), "dynamic" (integer weights with float data), or one of `QUANTISED`.
    """
    specs = [tf.TensorSpec(x.shape, x.dtype, name=f"x{place}") for place, x in enumerate(samples[0])]
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete])
    if precision != "float":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if precision == "float16":
        converter.target_spec.supported_types = [tf.float16]
    elif precision in QUANTISED:
        integers = (
            tf.lite.OpsSet.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8
            if precision == "int16"
            else tf.lite.OpsSet.TFLITE_BUILTINS_INT8
        )
        converter.target_spec.supported_ops = [integers, tf.lite.OpsSet.TFLITE_BUILTINS]
        converter.representative_dataset = lambda: iter(samples)
        converter.inference_input_type = converter.inference_output_type = getattr(tf, precision)
    return bytes(converter.convert())


def interpreted(content: bytes, sample: Sequence[Array]) -> tuple[dict[str, Array], list[Array], int]:
    """Run a model in LiteRT.

    Parameters
    ----------
    content
        The file.
    sample
        The inputs, which are quantised as the file says.

    Returns
    -------
    The inputs as they were given, the outputs, and how many operators compute.

    Raises
    ------
    ValueError
        If LiteRT's kernels disagree where the reference kernels are not the judge.
    """
    given: dict[str, Array] = {}

    def run(resolver: OpResolverType) -> tuple[list[Array], list[str]]:
        interpreter = Interpreter(model_content=content, experimental_op_resolver_type=resolver)
        interpreter.allocate_tensors()
        for detail in interpreter.get_input_details():
            name = detail["name"].partition(";")[0]
            value = sample[int(name.rpartition("x")[2].partition(":")[0])]
            scale, zero = detail["quantization"]
            if scale and value.dtype.kind == "f":
                limits = np.iinfo(detail["dtype"])
                value = np.clip(np.round(value / scale) + zero, limits.min, limits.max)
            given[name] = value.astype(detail["dtype"])
            interpreter.set_tensor(detail["index"], given[name])
        interpreter.invoke()
        names = [each["op_name"] for each in interpreter._get_ops_details()]
        outputs = [
            np.array(interpreter.get_tensor(each["index"])) for each in interpreter.get_output_details()
        ]
        return outputs, names

    outputs, names = run(OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    count = sum(name not in ("QUANTIZE", "DEQUANTIZE") for name in names)
    if _NOT_REFERENCE.isdisjoint(names):
        with contextlib.suppress(ValueError):  # no reference kernel for this type
            return given, run(OpResolverType.BUILTIN_REF)[0], count
    others, _ = run(OpResolverType.AUTO)
    for one, other in zip(outputs, others, strict=True):
        if difference(one, other, atol=1.0 if one.dtype.kind in "iu" else _ATOL):
            raise ValueError("LiteRT's kernels disagree")
    return given, outputs, count
