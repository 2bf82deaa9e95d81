"""Quantised recurrent layers, and the state of SVDF, as LiteRT has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tflite

from builder.errors import UnsupportedOperatorError
from tests.builder.importer.tflite.litert import distance, run_converted, run_litert
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write

TANH = tflite.ActivationFunctionType.TANH
RELU = tflite.ActivationFunctionType.RELU


def svdf(dtype: str, *, rank: int = 2, memory: int = 5, bias: bool = True, time: str = "int16") -> bytes:
    """A filter of 6 features of 4 numbers; `dtype` is that of its data."""
    rng = np.random.default_rng(2)
    graph = FileSubgraph()
    features, times = rng.uniform(-1, 1, (6, 4)), rng.uniform(-1, 1, (6, memory))
    biases = rng.uniform(-0.3, 0.3, 6 // rank)
    if dtype == "float32":
        graph.inputs, graph.outputs = [graph.tensor((2, 4))], [graph.tensor((2, 6 // rank))]
        weights = [graph.constant(v, "float32") for v in (features, times)]
        last = graph.constant(biases, "float32") if bias else -1
        state = graph.tensor((2, 6 * memory), variable=True)
    else:
        graph.inputs = [graph.tensor((2, 4), "int8", scales=[1 / 64], zeros=[-3])]
        graph.outputs = [graph.tensor((2, 6 // rank), "int8", scales=[3 / 255], zeros=[-128])]
        steps = 127 if time == "int8" else 32767
        weights = [
            graph.constant(np.round(features * 127).astype(np.int8), scales=[1 / 127], zeros=[0]),
            graph.constant(np.round(times * steps).astype(time), scales=[1 / steps], zeros=[0]),
        ]
        state = graph.tensor((2, 6 * memory), "int16", scales=[1 / 8192], zeros=[0], variable=True)
        scale = 1 / 8192 / steps
        numbers = np.round(biases / scale).astype(np.int32)
        last = graph.constant(numbers, scales=[scale], zeros=[0]) if bias else -1
    operands = [*graph.inputs, *weights, last, state]
    graph.op("SVDF", operands, graph.outputs, "SVDFOptions", Rank=rank, FusedActivationFunction=RELU)
    return write(graph)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(("rank", "memory", "bias"), [(1, 5, True), (2, 5, True), (2, 1, True), (3, 2, True)])
def test_a_filter_in_time_keeps_its_state(dtype: str, rank: int, memory: int, bias: bool) -> None:
    raw = svdf(dtype, rank=rank, memory=memory, bias=bias)
    rng = np.random.default_rng(3)
    steps: list[Any] = [[rng.uniform(-1, 1, (2, 4)).astype(np.float32)] for _ in range(7)]
    if dtype == "int8":
        steps = [[rng.integers(-128, 128, (2, 4)).astype(np.int8)] for _ in range(7)]
    theirs = run_litert(raw, [], "SVDF", steps=steps)
    assert not isinstance(theirs, str), theirs
    assert len({values.tobytes() for values in theirs}) > 3
    assert distance(run_converted(raw, [], steps=steps), theirs) <= (1 if dtype == "int8" else 1e-5)


def quantised_lstm(
    *,
    steps: int = 6,
    coupled: bool = False,
    project: bool = False,
    major: bool = False,
    clip: float = 0.0,
    **changes: Any,
) -> tuple[bytes, list[Any]]:
    """An LSTM of 5 numbers with 4 cells, as the converter quantises one."""
    rng = np.random.default_rng(4)
    n, cells, batch = 5, 4, 2
    units = 3 if project else cells
    data, hidden = (1 / 64, 7), (1 / 120, -5)
    output = (1 / 100, 3) if project else hidden
    graph = FileSubgraph()

    def weight(rows: int, columns: int, scale: float) -> int:
        numbers = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
        return graph.constant(numbers, scales=[scale], zeros=[0])

    shape = (steps, batch, n) if major else (batch, steps, n)
    kind = changes.get("dtype", "int8")
    graph.inputs = [graph.tensor(shape, kind, scales=[data[0]], zeros=[data[1]])]
    scales = [0.006 + 0.001 * gate for gate in range(4)]
    inputs: list[int] = [weight(cells, n, scale) for scale in scales]
    recurrent = [weight(cells, units, scale) for scale in scales]
    biases = [
        graph.constant(rng.integers(-3000, 3000, cells).astype(np.int32), scales=[data[0] * scale], zeros=[0])
        for scale in scales
    ]
    if coupled:
        inputs[0] = recurrent[0] = biases[0] = -1
    last = [-1, -1]
    if project:
        scale = 0.008
        numbers = rng.integers(-2000, 2000, units).astype(np.int32)
        last = [weight(units, cells, scale), graph.constant(numbers, scales=[hidden[0] * scale], zeros=[0])]
    holes = [-1, -1, -1]
    if changes.get("peepholes"):
        numbers = rng.integers(-9999, 9999, cells).astype(np.int16)
        holes = [graph.constant(numbers, scales=[1e-4], zeros=[0]) for _ in range(3)]
    states = [
        graph.tensor((batch, units), "int8", scales=[output[0]], zeros=[output[1]], variable=True),
        graph.tensor((batch, cells), "int16", scales=[2.0**-12], zeros=[0], variable=True),
    ]
    between = [graph.tensor((), "int16", scales=[2.0**-12], zeros=[0]) for _ in range(4)]
    between.append(graph.tensor((), "int8", scales=[hidden[0]], zeros=[hidden[1]]))
    graph.outputs = [graph.tensor((*shape[:2], units), kind, scales=[output[0]], zeros=[output[1]])]
    fields = {"FusedActivationFunction": TANH, "TimeMajor": major, "CellClip": clip, "ProjClip": clip / 2}
    graph.op(
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        [*graph.inputs, *inputs, *recurrent, *holes, *biases, *last, *states],
        graph.outputs,
        "UnidirectionalSequenceLSTMOptions",
        intermediates=between[: changes.get("intermediates", 5)],
        **fields,
    )
    return write(graph), [rng.integers(-128, 128, shape).astype(kind)]


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"major": True},
        {"steps": 1},
        {"steps": 30},
        {"coupled": True},
        {"project": True},
        {"project": True, "coupled": True, "major": True, "clip": 0.5},
        {"clip": 0.3},
        {"project": True, "clip": 0.9},
    ],
    ids=str,
)
def test_a_sequence_of_bytes(form: dict[str, Any]) -> None:
    raw, given = quantised_lstm(**form)
    theirs = run_litert(raw, given, "UNIDIRECTIONAL_SEQUENCE_LSTM")
    assert not isinstance(theirs, str), theirs
    assert len(np.unique(theirs[0])) > 20 or form.get("steps") == 1
    assert distance(run_converted(raw, given), theirs) <= 1


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"dtype": "int16"}, "a layer norm, peepholes, or data of 16 bits"),
        ({"peepholes": True}, "a layer norm, peepholes, or data of 16 bits"),
        ({"intermediates": 4}, "its five intermediate tensors"),
        ({"steps": 513}, "expected 1 to 512 steps, got 513"),
    ],
)
def test_other_quantised_sequences_are_refused(form: dict[str, Any], reason: str) -> None:
    raw, given = quantised_lstm(**form)
    with pytest.raises(UnsupportedOperatorError, match=reason):
        run_converted(raw, given)
