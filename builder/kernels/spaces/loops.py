"""What spaces ask of a schedule's loops and blocks, and what they do with several loops at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvm import s_tir as st
from tvm.s_tir.schedule import LoopRV, SBlockRV


def extent_of(sch: st.Schedule, loop: LoopRV) -> int:
    """Return the rounds of a loop."""
    return int(sch.get(loop).extent)


def extents_of(sch: st.Schedule, loops: Iterable[LoopRV]) -> list[int]:
    """Return the rounds of each loop."""
    return [extent_of(sch, loop) for loop in loops]


def longer(sch: st.Schedule, loops: Iterable[LoopRV]) -> list[LoopRV]:
    """Return the loops with more than one round."""
    return [loop for loop in loops if extent_of(sch, loop) > 1]


def fact(sch: st.Schedule, block: SBlockRV, name: str, default: Any = None) -> Any:  # noqa: ANN401 - TVM's
    """Return what was put on a block when it was made: its annotation `name`."""
    return sch.get(block).annotations.get(name, default)


def unroll_all(sch: st.Schedule, *loops: LoopRV) -> None:
    """Unroll loops."""
    for loop in loops:
        sch.unroll(loop)


def vectorise_all(sch: st.Schedule, *loops: LoopRV) -> None:
    """Make each loop a vector."""
    for loop in loops:
        sch.vectorize(loop)
