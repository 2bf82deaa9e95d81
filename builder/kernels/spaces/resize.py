"""Resizing pictures on packed channels: a vector holds the channels of one pixel.

A bilinear resize first blends two rows of the picture for each row of the result, and then two of its columns
for each pixel. Which ones, and how much of each, is in tables. Where the result leaves the packed layout, as
at the end of a network that labels each pixel, the same kernel unpacks what is resized for a few pixels from
the L1 cache.

For other methods, TVM's expression of the picture's coordinates is kept. It is computed once for each pixel,
not for each channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from tvm import relax, te, tirx, topi
from tvm import s_tir as st
from tvm.ir import Call
from tvm.s_tir.schedule import SBlockRV

from builder.errors import UnsuitedError
from builder.kernels.decisions import SPACE_MARK, Chooser
from builder.kernels.rewriter import op_name, shape_of
from builder.kernels.spaces.epilogue import emit_kernel
from builder.kernels.spaces.loops import extent_of, extents_of
from builder.kernels.spaces.unpacking import unpack
from builder.target.device_target import DeviceTarget

NAME: Final = "relax.image.resize2d"
KIND: Final = "resize"
_RANK: Final = 4  # of an image that is not packed
_MOST_BLOCKS: Final = 2  # a block of the result may have channels of two blocks, if groups are padded

# The place in the input of each place in the result, from the places and both extents (ONNX's Resize).
_Places = Callable[[np.ndarray, int, int], np.ndarray]
_PLACES: Final[Mapping[str, _Places]] = {
    "half_pixel": lambda at, before, after: (at + 0.5) * before / after - 0.5,
    "pytorch_half_pixel": lambda at, before, after: (
        (at + 0.5) * before / after - 0.5 if after > 1 else 0 * at
    ),
    "align_corners": lambda at, before, after: at * (before - 1) / max(1, after - 1),
    "asymmetric": lambda at, before, after: at * before / after,
}


def emit(bb: relax.BlockBuilder, call: Call, x: relax.Expr) -> relax.Expr | None:
    """Emit a resize of packed `x`, `[N, C/b, H, W, b]`; None if `call` is another operator."""
    if op_name(call) != NAME or call.attrs.layout != "NCHW":
        return None
    if not is_bilinear(call):
        return emit_kernel(bb, "resize2d", lambda data: _as_tvm(call, data), x)
    return emit_kernel(
        bb, "resize2d", lambda data, *tables: blended(data, tables, {SPACE_MARK: KIND}), x, *_tables(call)
    )


def is_bilinear(call: Call) -> bool:
    """Whether a resize of float32 blends two rows and two columns, of which none is outside the picture."""
    mode = str(call.attrs.coordinate_transformation_mode)
    return str(call.attrs.method) == "linear" and mode in _PLACES and str(call.ty.dtype) == "float32"


def emit_unpacked(bb: relax.BlockBuilder, call: Call, x: relax.Expr, channels: int, group: int) -> relax.Expr:
    """Emit a bilinear resize of packed `x` whose result is plain; see `unpacking.unpack`.

    `x`: `[N, C/b, H, W, b]`.
    `channels`, `group`: the channels without padding, and how many are before each padding.
    """

    def compute(data: te.Tensor, *tables: te.Tensor) -> te.Tensor:
        return unpack(blended(data, tables, {}), channels, group, KIND)

    return bb.emit(bb.call_te(compute, x, *_tables(call), primfunc_name_hint="resize2d"))


def _tables(call: Call) -> list[relax.Expr]:
    """Return for rows, then for columns: the first that is blended, the second, and the share of that."""
    tables: list[relax.Expr] = []
    for before, after in zip(shape_of(call.args[0])[2:], shape_of(call)[2:], strict=True):
        at = _PLACES[str(call.attrs.coordinate_transformation_mode)](np.arange(after), before, after)
        first = np.floor(at)
        both = [np.clip(place, 0, before - 1).astype(np.int32) for place in (first, first + 1)]
        tables += map(relax.const, both)
        tables.append(relax.const((at - first).astype(np.float32)))
    return tables


def blended(data: te.Tensor, tables: Sequence[te.Tensor], marks: Mapping[str, str]) -> te.Tensor:
    """Return the expression of a bilinear resize of packed `data`, with the tables of `_tables`."""
    top, bottom, down, left, right, across = tables
    n, blocks, _, width, b = (int(d) for d in data.shape)
    size = (int(top.shape[0]), int(left.shape[0]))
    one = tirx.const(1, "float32")

    def row(i: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        share = down[y]
        return data[i, o, top[y], z, v] * (one - share) + data[i, o, bottom[y], z, v] * share

    rows = te.compute((n, blocks, size[0], width, b), row, name="rows")

    def element(i: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        share = across[z]
        # Clipped once more for TVM, which must see that `rows` is not read outside.
        first, second = (tirx.min(tirx.max(at[z], 0), width - 1) for at in (left, right))
        return rows[i, o, y, first, v] * (one - share) + rows[i, o, y, second, v] * share

    return te.compute((n, blocks, *size, b), element, name="resize", attrs=dict(marks))


def _as_tvm(call: Call, data: te.Tensor) -> te.Tensor:
    """Return TVM's expression of a resize of packed `data`."""
    attrs, size = call.attrs, shape_of(call)[2:]
    n, blocks, height, width, b = (int(d) for d in data.shape)
    # One block of channels after the other is a batch, in the layout that TVM knows.
    pictures = te.compute(
        (n * blocks, height, width, b),
        lambda i, y, z, v: data[i // blocks, i % blocks, y, z, v],
        name="pictures",
    )
    resized = topi.image.resize2d(
        pictures,
        roi=attrs.roi,
        size=size,
        layout="NHWC",
        method=attrs.method,
        coordinate_transformation_mode=attrs.coordinate_transformation_mode,
        rounding_method=attrs.rounding_method,
        bicubic_alpha=attrs.cubic_alpha,
        bicubic_exclude=attrs.cubic_exclude,
        extrapolation_value=attrs.extrapolation_value,
    )

    def element(i: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        return resized[i * blocks + o, y, z, v]

    return te.compute((n, blocks, *size, b), element, name="resize")


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of a bilinear resize: a row of a block of channels is one job.

    Raises `UnsuitedError` if a few pixels of the result need more than the same pixels of the resized
        picture.
    """
    del choose
    last = block
    while consumers := sch.get_consumers(last):
        inner = [each for each in consumers if sch.get_consumers(each)]
        for each in inner or [last]:
            sch.compute_inline(each)
        last = last if inner else consumers[0]
    plain = len(sch.get_loops(last)) == _RANK
    before = sch.get_sblock("resize") if plain else last
    rows = sch.get_sblock("rows")
    if plain:
        resized_block = int(sch.get(before).writes[0].source.shape[4])
        image, channel, row, column = sch.get_loops(last)
        outer, inner = sch.split(channel, [None, min(resized_block, extent_of(sch, channel))])
        pixels, vector = sch.split(column, [None, min(target.simd.lanes, extent_of(sch, column))])
        sch.reorder(image, outer, row, pixels, inner, vector)
        sch.set_scope(before, 0, "local")
        sch.compute_at(before, pixels)
        outside = len(sch.get_loops(last)) - 2  # its last two loops are over pixels and channels of a tile
        tile = math.prod(extents_of(sch, sch.get_loops(before)[outside:]))
        if tile > _MOST_BLOCKS * resized_block * target.simd.lanes:
            raise UnsuitedError(f"expected the pixels of a tile, got {tile} elements of the picture")
        sch.vectorize(sch.get_loops(before)[-1])
    else:
        image, outer, row, column, vector = sch.get_loops(last)
    job = sch.fuse(image, outer, row)
    sch.compute_at(rows, job)
    sch.vectorize(sch.get_loops(rows)[-1])
    sch.parallel(job)
    sch.vectorize(vector)
