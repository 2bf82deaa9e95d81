"""Sparse weights are unpacked as LiteRT does it."""

from __future__ import annotations

import numpy as np
import pytest

from builder.errors import ModelError
from builder.importer.tflite.schema import read
from tests.builder.importer.tflite.litert import run_converted, run_litert
from tests.builder.importer.tflite.tflite_file import FileSubgraph, Sparse, write

# [[1, 0, 2, 0], [0, 0, 0, 0], [0, 3, 0, 4]], rows compressed.
ROWS = Sparse([0, 1], [], [3, ([0, 2, 2, 4], [0, 2, 1, 3])])
# The same, columns first.
COLUMNS = Sparse([1, 0], [], [4, ([0, 1, 2, 3, 4], [0, 2, 0, 2])], "Uint8Vector")
# [4, 4] in blocks of 2 x 2, of which two are stored: those at (0, 1) and (1, 0).
BLOCKS = Sparse([0, 1, 2, 3], [0, 1], [2, ([0, 1, 2], [1, 0]), 2, 2], "Uint16Vector")


def densified(sparse: Sparse, shape: tuple[int, int], values: list[float]) -> bytes:
    """A file that adds an input to an unpacked constant."""
    graph = FileSubgraph()
    graph.inputs = [graph.tensor(shape)]
    weight = graph.tensor(shape, "float32", np.asarray(values, np.float32), sparsity=sparse)
    dense, total = graph.tensor(shape), graph.tensor(shape)
    graph.op("DENSIFY", [weight], [dense], "DensifyOptions")
    graph.op("ADD", [0, dense], [total], "AddOptions")
    graph.outputs = [total]
    return write(graph)


@pytest.mark.parametrize(
    ("sparse", "values", "expected"),
    [
        (ROWS, [1, 2, 3, 4], [[1, 0, 2, 0], [0, 0, 0, 0], [0, 3, 0, 4]]),
        (COLUMNS, [1, 3, 2, 4], [[1, 0, 2, 0], [0, 0, 0, 0], [0, 3, 0, 4]]),
        (BLOCKS, [1, 2, 3, 4, 5, 6, 7, 8], [[0, 0, 1, 2], [0, 0, 3, 4], [5, 6, 0, 0], [7, 8, 0, 0]]),
    ],
)
def test_sparse_constants(sparse: Sparse, values: list[float], expected: list[list[int]]) -> None:
    shape = len(expected), len(expected[0])
    raw, zeros = densified(sparse, shape, values), [np.zeros(shape, np.float32)]
    [ours] = run_converted(raw, zeros)
    assert ours.tolist() == expected
    theirs = run_litert(raw, zeros)
    assert not isinstance(theirs, str), theirs
    assert theirs[0].tolist() == expected


@pytest.mark.parametrize(
    ("sparse", "values"),
    [
        (ROWS, [1, 2, 3]),
        (ROWS, [1, 2, 3, 4, 5]),
        (Sparse([0, 1], [], [3, ([0, 2, 2, 4], [0, 2, 1, 9])]), [1, 2, 3, 4]),
        (Sparse([0, 1], [], [3, ([0, 2, 2, 99], [0, 2, 1, 3])]), [1, 2, 3, 4]),
        (Sparse([0, 1], [], [3, ([0, 4, 2, 4], [0, 2, 1, 3])]), [1, 2, 3, 4]),
        (Sparse([0, 1], [], [1 << 30, ([0, 2, 2, 4], [0, 2, 1, 3])]), [1, 2, 3, 4]),
        (Sparse([0, 0], [], [3, 4]), [1, 2, 3, 4]),
        (Sparse([0], [], [3]), [1, 2, 3]),
    ],
)
def test_places_that_do_not_fit(sparse: Sparse, values: list[float]) -> None:
    with pytest.raises(ModelError, match="damaged"):
        read(densified(sparse, (3, 4), values), "file")


def test_sparse_weights_that_are_too_large() -> None:
    huge = Sparse([0, 1], [], [1 << 14, ([0] * ((1 << 14) + 1), [])])
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1,))]
    graph.tensor((1 << 14, 1 << 14), "float32", np.zeros(1, np.float32), sparsity=huge)
    graph.outputs = [graph.tensor((1,))]
    graph.op("RELU", [0], graph.outputs)
    with pytest.raises(ModelError, match="bytes of sparse weights"):
        read(write(graph), "file")
