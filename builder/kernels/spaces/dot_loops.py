"""The loops that `builder.codegen.dot_products` replaces by instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from tvm import s_tir as st
from tvm import te, tirx

DOT_MARK: Final = "edge.dot"
LANES_MARK: Final = "edge.dot_lanes"


def mark_dot(sch: st.Schedule, loop: st.schedule.LoopRV) -> None:
    """Mark the loop over the lanes of a vector of sums; only the loop over a group may be inside it."""
    sch.annotate(loop, DOT_MARK, 1)


def mark_lanes(sch: st.Schedule, loop: st.schedule.LoopRV) -> None:
    """Mark the loop over the lanes of a vector of sums if each lane has data of its own, in several rows.

    Only the loop over the rows, which are the elements of a group, may be inside it.
    """
    sch.annotate(loop, LANES_MARK, 1)


def in_halves(weights: np.ndarray) -> np.ndarray:
    """Return weights `[..., lanes, 4]` as `[..., lanes / 4, 2, 4, 2]`: first and second halves of groups."""
    *lead, lanes, _ = weights.shape
    split = weights.reshape(*lead, lanes // 4, 4, 2, 2)
    return np.ascontiguousarray(split.swapaxes(-3, -2))


def fits_halves(weights: np.ndarray) -> bool:
    """Whether two products of weights `[..., lanes, 4]`, int8, with any int8 fit 16 bits.

    The products of the elements 0 and 2, and of 1 and 3, are added.
    """
    lowest = weights == -128  # two products of -128 and -128 are 2^15
    return not (lowest[..., :2] & lowest[..., 2:]).any()


def group_axes(group: int, *, halves: bool) -> list[tirx.IterVar]:
    """Return the axes of the reduction over the elements of a group."""
    extents = (2, 2) if halves else (group,)
    return [te.reduce_axis((0, extent), name) for extent, name in zip(extents, ("ih", "ig"), strict=False)]


def member(axes: Sequence[tirx.IterVar]) -> tirx.Expr:
    """Return the place of an element in its group."""
    return axes[0] if len(axes) == 1 else axes[0] * 2 + axes[1]


def lane_index(lane: tirx.Var, axes: Sequence[tirx.IterVar]) -> tuple[tirx.Expr, ...]:
    """Return the last indices of the weights of a lane: `[lanes, group]`, or as `in_halves` stores them."""
    return (lane, axes[0]) if len(axes) == 1 else (lane // 4, axes[0], lane % 4, axes[1])
