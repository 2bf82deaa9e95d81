"""The epilogue: the operators that are fused after an anchor, such as bias, activation and residual add.

The blocks after the anchor are inlined into the last of them, which is computed while the anchor's tile is
still in registers. If no block follows an anchor, it gets a copy as its epilogue, so that it accumulates in
a separate buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from tvm import relax, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import LoopRV, SBlockRV

from builder.kernels.spaces.fallback import is_cheap
from builder.kernels.spaces.loops import extent_of, unroll_all

# Attributes of a function (TVM's OpPatternKind): whether fusion appends element-wise operators to it.
# For a result that is larger than its operand, although TVM may take it for element-wise by its indices.
INJECTIVE: Final[Mapping[str, int]] = {"op_pattern": 2}  # kInjective
FUSES_ELEMENTWISE: Final[Mapping[str, int]] = {"op_pattern": 4}  # kOutEWiseFusable
NEVER_FUSED: Final[Mapping[str, int]] = {"op_pattern": 8}  # kOpaque
# No tile has more vectors. The epilogue of a gate has: it multiplies a whole picture by each of its elements.
_MAX_UNROLLED: Final = 32
# Vectors whose bytes are stored together (`builder.codegen.joined_bytes`).
_JOINED: Final = 4


def emit_kernel(
    bb: relax.BlockBuilder,
    name: str,
    compute: Callable[..., Any],
    *args: Any,  # noqa: ANN401 - as `call_te` takes them
    attrs: Mapping[str, object] = FUSES_ELEMENTWISE,
) -> relax.Expr:
    """Emit a call of a tensor expression; `attrs` say what is fused to its kernel."""
    return bb.emit(bb.call_te(compute, *args, primfunc_name_hint=name, primfunc_attrs=attrs))


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The blocks after an anchor, as one block.

    `apart`: whether it has loops of its own: each of its rows repeats the only column of the anchor, so no
        tile of the anchor has a tile of it.
    """

    sch: st.Schedule
    block: SBlockRV
    apart: bool = False

    @classmethod
    def after(cls, sch: st.Schedule, anchor: SBlockRV) -> Epilogue:
        """Inline all blocks after `anchor` into the last of them.

        Raises `ScheduleError` if several outputs of the function read the anchor.
        """
        columns = [_columns(sch, consumer) for consumer in sch.get_consumers(anchor)]
        while consumers := sch.get_consumers(anchor):
            inner = [block for block in consumers if sch.get_consumers(block)]
            if not inner and len(consumers) == 1:
                cls._inline_operands(sch, consumers[0], anchor)
                return cls(sch, consumers[0], apart=columns == [1] and _columns(sch, consumers[0]) > 1)
            if not inner:
                raise st.ScheduleError("expected one output after the anchor, got several")
            for block in inner:
                sch.compute_inline(block)
        return cls(sch, sch.cache_write(anchor, 0, "global"))

    @staticmethod
    def _inline_operands(sch: st.Schedule, block: SBlockRV, anchor: SBlockRV) -> None:
        """Inline what computes the other operands of an epilogue, such as a residual that is dequantised."""
        name = sch.get(anchor).name_hint
        while others := [p for p in sch.get_producers(block) if sch.get(p).name_hint != name]:
            for other in others:
                sch.compute_inline(other)

    def place(self, loop: LoopRV, vector: int | None = None, *, unrolled: bool = True) -> None:
        """Compute the epilogue inside `loop`: its last axis is vectorised, the axes of the tile are unrolled.

        `loop`: a loop of the anchor that encloses one tile.
        `vector`: elements of the last axis in a vector; None if the whole axis is one vector.
        `unrolled`: whether the axes of the tile are unrolled, because its sums are in registers. Otherwise
            only the last one is, if it has a few vectors: their bytes are then stored together.
        """
        sch = self.sch
        if self.apart:
            last = sch.get_loops(self.block)[-1]
            sch.vectorize(last if vector is None else sch.split(last, [None, vector])[1])
            return
        sch.reverse_compute_at(self.block, loop, preserve_unit_loops=True)
        inner = sch.get_loops(self.block)[_depth(sch, loop) :]
        last = inner.pop()
        if vector is not None and extent_of(sch, last) > vector:
            outer, last = sch.split(last, [None, vector])
            inner.append(outer)
            if not unrolled and extent_of(sch, outer) <= _JOINED and is_cheap(sch.get(self.block)):
                sch.unroll(outer)
        sch.vectorize(last)
        # A long formula unrolled over a tile would be more code than the product itself. It stays a loop, and
        # reads the tile from the L1 cache.
        vectors = prod(extent_of(sch, rest) for rest in inner)
        if unrolled and vectors <= _MAX_UNROLLED and is_cheap(sch.get(self.block)):
            unroll_all(sch, *inner)


def _columns(sch: st.Schedule, block: SBlockRV) -> int:
    """Return the extent of the last axis of what a block computes."""
    return int(sch.get(block).writes[0].source.shape[-1])


def _depth(sch: st.Schedule, loop: LoopRV) -> int:
    """Count the loops from the outermost to `loop`, including both."""
    depth = 0
    sref = sch.get_sref(loop)
    while isinstance(sref.stmt, tirx.For):
        depth += 1
        sref = sref.parent
    return depth
