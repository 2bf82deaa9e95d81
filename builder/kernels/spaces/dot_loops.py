"""The loops that `builder.codegen.dot_products` replaces by instructions."""

from __future__ import annotations

from typing import Final

from tvm import s_tir as st

DOT_MARK: Final = "edge.dot"


def mark_dot(sch: st.Schedule, loop: st.schedule.LoopRV) -> None:
    """Mark the loop over the lanes of a vector of sums; only the loop over a group may be inside it."""
    sch.annotate(loop, DOT_MARK, 1)
