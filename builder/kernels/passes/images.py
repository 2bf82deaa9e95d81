"""Values of other ranks as images `[N, C, H, W]`: a signal is one row, a video one image for each frame.

Promises that a value gets its own shape back where an operator asks for it. Leaves to `convolutions` and
`image_operators` which operators are computed on images.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from tvm import relax

from builder.kernels.rewriter import Values, constant_of, shape_of

# The ranks of `[N, C, W]`, of images and of `[N, C, D, H, W]`.
SIGNAL, IMAGE, VIDEO = 3, 4, 5
# Where their axes are in images. Only a single video has its frames along the first axis.
AXES: Final = {SIGNAL: (0, 1, 3), VIDEO: (None, 1, 0, 2, 3)}


class Images(Values):
    """A table in which signals and single videos may exist as images, and in their own shape on demand.

    `images`: old variable -> its value, `[N, C, 1, W]` or `[D, C, H, W]`.
    """

    def __init__(self, bb: relax.BlockBuilder) -> None:
        super().__init__(bb)
        self.images: dict[relax.Var, relax.Expr] = {}

    def plain(self, expr: relax.Expr) -> relax.Expr:
        """Return `expr` in its own shape."""
        if isinstance(expr, relax.Var) and expr not in self._plain:
            image, shape = self.images[expr], shape_of(expr)
            new = relax.op.squeeze(image, [2]) if len(shape) == SIGNAL else from_frames(self.bb, image, 1)
            self.define(expr, self.bb.emit(new))
        return super().plain(expr)

    def fits(self, expr: relax.Expr, shape: tuple[int, ...]) -> bool:
        """Whether `expr`, which broadcasts to `shape`, does so as an image too."""
        if len(shape) == SIGNAL:
            return True
        own = (1,) * (len(shape) - len(shape_of(expr))) + shape_of(expr)
        return len(shape) == VIDEO and shape[0] == 1 and own[2] in (1, shape[2])

    def as_image(self, expr: relax.Expr, rank: int) -> relax.Expr:
        """Return a value as an image.

        `expr`: a signal or a single video, or what broadcasts to one.
        `rank`: `SIGNAL` or `VIDEO`.
        """
        own = shape_of(expr)
        if isinstance(expr, relax.Var) and expr in self.images and len(own) == rank:
            return self.images[expr]
        shape = (1,) * (rank - len(own)) + own
        numbers = constant_of(expr)
        if numbers is not None:
            return relax.const(_image_of(numbers.reshape(shape)), str(numbers.dtype))
        value = self.plain(expr)
        if rank == SIGNAL:
            *before, width = shape
            new = self.bb.emit(relax.op.reshape(value, (*before, 1, width)))
        else:
            value = value if own == shape else self.bb.emit(relax.op.reshape(value, shape))
            new = self.bb.emit(to_frames(self.bb, value))
        if isinstance(expr, relax.Var) and len(own) == rank:
            self.images[expr] = new
        return new


def _image_of(array: np.ndarray) -> np.ndarray:
    """Return a constant signal or video as an image."""
    if array.ndim == SIGNAL:
        return np.expand_dims(array, 2)
    n, c, d, h, w = array.shape
    return np.ascontiguousarray(array.transpose(0, 2, 1, 3, 4).reshape(n * d, c, h, w))


def to_frames(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """Return videos `[N, C, D, H, W]` as `[N * D, C, H, W]`."""
    n, c, d, h, w = shape_of(x)
    if c > 1 and d > 1:
        x = bb.emit(relax.op.permute_dims(x, [0, 2, 1, 3, 4]))
    return relax.op.reshape(x, (n * d, c, h, w))


def from_frames(bb: relax.BlockBuilder, x: relax.Expr, n: int) -> relax.Expr:
    """Return `[N * D, C, H, W]` as `n` videos `[N, C, D, H, W]`."""
    frames, c, h, w = shape_of(x)
    d = frames // n
    if c == 1 or d == 1:
        return relax.op.reshape(x, (n, c, d, h, w))
    return relax.op.permute_dims(bb.emit(relax.op.reshape(x, (n, d, c, h, w))), [0, 2, 1, 3, 4])


def pad_frames(
    bb: relax.BlockBuilder, x: relax.Expr, n: int, widths: tuple[int, int], value: float
) -> relax.Expr:
    """Return `[N * D, C, H, W]` with frames of a number before and after those of each of `n` videos."""
    if not any(widths):
        return x
    frames, *rest = shape_of(x)
    x = x if n == 1 else bb.emit(relax.op.reshape(x, (n, frames // n, *rest)))
    around = [0] * (2 * len(shape_of(x)))
    around[0 if n == 1 else 2 : 2 if n == 1 else 4] = widths
    x = bb.emit(relax.op.nn.pad(x, around, "constant", value))
    return x if n == 1 else bb.emit(relax.op.reshape(x, (n * (frames // n + sum(widths)), *rest)))


def cut_frames(bb: relax.BlockBuilder, x: relax.Expr, n: int, frames: slice) -> relax.Expr:
    """Return the chosen frames of each of `n` videos, of `[N * D, C, H, W]`."""
    count, *rest = shape_of(x)
    chosen = range(*frames.indices(count // n))
    if len(chosen) == count // n:
        return x
    axis = 0 if n == 1 else 1
    x = x if n == 1 else bb.emit(relax.op.reshape(x, (n, count // n, *rest)))
    bounds = ([chosen.start], [chosen[-1] + 1], [chosen.step])
    x = bb.emit(relax.op.strided_slice(x, [axis], *bounds))
    return x if n == 1 else bb.emit(relax.op.reshape(x, (n * len(chosen), *rest)))
