"""Weights of few bits in a Relax module: integers with a scale for each block of a column, as one call.

This is what ONNX's DequantizeLinear with a `block_size` and com.microsoft's MatMulNBits mean:

    weight[k, n] = (codes[k, n] - zeros[k // block, n]) * scales[k // block, n]

TVM's front end has no such operator. A call stays one node until `builder.kernels.passes.blocked` writes the
kernels that decode the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from tvm import relax
from tvm.ir import Call

from builder.calls.packed import packed_name

_PREFIX: Final = "edge.blocked_weights"
TYPES: Final = ("int8", "uint8")
# The codes that fit four bits.
_NIBBLES: Final[Mapping[str, tuple[int, int]]] = {"int8": (-8, 7), "uint8": (0, 15)}


@dataclass(frozen=True, slots=True)
class BlockedWeights:
    """A matrix of weights.

    Attributes
    ----------
    codes
        int8 or uint8, `[rows, columns]`.
    scales
        float32, the shape of `codes` with `ceil(extent / block)` along `axis`.
    zeros
        The codes that stand for 0: the type of `codes`, the shape of `scales`.
    axis
        The axis that is divided into blocks, 0 or 1.
    block
        Elements of a block; the last one may be incomplete.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    axis: int
    block: int

    def __post_init__(self) -> None:
        shape = list(self.codes.shape)
        if len(shape) != 2 or self.axis not in (0, 1) or self.block < 1 or self.codes.size == 0:
            raise ValueError(f"expected a matrix in blocks along axis 0 or 1, got {shape}")
        shape[self.axis] = -(-shape[self.axis] // self.block)
        if list(self.scales.shape) != shape or list(self.zeros.shape) != shape:
            got = f"{list(self.scales.shape)} and {list(self.zeros.shape)}"
            raise ValueError(f"expected scales and zero points of shape {shape}, got {got}")
        if str(self.codes.dtype) not in TYPES or self.zeros.dtype != self.codes.dtype:
            got = f"{self.codes.dtype} and {self.zeros.dtype}"
            raise ValueError(f"expected codes and zero points in int8 or uint8, got {got}")

    @property
    def bits(self) -> int:
        """4 if all codes and zero points fit four bits, else 8."""
        low, high = _NIBBLES[str(self.codes.dtype)]
        parts = (self.codes, self.zeros)
        return 4 if all(part.min() >= low and part.max() <= high for part in parts) else 8

    def spread(self, part: np.ndarray) -> np.ndarray:
        """Repeat an array of one element for each block, so that it has the shape of `codes`."""
        indices = np.arange(self.codes.shape[self.axis]) // self.block
        return np.take(part, indices, self.axis)

    def dense(self) -> np.ndarray:
        """Return the weights, float32, `[rows, columns]`."""
        steps = self.codes.astype(np.float32) - self.spread(self.zeros).astype(np.float32)
        return np.asarray(steps * self.spread(self.scales), np.float32)

    def transposed(self) -> BlockedWeights:
        """Return the transposed matrix."""
        codes, scales, zeros = (np.ascontiguousarray(a.T) for a in (self.codes, self.scales, self.zeros))
        return BlockedWeights(codes, scales, zeros, 1 - self.axis, self.block)

    def emit(self, bb: relax.BlockBuilder) -> relax.Expr:
        """Emit the call that stands for the weights."""
        arguments = relax.Tuple([relax.const(part) for part in (self.codes, self.scales, self.zeros)])
        name = f"{_PREFIX}.{self.axis}.{self.block}"
        kind = relax.TensorType(self.codes.shape, "float32")
        return bb.emit(relax.call_dps_packed(name, arguments, kind))

    @classmethod
    def of(cls, call: Call) -> BlockedWeights | None:
        """Return the weights that a call stands for, None if it is any other call."""
        name = packed_name(call)
        if not name.startswith(f"{_PREFIX}."):
            return None
        axis, block = name.removeprefix(f"{_PREFIX}.").split(".")
        codes, scales, zeros = (field.value.numpy() for field in call.args[1].fields)
        return cls(codes, scales, zeros, int(axis), int(block))
