"""Operators with random extents, and their smooth neighbours.

A kind of operator says how its extents are drawn, what their friendly multiples are, how the operator is
written, and how many operations are useful. Compiling and timing are left to `timing`, counting to `steps`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import tvm
from tvm import relax

from builder.kernels.rewriter import shape_of

Extents: TypeAlias = Mapping[str, int]
# A vector that is not full costs as much as a full one. So an extent in vectors is drawn again if rounding it
# up adds more than this share: completing vectors is arithmetic, and no cliff.
MOST_PADDING: Final = 0.25
VECTOR: Final = 16
SPATIAL: Final = 4
# Operators with fewer operations measure the clock; with more, the patience.
LEAST_PRODUCT, MOST_PRODUCT = 4e6, 1.2e8
LEAST_ELEMENTS, MOST_ELEMENTS = 3e4, 1.5e6


@dataclass(frozen=True, slots=True)
class Range:
    """How an extent is drawn.

    Attributes
    ----------
    low, high
        The least and the largest value.
    multiple
        What the extent of the smooth neighbour is a multiple of; 1 if it is the same.
    in_vectors
        Whether vectors run along the extent, so that rounding it up costs its share.
    """

    low: int
    high: int
    multiple: int = 1
    in_vectors: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of operator.

    Attributes
    ----------
    ranges
        Extent -> how it is drawn.
    useful
        Returns the useful operations; for kinds that wait for memory, elements.
    shapes
        Returns the shapes of the computed inputs.
    build
        Writes the operator, for the inputs and a source of constant weights.
    work
        The least and the most useful operations of an operator.
    counted
        Only kernels whose name contains this word are counted, because the operator needs another one before
        it; all except changes of layout if empty.
    """

    ranges: Mapping[str, Range]
    useful: Callable[[Extents], float]
    shapes: Callable[[Extents], Sequence[tuple[int, ...]]]
    build: Callable[[Extents, Sequence[relax.Var], Weights], relax.Expr]
    work: tuple[float, float] = (LEAST_PRODUCT, MOST_PRODUCT)
    counted: str = ""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator with extents."""

    kind: str
    extents: Extents

    def __str__(self) -> str:
        return f"{self.kind} " + " ".join(f"{name}={extent}" for name, extent in self.extents.items())

    @property
    def useful(self) -> float:
        """The useful operations."""
        return KINDS[self.kind].useful(self.extents)

    def smooth(self) -> Operator:
        """Return the neighbour: each extent rounded up to its friendly multiple."""
        ranges = KINDS[self.kind].ranges
        up = {name: _round_up(extent, ranges[name].multiple) for name, extent in self.extents.items()}
        return Operator(self.kind, up)

    def module(self) -> tvm.IRModule:
        """Return a Relax module of this operator; weights are random constants."""
        kind = KINDS[self.kind]
        builder = relax.BlockBuilder()
        inputs = [
            relax.Var(f"x{i}", relax.TensorType(shape, "float32"))
            for i, shape in enumerate(kind.shapes(self.extents))
        ]
        with builder.function("main", inputs):
            with builder.dataflow():
                built = kind.build(self.extents, inputs, Weights())
                result = builder.emit_output(builder.normalize(built))
            builder.emit_func_output(result)
        return builder.get()

    def counts(self, kernel: str) -> bool:
        """Whether a kernel belongs to the operator itself.

        Networks keep channels packed, so changes of layout at the ends of a single operator are left out.
        """
        word = KINDS[self.kind].counted
        return word in kernel if word else kernel.rstrip("0123456789") not in ("pack", "unpack")


class Weights:
    """A source of constant weights with a fixed seed."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def __call__(self, *shape: int) -> relax.Constant:
        """Return a constant of `shape`."""
        return relax.const(self._random.standard_normal(shape, "float32"))


