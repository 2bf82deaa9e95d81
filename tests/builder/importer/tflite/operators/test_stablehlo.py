"""StableHLO in a file: as the specification says, and as LiteRT."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pytest
import tflite
from numpy.typing import NDArray

from builder.errors import UnsupportedOperatorError
from tests.builder.importer.tflite.litert import distance, run_converted, run_litert
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write

Array = NDArray[Any]
RNG: Final = np.random.default_rng(0)
X: Final = RNG.uniform(-2, 2, (2, 3)).astype(np.float32)
Y: Final = RNG.uniform(-2, 2, (2, 3)).astype(np.float32)
NAN: Final = np.array([[np.nan, -np.inf, 0], [1, np.inf, -0.0]], np.float32)
I: Final = np.array([[7, -7, 2], [-8, 0, 5]], np.int32)  # noqa: E741
J: Final = np.array([[2, 2, -3], [3, 5, 1]], np.int32)
TWO: Final = np.asarray(2, np.int32)
TRUE: Final = np.array([[True, False, True], [False, False, True]])
DEEP: Final = RNG.uniform(-1, 1, (2, 3, 4)).astype(np.float32)
PICTURE: Final = RNG.uniform(-1, 1, (1, 5, 6, 2)).astype(np.float32)


def file_of(
    code: str, inputs: Sequence[Array], shape: Sequence[int], dtype: str, fields: Mapping[str, Any]
) -> FileSubgraph:
    """A file of one operator."""
    graph = FileSubgraph()
    graph.inputs = [graph.tensor(x.shape, str(x.dtype)) for x in inputs]
    graph.outputs = [graph.tensor(shape, dtype)]
    name = "".join(part.capitalize() for part in code.split("_"))
    options = f"Stablehlo{name}Options" if fields else ""
    graph.op(f"STABLEHLO_{code}", graph.inputs, graph.outputs, options, **fields)
    return graph


def judge(
    code: str, inputs: Sequence[Array], wanted: Array, fields: Mapping[str, Any], *more: FileSubgraph
) -> None:
    raw = write(file_of(code, inputs, wanted.shape, str(wanted.dtype), fields), *more)
    found = run_converted(raw, inputs)
    assert distance(found, [wanted]) < 1e-6
    has_no_vectors = "IndexVectorDim" in fields and fields["IndexVectorDim"] == inputs[1].ndim
    if has_no_vectors:  # LiteRT dies of indices without an axis of coordinates
        return
    theirs = run_litert(raw, inputs)
    if not isinstance(theirs, str):
        assert distance(found, theirs) < 1e-6


def unary(function: Callable[[Array], Any], x: Array = X) -> tuple[list[Array], Array]:
    return [x], np.asarray(function(x), x.dtype)


def binary(function: Callable[[Array, Array], Any], x: Array = X, y: Array = Y) -> tuple[list[Array], Array]:
    return [x, y], np.asarray(function(x, y), x.dtype)


ELEMENTS: Final[dict[str, list[tuple[list[Array], Array]]]] = {
    "ADD": [binary(np.add), binary(np.add, I, J)],
    "AND": [binary(np.logical_and, TRUE, ~TRUE), binary(np.bitwise_and, I, J)],
    "CBRT": [unary(np.cbrt), unary(np.cbrt, NAN)],
    "MAXIMUM": [binary(np.maximum), binary(np.maximum, NAN), binary(np.maximum, I, J)],
    "MINIMUM": [binary(np.minimum), binary(np.minimum, I, J)],
    "MULTIPLY": [binary(np.multiply), binary(np.multiply, I, J)],
    "SHIFT_LEFT": [
        binary(np.left_shift, I, np.abs(J)),
        binary(np.left_shift, I.astype(np.int8), np.full_like(I, 5, np.int8)),
        ([I, np.full_like(I, 32)], np.zeros_like(I)),
    ],
}


@pytest.mark.parametrize("code", ELEMENTS)
def test_elements(code: str) -> None:
    for inputs, wanted in ELEMENTS[code]:
        judge(code, inputs, wanted, {})


def test_padding_at_the_edges_and_between() -> None:
    wanted = np.array([[9, 9, 9, 9], [X[0, 1], 9, X[0, 2], 9], [9] * 4, [X[1, 1], 9, X[1, 2], 9]], np.float32)
    fields = {"EdgePaddingLow": [1, -2], "EdgePaddingHigh": [0, 1], "InteriorPadding": [1, 1]}
    judge("PAD", [X, np.asarray(9, np.float32)], wanted, fields)


def gathered(x: Array, starts: Array, fields: Mapping[str, Any]) -> Array:
    """The specification's gather, element by element."""
    sizes, mapped, places = fields["SliceSizes"], fields["StartIndexMap"], fields["OffsetDims"]
    vector, dropped = fields["IndexVectorDim"], fields["CollapsedSliceDims"]
    starts = np.moveaxis(starts[..., None] if vector == starts.ndim else starts, vector, -1)
    parts = np.zeros((*starts.shape[:-1], *sizes), x.dtype)
    for at in np.ndindex(starts.shape[:-1]):
        first = np.zeros(x.ndim, np.int64)
        first[mapped] = starts[at]
        first = np.clip(first, 0, np.array(x.shape) - sizes)
        parts[at] = x[tuple(slice(a, a + size) for a, size in zip(first, sizes, strict=True))]
    batches = starts.ndim - 1
    parts = parts.reshape([*parts.shape[:batches], *(s for a, s in enumerate(sizes) if a not in dropped)])
    return np.moveaxis(parts, range(batches, parts.ndim), places)


