"""Operators whose results are as long as there are numbers: taken where the numbers are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.errors import UnsupportedOperatorError
from tests.builder.importer.tflite.litert import distance, run_converted, run_litert
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write


def counted(code: str, numbers: Any, dtype: str = "int32") -> bytes:
    """A file that adds an input to each output of UNIQUE or WHERE of a constant."""
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((), "int64"), graph.tensor((), dtype)]
    places = graph.tensor((), "int64")
    if code == "UNIQUE":
        found = graph.tensor((), dtype)
        fields = {"IdxOutType": 4}  # int64
        graph.op(code, [graph.constant(numbers)], [found, places], "UniqueOptions", **fields)
        graph.outputs = [graph.tensor((), "int64"), graph.tensor((), dtype)]
        graph.op("ADD", [found, graph.inputs[1]], graph.outputs[1:], "AddOptions")
    else:
        graph.op(code, [graph.constant(numbers)], [places])
        graph.outputs = [graph.tensor((), "int64")]
    graph.op("ADD", [places, graph.inputs[0]], graph.outputs[:1], "AddOptions")
    return write(graph)


@pytest.mark.parametrize(
    ("code", "numbers", "dtype"),
    [
        ("UNIQUE", np.array([3, 1, 3, 2, 1, 1], np.int32), "int32"),
        ("UNIQUE", np.array([2.5, -1, 2.5], np.float32), "float32"),
        ("WHERE", np.array([[True, False, True], [False, False, True]]), "int32"),
        ("WHERE", np.array([0, 1.5, 0, -2], np.float32), "int32"),
    ],
)
def test_numbers_that_are_known(code: str, numbers: Any, dtype: str) -> None:
    raw = counted(code, numbers, dtype)
    given = [np.asarray(0, np.int64), np.asarray(0, dtype)]
    theirs = run_litert(raw, given)
    assert not isinstance(theirs, str), theirs
    assert distance(run_converted(raw, given), theirs) == 0


@pytest.mark.parametrize("code", ["UNIQUE", "WHERE"])
def test_numbers_of_a_request_are_refused_with_a_hint(code: str) -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((5,), "int32")]
    graph.outputs = [graph.tensor((), "int64")]
    graph.op(code, graph.inputs, graph.outputs, "UniqueOptions" if code == "UNIQUE" else "")
    with pytest.raises(UnsupportedOperatorError, match="the length of its result") as caught:
        run_converted(write(graph), [])
    assert "--input-values" in str(caught.value.hint)
