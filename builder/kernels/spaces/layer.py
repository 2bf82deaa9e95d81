"""A convolution of packed channels, as each algorithm that may compute it is given it.

An algorithm's `emit` returns None where it does not apply, or is slower than those after it in the list of
candidates (`builder.kernels.passes.packed_convolutions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import relax, te, tirx

from builder.kernels.rewriter import shape_of
from builder.kernels.spaces.epilogue import emit_kernel
from builder.kernels.spaces.geometry import Conv2d
from builder.target.device_target import DeviceTarget

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution whose result is `[N, OC/bo, OH, OW, bo]`.

    `bb`: receives the calls.
    `x`: the input, `[N, IC/bi, H, W, bi]`.
    `weight`: `[OC, IC/groups, KH, KW]`: a constant, or computed, which is packed at each run.
    `out_block`: `bo`, the channels in a block of the output.
    `target`: its heuristic tiles decide how weights are packed.
    `zero`: the zero point of bytes, int32, a scalar; None for real numbers. Sums of bytes are int32, and
        what padding adds to them is left to the caller.
    `dtype`: the result's if it has real numbers: float16 if the sums of a single chunk may be.
    `is_whole`: whether the window has all the model's taps, not only those that read the image.
    """

    bb: relax.BlockBuilder
    op: Conv2d
    x: relax.Expr
    weight: Array | relax.Expr
    out_block: int
    target: DeviceTarget
    zero: relax.Expr | None = None
    dtype: str = "float32"
    is_whole: bool = True

    @property
    def in_block(self) -> int:
        """`bi`, the channels in a block of the input."""
        return shape_of(self.x)[4]

    @property
    def out_blocks(self) -> int:
        """Blocks of the output's channels."""
        return -(-self.op.out_channels // self.out_block)

    @property
    def data(self) -> str:
        """The input's dtype."""
        return str(self.x.ty.dtype)

    @property
    def numbers(self) -> Array:
        """The weights, which are constant."""
        assert isinstance(self.weight, np.ndarray)
        return self.weight

    @property
    def is_in_halves(self) -> bool:
        """Whether its products are computed in float16."""
        return isinstance(self.weight, np.ndarray) and self.weight.dtype == np.float16

    def emit_bytes(
        self,
        name: str,
        packed: Array,
        number: int | None,
        dtype: str,
        compute: Callable[[te.Tensor, te.Tensor, tirx.Expr], te.Tensor],
    ) -> relax.Expr:
        """Emit a kernel of bytes.

        `number`: the zero point if it is written into the kernel; None if it is an operand.
        `compute`: takes the data, the packed weights, and the zero point, of `dtype`.
        """

        def with_point(data: te.Tensor, w: te.Tensor, *point: te.Tensor) -> te.Tensor:
            value = point[0]().astype(dtype) if number is None else tirx.const(number, dtype)
            return compute(data, w, value)

        operands = [self.zero] if number is None else []
        return emit_kernel(self.bb, name, with_point, self.x, relax.const(packed), *operands)
