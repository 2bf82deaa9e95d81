"""Prefetches of weights.

Register tiles read one panel of weights again and again, then the next. The first tile of a panel does not
find it in the L1 or L2 cache. On small planes, where a panel serves only a few tiles, the core then waits for
memory, which was idle before. So a design space marks the loop that reads a panel (`mark`), and
`prefetch_panels` makes each round of that loop prefetch its share of the next panel.

LLVM takes a prefetch for a reader of all memory that is not on the stack. Sums that a round changes must be
there (scope `local`; `builder.codegen.register_tiles`), or every round stores them.

Only x86 does this: small ARM cores track few outstanding cache misses, and each instruction costs them more.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import tvm_ffi
from tvm import s_tir as st
from tvm import tirx
from tvm.ir import Call, Op, TensorLoad
from tvm.s_tir.schedule import LoopRV
from tvm_ffi import WalkResult

from builder.target.device_target import DeviceTarget

_MARK: Final = "edge.panel_rounds"
_ALWAYS: Final = "edge.always_prefetched"
_PANELS: Final = "edge.panels_of_a_round"
_TIMES: Final = "edge.times_all_panels"
_MARKS: Final = (_MARK, _ALWAYS, _PANELS, _TIMES)
LINE_BYTES: Final = 64
# Arguments of llvm.prefetch. The next panel goes to the L2 cache: the L1 cache holds the current panel.
_READ, _L2, _DATA = 0, 2, 1


def mark(
    sch: st.Schedule, loop: LoopRV, rows: int, *, always: bool = False, panels: int = 1, times: int = 1
) -> None:
    """Mark `loop` as the one that reads a panel of weights.

    `loop`: a loop of a reduction, inside one parallel loop and any number of others.
    `rows`: successive rounds of the parallel loop that read the same panel.
    `always`: whether to prefetch however many tiles a panel serves, because its rounds are long.
    `panels`: panels that a round of the parallel loop reads one after another, in the outermost loops inside
        it.
    `times`: how often the parallel loop reads all panels, such as once for each image.
    """
    sch.annotate(loop, _MARK, rows)
    if times > 1:
        sch.annotate(loop, _TIMES, times)
    if panels > 1:
        sch.annotate(loop, _PANELS, panels)
    if always:
        sch.annotate(loop, _ALWAYS, 1)


def prefetch_panels(func: tirx.PrimFunc, target: DeviceTarget) -> tirx.PrimFunc:
    """Return `func` without marks and, if they pay, with prefetches of the next panel in the marked loops."""
    wanted = target.core.prefetches

    def parallel(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        found = _marked(loop.body, ())
        if found is None:
            return loop
        inner, between = found
        prefetches = _prefetches(loop, between, inner) if wanted else ()
        body = tirx.SeqStmt([*prefetches, inner.body]) if prefetches else inner.body
        others = {key: value for key, value in inner.annotations.items() if key not in _MARKS}
        new = tirx.For(inner.loop_var, inner.min, inner.extent, inner.kind, body, None, others)

        def replace(other: tirx.For) -> tirx.For:
            return new if other.loop_var.same_as(inner.loop_var) else other

        body = tvm_ffi.structural_map(loop.body, (tirx.For, replace))
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, None, loop.annotations)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, parallel)))


def _marked(body: tirx.Stmt, outside: tuple[tirx.For, ...]) -> tuple[tirx.For, tuple[tirx.For, ...]] | None:
    """Return the marked loop in `body`, and the loops around it: `outside` and those in `body`."""
    found: list[tuple[tirx.For, tuple[tirx.For, ...]]] = []

    def loop(stmt: tirx.For) -> WalkResult:
        if _MARK in stmt.annotations:
            found.append((stmt, outside))
        elif (deeper := _marked(stmt.body, (*outside, stmt))) is not None:
            found.append(deeper)
        return WalkResult.SKIP

    tvm_ffi.structural_walk(body, (tirx.For, loop), order="pre")
    return found[0] if found else None


def _prefetches(outer: tirx.For, between: tuple[tirx.For, ...], inner: tirx.For) -> tuple[tirx.Stmt, ...]:
    """Return the prefetches of a round of `inner`: its share of the next panel, in whole cache lines.

    If a share is less than half a line, there are none unless the loop is marked so: the panel then serves so
    many tiles that waiting for it hardly matters.
    """
    weights = _second_factor(inner.body)
    if weights is None:
        return ()
    loops = (*between, inner)
    rows, panels, times = (int(inner.annotations.get(key, 1)) for key in (_MARK, _PANELS, _TIMES))
    panel = math.prod(int(d) for d in weights.shape) * rows * times // (int(outer.extent) * panels)
    which = outer.loop_var // rows
    if times > 1:
        which = which % (outer.extent // (rows * times))
    count = int(outer.extent) * panels // (rows * times)
    if times > 1 and count == 1:
        return ()  # the only panel is in the cache
    while panels > 1:
        which = which * loops[0].extent + loops[0].loop_var
        panels //= int(loops[0].extent)
        loops = loops[1:]
    rounds = rows * math.prod(int(q.extent) for q in loops)
    line = LINE_BYTES // np.dtype(str(weights.dtype)).itemsize
    lines = round(panel / (rounds * line))
    step = lines * line
    if _ALWAYS in inner.annotations:
        # Successive rounds may prefetch the same line, and all of them together only the next panel.
        lines, step = -(-panel // (rounds * line)), -(-panel // rounds)
    at = outer.loop_var % rows
    for loop in loops:
        at = at * loop.extent + loop.loop_var
    following = (which + 1) % count if times > 1 else which + 1  # after the last panel, the first again
    first = following * panel + at * step
    zeros = [0] * (len(weights.shape) - 1)
    how = [tirx.const(a, "int32") for a in (_READ, _L2, _DATA)]
    addresses = [tirx.address_of(weights[(*zeros, first + k * line)]) for k in range(lines)]
    prefetch = Op.get("tirx.prefetch")
    return tuple(tirx.Evaluate(Call(prefetch, [address, *how], ret_ty="void")) for address in addresses)


def _second_factor(body: tirx.Stmt) -> tirx.Buffer | None:
    """Return the buffer of the weights: the second factor of the innermost product."""
    products: list[tirx.Mul] = []
    tvm_ffi.structural_walk(body, (tirx.Mul, products.append))
    for product in products:
        a, b = (f.value if isinstance(f, tirx.Cast) else f for f in (product.a, product.b))
        if isinstance(a, TensorLoad) and isinstance(b, TensorLoad):
            return b.source
    return None
