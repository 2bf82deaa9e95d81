"""Rows of a table whose numbers have few bits, such as an embedding.

Only the rows that are read are decoded. The table is `BlockedWeights`. Codes of four bits are stored two in a
byte: those of columns 2j and 2j + 1, the first in the lower half. An index out of range takes the nearest
row, as in every gather: indices may come from users.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from tvm import relax, te, tirx

from builder.calls.blocked_weights import BlockedWeights
from builder.kernels.rewriter import emit_weights

_NIBBLES: Final = 2


def emit(bb: relax.BlockBuilder, weights: BlockedWeights, indices: relax.Expr) -> relax.Expr:
    """Emit the rows of `weights`, `[..., columns]`, for integers of any shape."""
    codes, columns = weights.codes, weights.codes.shape[1]
    shift, bits = 0, weights.bits
    if bits == 4:
        shift = 8 if codes.dtype == np.int8 else 0
        whole = np.zeros((len(codes), columns + columns % _NIBBLES), np.uint8)
        whole[:, :columns] = (codes + shift).astype(np.uint8)
        codes = whole[:, 0::2] | whole[:, 1::2] << 4
    points = weights.zeros.astype(np.int16) + shift
    zero = int(points.flat[0]) if (points == points.flat[0]).all() else None
    operands = [relax.const(codes), emit_weights(bb, weights.scales)]
    if zero is None:
        operands.append(relax.const(points.astype(codes.dtype)))
    height = len(weights.codes)

    def rows(index: te.Tensor, table: te.Tensor, scale: te.Tensor, *point: te.Tensor) -> te.Tensor:
        def element(*i: tirx.Var) -> tirx.Expr:
            *at, j = i
            wanted = index(*at).astype("int64")
            row = tirx.max(tirx.min(wanted, tirx.const(height - 1, "int64")), tirx.const(0, "int64"))
            block = (row // weights.block, j) if weights.axis == 0 else (row, j // weights.block)
            if bits == 4:
                both = table[row, j // _NIBBLES].astype("int32")
                value = (both >> (j % _NIBBLES * 4)) & 15
            else:
                value = table[row, j].astype("int32")
            origin = point[0][block].astype("int32") if point else tirx.const(zero, "int32")
            return (value - origin).astype("float32") * scale[block]

        return te.compute((*index.shape, columns), element, name="rows")

    call = bb.call_te(rows, indices, *operands, primfunc_name_hint="decoded_rows")
    return bb.emit(call)