def _round_up(extent: int, multiple: int) -> int:
    return -(-extent // multiple) * multiple


def draw(kind: str, state: random.Random) -> Operator:
    """Return an operator of `kind` with random extents of which at least one is not smooth."""
    about = KINDS[kind]
    low, high = about.work
    while True:
        operator = Operator(kind, {name: _extent(range_, state) for name, range_ in about.ranges.items()})
        if low <= operator.useful <= high and operator.smooth() != operator:
            return operator


def _extent(range_: Range, state: random.Random) -> int:
    while True:
        extent = state.randint(range_.low, range_.high)
        padding = _round_up(extent, range_.multiple) / extent - 1
        if not range_.in_vectors or padding <= MOST_PADDING:
            return extent


def drawn(kinds: Sequence[str], count: int, seed: int) -> list[Operator]:
    """Return `count` operators, the kinds in turn."""
    state = random.Random(seed)
    return [draw(kinds[i % len(kinds)], state) for i in range(count)]


_CHANNELS: Final = Range(40, 320, VECTOR, in_vectors=True)
_PLANE: Final = Range(7, 60, SPATIAL)
_ROWS: Final = Range(8, 250, SPATIAL)
_COLUMNS: Final = Range(40, 1300, VECTOR, in_vectors=True)


def _convolution(size: int, stride: int = 1) -> Kind:
    """Return a convolution; its extents are those of the output."""

    def build(e: Extents, x: Sequence[relax.Var], weights: Weights) -> relax.Expr:
        return _conv(x[0], weights(e["out"], e["in"], size, size), stride)

    return Kind(
        {"in": _CHANNELS, "out": _CHANNELS, "h": _PLANE, "w": _PLANE},
        lambda e: 2.0 * size * size * e["in"] * e["out"] * e["h"] * e["w"],
        lambda e: [(1, e["in"], e["h"] * stride, e["w"] * stride)],
        build,
    )


def _grouped() -> Kind:
    def build(e: Extents, x: Sequence[relax.Var], weights: Weights) -> relax.Expr:
        return _conv(x[0], weights(e["groups"] * e["out"], e["in"], 3, 3), 1, e["groups"])

    per_group = Range(12, 64, VECTOR, in_vectors=True)
    return Kind(
        {"groups": Range(2, 9), "in": per_group, "out": per_group, "h": _PLANE, "w": _PLANE},
        lambda e: 2.0 * 9 * e["groups"] * e["in"] * e["out"] * e["h"] * e["w"],
        lambda e: [(1, e["groups"] * e["in"], e["h"], e["w"])],
        build,
    )


def _depthwise() -> Kind:
    def build(e: Extents, x: Sequence[relax.Var], weights: Weights) -> relax.Expr:
        channels, size = e["channels"], 2 * e["radius"] + 1
        return _conv(x[0], weights(channels, 1, size, size), e["stride"], channels)

    return Kind(
        {"channels": _CHANNELS, "h": _PLANE, "w": _PLANE, "radius": Range(1, 2), "stride": Range(1, 2)},
        lambda e: 2.0 * (2 * e["radius"] + 1) ** 2 * e["channels"] * e["h"] * e["w"],
        lambda e: [(1, e["channels"], e["h"] * e["stride"], e["w"] * e["stride"])],
        build,
        (LEAST_PRODUCT / 4, MOST_PRODUCT / 4),
    )


def _conv(x: relax.Expr, weight: relax.Constant, stride: int, groups: int = 1) -> relax.Expr:
    size = shape_of(weight)[-1]
    pad = size // 2
    product = relax.op.nn.conv2d(
        x, weight, strides=(stride, stride), padding=(pad, pad, pad, pad), groups=groups
    )
    return relax.op.nn.relu(product)


def _matmul() -> Kind:
    def build(e: Extents, x: Sequence[relax.Var], weights: Weights) -> relax.Expr:
        return relax.op.add(relax.op.matmul(x[0], weights(e["depth"], e["columns"])), weights(e["columns"]))

    return Kind(
        {"rows": _ROWS, "depth": Range(40, 800, VECTOR), "columns": _COLUMNS},
        lambda e: 2.0 * e["rows"] * e["depth"] * e["columns"],
        lambda e: [(1, e["rows"], e["depth"])],
        build,
    )


def _batch_matmul() -> Kind:
    return Kind(
        {
            "batch": Range(2, 12),
            "rows": _ROWS,
            "depth": Range(24, 260, VECTOR),
            "columns": Range(40, 260, VECTOR, in_vectors=True),
        },
        lambda e: 2.0 * e["batch"] * e["rows"] * e["depth"] * e["columns"],
        lambda e: [(e["batch"], e["rows"], e["depth"]), (e["batch"], e["depth"], e["columns"])],
        lambda _e, x, _weights: relax.op.matmul(x[0], x[1]),
    )


def _attention() -> Kind:
    def build(e: Extents, x: Sequence[relax.Var], _weights: Weights) -> relax.Expr:
        op, shape = relax.op, (1, e["tokens"], e["heads"], e["size"])
        query, key, value = (op.reshape(v, shape) for v in x)
        query, value = (op.permute_dims(v, (0, 2, 1, 3)) for v in (query, value))
        scores = op.matmul(query, op.permute_dims(key, (0, 2, 3, 1)))
        scale = relax.const(np.float32(e["size"] ** 0.5))
        context = op.matmul(op.nn.softmax(op.divide(scores, scale)), value)
        return op.reshape(op.permute_dims(context, (0, 2, 1, 3)), (1, e["tokens"], e["heads"] * e["size"]))

    return Kind(
        {
            "heads": Range(2, 12),
            "tokens": Range(40, 260, VECTOR, in_vectors=True),
            "size": Range(24, 96, VECTOR, in_vectors=True),
        },
        lambda e: 4.0 * e["heads"] * e["tokens"] ** 2 * e["size"],
        lambda e: [(1, e["tokens"], e["heads"] * e["size"])] * 3,
        build,
    )


def _pooling() -> Kind:
    def build(e: Extents, x: Sequence[relax.Var], weights: Weights) -> relax.Expr:
        packed = _conv(x[0], weights(e["channels"], VECTOR, 1, 1), 1)
        return relax.op.nn.max_pool2d(packed, (3, 3), (2, 2), (1, 1, 1, 1))

    return Kind(
        {"channels": _CHANNELS, "h": _PLANE, "w": _PLANE},
        lambda e: float(e["channels"] * e["h"] * e["w"]),
        lambda e: [(1, VECTOR, e["h"] * 2, e["w"] * 2)],
        build,
        (LEAST_ELEMENTS, MOST_ELEMENTS),
        counted="pool",
    )


def _resize() -> Kind:
    def build(e: Extents, x: Sequence[relax.Var], weights: Weights) -> relax.Expr:
        packed = _conv(x[0], weights(e["channels"], VECTOR, 1, 1), 1)
        size = (2 * e["h"], 2 * e["w"])
        return relax.op.image.resize2d(
            packed, size, layout="NCHW", method="linear", coordinate_transformation_mode="half_pixel"
        )

    return Kind(
        {"channels": _CHANNELS, "h": Range(7, 40, SPATIAL), "w": Range(7, 40, SPATIAL)},
        lambda e: 4.0 * e["channels"] * e["h"] * e["w"],
        lambda e: [(1, VECTOR, e["h"], e["w"])],
        build,
        (LEAST_ELEMENTS, MOST_ELEMENTS),
        counted="resize",
    )


def _rows(build: Callable[[Extents, Sequence[relax.Var], Weights], relax.Expr]) -> Kind:
    return Kind(
        {"rows": Range(20, 1500), "columns": _COLUMNS},
        lambda e: float(e["rows"] * e["columns"]),
        lambda e: [(1, e["rows"], e["columns"])],
        build,
        (LEAST_ELEMENTS, MOST_ELEMENTS),
    )


def _layer_norm(e: Extents, x: Sequence[relax.Var], weights: Weights) -> relax.Expr:
    scale, shift = weights(e["columns"]), weights(e["columns"])
    return relax.op.nn.layer_norm(x[0], scale, shift, axes=[-1], epsilon=1e-5)


def _elementwise() -> Kind:
    def build(_e: Extents, x: Sequence[relax.Var], _weights: Weights) -> relax.Expr:
        return relax.op.add(relax.op.multiply(x[0], relax.op.sigmoid(x[0])), x[1])

    return Kind(
        {"channels": Range(5, 320, VECTOR), "h": _PLANE, "w": _PLANE},
        lambda e: float(e["channels"] * e["h"] * e["w"]),
        lambda e: [(1, e["channels"], e["h"], e["w"])] * 2,
        build,
        (LEAST_ELEMENTS, MOST_ELEMENTS),
    )


KINDS: Final[Mapping[str, Kind]] = {
    "conv1x1": _convolution(1),
    "conv3x3": _convolution(3),
    "conv3x3-strided": _convolution(3, stride=2),
    "conv-grouped": _grouped(),
    "depthwise": _depthwise(),
    "matmul": _matmul(),
    "batch-matmul": _batch_matmul(),
    "attention": _attention(),
    "pooling": _pooling(),
    "softmax": _rows(lambda _e, x, _weights: relax.op.nn.softmax(x[0], axis=-1)),
    "layer-norm": _rows(_layer_norm),
    "resize": _resize(),
    "elementwise": _elementwise(),
}
