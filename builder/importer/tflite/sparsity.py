"""Sparse constants of TFLite files, unpacked.

The format is that of the tensor algebra compiler, as `DimensionMetadata` in TensorFlow Lite's schema
describes it: dimensions are stored in an order of their own, each dense or as compressed rows, and may be
split in blocks.
Promises that no more is allocated than the stored values and the dense tensor need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import tflite
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Level:
    """How one dimension is stored.

    `size`: its extent, if it is dense.
    `segments`, `indices`: where each row begins, and the positions of the stored elements; None if it is
        dense.
    """

    size: int
    segments: NDArray[np.int64] | None = None
    indices: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Sparsity:
    """How a sparse tensor is stored.

    `order`: the dimensions, then the dimensions of blocks, in the order in which they are stored.
    `block_map`: for each dimension of a block, the dimension that it is a part of.
    `levels`: one for each entry of `order`.
    """

    order: tuple[int, ...]
    block_map: tuple[int, ...]
    levels: tuple[Level, ...]

    @classmethod
    def read(cls, table: Any, rank: int) -> Sparsity:  # noqa: ANN401 - the schema's classes have no types
        """Read the parameters of a tensor.

        Raises `ValueError` if they do not fit a tensor of `rank` dimensions.
        """
        blocks = table.BlockMapLength()
        if blocks > rank or table.TraversalOrderLength() != rank + blocks:
            raise ValueError("expected an order of all dimensions")
        order = tuple(int(table.TraversalOrder(i)) for i in range(rank + blocks))
        block_map = tuple(int(table.BlockMap(i)) for i in range(blocks))
        if table.DimMetadataLength() != len(order) or sorted(order) != list(range(len(order))):
            raise ValueError("expected every dimension once")
        if sorted(order[:rank]) != list(range(rank)) or not all(0 <= axis < rank for axis in block_map):
            raise ValueError("expected blocks after all dimensions")
        return cls(order, block_map, tuple(_level(table.DimMetadata(i)) for i in range(len(order))))

    def unpack(self, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Unpack the stored values.

        Raises `ValueError` if the places of the values do not fit the shape.
        """
        limit = max(values.size, math.prod(shape))
        positions = np.zeros(1, np.int64)
        places: list[NDArray[np.int64]] = []
        for level in self.levels:
            if level.segments is None or level.indices is None:
                counts = np.full(positions.size, level.size, np.int64)
                starts = positions * level.size
            else:
                starts = level.segments[positions]
                counts = level.segments[positions + 1] - starts
            if (counts.size and int(counts.min()) < 0) or int(counts.sum()) > limit:
                raise ValueError("expected as many places as values")
            source = np.repeat(np.arange(positions.size), counts)
            within = np.arange(source.size) - np.repeat(np.cumsum(counts) - counts, counts)
            positions = starts[source] + within
            places = [place[source] for place in places]
            places.append(within if level.indices is None else level.indices[positions])
        if positions.size != values.size:
            raise ValueError("expected as many places as values")
        rank = len(shape)
        coordinates = [np.zeros(0, np.int64)] * rank
        for axis, place in zip(self.order[:rank], places, strict=False):
            coordinates[axis] = place
        for axis, level, place in zip(self.order[rank:], self.levels[rank:], places[rank:], strict=True):
            whole = self.block_map[axis - rank]
            coordinates[whole] = coordinates[whole] * level.size + place
        inside = (
            not place.size or (int(place.min()) >= 0 and int(place.max()) < extent)
            for place, extent in zip(coordinates, shape, strict=True)
        )
        if not all(inside):
            raise ValueError("expected places inside the tensor")
        dense: NDArray[Any] = np.zeros(shape, values.dtype)
        dense[tuple(coordinates)] = values
        return dense


def _level(table: Any) -> Level:  # noqa: ANN401
    if table.Format() == tflite.DimensionType.DENSE:
        if table.DenseSize() < 0:
            raise ValueError("expected an extent of 0 or more")
        return Level(int(table.DenseSize()))
    segments = _numbers(table.ArraySegmentsType(), table.ArraySegments())
    indices = _numbers(table.ArrayIndicesType(), table.ArrayIndices())
    return Level(0, segments, indices)


def _numbers(kind: int, table: Any) -> NDArray[np.int64]:  # noqa: ANN401
    names = {
        tflite.SparseIndexVector.Int32Vector: tflite.Int32Vector,
        tflite.SparseIndexVector.Uint16Vector: tflite.Uint16Vector,
        tflite.SparseIndexVector.Uint8Vector: tflite.Uint8Vector,
    }
    if kind not in names or table is None:
        raise ValueError("expected indices")
    vector = names[kind]()
    vector.Init(table.Bytes, table.Pos)
    if not vector.ValuesLength():
        return np.zeros(0, np.int64)
    return np.asarray(vector.ValuesAsNumpy()).astype(np.int64)
