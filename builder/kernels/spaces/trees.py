"""Tree ensembles as one kernel: several walks at once, without branches.

A walk is a chain of loads that depend on one another, so one walk leaves a core idle. Here eight walks
take their steps together: several trees of one sample, or one tree of several samples. A step compares and
selects; no branch can be mispredicted. Walks are scalars even where a core can gather.

Two layouts. **Complete** trees, if all are shallow: a test's children are at places that follow from its
own, `2 i + 1` and `2 i + 2`, so a step loads the feature's number, the threshold and the feature. **Nodes**
otherwise: 16 bytes each, in preorder, with the places of both children. A leaf is its own children, so walks
of different lengths stay together until the last one has arrived.

Leaves are added in the order of the trees for each sample, as ONNX Runtime does with one thread. All arrays
are weights; the code has the same length for ten trees as for ten thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np
from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

from builder.calls.trees import EQUAL, LESS, MEMBER, NAN, Ensemble
from builder.kernels.instructions import instruction
from builder.kernels.spaces.epilogue import emit_kernel
from builder.kernels.spaces.packed_trees import FEATURE_MASK, TEST_SHIFT, Packed, pack
from builder.target.device_target import DeviceTarget

# The kernel is written out, not scheduled: this names where its loops come from.
KIND: Final = "trees"
# Walks that take their steps together: enough to hide the latency of a step, few enough for the registers.
_AT_ONCE: Final = 8
# Steps between two tests of whether all walks have arrived.
_STEPS: Final = 4

Index: TypeAlias = "tirx.Expr | int"


class Flat(Protocol):
    """A buffer, addressed by the place of an element in row-major order."""

    def __getitem__(self, place: Index) -> tirx.Expr:
        """Return the load of an element."""

    def __setitem__(self, place: Index, value: Index) -> None:
        """Write the store of an element into the current loop."""


def emit(bb: relax.BlockBuilder, samples: relax.Expr, ensemble: Ensemble, target: DeviceTarget) -> relax.Expr:
    """Emit an ensemble; it returns what the leaves add up to, `[samples, targets]`.

    `samples`: `[samples, features]`, of the type of the ensemble's thresholds.
    """
    count, features = (int(dim) for dim in samples.ty.shape)
    rows = min(count, _AT_ONCE)
    packed = pack(ensemble, features, max(1, _AT_ONCE // rows))
    dtype = str(ensemble.threshold.dtype)
    weights = [relax.const(array.reshape(-1), str(array.dtype)) for array in packed.arrays]

    def compute(*arguments: te.Tensor) -> te.Tensor:
        return te.extern(
            [(count, packed.targets)],
            list(arguments),
            lambda ins, outs: _Writer(packed, count, dtype, target, ins, outs[0]).write(),
            name=KIND,
            dtype=[dtype],
            in_buffers=[tirx.decl_buffer(a.shape, str(a.dtype)) for a in arguments],
            out_buffers=[tirx.decl_buffer((count, packed.targets), dtype)],
        )

    return emit_kernel(bb, KIND, compute, samples, *weights, attrs={"edge.written": KIND})


class _Writer:
    """Writes an ensemble's loops into the current builder."""

    def __init__(
        self,
        packed: Packed,
        count: int,
        dtype: str,
        target: DeviceTarget,
        ins: Sequence[tirx.Buffer],
        out: tirx.Buffer,
    ) -> None:
        self._packed = packed
        self._count = count
        self._dtype = dtype
        self._many_cores = target.cores > 1
        self._has_gathers = target.arch == "x86_64"
        self._samples, *rest = (_flat(buffer) for buffer in ins)
        names = ["feature", "threshold"] if packed.complete else ["roots", "nodes"]
        if not packed.complete and dtype == "float64":
            names.append("threshold")
        names += ["rows", "values"] if packed.complete and not packed.one_target else ["values"]
        names += ["sets"] if packed.mixed else []
        names += ["owner"] if packed.one_target and packed.targets > 1 else []
        self._weights = dict(zip(names, rest, strict=True))
        self._out = _flat(out)

    def write(self) -> tirx.Stmt:
        """Return all loops."""
        rows = min(self._count, _AT_ONCE)
        whole, rest = divmod(self._count, rows)
        with IRBuilder() as builder:
            with ir.seq_scope():
                parallel = ir.parallel if self._many_cores and whole > 1 else ir.serial
                with parallel(0, whole) as tile:
                    self._tile(tile * rows, rows)
                if rest:
                    self._tile(whole * rows, rest)
            return builder.get()

    def _tile(self, first: Index, rows: int) -> None:
        """Write some samples: all trees for them, in groups."""
        packed = self._packed
        samples, stride, start = self._samples, packed.features, first * packed.features
        if packed.missing:
            samples, stride, start = self._copied(first, rows), 2 * packed.features, 0
        bases = [start + row * stride for row in range(rows)]
        neutral = {"MIN": np.inf, "MAX": -np.inf}.get(packed.aggregate, 0.0)
        sums = _local(rows * packed.targets, self._dtype)
        with ir.serial(0, rows * packed.targets) as i:
            sums[i] = tirx.const(neutral, self._dtype)
        walk = self._complete_walk if packed.complete else self._node_walk
        with ir.serial(0, packed.trees // packed.group) as group:
            trees = [group * packed.group + place for place in range(packed.group)]
            places = _local(rows * packed.group, "int32")
            walk(samples, bases, trees, places)
            for place, tree in enumerate(trees):
                for row in range(rows):
                    self._add(sums, row, tree, places[place * rows + row])
        with ir.serial(0, rows * packed.targets) as i:
            total = sums[i]
            if neutral:  # a target that no leaf spoke of is 0
                total = tirx.Select(total == tirx.const(neutral, self._dtype), _zero(self._dtype), total)
            self._out[first * packed.targets + i] = total

    def _copied(self, first: Index, rows: int) -> Flat:
        """Write copies of the samples: as they are, and with negative infinity for missing values."""
        features = self._packed.features
        copy = _local(rows * 2 * features, self._dtype)
        lowest = tirx.const(-np.inf, self._dtype)
        for row in range(rows):
            with ir.serial(0, features) as i:
                value = self._samples[(first + row) * features + i]
                copy[row * 2 * features + i] = value
                copy[(row * 2 + 1) * features + i] = tirx.Select(tirx.isnan(value), lowest, value)
        return copy

    def _complete_walk(
        self, samples: Flat, bases: Sequence[Index], trees: Sequence[Index], places: Flat
    ) -> None:
        """Write walks through complete trees; then `places` has the number of each leaf in its tree."""
        packed = self._packed
        tests = max(1, 2**packed.levels - 1)
        feature, threshold = self._weights["feature"], self._weights["threshold"]
        pairs = [(tree, base) for tree in trees for base in bases]
        for walk in range(len(pairs)):
            places[walk] = 0
        for level in range(packed.levels):
            for walk, (tree, base) in enumerate(pairs):
                test = tree * tests + (2**level - 1) + places[walk]
                value = samples[base + feature[test]]
                places[walk] = places[walk] * 2 + tirx.Select(self._passes(value, threshold[test]), 0, 1)

    def _passes(self, value: tirx.Expr, threshold: tirx.Expr) -> tirx.Expr:
        if self._has_gathers:
            value, threshold = self._scalar(value), self._scalar(threshold)
        return value < threshold if self._packed.strict else value <= threshold

    def _scalar(self, value: tirx.Expr) -> tirx.Expr:
        """Keep LLVM from making one vector of what several walks load.

        It would gather; a chain of gathers takes up to twice as long as eight chains of loads.
        """
        return instruction("arithmetic.fence", self._dtype, value)

    def _node_walk(self, samples: Flat, bases: Sequence[Index], trees: Sequence[Index], places: Flat) -> None:
        """Write walks through nodes; then `places` has the payload of each leaf."""
        packed = self._packed
        nodes, roots = self._weights["nodes"], self._weights["roots"]
        pairs = [(tree, base) for tree in trees for base in bases]
        for walk, (tree, _) in enumerate(pairs):
            places[walk] = roots[tree]
        moved = _local(1, "int32")
        moved[0] = 1
        # Not a `while`: the bound says how much work this is.
        with (
            ir.serial(0, max(1, -(-packed.levels // (1 if packed.mixed else _STEPS)))),
            ir.If(moved[0] != 0),
            ir.Then(),
        ):
            moved[0] = 0
            if packed.mixed:
                self._mixed_step(samples, bases, places, len(pairs), moved)
            for step in range(0 if packed.mixed else _STEPS):
                last = moved if step == _STEPS - 1 else None
                for walk, (_, base) in enumerate(pairs):
                    self._step(samples, base, places, walk, last)
        for walk in range(len(pairs)):
            places[walk] = nodes[places[walk] * 4 + 1]

    def _step(self, samples: Flat, base: Index, places: Flat, walk: int, moved: Flat | None) -> None:
        """Write a step of a walk; `moved` becomes true if it has not arrived yet."""
        nodes, place = self._weights["nodes"], places[walk]
        passes = self._node_passes(samples, base, place)
        following = tirx.Select(passes, nodes[place * 4 + 2], nodes[place * 4 + 3])
        if moved is None:
            places[walk] = following
            return
        after = _local(1, "int32")
        after[0] = following
        moved[0] = tirx.bitwise_or(moved[0], tirx.bitwise_xor(after[0], place))
        places[walk] = after[0]

    def _node_passes(self, samples: Flat, base: Index, place: tirx.Expr) -> tirx.Expr:
        """Return whether a sample passes a node's test; a leaf's test does not matter."""
        nodes = self._weights["nodes"]
        return self._passes(samples[base + nodes[place * 4]], self._threshold(place))

    def _threshold(self, place: tirx.Expr) -> tirx.Expr:
        if self._dtype == "float64":
            return self._weights["threshold"][place]
        return tirx.reinterpret("float32", self._weights["nodes"][place * 4 + 1])

    def _mixed_step(
        self, samples: Flat, bases: Sequence[Index], places: Flat, walks: int, moved: Flat
    ) -> None:
        """Write a step of all walks, whose nodes say what passes; a loop, because a step is long."""
        nodes = self._weights["nodes"]
        stride = bases[1] - bases[0] if len(bases) > 1 else 0
        ints, numbers = _local(3, "int32"), _local(2, self._dtype)
        with ir.serial(0, walks) as walk:
            ints[0] = places[walk]
            ints[1] = nodes[ints[0] * 4]
            word = ints[1]
            base = bases[0] + tirx.floormod(walk, len(bases)) * stride
            numbers[0] = samples[base + tirx.bitwise_and(word, FEATURE_MASK)]
            numbers[1] = self._threshold(ints[0])
            value, threshold = numbers[0], numbers[1]

            def has(bit: int) -> tirx.Expr:
                return tirx.bitwise_and(word, bit << TEST_SHIFT) != 0

            less = tirx.And(value < threshold, has(LESS))
            equal = tirx.And(value == threshold, has(EQUAL))
            missing = tirx.And(tirx.isnan(value), has(NAN))
            passes = tirx.Or(tirx.Or(less, equal), missing)
            member = tirx.And(self._is_member(value, nodes[ints[0] * 4 + 1], has(MEMBER)), has(MEMBER))
            places[walk] = tirx.Select(
                tirx.Or(passes, member), nodes[ints[0] * 4 + 2], nodes[ints[0] * 4 + 3]
            )
            moved[0] = tirx.bitwise_or(moved[0], tirx.bitwise_xor(places[walk], ints[0]))

    def _is_member(self, value: tirx.Expr, payload: tirx.Expr, applies: tirx.Expr) -> tirx.Expr:
        """Return whether a value is in the set at `payload`; other nodes look into the first set instead."""
        sets = self._weights["sets"]
        at = _local(2, "int32")
        at[0] = tirx.Select(applies, payload, 0)
        start = at[0]
        limit = tirx.Cast(self._dtype, sets[start] * 32)
        inside = tirx.And(value >= _zero(self._dtype), value < limit)
        # A conversion of what does not fit an integer is undefined.
        at[1] = tirx.Cast("int32", tirx.Select(inside, value, _zero(self._dtype)))
        category = at[1]
        whole = tirx.Cast(self._dtype, category) == value
        bits = sets[start + 1 + tirx.shift_right(category, 5)]
        bit = tirx.bitwise_and(tirx.shift_right(bits, tirx.bitwise_and(category, 31)), 1)
        return tirx.And(tirx.And(inside, whole), bit != 0)

    def _add(self, sums: Flat, row: int, tree: Index, leaf: tirx.Expr) -> None:
        """Write the aggregation of a leaf into the sums of a sample."""
        packed = self._packed
        combine = _COMBINE[packed.aggregate]
        values = self._weights["values"]
        if packed.one_target:
            value = values[tree * 2**packed.levels + leaf] if packed.complete else values[leaf]
            place = row * packed.targets
            if packed.targets > 1:
                place = place + self._weights["owner"][tree]
            sums[place] = combine(sums[place], value)
            return
        if packed.complete:
            leaf = self._weights["rows"][tree * 2**packed.levels + leaf]
        # One at a time, so that each target's sum keeps its order; LLVM makes vectors of them.
        with ir.vectorized(0, packed.targets) if packed.targets <= 4 else ir.serial(0, packed.targets) as i:
            place = row * packed.targets + i
            sums[place] = combine(sums[place], values[leaf * packed.targets + i])


_COMBINE: Final[dict[str, Callable[[tirx.Expr, tirx.Expr], tirx.Expr]]] = {
    "SUM": lambda a, b: a + b,
    "MIN": lambda a, b: tirx.Select(b < a, b, a),
    "MAX": lambda a, b: tirx.Select(b > a, b, a),
}


def _zero(dtype: str) -> tirx.Expr:
    return tirx.const(0.0, dtype)


def _flat(buffer: tirx.Buffer) -> Flat:
    flat: Flat = ir.buffer_proxy(buffer)
    return flat


def _local(count: int, dtype: str) -> Flat:
    return _flat(ir.alloc_buffer((count,), dtype, scope="local"))
