"""The stages before and after Winograd's product, which floats, float16 and integers have in common.

The product between them, where the time is spent, is written by each of them; `winograd_loops` orders these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from tvm import s_tir as st
from tvm import te, tirx

from builder.kernels.signature import SPACE_MARK
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.winograd_transforms import Matrix, places, select

Extents: TypeAlias = tuple[int, int]
"""Rows and columns."""
# What a result says of its output tile.
TILE_ROWS: Final = "edge.tile_rows"
TILE_COLUMNS: Final = "edge.tile_columns"


def tile_of(sch: st.Schedule, result: st.schedule.SBlockRV) -> Extents:
    """Return the rows and columns of an output tile of a block that `Stages.result` made."""
    marks = sch.get(result).annotations
    return int(marks[TILE_ROWS]), int(marks[TILE_COLUMNS])


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of one convolution.

    Attributes
    ----------
    op
        The geometry.
    m
        Rows and columns of an output tile.
    beside
        Tiles that the product keeps in registers, and that are adjacent in the transformed input.
    band
        Rows of tiles whose three stages follow one another, so that what is between the stages stays in the
        L2 cache; None if each stage does all tiles of all pictures. With a band, `data` and the product have
        one more axis in front: the bands. It divides the rows if there are several pictures.
    """

    op: Conv2d
    m: Extents
    beside: int
    band: int | None = None

    @property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The places along each axis of an input tile, in the order of the transforms."""
        rows, columns = (places(m, self.op.strides[0]) for m in self.m)
        return rows, columns

    @property
    def size(self) -> Extents:
        """The extents of an input tile, and the products along each axis of it."""
        rows, columns = map(len, self.places)
        return rows, columns

    @property
    def positions(self) -> int:
        """The products of a tile, for each pair of channels."""
        return self.size[0] * self.size[1]

    @property
    def rows(self) -> int:
        """Rows of tiles in a picture."""
        return -(-self.op.out_height // self.m[0])

    @property
    def columns(self) -> int:
        """Tiles in a row."""
        return -(-self.op.out_width // self.m[1])

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

    def data(
        self, x: te.Tensor, matrices: tuple[Matrix, Matrix], dtype: str, outside: tirx.Expr
    ) -> te.Tensor:
        """Return the transformed input, `[positions, tiles/beside, IB, beside, bi]`, behind the bands.

        Parameters
        ----------
        x
            The packed input, `[N, IB, H, W, bi]`.
        matrices
            The transforms along the rows of a tile, and along its columns.
        dtype
            The datatype of the stages.
        outside
            What is around the picture.
        """
        (height_in, width_in), rows, columns, beside = self.size, self.rows, self.columns, self.beside
        steps = [m * stride for m, stride in zip(self.m, self.op.strides, strict=True)]
        at_rows, at_columns = self.places
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
        # A tile reaches beyond the first place of the next one.
        extents = ((rows - 1) * steps[0] + height_in, (columns - 1) * steps[1] + width_in)
        pad = te.compute((images, in_blocks, *extents, bi), padded, name="pad")

        def vertical(*at: tirx.Var) -> tirx.Expr:
            *band, c, tile, e, b, v = at
            i, y, z = self._place(band, tile)
            left = z * steps[1] + b
            return select(e, matrices[0], lambda a: pad[i, c, y * steps[0] + at_rows[a], left, v], dtype)

        shape = (*bands, in_blocks, groups * beside, height_in, width_in, bi)
        half_in = te.compute(shape, vertical, name="half_in")

        def transformed(*at: tirx.Var) -> tirx.Expr:
            *band, xi, group, c, tile, v = at
            return select(
                xi % width_in,
                matrices[1],
                lambda b: half_in[(*band, c, group * beside + tile, xi // width_in, at_columns[b], v)],
                dtype,
            )

        shape = (*bands, self.positions, groups, in_blocks, beside, bi)
        return te.compute(shape, transformed, name="data")

    def result(
        self,
        product: te.Tensor,
        matrices: tuple[Matrix, Matrix],
        kind: str,
        finish: Callable[[tirx.Expr], tirx.Expr] = lambda value: value,
    ) -> te.Tensor:
        """Return the convolution, `[N, OB, OH, OW, bo]`, of `product`.

        Parameters
        ----------
        product
            `[positions, OB, tiles, bo]`, behind the bands; its datatype is that of the result before
            `finish`.
        matrices
            The transforms along the rows of a tile, and along its columns.
        kind
            The kind of the design space.
        finish
            What is done with each element.
        """
        (height, width), width_in, together = self.m, self.size[1], self.band
        *bands, _, out_blocks, tiles, bo = (int(d) for d in product.shape)
        dtype = str(product.dtype)

        def vertical(*at: tirx.Var) -> tirx.Expr:
            *band, o, tile, a, nu, v = at
            return select(a, matrices[0], lambda e: product[(*band, e * width_in + nu, o, tile, v)], dtype)

        half_out = te.compute((*bands, out_blocks, tiles, height, width_in, bo), vertical, name="half_out")

        def element(i: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
            row = i * self.rows + y // height
            band = () if together is None else (row // together,)
            tile = (row if together is None else row % together) * self.columns + z // width
            half = lambda nu: half_out[(*band, o, tile, y % height, nu, v)]  # noqa: E731
            return finish(select(z % width, matrices[1], half, dtype))

        return te.compute(
            (self.op.batch, out_blocks, self.op.out_height, self.op.out_width, bo),
            element,
            name="winograd",
            attrs={SPACE_MARK: kind, TILE_ROWS: height, TILE_COLUMNS: width},
        )