PLACES: Final = np.array([[1, 2], [0, -5], [9, 0], [1, 1]], np.int32)
# Starts, window, axes of the window in the result, dropped axes, mapped axes, axis of the starts.
GATHERS: Final[dict[str, Any]] = {
    "rows": (PLACES[:, 0], [1, 3, 4], [1, 2], [0], [0], 1),
    "elements": (PLACES, [1, 1, 4], [1], [0, 1], [0, 1], 1),
    "windows": (PLACES, [1, 2, 3], [0, 2, 3], [], [0, 2], 1),
    "vectors first": (PLACES.T, [2, 2, 1], [0, 1], [2], [1, 2], 0),
    "axes exchanged": (PLACES.reshape(2, 2, 2), [1, 1, 1], [], [0, 1, 2], [2, 1], 2),
    "of one place": (PLACES[1], [2, 1, 2], [0, 1], [1], [2, 0], 0),
}


@pytest.mark.parametrize("dtype", ["float32", "int32", "int8"])
@pytest.mark.parametrize("case", GATHERS)
def test_gathers(case: str, dtype: str) -> None:
    names = ("SliceSizes", "OffsetDims", "CollapsedSliceDims", "StartIndexMap", "IndexVectorDim")
    starts, *rest = GATHERS[case]
    fields = dict(zip(names, rest, strict=True))
    x = (DEEP * 50).astype(dtype)
    judge("GATHER", [x, starts], gathered(x, starts, fields), fields)


# Starts, shape of the updates, axes of the window in them, inserted axes, mapped axes, axis of the starts.
SCATTERS: Final[dict[str, Any]] = {
    "rows": (PLACES[:, 0], (4, 3, 4), [1, 2], [0], [0], 1),
    "elements": (PLACES, (4, 4), [1], [0, 1], [0, 1], 1),
    "windows": (PLACES, (1, 4, 2, 3), [0, 2, 3], [], [0, 2], 1),
    "vectors first": (PLACES.T, (2, 2, 4), [0, 1], [2], [1, 2], 0),
    "of one place": (PLACES[3], (2, 2), [0, 1], [1], [2, 0], 0),
}


