"""The stages before and after Winograd's product, which floats, float16 and integers have in common.

The product between them, where the time is spent, is written by each of them; `winograd_loops` orders these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import te, tirx

from builder.kernels.signature import SPACE_MARK
from builder.kernels.spaces.convolution import Conv2d
from builder.kernels.spaces.winograd_transforms import Matrix, select


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
    """

    op: Conv2d
    m: int
    beside: int

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
        """Tiles of all pictures."""
        return self.op.batch * self.rows * self.columns

    def data(self, x: te.Tensor, matrix: Matrix, dtype: str, outside: tirx.Expr) -> te.Tensor:
        """Return the transformed input, `[(m + 2)**2, tiles/beside, IB, beside, bi]`.

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
        m, size, rows, columns, beside = self.m, self.m + 2, self.rows, self.columns, self.beside
        n, in_blocks, height, width, bi = (int(d) for d in x.shape)
        top, left = self.op.padding[:2]
        groups = -(-self.tiles // beside)

        def padded(i: tirx.Expr, c: tirx.Expr, y: tirx.Expr, z: tirx.Expr, v: tirx.Expr) -> tirx.Expr:
            inside = tirx.all(i < n, y >= top, y < height + top, z >= left, z < width + left)
            return tirx.if_then_else(inside, x[i, c, y - top, z - left, v].astype(dtype), outside)

        # The last group of tiles may reach into the image after the last one, which is not there.
        images = -(-groups * beside // (rows * columns))
        pad = te.compute((images, in_blocks, rows * m + 2, columns * m + 2, bi), padded, name="pad")

        def vertical(c: tirx.Var, tile: tirx.Var, e: tirx.Var, b: tirx.Var, v: tirx.Var) -> tirx.Expr:
            i, y, z = tile // (rows * columns), tile // columns % rows, tile % columns
            return select(e, matrix, lambda a: pad[i, c, y * m + a, z * m + b, v], dtype)

        half_in = te.compute((in_blocks, groups * beside, size, size, bi), vertical, name="half_in")
        return te.compute(
            (size * size, groups, in_blocks, beside, bi),
            lambda xi, group, c, tile, v: select(
                xi % size, matrix, lambda b: half_in[c, group * beside + tile, xi // size, b, v], dtype
            ),
            name="data",
        )

    def result(
        self,
        product: te.Tensor,
        matrix: Matrix,
        kind: str,
        finish: Callable[[tirx.Expr], tirx.Expr] = lambda value: value,
    ) -> te.Tensor:
        """Return the convolution, `[N, OB, OH, OW, bo]`, of its product, `[(m + 2)**2, OB, tiles, bo]`.

        Parameters
        ----------
        product
            The product, whose datatype is that of the result before `finish`.
        matrix
            The transform of rows and columns.
        kind
            The kind of the design space.
        finish
            What is done with each element.
        """
        m, size, rows, columns = self.m, self.m + 2, self.rows, self.columns
        _, out_blocks, tiles, bo = (int(d) for d in product.shape)
        dtype = str(product.dtype)
        half_out = te.compute(
            (out_blocks, tiles, m, size, bo),
            lambda o, tile, a, nu, v: select(a, matrix, lambda e: product[e * size + nu, o, tile, v], dtype),
            name="half_out",
        )

        def element(i: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
            tile = (i * rows + y // m) * columns + z // m
            return finish(select(z % m, matrix, lambda nu: half_out[o, tile, y % m, nu, v], dtype))

        return te.compute(
            (self.op.batch, out_blocks, self.op.out_height, self.op.out_width, bo),
            element,
            name="winograd",
            attrs={SPACE_MARK: kind, "edge.tile": m},
        )
