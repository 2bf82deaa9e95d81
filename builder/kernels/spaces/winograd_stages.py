"""The stages before and after Winograd's product, which floats, float16 and integers have in common.

The product between them, where the time is spent, is written by each of them; `winograd_loops` orders these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import te, tirx

from builder.kernels.decisions import SPACE_MARK
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.winograd_transforms import Matrix, places, select
from builder.target.device_target import DeviceTarget

Tile: TypeAlias = tuple[int, int]
"""Rows and columns of the output that are computed together."""

Matrices: TypeAlias = tuple[Matrix, Matrix]
"""The transforms of rows and of columns."""


def shares_sums(target: DeviceTarget) -> bool:
    """Whether transforms share sums, as `Stages.sharing` says: x86 waits for memory there, not for sums."""
    return target.arch == "aarch64"


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of one convolution.

    `tile`: rows and columns of the output's tile.
    `beside`: tiles that the product keeps in registers, and that are adjacent in the transformed input.
    `band`: rows of tiles whose three stages follow one another, so that what is between the stages stays in
        the L2 cache; None if each stage does all tiles of all pictures. With a band, `data` and the product
        have one more axis in front: the bands. It divides the rows if there are several pictures.
    `sharing`: whether the rows of a transform share all sums that they can:
        `winograd_transforms.combine_sharing`.
    """

    op: Conv2d
    tile: Tile
    beside: int
    band: int | None = None
    sharing: bool = False

    @property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The places along the axes of an input tile, as `winograd_transforms.places` orders them."""
        (high, wide), (down, right), (kernel_height, kernel_width) = (
            self.tile,
            self.op.strides,
            self.op.kernel,
        )
        return places(high, down, kernel_height), places(wide, right, kernel_width)

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows and columns of an input tile, and the products along these axes."""
        rows, columns = self.places
        return len(rows), len(columns)

    @property
    def positions(self) -> int:
        """The products of a tile, for a pair of channels."""
        return math.prod(self.sizes)

    @property
    def weights(self) -> int:
        """The transformed weights of a filter: at stride 2, the products of a tile share some of them."""
        return math.prod(m + taps - 1 for m, taps in zip(self.tile, self.op.kernel, strict=True))

    def weights_at(self, position: tirx.Expr) -> tirx.Expr:
        """Return the number of the weights of a position: at stride 2, those from m + 1 on share them."""
        if self.op.strides == (1, 1):
            return position
        wide = self.sizes[1]
        row, column = (
            tirx.min(at, tirx.const(m + 1, "int32"))
            for at, m in zip((position // wide, position % wide), self.tile, strict=True)
        )
        return row * (self.tile[1] + 2) + column

    @property
    def rows(self) -> int:
        """Rows of tiles in a picture."""
        return -(-self.op.out_height // self.tile[0])

    @property
    def columns(self) -> int:
        """Tiles in a row."""
        return -(-self.op.out_width // self.tile[1])

    @property
    def tiles(self) -> int:
        """Tiles of a band, or of all pictures."""
        return (self.op.batch * self.rows if self.band is None else self.band) * self.columns

    @property
    def bands(self) -> tuple[int, ...]:
        """The extent of the axis of bands, if there is one."""
        return () if self.band is None else (-(-self.op.batch * self.rows // self.band),)

    def _place(self, at: Sequence[tirx.Expr], tile: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
        """Return the picture, the row and the column of a tile of the band `at`."""
        row = tile // self.columns
        for band in at:
            row = band * self.band + row
        return row // self.rows, row % self.rows, tile % self.columns

    def _select(
        self, index: tirx.Expr, rows: Matrix, value: Callable[[int], tirx.Expr], dtype: str
    ) -> tirx.Expr:
        return select(index, rows, value, dtype, sharing=self.sharing)

    def data(self, x: te.Tensor, matrices: Matrices, dtype: str, outside: tirx.Expr) -> te.Tensor:
        """Return the transformed input, `[positions, tiles/beside, IB, beside, bi]`, behind the bands.

        `x`: the packed input, `[N, IB, H, W, bi]`.
        `matrices`: the transforms of rows and of columns.
        """
        rows, columns, beside = self.rows, self.columns, self.beside
        (high, wide), (at_rows, at_columns) = self.sizes, self.places
        down, right = (m * stride for m, stride in zip(self.tile, self.op.strides, strict=True))
        n, in_blocks, height, width, bi = (int(d) for d in x.shape)
        top, left = self.op.padding[:2]
        groups = -(-self.tiles // beside)
        bands = self.bands

        def padded(i: tirx.Expr, c: tirx.Expr, y: tirx.Expr, z: tirx.Expr, v: tirx.Expr) -> tirx.Expr:
            inside = tirx.all(i < n, y >= top, y < height + top, z >= left, z < width + left)
            return tirx.if_then_else(inside, x[i, c, y - top, z - left, v].astype(dtype), outside)

        # The last group of tiles may reach into the image after the last one, which is not there.
        before = sum((count - 1) * (self.band or 0) for count in bands)
        images = -(-(before * columns + groups * beside) // (rows * columns))
        # A tile of the input reaches into the next one.
        extents = ((rows - 1) * down + high, (columns - 1) * right + wide)
        pad = te.compute((images, in_blocks, *extents, bi), padded, name="pad")

        def vertical(*at: tirx.Var) -> tirx.Expr:
            *band, c, tile, e, b, v = at
            i, y, z = self._place(band, tile)
            return self._select(
                e, matrices[0], lambda a: pad[i, c, y * down + at_rows[a], z * right + b, v], dtype
            )

        half_in = te.compute((*bands, in_blocks, groups * beside, high, wide, bi), vertical, name="half_in")

        def transformed(*at: tirx.Var) -> tirx.Expr:
            *band, xi, group, c, tile, v = at
            return self._select(
                xi % wide,
                matrices[1],
                lambda b: half_in[(*band, c, group * beside + tile, xi // wide, at_columns[b], v)],
                dtype,
            )

        return te.compute((*bands, high * wide, groups, in_blocks, beside, bi), transformed, name="data")

    def result(
        self,
        product: te.Tensor,
        matrices: Matrices,
        kind: str,
        finish: Callable[[tirx.Expr], tirx.Expr] = lambda value: value,
    ) -> te.Tensor:
        """Return the convolution, `[N, OB, OH, OW, bo]`, of `product`.

        `product`: `[positions, OB, tiles, bo]`, behind the bands; its datatype is that of the result before
            `finish`.
        """
        (high, wide), (_, size) = self.tile, self.sizes
        rows, columns, together = self.rows, self.columns, self.band
        *bands, _, out_blocks, tiles, bo = (int(d) for d in product.shape)
        dtype = str(product.dtype)

        def vertical(*at: tirx.Var) -> tirx.Expr:
            *band, o, tile, a, nu, v = at
            return self._select(a, matrices[0], lambda e: product[(*band, e * size + nu, o, tile, v)], dtype)

        half_out = te.compute((*bands, out_blocks, tiles, high, size, bo), vertical, name="half_out")

        def element(i: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
            row = i * rows + y // high
            band = () if together is None else (row // together,)
            tile = (row if together is None else row % together) * columns + z // wide
            value = self._select(
                z % wide, matrices[1], lambda nu: half_out[(*band, o, tile, y % high, nu, v)], dtype
            )
            return finish(value)

        return te.compute(
            (self.op.batch, out_blocks, self.op.out_height, self.op.out_width, bo),
            element,
            name="winograd",
            attrs={SPACE_MARK: kind, "edge.tile": list(self.tile)},
        )
