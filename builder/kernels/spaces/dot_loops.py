"""The loops that `builder.codegen.dot_products` replaces by instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from tvm import s_tir as st
from tvm import te, tirx
from tvm.s_tir.schedule import LoopRV

from builder.target.dot import Dot

DOT_MARK: Final = "edge.dot"
LANES_MARK: Final = "edge.dot_lanes"


def mark_dot(sch: st.Schedule, loop: LoopRV) -> None:
    """Mark the loop over the lanes of a vector of sums; only the loop over a group may be inside it."""
    sch.annotate(loop, DOT_MARK, 1)


def mark_lanes(sch: st.Schedule, loop: LoopRV) -> None:
    """Mark the loop over the lanes of a vector of sums if each lane has data of its own, in several rows.

    Only the loop over the rows, which are the elements of a group, may be inside it.
    """
    sch.annotate(loop, LANES_MARK, 1)


def in_pairs(weights: np.ndarray) -> np.ndarray:
    """Return weights `[..., lanes, group]` as `[..., lanes / 4, group / 2, 4, 2]`: pairs of four lanes."""
    *lead, lanes, group = weights.shape
    split = weights.reshape(*lead, lanes // 4, 4, group // 2, 2)
    return np.ascontiguousarray(split.swapaxes(-3, -2))


def fits_words(weights: np.ndarray) -> bool:
    """Whether the sums of a group fit 16 bits, for weights `[..., lanes, group]`, int8, and any int8.

    A group has two sums: those of the products of its even and of its odd elements. Each is largest if every
    factor is 127 or -128, by the sign of its weight, and smallest if it is the other one.
    """
    *lead, group = weights.shape
    chains = weights.reshape(*lead, group // 2, 2).astype(np.int32)
    up, down = np.maximum(chains, 0).sum(axis=-2), -np.minimum(chains, 0).sum(axis=-2)
    word = np.iinfo(np.int16)
    return bool(((127 * up + 128 * down) <= word.max).all() and ((128 * up + 127 * down) <= -word.min).all())


def words_group(pack: Callable[[int], np.ndarray], dot: Dot, depth: int) -> int:
    """Return how many adjacent elements are multiplied until their sums of 16 bits are added to those of 32.

    A group of eight has two sums of four products, so it needs half of the additions (SADALP) that two groups
    of four need. In registers, a group of sixteen takes more than it saves.

    `pack`: returns the weights `[..., lanes, group]` for the length of a group.
    `dot`: the instruction. Without `halves`, the result is its own group.
    `depth`: adjacent elements of the left factor, which groups divide.
    Result: the longest group of which all sums fit 16 bits; 1 if the weights are too large for any.
    """
    if not dot.halves:
        return dot.group
    groups = [2 * dot.group] if depth % (2 * dot.group) == 0 else []
    return next((group for group in (*groups, dot.group) if fits_words(pack(group))), 1)


def is_shorter_than_wanted(func: tirx.PrimFunc) -> bool:
    """Whether a kernel adds two products in 16 bits because its weights are too large for four."""
    types = [param.ty for param in func.params if isinstance(param.ty, tirx.BufferType)]
    shapes = [[int(d) for d in t.shape] for t in types if str(t.dtype) == "int8"]
    # [OC/bo/t, IC/bi, KH, KW, bi/4, t, bo/4, 2, 4, 2] or [N/nb, K/4, nb/4, 2, 4, 2], with whole groups of 8.
    groups = {10: 4, 6: 1}
    return any(s[-3:] == [2, 4, 2] and len(s) in groups and s[groups[len(s)]] % 2 == 0 for s in shapes)


def group_axes(group: int, *, halves: bool) -> list[tirx.IterVar]:
    """Return the axes of the reduction over the elements of a group."""
    extents = (group // 2, 2) if halves else (group,)
    return [te.reduce_axis((0, extent), name) for extent, name in zip(extents, ("ih", "ig"), strict=False)]


def member(axes: Sequence[tirx.IterVar]) -> tirx.Expr:
    """Return the place of an element in its group."""
    return axes[0] if len(axes) == 1 else axes[0] * 2 + axes[1]


def lane_index(lane: tirx.Var, axes: Sequence[tirx.IterVar]) -> tuple[tirx.Expr, ...]:
    """Return the last indices of the weights of a lane: `[lanes, group]`, or as `in_pairs` stores them."""
    return (lane, axes[0]) if len(axes) == 1 else (lane // 4, axes[0], lane % 4, axes[1])
