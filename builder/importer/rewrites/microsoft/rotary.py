"""Rotary position embeddings of com.microsoft.

Source: ONNX Runtime's operator documentation, ContribOperators; Su et al. 2021, RoFormer.
"""

from __future__ import annotations

from collections.abc import Sequence

from builder.importer.rewrites.replacement import Nodes, Replacement


def rotary_embedding(new: Replacement) -> Nodes | None:
    """RotaryEmbedding of x, positions, cosines and sines.

    x is [batch, steps, heads * width] or [batch, heads, steps, width].
    """
    options = new.attributes
    x, positions, cosines, sines = new.inputs[:4]
    shape, table = new.shape_of(x), new.shape_of(cosines)
    places = new.shape_of(positions)
    if options.get("is_packed_batching", 0):
        return None
    turned = int(options.get("rotary_embedding_dim", 0)) or 2 * table[1]
    heads = int(options.get("num_heads", 0))
    batch = shape[0]
    if len(shape) == 3:
        steps = shape[1]
        width = shape[2] // heads if heads else turned
        heads = shape[2] // width
        x = new.op("Transpose", new.op("Reshape", x, new.ints(batch, steps, heads, width)), perm=[0, 2, 1, 3])
    elif len(shape) == 4:
        heads, steps, width = shape[1:]
    else:
        return None
    if places != (batch, steps):
        # One number: the position of the first step.
        offsets = new.constant([list(range(steps))], "int64")
        positions = new.op("Add", new.op("Reshape", positions, new.ints(1, 1)), offsets)
    angles = [new.op("Gather", each, positions, axis=0) for each in (cosines, sines)]
    interleaved = bool(options.get("interleaved", 0))
    y = rotate(new, x, angles, (heads, steps, width), turned, interleaved=interleaved)
    if len(shape) == 3:
        y = new.op("Transpose", y, perm=[0, 2, 1, 3])
    return new.result("Reshape", y, new.ints(*shape))


def rotate(
    new: Replacement,
    x: str,
    angles: Sequence[str],
    extents: tuple[int, int, int],
    turned: int,
    *,
    interleaved: bool,
) -> str:
    """Rotate pairs of numbers by the angle of their position.

    `x`: [batch, heads, steps, width].
    `angles`: cosines and sines, [batch or 1, steps, turned / 2].
    `turned`: how many of the `width` numbers are rotated, the first ones; the others stay.
    `interleaved`: whether a pair is two neighbours, instead of one number of the first half and one of the
        second.
    """
    heads, steps, width = extents
    half = turned // 2
    cosine, sine = (new.op("Unsqueeze", each, new.ints(1)) for each in angles)
    rest = ""
    if turned < width:
        x, rest = new.op_many("Split", 2, x, new.ints(turned, width - turned), axis=-1)
    if interleaved:
        pairs = new.op("Reshape", x, new.ints(-1, heads, steps, half, 2))
        halves = [new.op("Gather", pairs, new.constant(part, "int64"), axis=-1) for part in (0, 1)]
    else:
        halves = new.op_many("Split", 2, x, new.ints(half, half), axis=-1)
    left, right = halves
    real = new.op("Sub", new.op("Mul", left, cosine), new.op("Mul", right, sine))
    imaginary = new.op("Add", new.op("Mul", left, sine), new.op("Mul", right, cosine))
    if interleaved:
        stacked = [new.op("Unsqueeze", each, new.ints(-1)) for each in (real, imaginary)]
        y = new.op("Reshape", new.op("Concat", *stacked, axis=-1), new.ints(-1, heads, steps, turned))
    else:
        y = new.op("Concat", real, imaginary, axis=-1)
    return new.op("Concat", y, rest, axis=-1) if rest else y
