"""Products with weights of few bits, which are decoded in registers.

The weights are `BlockedWeights` with blocks along K. Their codes become panels, `[N/nb, blocks, B, nb]`;
or `[N/nb, blocks, B/8, nb]` of int32 with eight codes of four bits, those of steps 8k to 8k + 7, the first in
the lowest bits. For each block, a tile of `rows` rows x one panel sums the products with the codes. Only then
it applies scale and zero point:

    y[n]  =  sum over blocks of (sum(x * code) - zero * sum(x)) * scale

A code of four bits is not shifted to the right: masked where it is, code `j` of a word becomes the number
`code * 16^j`, and the row was multiplied by `16^-j` before. So it takes two instructions, a mask and a
conversion. The last code is shifted instead, because it contains the sign.

A product with many rows decodes its weights when the bundle is loaded instead: there the arithmetic takes the
time, not the reading of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import SBlockRV

from builder.calls.blocked_weights import BlockedWeights
from builder.kernels.decisions import SPACE_MARK, Chooser
from builder.kernels.rewriter import emit_weights, shape_of
from builder.kernels.spaces import matmul, tiled
from builder.kernels.spaces.epilogue import NEVER_FUSED, emit_kernel
from builder.kernels.spaces.half_matmul import PartTile, order_parts
from builder.kernels.spaces.loops import extent_of, extents_of, fact
from builder.kernels.spaces.register_tile import multiplies_by_element, tilings
from builder.target.device_target import DeviceTarget

KIND: Final = "blocked_matmul"
_NIBBLES: Final = 8  # codes of four bits in a word
_LAST: Final = _NIBBLES - 1


def panel_width(columns: int, rows: int, target: DeviceTarget) -> int:
    """Return the columns of a panel: more vectors for a single row, whose sums must hide latencies."""
    lanes = target.simd.lanes
    most = max(1, target.simd.registers // (4 if rows == 1 else 8))
    vectors = -(-columns // lanes)
    return lanes * min(range(1, most + 1), key=lambda c: (-(-vectors // c) * c - vectors, -c))


def pack_codes(weights: BlockedWeights, panel: int) -> np.ndarray:
    """Return the codes in panels, `[N/nb, blocks, B, nb]`; `[N/nb, blocks, B/8, nb]` if they have 4 bits.

    Codes of 4 bits are unsigned: those of int8 are 8 larger.
    """
    depth, columns = weights.codes.shape
    blocks, steps = len(weights.scales), _steps(weights)
    size = min(weights.block, depth)
    filler = np.zeros((blocks * size, columns), weights.codes.dtype)
    filler[:depth] = weights.codes
    codes = np.zeros((blocks, steps, columns), weights.codes.dtype)
    codes[:, :size] = filler.reshape(blocks, size, columns)
    if weights.bits == 4:
        unsigned = (codes + _shift(weights)).astype(np.uint32)
        parts = [unsigned[:, j::_NIBBLES] << np.uint32(4 * j) for j in range(_NIBBLES)]
        codes = np.bitwise_or.reduce(parts).view(np.int32)
    return matmul.pack(codes, panel)


def _steps(weights: BlockedWeights) -> int:
    """Return the steps of a block, completed to whole words."""
    size = min(weights.block, len(weights.codes))
    return -(-size // _NIBBLES) * _NIBBLES if weights.bits == 4 else size


def _shift(weights: BlockedWeights) -> int:
    return 8 if weights.bits == 4 and weights.codes.dtype == np.int8 else 0


@dataclass(frozen=True, slots=True)
class Codes:
    """How the codes of a panel are read.

    `bits`: 4 or 8.
    `steps`: steps of K in a block, completed to whole words.
    `block`: those that are not filler, but for the last block.
    `depth`: K.
    `zero`: the code that stands for 0 everywhere; None if each block has its own.
    """

    bits: int
    steps: int
    block: int
    depth: int
    zero: int | None

    @classmethod
    def of(cls, weights: BlockedWeights) -> Codes:
        """Return how the packed codes of `weights` are read."""
        zeros = weights.zeros.astype(np.int32) + _shift(weights)
        zero = int(zeros.flat[0]) if (zeros == zeros.flat[0]).all() else None
        depth = len(weights.codes)
        return cls(weights.bits, _steps(weights), min(weights.block, depth), depth, zero)

    def read(self, codes: te.Tensor, p: tirx.Expr, b: tirx.Expr, k: tirx.Expr, n: tirx.Expr) -> tirx.Expr:
        """Return the code of step `k` of block `b` in column `n` of panel `p`, as float32."""
        if self.bits == 8:
            return codes[p, b, k, n].astype("float32")
        word, place = codes[p, b, k // _NIBBLES, n], (k % _NIBBLES).astype("int32")
        return ((word >> (place * 4)) & 15).astype("float32")

    def read_scaled(
        self, codes: te.Tensor, p: tirx.Expr, b: tirx.Expr, k: tirx.Expr, n: tirx.Expr
    ) -> tirx.Expr:
        """Return the same, but a code of four bits divided by `factor`."""
        if self.bits == 8:
            return self.read(codes, p, b, k, n)
        word, place = codes[p, b, k // _NIBBLES, n], (k % _NIBBLES).astype("int32")
        last = (word >> (4 * _LAST)) & 15
        mask = tirx.const(15, "int32") << (place * 4)
        return tirx.Select(place == _LAST, last, word & mask).astype("float32")

    def factor(self, k: tirx.Expr) -> tirx.Expr:
        """Return the power of two by which a row's element of step `k` is multiplied for `read_scaled`."""
        result: tirx.Expr = tirx.const(1.0, "float32")
        for place in range(1, _LAST):
            result = tirx.Select(k % _NIBBLES == place, tirx.const(16.0**-place, "float32"), result)
        return result

    def point(self, zeros: te.Tensor | None, p: tirx.Expr, b: tirx.Expr, n: tirx.Expr) -> tirx.Expr | None:
        """Return the code that stands for 0 in a column of a block, float32; None if it is always 0."""
        if zeros is not None:
            return zeros[p, b, n].astype("float32")
        return tirx.const(float(self.zero), "float32") if self.zero else None


