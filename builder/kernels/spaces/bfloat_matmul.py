"""Products of bfloat16 with constant weights, with float32 sums.

Both operands are bits of bfloat16 (`bfloat_numbers`). Layouts and loops are those of products of integers: of
`integer_matmul` with a group of two elements, or of `tile_matmul` if the core multiplies tiles of bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from tvm import relax, te
from tvm import s_tir as st
from tvm.ir import Call

from builder.errors import BuildError
from builder.kernels.decisions import Chooser
from builder.kernels.rewriter import constant_of, shape_of
from builder.kernels.spaces import integer_matmul, tile_matmul, tiled
from builder.kernels.spaces.bfloat_numbers import BITS, bits_of
from builder.kernels.spaces.epilogue import FUSES_ELEMENTWISE
from builder.kernels.spaces.tile_loops import FEWEST_ROWS, STEPS
from builder.target.device_target import DeviceTarget
from builder.target.dot import Dot

KIND: Final = "bfloat_matmul"
TILE_KIND: Final = "bfloat_tile_matmul"
# With so few rows, a product takes as long as its weights take to arrive, which are half as many bytes.
FEW_ROWS: Final = 4


def fits(call: Call, target: DeviceTarget) -> bool:
    """Whether a product of float32 has a constant matrix on its right, and is faster in bfloat16."""
    weight = constant_of(call.args[1])
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32 or not weight.size:
        return False
    shape = shape_of(call.args[0])
    return str(call.args[0].ty.dtype) == "float32" and len(shape) >= 2 and pays(shape[:-1], target)


def pays(lead: Sequence[int], target: DeviceTarget) -> bool:
    """Whether a product whose left operand is `[*lead, K]` is faster in bfloat16 than in float32."""
    if _on_tiles(lead, target):
        return True
    return _has_pairs(target) and (target.core.bfloats > 1 or math.prod(lead) <= FEW_ROWS)


def rows_that_pay(target: DeviceTarget) -> str:
    """Return the condition of `pays` as words that follow "products"; "" if there is none."""
    if _has_pairs(target) and target.core.bfloats > 1:
        return ""
    few = [f"at most {FEW_ROWS}"] if _has_pairs(target) else []
    many = [f"at least {FEWEST_ROWS}"] if _dot_of(target).tiles else []
    return f" of {' or '.join([*few, *many])} rows"


def _has_pairs(target: DeviceTarget) -> bool:
    return bool(_dot_of(target).name)


def _on_tiles(lead: Sequence[int], target: DeviceTarget) -> bool:
    return _dot_of(target).tiles and tiled.whole_rows(lead) >= FEWEST_ROWS


def emit(bb: relax.BlockBuilder, x: relax.Expr, weight: np.ndarray, target: DeviceTarget) -> relax.Expr:
    """Emit the product of rows with a constant matrix.

    Parameters
    ----------
    bb
        Receives the call.
    x
        The left operand, `[..., K]`, bits of bfloat16.
    weight
        The right one, `[K, N]`, float32; it is rounded.
    target
        A device that multiplies bfloat16.

    Returns
    -------
    relax.Expr
        The product, `[..., N]`, float32.
    """
    dot = _dot_of(target)
    columns, rows = weight.shape[1], tiled.whole_rows(shape_of(x)[:-1])
    bits = bits_of(weight)
    if _on_tiles(shape_of(x)[:-1], target):
        panels = tile_matmul.pack_panels(bits, rows, dot.group)

        def compute(a: te.Tensor, b: te.Tensor) -> te.Tensor:
            left = integer_matmul.filled_rows(a, STEPS * dot.group, BITS)
            return tile_matmul.product(left, b, columns, TILE_KIND)

        name = "bfloat_matmul_on_tiles"
    else:
        panel = integer_matmul.panel_width(columns, rows, replace(target, dot=dot))
        panels = integer_matmul.pack(bits, panel, dot.group)

        def compute(a: te.Tensor, b: te.Tensor) -> te.Tensor:
            return integer_matmul.product(integer_matmul.filled_rows(a, dot.group, BITS), b, columns, KIND)

        name = "bfloat_matmul"
    call = bb.call_te(
        compute, x, relax.const(panels), primfunc_name_hint=name, primfunc_attrs=FUSES_ELEMENTWISE
    )
    return bb.emit(call)


def _dot_of(target: DeviceTarget) -> Dot:
    """Return the instruction for bfloat16.

    Raises
    ------
    BuildError
        If the device has none; no model is compiled so for it.
    """
    if target.bfloat is None:
        raise BuildError(f"expected a target that multiplies bfloat16, got {target.name} ({target.cpu})")
    return target.bfloat


def schedule(sch: st.Schedule, block: st.schedule.SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block` by the decisions of `choose`."""
    integer_matmul.schedule(sch, block, replace(target, dot=_dot_of(target)), choose)
