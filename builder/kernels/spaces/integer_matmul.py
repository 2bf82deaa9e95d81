"""Products of small integers with constant weights, with int32 sums.

The left operand is `[..., K]` of `uint8` or `int8`; weights become `[N/nb, K/g, nb, g]`, where a panel of
`nb` columns is a few vectors wide and `g` is the group of the core's instruction (`builder.target.dot`). A
tile of `rows` rows x one panel is kept in registers while K runs. Panels are the outer, parallel loop, so
each weight is read by one core. The last panel and the last group are filled with zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm.s_tir.schedule import LoopRV, SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser, Decision, Space
from builder.kernels.rewriter import Values, constant_of, shape_of
from builder.kernels.spaces import prefetch, tiled
from builder.kernels.spaces.dot_loops import group_axes, in_pairs, lane_index, mark_dot, member, words_group
from builder.kernels.spaces.epilogue import Epilogue, emit_kernel
from builder.kernels.spaces.integer_convolution import is_longer_group, start_sums, tile_cost
from builder.kernels.spaces.loops import extent_of, extents_of, fact, unroll_all
from builder.kernels.spaces.matmul import first_columns
from builder.kernels.spaces.register_tile import hold_operand, tilings
from builder.target.device_target import DeviceTarget

KIND: Final = "integer_matmul"
# Steps of the reduction that are unrolled, in bytes of a row: one vector of a held operand. With many
# registers and nothing held, twice as many, so that a round has a line of the next panel to prefetch.
_UNROLLED: Final = 16


def panel_width(columns: int, rows: int, target: DeviceTarget) -> int:
    """Return the columns of a panel: for several rows, those of the tile with the fewest loads a product.

    If data are held in registers, or for one row, it is the widest without much padding.
    """
    lanes = max(target.dot.lanes, target.simd.lanes)
    most = 4 if rows > 1 else 8
    widths = [lanes * count for count in range(1, most + 1) if rows == 1 or _rows(count * lanes, target) > 1]

    def whole(width: int) -> int:
        return -(-columns // width) * width

    def loads(width: int) -> float:
        at_once = min(_rows(width, target), rows)
        return whole(width) / width * (tile_cost(1, at_once, width, target) or math.inf) / at_once

    if rows == 1 or target.dot.held:
        return min(widths or [lanes], key=lambda width: (whole(width), -width))
    return min(widths or [lanes], key=lambda width: (loads(width), -width))


def _rows(width: int, target: DeviceTarget, group: int = 1) -> int:
    """Return how many rows of `width` sums fit the registers."""
    return max((r for r in range(1, 17) if tile_cost(1, r, width, target, group) is not None), default=1)


def pack(weight: np.ndarray, panel: int, group: int) -> np.ndarray:
    """Return `[K, N]` as `[ceil(N / panel), ceil(K / group), panel, group]`, filled with zeros."""
    depth, columns = weight.shape
    full = np.zeros((-(-depth // group) * group, -(-columns // panel) * panel), weight.dtype)
    full[:depth, :columns] = weight
    full = full.reshape(-1, group, full.shape[1] // panel, panel)
    return np.ascontiguousarray(full.transpose(2, 0, 3, 1))


def emit(table: Values, var: relax.Var, call: Call, target: DeviceTarget) -> bool:
    """Replace the product with a constant int8 matrix by one with packed panels.

    Result: whether `var` was defined.
    """
    weight, left, dot = constant_of(call.args[1]), shape_of(call.args[0]), target.dot
    if weight is None or weight.ndim != 2 or weight.dtype != np.int8 or len(left) < 2:
        return False
    if str(call.ty.dtype) != "int32" or str(call.args[0].ty.dtype) not in ("uint8", "int8"):
        return False
    if dot.data in ("uint8", "int8") and dot.data != str(call.args[0].ty.dtype):
        return False
    columns = weight.shape[1]
    panel = panel_width(columns, int(np.prod(left[:-1])), target)
    group = words_group(partial(pack, weight, panel), dot, weight.shape[0])
    packed, dtype = pack(weight, panel, group), dot.data
    if dot.halves and group > 1:
        packed = in_pairs(packed)
    elif dot.halves:
        dtype = "int16"
    new = emit_kernel(
        table.bb,
        "integer_matmul",
        lambda a, b: product(filled_rows(a, group, dtype), b, columns),
        table.plain(call.args[0]),
        relax.const(packed),
    )
    table.define(var, new)
    return True


def filled_rows(x: te.Tensor, group: int, dtype: str) -> te.Tensor:
    """Return `x` as `dtype`, its rows filled to whole groups; `x` itself if it is that already."""
    *lead, depth = (int(d) for d in x.shape)
    full = -(-depth // group) * group
    if full == depth and str(x.dtype) == dtype:
        return x

    def element(*i: tirx.Var) -> tirx.Expr:
        value = x(*i).astype(dtype)
        return value if full == depth else tirx.if_then_else(i[-1] < depth, value, tirx.const(0, dtype))

    return te.compute((*lead, full), element, name="filled")


def product(a: te.Tensor, b: te.Tensor, columns: int) -> te.Tensor:
    """Return the tensor expression of a product with packed panels.

    `a`: the left operand, `[..., K]`, K a multiple of the group.
    `b`: the panels, `[ceil(N / panel), K / group, panel, group]`, or groups as `dot_loops.in_pairs`.
    `columns`: N. If it is not a multiple of the panel, the product has the panel's columns, and a copy
        without them follows.
    """
    panels, steps, *lanes = (int(d) for d in b.shape)
    group = int(a.shape[-1]) // steps
    panel = math.prod(lanes) // group
    ko = te.reduce_axis((0, steps), "ko")
    kg = group_axes(group, halves=len(lanes) > 2)

    def element(*i: tirx.Var) -> tirx.Expr:
        value = a(*i[:-1], ko * group + member(kg)).astype("int32")
        factor = b(i[-1] // panel, ko, *lane_index(i[-1] % panel, kg)).astype("int32")
        return te.sum(value * factor, axis=[ko, *kg])

    full = te.compute(
        (*a.shape[:-1], panels * panel), element, name="matmul", attrs={SPACE_MARK: KIND, "edge.panel": panel}
    )
    return first_columns(full, columns)


@dataclass(frozen=True, slots=True)
class IntegerMatmulTiles:
    """The decisions of the design space.

    `rows`: rows held in registers.
    `k`: groups of the reduction unrolled.
    """

    rows: Decision
    k: Decision


def space(
    rows: int, steps: int, panel: int, target: DeviceTarget, group: int = 1
) -> Space[IntegerMatmulTiles]:
    """Return the design space of a product of `rows` rows, `steps` groups and panels of `panel` columns.

    `group` is the length of a group, if it is longer than that of the instruction.
    """
    options = tilings(rows, 32)
    most = _rows(panel, target, group)
    best = min((r for r in options if r <= most), key=lambda r: (-(-rows // r) * (panel + r), -r))
    ks = tuple(k for k in (1, 2, 4, 8) if steps % k == 0)
    unrolled = _UNROLLED if target.dot.held or target.simd.registers < 32 else 2 * _UNROLLED
    wanted = max(1, unrolled // (max(group, target.dot.group) * np.dtype(target.dot.data).itemsize))
    return Space(IntegerMatmulTiles(best, max(k for k in ks if k <= wanted)), {"rows": options, "k": ks})


def _loops(sch: st.Schedule, block: SBlockRV) -> tuple[list[LoopRV], list[LoopRV]]:
    """Return the loops over the result, and those of the reduction."""
    kinds = [var.iter_type for var in sch.get(block).iter_vars]
    count = kinds.count(tirx.IterVar.DataPar)
    loops = list(sch.get_loops(block))
    return loops[:count], loops[count:]


def apply(
    sch: st.Schedule, block: SBlockRV, tiles: IntegerMatmulTiles, panel: int, target: DeviceTarget
) -> None:
    """Order the loops of a product with packed panels, of its operand and of its epilogue."""
    operands = sch.get_producers(block)
    epilogue = Epilogue.after(sch, block)
    (*lead, j), (k, *kg) = _loops(sch, block)
    i = tiled.pop_rows(sch, lead)
    width = max(target.dot.lanes, target.simd.lanes)
    io, ii = sch.split(i, [None, tiles.rows])
    lanes = width if len(kg) == 1 else 4
    jo, jt, ji = sch.split(j, [None, panel // lanes, lanes])
    ko, ki = sch.split(k, [None, tiles.k])
    tile = (jt, ii) if is_longer_group(sch, kg, target) else (ii, jt)
    sch.reorder(jo, *lead, io, ko, ki, *tile, ji, *kg)
    epilogue.place(io, vector=width)
    if target.dot.held:
        hold_operand(sch, block, ko)
    else:
        prefetch.mark(sch, ko, rows=1)
    sch.parallel(jo)
    unroll_all(sch, jt, ii, ki)
    start_sums(sch, block, ko)
    mark_dot(sch, ji)
    for operand in operands:
        *rows, row = sch.get_loops(operand)
        sch.vectorize(sch.split(row, [None, width])[1])
        sch.parallel(sch.fuse(*rows) if len(rows) > 1 else rows[0])


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block` by the decisions of `choose`."""
    panel = int(fact(sch, block, "edge.panel"))
    (*lead, _), (k, *kg) = _loops(sch, block)
    group = math.prod(extents_of(sch, kg))
    rows, steps = extents_of(sch, lead), extent_of(sch, k)
    tiles = space(tiled.whole_rows(rows), steps, panel, target, group).decide(choose)
    apply(sch, block, tiles, panel, target)
