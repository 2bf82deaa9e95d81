"""Matrices as a tensor stores them, behind transposes that are not computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import relax, te, tirx

from builder.kernels.rewriter import RESHAPES, Values, definition, op_name, shape_of


@dataclass(frozen=True, slots=True)
class MatrixView:
    """Matrices, `[..., rows, columns]`, as a tensor stores them.

    `axes`: for each axis of the tensor, which axis of the matrices it is; None if it has a single element.
    """

    tensor: relax.Expr
    axes: tuple[int | None, ...]

    @classmethod
    def of(cls, table: Values, expr: relax.Expr, *, turned: bool) -> MatrixView:
        """Return the matrices of a value, without the transposes that it is made by.

        `expr`: the value, over old variables.
        `turned`: whether neighbours in a row of the matrix may be far apart in the tensor.
        """
        tensor = table.plain(expr)
        last = len(shape_of(tensor)) - 1
        axes: tuple[int | None, ...] = tuple(range(last + 1))
        view = cls(tensor, axes)
        while (call := definition(table, tensor, "relax.permute_dims", *RESHAPES)) is not None:
            source = call.args[0]
            if op_name(call) == "relax.permute_dims":
                order = call.attrs.axes
                places = [int(a) for a in order] if order is not None else list(range(len(axes)))[::-1]
                axes = tuple(axes[places.index(axis)] for axis in range(len(axes)))
            else:
                old, new = shape_of(source), shape_of(tensor)
                long = [axis for axis, extent in zip(axes, new, strict=True) if extent > 1]
                if [n for n in old if n > 1] != [n for n in new if n > 1]:
                    break
                following = iter(long)
                axes = tuple(next(following) if extent > 1 else None for extent in old)
            tensor = source
            if turned or axes[-1] == last:
                view = cls(tensor, axes)
        return view

    def at(self, data: te.Tensor, lead: Sequence[tirx.Expr], row: tirx.Expr, column: tirx.Expr) -> tirx.Expr:
        """Return an element; axes before the last two that have one element are broadcast."""
        indices = [*lead, row, column]
        zero = tirx.const(0, "int32")
        return data[
            tuple(
                zero if axis is None or int(extent) == 1 else indices[axis]
                for axis, extent in zip(self.axes, data.shape, strict=True)
            )
        ]

    def extents(self, count: int) -> list[int]:
        """Return the extents of the first `count` axes of the matrices."""
        known = dict(zip(self.axes, shape_of(self.tensor), strict=True))
        return [known.get(axis, 1) for axis in range(count)]
