"""RESIZE_BILINEAR and RESIZE_NEAREST_NEIGHBOR."""

from __future__ import annotations

import numpy as np

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.scope import Layout


def _sizes(op: Operation) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width of the input and of the output."""
    shape, wanted = op.shape(0), op.integers(1, "size")
    if len(shape) != 4 or len(wanted) != 2 or min(wanted) < 1 or min(shape) < 1:
        raise RefusalError(f"expected a picture and its new size, got {list(shape)} and {wanted}")
    op.graph.check_made(max(*wanted, *shape[1:3]))
    return (shape[1], shape[2]), (wanted[0], wanted[1])


def resize_bilinear(op: Operation) -> None:
    """RESIZE_BILINEAR of a picture [n, h, w, c]."""
    options = op.options("ResizeBilinearOptions")
    _, wanted = _sizes(op)
    if options.AlignCorners():
        mode = "align_corners"
    else:
        mode = "half_pixel" if options.HalfPixelCenters() else "asymmetric"
    x = op.real(0, Layout.FIRST)
    sizes = op.graph.constant([*op.graph.shape_of(x)[:2], *wanted])
    result = op.graph.node("Resize", x, "", "", sizes, mode="linear", coordinate_transformation_mode=mode)
    op.put_real(result, Layout.FIRST)


def nearest(extent: int, size: int, *, align_corners: bool, half_pixel: bool) -> list[int]:
    """Which element each element of the result takes (reference_ops.h, GetNearestNeighbor).

    Computed in float32, as the interpreter does: at a boundary, rounding decides.
    """
    scale = np.float32(extent) / np.float32(size)
    if align_corners and size > 1:
        scale = np.float32(extent - 1) / np.float32(size - 1)
    offset = np.float32(0.5 if half_pixel else 0)
    places = (np.arange(size, dtype=np.float32) + offset) * scale
    chosen = np.floor(places + np.float32(0.5)) if align_corners else np.floor(places)
    return [int(index) for index in np.clip(chosen, 0, extent - 1)]


def resize_nearest_neighbor(op: Operation) -> None:
    """RESIZE_NEAREST_NEIGHBOR of a picture [n, h, w, c]."""
    options = op.options("ResizeNearestNeighborOptions")
    extents, wanted = _sizes(op)
    indices = [
        nearest(
            extent,
            size,
            align_corners=options.AlignCorners(),
            half_pixel=options.HalfPixelCenters(),
        )
        for extent, size in zip(extents, wanted, strict=True)
    ]
    repeats = all(
        size % extent == 0 and chosen == [i // (size // extent) for i in range(size)]
        for extent, size, chosen in zip(extents, wanted, indices, strict=True)
    )
    if repeats:
        x = op.real(0, Layout.FIRST)
        sizes = op.graph.constant([*op.graph.shape_of(x)[:2], *wanted])
        result = op.graph.node(
            "Resize", x, "", "", sizes,
            mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor",
        )  # fmt: skip
        op.put_real(result, Layout.FIRST)
        return
    layout = op.layout()
    first = 1 if layout is Layout.LAST else 2
    op.move(lambda x, _: op.gather(op.gather(x, indices[0], first), indices[1], first + 1), layout=layout)
