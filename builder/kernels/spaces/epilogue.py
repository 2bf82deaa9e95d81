"""What is fused after an anchor: bias, activation, residual add.

The blocks after the anchor are inlined into the last of them, and that one is computed where the anchor's
tile is still in registers. An anchor with nothing after it gets a copy in its place, so that it accumulates
in a buffer of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tvm import s_tir as st
from tvm import tirx

from builder.kernels.spaces.fallback import is_cheap

# Values of a function's attribute `op_pattern`, TVM's OpPatternKind: what FuseOps may put behind it.
FUSES_ELEMENTWISE: Final = 4  # kOutEWiseFusable
FUSES_NOTHING: Final = 8  # kOpaque


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The last block of a fused function, after an anchor."""

    sch: st.Schedule
    block: st.schedule.SBlockRV

    @classmethod
    def after(cls, sch: st.Schedule, anchor: st.schedule.SBlockRV) -> Epilogue:
        """Inline everything behind `anchor` into one block."""
        while consumers := sch.get_consumers(anchor):
            inner = [block for block in consumers if sch.get_consumers(block)]
            if not inner and len(consumers) == 1:
                return cls(sch, consumers[0])
            if not inner:
                raise st.ScheduleError("the anchor's result is an output several times over")
            for block in inner:
                sch.compute_inline(block)
        return cls(sch, sch.cache_write(anchor, 0, "global"))

    def place(self, loop: st.schedule.LoopRV, vector: int | None = None) -> None:
        """Compute the epilogue under `loop`, its last axis vectorised and the rest of the tile unrolled.

        Parameters
        ----------
        loop
            A loop of the anchor that encloses one tile.
        vector
            Elements of the last axis in a vector, None where the whole axis is one.
        """
        sch = self.sch
        sch.reverse_compute_at(self.block, loop, preserve_unit_loops=True)
        inner = sch.get_loops(self.block)[_depth(sch, loop) :]
        last = inner.pop()
        if vector is not None and int(sch.get(last).extent) > vector:
            outer, last = sch.split(last, [None, vector])
            inner.append(outer)
        sch.vectorize(last)
        # A long formula, unrolled over a tile, would be more code than the product; it reads the tile from
        # the first cache instead.
        if is_cheap(sch.get(self.block)):
            for rest in inner:
                sch.unroll(rest)


def _depth(sch: st.Schedule, loop: st.schedule.LoopRV) -> int:
    """How many loops there are from the outermost down to `loop`, itself included."""
    depth = 0
    sref = sch.get_sref(loop)
    while isinstance(sref.stmt, tirx.For):
        depth += 1
        sref = sref.parent
    return depth
