"""A convolution's geometry, and how to change it without changing results."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from tvm import tirx
from tvm.ir import Call

from builder.kernels.rewriter import shape_of
from builder.kernels.spaces.register_tile import even_part

# What it costs to move an output that has padding before it, in vectors of products.
_OPERATIONS_TO_MOVE: Final = 2.0


@dataclass(frozen=True, slots=True)
class Conv2d:
    """A convolution's geometry.

    Attributes
    ----------
    batch
        Images.
    in_channels, in_height, in_width
        Of the input.
    out_channels
        Of the output.
    kernel
        The window's rows and columns.
    strides, dilation
        Along rows and columns.
    padding
        Top, left, bottom, right.
    groups
        Groups of channels, each convolved separately.
    """

    batch: int
    in_channels: int
    in_height: int
    in_width: int
    out_channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int

    @classmethod
    def of(cls, call: Call) -> Conv2d | None:
        """Return the geometry of a Relax call, None if its layout is not NCHW."""
        attrs = call.attrs
        if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCHW", "OIHW", "NCHW"):
            return None
        n, c, h, w = shape_of(call.args[0])
        o, _, kh, kw = shape_of(call.args[1])
        padding = [int(p) for p in attrs.padding]
        top, left, bottom, right = padding * 2 if len(padding) == 2 else padding
        sh, sw = (int(v) for v in attrs.strides)
        dh, dw = (int(v) for v in attrs.dilation)
        return cls(n, c, h, w, o, (kh, kw), (sh, sw), (top, left, bottom, right), (dh, dw), int(attrs.groups))

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel has its own filter."""
        return self.groups == self.in_channels == self.out_channels and self.groups > 1

    @property
    def out_height(self) -> int:
        """Rows of the output."""
        span = (self.kernel[0] - 1) * self.dilation[0] + 1
        return (self.in_height + self.padding[0] + self.padding[2] - span) // self.strides[0] + 1

    @property
    def out_width(self) -> int:
        """Columns of the output."""
        span = (self.kernel[1] - 1) * self.dilation[1] + 1
        return (self.in_width + self.padding[1] + self.padding[3] - span) // self.strides[1] + 1

    def idle_share(self, axis: int) -> float:
        """Return the share of taps along an axis, 0 for rows, that read padding, for all outputs together."""
        taps = np.arange(self.kernel[axis]) * self.dilation[axis] - self.padding[axis]
        outputs, inputs = ((self.out_height, self.in_height), (self.out_width, self.in_width))[axis]
        at = np.arange(outputs)[:, None] * self.strides[axis] + taps
        return float(np.mean((at < 0) | (at >= inputs)))


@dataclass(frozen=True, slots=True)
class Rows:
    """How the rows of the output read the input.

    `bytes_each`: bytes of the input that a row reads and the row before it does not.
    """

    count: int = 1
    bytes_each: int = 0

    @classmethod
    def of(cls, count: int, data: tirx.Buffer, image: tuple[int, int] | None = None) -> Rows:
        """Return how `count` rows of the output read `data`, which are packed: `[N, C/b, H, W, b]`.

        If the padding in `data` is not read, `image` has the rows and columns without it.
        """
        _, channels, *extents, block = (int(d) for d in data.shape)
        elements = channels * block * math.prod(image or extents)
        return cls(count, np.dtype(str(data.dtype)).itemsize * elements // count)

    def at_once(self, cache_bytes: int) -> int:
        """Return how many rows are computed together: as many as have an input that fits half a cache."""
        return even_part(self.count, max(1, cache_bytes // 2 // max(1, self.bytes_each)))


@dataclass(frozen=True, slots=True)
class Columns:
    """How the columns of the output read those of the input.

    `window`, `stride`, `dilation`: the convolution's, along a row.
    """

    window: int = 1
    stride: int = 1
    dilation: int = 1

    def reach(self, columns: int) -> int:
        """Return how many columns of the input `columns` adjacent columns of the output read."""
        return (columns - 1) * self.stride + (self.window - 1) * self.dilation + 1


def without_idle_taps(op: Conv2d, weight: np.ndarray) -> tuple[Conv2d, np.ndarray]:
    """Drop the taps at the edges of a window that read only padding, as with a dilation beyond the image.

    `weight`: `[OC, IC/groups, KH, KW]`.
    """
    rows = _used(op.kernel[0], op.strides[0], op.dilation[0], (op.padding[0], op.in_height, op.out_height))
    columns = _used(op.kernel[1], op.strides[1], op.dilation[1], (op.padding[1], op.in_width, op.out_width))
    if (len(rows), len(columns)) == op.kernel:
        return op, weight
    top, left = op.padding[0] - rows[0] * op.dilation[0], op.padding[1] - columns[0] * op.dilation[1]
    bottom = (op.out_height - 1) * op.strides[0] + (len(rows) - 1) * op.dilation[0] + 1 - op.in_height - top
    right = (op.out_width - 1) * op.strides[1] + (len(columns) - 1) * op.dilation[1] + 1 - op.in_width - left
    kernel = np.ascontiguousarray(weight[:, :, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    return replace(op, kernel=(len(rows), len(columns)), padding=(top, left, bottom, right)), kernel


def _used(taps: int, stride: int, dilation: int, extents: tuple[int, int, int]) -> range:
    """Return the taps along an axis that must stay: those that read the input.

    More stay where the padding would be negative without them. `extents` has the padding before the input,
    and the extents of input and output.
    """
    before, inputs, outputs = extents
    reach = (outputs - 1) * stride
    used = [tap for tap in range(taps) if -reach <= tap * dilation - before < inputs]
    first = min(used[0], before // dilation) if used else 0
    last = used[-1] if used else taps - 1
    while last < taps - 1 and reach + last * dilation + 1 < inputs + before:
        last += 1
    return range(first, last + 1)


def fill_groups(op: Conv2d, weight: np.ndarray, lanes: int) -> tuple[Conv2d, np.ndarray, int]:
    """Add outputs whose weights are zeros to each group, so that its outputs fill whole blocks.

    Groups are not merged with zeros between their weights: NaN or infinity in one would make the others NaN.
    Nor would it be much faster: merged groups take as many vectors of products or more, and save only what it
    costs to move outputs that have padding before them.

    `op`: the geometry, with groups of several channels.
    `weight`: `[OC, IC/groups, KH, KW]`.
    `lanes`: values in a vector.
    `op`, `weight`, `block`: the convolution, and the channels in a block of the output, which divides a
        group's outputs. Of all blocks, the one with the fewest operations is taken.
    """
    outputs, inputs = op.out_channels // op.groups, op.in_channels // op.groups

    def operations(block: int) -> float:
        """Return how many vectors are computed or moved for each group."""
        moved = 0 if outputs % block == 0 else _OPERATIONS_TO_MOVE * outputs
        return -(-outputs // block) * inputs * math.prod(op.kernel) + moved

    _, block = min((operations(block), -block) for block in (lanes, lanes // 2, lanes // 4) if block >= 4)
    filled = with_gaps(weight, 0, outputs, -block)
    return replace(op, out_channels=len(filled)), filled, -block


def with_gaps(array: np.ndarray, axis: int, group: int, block: int, fill: float = 0.0) -> np.ndarray:
    """Return `array` with `fill` after each `group` elements of `axis`, up to a whole `block`."""
    padded = -(-group // block) * block
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    split = array.reshape(*before, -1, group, *after)
    widths = [(0, 0)] * split.ndim
    widths[axis + 1] = (0, padded - group)
    return np.pad(split, widths, constant_values=fill).reshape(*before, -1, *after)