def emit(bb: relax.BlockBuilder, x: relax.Expr, weights: BlockedWeights, target: DeviceTarget) -> relax.Expr:
    """Emit the product of `x`, float32, `[..., K]`, with weights whose blocks are along axis 0."""
    rows = int(np.prod(shape_of(x)[:-1]))
    columns = weights.codes.shape[1]
    few = rows <= matmul.FEW_ROWS
    panel = (panel_width if few else matmul.panel_width)(columns, rows, target)
    code = Codes.of(weights)
    operands = [relax.const(pack_codes(weights, panel)), emit_weights(bb, matmul.pack(weights.scales, panel))]
    if code.zero is None:
        zeros = weights.zeros.astype(np.int16) + _shift(weights)
        dtype = np.uint8 if weights.bits == 4 else weights.codes.dtype
        operands.append(relax.const(matmul.pack(zeros.astype(dtype), panel)))
    if not few:
        dense = emit_kernel(
            bb, "decoded_weights", lambda b, s, *z: decoded(b, s, *z, code=code), *operands, attrs=NEVER_FUSED
        )
        return matmul.emit_packed(bb, x, dense, columns, target)
    width = min(panel, target.simd.lanes)
    return emit_kernel(
        bb,
        "blocked_matmul",
        lambda a, b, s, *z: product(a, b, s, *z, code=code, columns=columns, width=width),
        x,
        *operands,
    )


def decoded(b: te.Tensor, s: te.Tensor, z: te.Tensor | None = None, *, code: Codes) -> te.Tensor:
    """Return the weights of packed codes, float32, `[N/nb, K, nb]`."""

    def element(p: tirx.Var, k: tirx.Var, n: tirx.Var) -> tirx.Expr:
        block, step = k // code.block, k % code.block
        value, point = code.read(b, p, block, step, n), code.point(z, p, block, n)
        return (value if point is None else value - point) * s[p, block, n]

    panels, panel = int(b.shape[0]), int(b.shape[-1])
    return te.compute((panels, code.depth, panel), element, name="decoded")


