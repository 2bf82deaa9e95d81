"""The stages before and after Winograd's product, which floats, float16 and integers have in common.

The product between them, where the time is spent, is written by each of them; `winograd_loops` orders these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import te, tirx

from builder.kernels.signature import SPACE_MARK
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.winograd_transforms import Matrix, places, select
from builder.target.device_target import DeviceTarget


def shares_sums(target: DeviceTarget) -> bool:
    """Whether transforms share sums, as `Stages.sharing` says: x86 waits for memory there, not for sums."""
    return target.arch == "aarch64"


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of one convolution.

    Attributes
    ----------
    op
        The geometry.
    m
        The extent of the output tile.
    beside
        Tiles that the product keeps in registers, and that are adjacent in the transformed input.
    band
        Rows of tiles whose three stages follow one another, so that what is between the stages stays in the
        L2 cache; None if each stage does all tiles of all pictures. With a band, `data` and the product have
        one more axis in front: the bands. It divides the rows if there are several pictures.
    sharing
        Whether the rows of a transform share all sums that they can: `winograd_transforms.combine_sharing`.
    """

    op: Conv2d
    m: int
    beside: int
    band: int | None = None
    sharing: bool = False

    @property
    def size(self) -> int:
        """The extent of an input tile, and the products along an axis of it."""
        return len(self.places)

    @property
    def places(self) -> tuple[int, ...]:
        """The places along an axis of an input tile, as `winograd_transforms.places` orders them."""
        return places(self.m, self.op.strides[0], self.op.kernel[0])

    @property
    def rows(self) -> int:
        """Rows of tiles in a picture."""
        return -(-self.op.out_height // self.m)

    @property
    def columns(self) -> int:
        """Tiles in a row."""
        return -(-self.op.out_width // self.m)

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

    def data(self, x: te.Tensor, matrix: Matrix, dtype: str, outside: tirx.Expr) -> te.Tensor:
        """Return the transformed input, `[size**2, tiles/beside, IB, beside, bi]`, behind the bands.

        Parameters
        ----------
        x
            The packed input, `[N, IB, H, W, bi]`.
        matrix
            The transform of rows and columns.
        dtype
            The datatype of the stages.
        outside
            What is around the picture.
        """
        size, rows, columns, beside = self.size, self.rows, self.columns, self.beside
        step, at_places = self.m * self.op.strides[0], self.places
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
        beyond = size - step  # of a tile, into the next one
        extents = (rows * step + beyond, columns * step + beyond)
        pad = te.compute((images, in_blocks, *extents, bi), padded, name="pad")

        def vertical(*at: tirx.Var) -> tirx.Expr:
            *band, c, tile, e, b, v = at
            i, y, z = self._place(band, tile)
            return self._select(
                e, matrix, lambda a: pad[i, c, y * step + at_places[a], z * step + b, v], dtype
            )

        half_in = te.compute((*bands, in_blocks, groups * beside, size, size, bi), vertical, name="half_in")

        def transformed(*at: tirx.Var) -> tirx.Expr:
            *band, xi, group, c, tile, v = at
            return self._select(
                xi % size,
                matrix,
                lambda b: half_in[(*band, c, group * beside + tile, xi // size, at_places[b], v)],
                dtype,
            )

        return te.compute((*bands, size * size, groups, in_blocks, beside, bi), transformed, name="data")

    def result(
        self,
        product: te.Tensor,
        matrix: Matrix,
        kind: str,
        finish: Callable[[tirx.Expr], tirx.Expr] = lambda value: value,
    ) -> te.Tensor:
        """Return the convolution, `[N, OB, OH, OW, bo]`, of `product`.

        Parameters
        ----------
        product
            `[size**2, OB, tiles, bo]`, behind the bands; its datatype is that of the result before
            `finish`.
        matrix
            The transform of rows and columns.
        kind
            The kind of the design space.
        finish
            What is done with each element.
        """
        m, size, rows, columns, together = self.m, self.size, self.rows, self.columns, self.band
        *bands, _, out_blocks, tiles, bo = (int(d) for d in product.shape)
        dtype = str(product.dtype)

        def vertical(*at: tirx.Var) -> tirx.Expr:
            *band, o, tile, a, nu, v = at
            return self._select(a, matrix, lambda e: product[(*band, e * size + nu, o, tile, v)], dtype)

        half_out = te.compute((*bands, out_blocks, tiles, m, size, bo), vertical, name="half_out")

        def element(i: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
            row = i * rows + y // m
            band = () if together is None else (row // together,)
            tile = (row if together is None else row % together) * columns + z // m
            value = self._select(z % m, matrix, lambda nu: half_out[(*band, o, tile, y % m, nu, v)], dtype)
            return finish(value)

        return te.compute(
            (self.op.batch, out_blocks, self.op.out_height, self.op.out_width, bo),
            element,
            name="winograd",
            attrs={SPACE_MARK: kind, "edge.tile": m},
        )
