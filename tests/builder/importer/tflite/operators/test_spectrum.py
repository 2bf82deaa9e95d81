"""Fourier transforms: spectra as LiteRT has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from builder.errors import UnsupportedOperatorError
from tests.builder.importer.tflite.litert import distance, run_converted, run_litert
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write


def spectrum(shape: Sequence[int], lengths: Sequence[int], *readers: str) -> bytes:
    """A file of a transform, and of what reads its result."""
    graph = FileSubgraph()
    graph.inputs = [graph.tensor(shape)]
    bins = (*shape[:-2], lengths[0], lengths[1] // 2 + 1)
    made = graph.tensor(bins, "complex64")
    graph.op(
        "RFFT2D", [graph.inputs[0], graph.constant(np.asarray(lengths, np.int32))], [made], "Rfft2dOptions"
    )
    graph.outputs = [graph.tensor(bins) for _ in readers]
    for reader, output in zip(readers, graph.outputs, strict=True):
        graph.op(reader, [made], [output])
    return write(graph)


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ((3, 1, 16), (1, 16)),
        ((1, 512), (1, 512)),
        ((2, 3, 1, 12), (1, 16)),  # padded, as frames of 400 samples are
        ((1, 40), (1, 32)),  # cut
        ((8, 8), (8, 8)),
        ((2, 5, 7), (8, 4)),
        ((4, 8), (1, 8)),  # only the first row
        ((1, 8), (4, 8)),
        ((1, 4096), (1, 4096)),
    ],
)
def test_spectra(shape: tuple[int, ...], lengths: tuple[int, int]) -> None:
    raw = spectrum(shape, lengths, "COMPLEX_ABS", "REAL", "IMAG")
    given = [np.random.default_rng(0).standard_normal(shape).astype(np.float32)]
    theirs = run_litert(raw, given)
    assert not isinstance(theirs, str), theirs
    assert distance(run_converted(raw, given), theirs) < 1e-5


def test_complex_numbers_are_moved() -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((3, 1, 16))]
    bins, flat = graph.tensor((3, 1, 9), "complex64"), graph.tensor((3, 9), "complex64")
    deep, magnitudes = graph.tensor((3, 9, 1), "complex64"), graph.tensor((3, 9, 1))
    graph.op("RFFT2D", [*graph.inputs, graph.constant([1, 16])], [bins], "Rfft2dOptions")
    graph.op("SQUEEZE", [bins], [flat], "SqueezeOptions", SqueezeDims=[1])
    graph.op("RESHAPE", [flat, graph.constant([3, 9, 1])], [deep], "ReshapeOptions")
    graph.op("COMPLEX_ABS", [deep], [magnitudes])
    graph.outputs = [magnitudes]
    raw = write(graph)
    given = [np.random.default_rng(1).standard_normal((3, 1, 16)).astype(np.float32)]
    theirs = run_litert(raw, given)
    assert not isinstance(theirs, str), theirs
    assert distance(run_converted(raw, given), theirs) < 1e-5


def refused(graph: FileSubgraph, match: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=match):
        run_converted(write(graph), [])


def transformed() -> tuple[FileSubgraph, int]:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((3, 1, 16))]
    bins = graph.tensor((3, 1, 9), "complex64")
    graph.op("RFFT2D", [*graph.inputs, graph.constant([1, 16])], [bins], "Rfft2dOptions")
    return graph, bins


def test_complex_outputs_are_refused() -> None:
    graph, bins = transformed()
    graph.outputs = [bins]
    refused(graph, "output 't1' cannot be served: its datatype is COMPLEX64")


@pytest.mark.parametrize(("code", "options"), [("ABS", ""), ("ADD", "AddOptions"), ("SUM", "ReducerOptions")])
def test_other_operators_refuse_complex_numbers(code: str, options: str) -> None:
    graph, bins = transformed()
    graph.outputs = [graph.tensor((3, 1, 9), "complex64")]
    second: list[Any] = {"ABS": [], "ADD": [bins], "SUM": [graph.constant([0])]}[code]
    graph.op(code, [bins, *second], graph.outputs, options)
    refused(graph, "its datatype is COMPLEX64")


def test_magnitudes_of_real_numbers_are_refused() -> None:
    graph = FileSubgraph()
    graph.inputs, graph.outputs = [graph.tensor((3,))], [graph.tensor((3,))]
    graph.op("COMPLEX_ABS", graph.inputs, graph.outputs)
    refused(graph, "expected complex numbers that an operator makes, got 't0'")