def product(
    a: te.Tensor,
    b: te.Tensor,
    s: te.Tensor,
    z: te.Tensor | None = None,
    *,
    code: Codes,
    columns: int,
    width: int,
) -> te.Tensor:
    """Return the tensor expression of a product with packed codes.

    `a`: the left operand, `[..., K]`.
    `b`, `s`, `z`: codes, scales and zero points in panels; without `z`, `code` has the zero point.
    `columns`: N. If it is not a multiple of `width`, the product has columns that complete its last vector,
        and a copy without them follows.
    """
    lead = tuple(int(d) for d in a.shape[:-1])
    blocks, panel = int(b.shape[1]), int(b.shape[-1])
    full = -(-columns // width) * width
    rows = a
    if code.steps != code.block or blocks * code.block != code.depth:
        rows = _filled(a, blocks, code)
    scaled = rows
    if code.bits == 4:
        scaled = te.compute(rows.shape, lambda *i: rows(*i) * code.factor(i[-1]), name="scaled")
    k = te.reduce_axis((0, code.steps), "k")

    def partial(*i: tirx.Var) -> tirx.Expr:
        *at, block, n = i
        value = scaled[(*at, block * code.steps + k)]
        return te.sum(value * code.read_scaled(b, n // panel, block, k, n % panel), axis=k)

    sums = te.compute((*lead, blocks, full), partial, name="block_sums")
    totals = None
    if code.zero != 0:
        kt = te.reduce_axis((0, code.steps), "k")
        totals = te.compute(
            (*lead, blocks),
            lambda *i: te.sum(rows[(*i[:-1], i[-1] * code.steps + kt)], axis=kt),
            name="totals",
        )
    block = te.reduce_axis((0, blocks), "block")

    def element(*i: tirx.Var) -> tirx.Expr:
        *at, n = i
        part = sums[(*at, block, n)]
        point = code.point(z, n // panel, block, n % panel)
        if point is not None and totals is not None:
            part = part - point * totals[(*at, block)]
        return te.sum(part * s[n // panel, block, n % panel], axis=block)

    mark = {SPACE_MARK: KIND, "edge.panel": panel}
    result = te.compute((*lead, full), element, name="matmul", attrs=mark)
    return matmul.first_columns(result, columns)


def _filled(a: te.Tensor, blocks: int, code: Codes) -> te.Tensor:
    """Return rows whose blocks are completed with zeros to whole words, and the last to a whole block."""

    def element(*i: tirx.Var) -> tirx.Expr:
        *at, j = i
        step = j % code.steps
        k = j // code.steps * code.block + step
        inside = tirx.all(step < code.block, k < code.depth)
        return tirx.if_then_else(inside, a[(*at, k)], tirx.const(0.0, "float32"))

    return te.compute((*a.shape[:-1], blocks * code.steps), element, name="filled")


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block`, a product with packed codes."""
    panel = int(fact(sch, block, "edge.panel"))
    width = min(panel, target.simd.lanes)
    sums = next(p for p in sch.get_producers(block) if sch.get(p).name_hint == "block_sums")
    count, vectors = tiled.whole_rows(extents_of(sch, sch.get_loops(block)[:-2])), panel // width
    options, most = tilings(count, matmul.FEW_ROWS), max(1, target.simd.registers // 2 // vectors)
    rows = choose("rows", options, max(r for r in options if r <= most or r == 1))
    steps = extent_of(sch, sch.get_loops(sums)[-1])
    # Codes of four bits are read from a word: their steps are unrolled together.
    is_words = str(sch.get(sums).reads[-1].source.dtype) == "int32"
    sizes = (_NIBBLES, 2 * _NIBBLES) if is_words else (1, 2, 4, 8, 16)
    unrolled = tuple(d for d in sizes if steps % d == 0)
    unroll = choose("k", unrolled, max(d for d in unrolled if d <= (_NIBBLES if is_words else 4)))
    tile = PartTile(rows, unroll, vectors, width, multiplies_by_element(target) and unroll % 4 == 0)
    others = sch.get_child_blocks(sch.get_sblock("root"))
    order_parts(sch, block, sums, tile, [o for o in others if sch.get(o).name_hint == "filled"])