@pytest.mark.parametrize("function", ["", "ADD", "MULTIPLY", "MAXIMUM", "MINIMUM"])
@pytest.mark.parametrize("case", SCATTERS)
def test_scatters(case: str, function: str) -> None:
    names = ("UpdateWindowDims", "InsertedWindowDims", "ScatterDimsToOperandDims", "IndexVectorDim")
    starts, shape, *rest = SCATTERS[case]
    fields = dict(zip(names, rest, strict=True))
    updates = RNG.uniform(-2, 2, shape).astype(np.float32)
    whole = np.moveaxis(starts[..., None] if rest[3] == starts.ndim else starts, rest[3], -1)
    ufunc: Any = getattr(np, function.lower(), lambda _, new: new)
    wanted = DEEP.copy()
    batches = [axis for axis in range(len(shape)) if axis not in rest[0]]
    free = [axis for axis in range(3) if axis not in rest[1]]
    for at in np.ndindex(shape):
        place = np.zeros(3, np.int64)
        place[rest[2]] = whole[tuple(at[axis] for axis in batches)]
        place[free] += [at[axis] for axis in rest[0]]
        if ((place >= 0) & (place < DEEP.shape)).all():
            wanted[tuple(place)] = ufunc(wanted[tuple(place)], updates[at])
    sub = body(f"STABLEHLO_{function}") if function else FileSubgraph()
    if not function:
        sub.inputs = [sub.tensor(), sub.tensor()]
        sub.outputs = sub.inputs[1:]
    judge("SCATTER", [DEEP, starts, updates], wanted, fields | {"UpdateComputationSubgraphIndex": 1}, sub)


def body(code: str, dtype: str = "float32") -> FileSubgraph:
    """A subgraph that makes one number of two."""
    graph = FileSubgraph()
    graph.inputs, graph.outputs = [graph.tensor((), dtype) for _ in range(2)], [graph.tensor((), dtype)]
    graph.op(code, graph.inputs, graph.outputs)
    return graph


@pytest.mark.parametrize("function", ["ADD", "MULTIPLY", "MAXIMUM", "MINIMUM"])
def test_windows(function: str) -> None:
    ufunc: Any = getattr(np, function.lower())
    first = {"ADD": 0, "MULTIPLY": 1, "MAXIMUM": -np.inf, "MINIMUM": np.inf}[function]
    padded = np.pad(PICTURE, [(0, 0), (1, 0), (2, 1), (0, 0)], constant_values=first)
    parts = [padded[:, y : y + 4 : 2, x : x + 7 : 1] for y in (0, 2) for x in (0, 1, 2)]
    fields = {
        "WindowDimensions": [1, 2, 3, 1],
        "WindowStrides": [1, 2, 1, 1],
        "WindowDilations": [1, 2, 1, 1],
        "BaseDilations": [1, 1, 1, 1],
        "Padding": [0, 0, 1, 0, 2, 1, 0, 0],
        "BodySubgraphIndex": 1,
    }
    inputs = [PICTURE, np.asarray(first, np.float32)]
    judge("REDUCE_WINDOW", inputs, ufunc.reduce(parts), fields, body(f"STABLEHLO_{function}"))


@pytest.mark.parametrize(("function", "first"), [("ADD", 0), ("MUL", 1), ("MINIMUM", 9), ("MAXIMUM", -9)])
def test_windows_of_tensorflow_lite(function: str, first: float) -> None:
    graph = FileSubgraph()
    graph.inputs, graph.outputs = [graph.tensor(PICTURE.shape)], [graph.tensor((1, 2, 4, 2))]
    settings = [graph.constant(v, "int64") for v in ([1, 2, 3, 1], [1, 2, 1, 1], [1, 2, 1, 1])]
    operands = [*graph.inputs, graph.constant(np.asarray(first, np.float32)), *settings]
    kind = getattr(tflite.ReduceWindowFunction, function)
    graph.op("REDUCE_WINDOW", operands, graph.outputs, "ReduceWindowOptions", ReduceFunction=kind)
    raw = write(graph)
    theirs = run_litert(raw, [PICTURE])
    assert not isinstance(theirs, str), theirs
    assert distance(run_converted(raw, [PICTURE]), theirs) < 1e-6


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"WindowDimensions": [9, 9], "BodySubgraphIndex": 1}, "a window that fits"),
        ({"BaseDilations": [2, 1], "BodySubgraphIndex": 1}, "space between"),
        ({"WindowDimensions": [1, 1], "BodySubgraphIndex": 9}, "expected one operator that reduces"),
    ],
)
def test_windows_that_are_refused(fields: dict[str, Any], reason: str) -> None:
    inputs = [X, np.asarray(0, np.float32)]
    with pytest.raises(UnsupportedOperatorError, match=reason):
        run_converted(write(file_of("REDUCE_WINDOW", inputs, (2, 3), "float32", fields), body("ADD")), inputs)


def test_what_litert_has_no_kernel_for_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match="STABLEHLO_COSINE"):
        run_converted(write(file_of("COSINE", [X], X.shape, "float32", {})), [X])
