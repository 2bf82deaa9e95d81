"""The import is compared with LiteRT, operator by operator."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.errors import ParityError
from builder.importer.tflite import comparison
from builder.importer.tflite.comparison import compare
from builder.importer.tflite.control_flow import STATIC, Program
from builder.importer.tflite.conversion import convert
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.operators import CONVERTERS, Converter, detection, elementwise, pooling
from builder.importer.tflite.schema import read
from tests import damaged_archives
from tests.builder.importer.tflite.operator_cases import PICTURE, VALID, Case, X, Y, build
from tests.builder.importer.tflite.operators.test_detection import post_process, suppression
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write

pytestmark = pytest.mark.skipif(not comparison.is_installed(), reason="ai-edge-litert is not installed")


_DIVISOR = {"values": np.arange(0, 64, dtype=np.int8), "scales": [0.02], "zeros": [-128]}


def compared(raw: bytes) -> list[str]:
    """Compare a file with the interpreter; return the notes."""
    notes: list[str] = []
    model = read(raw, "file")
    compare(raw, model, convert(model, "file"), notes.append)
    return notes


def replace(monkeypatch: pytest.MonkeyPatch, **converters: Converter) -> None:
    monkeypatch.setattr("builder.importer.tflite.conversion.CONVERTERS", {**CONVERTERS, **converters})


def pooled(dtype: str = "float32") -> bytes:
    fields = {"StrideH": 2, "StrideW": 1, "FilterHeight": 2, "FilterWidth": 2, "Padding": VALID}
    case = Case("MAX_POOL_2D", [X(PICTURE)], [Y(same=True)], "Pool2DOptions", fields)
    return build(case, dtype, between=True)[0]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_an_import_that_is_right(dtype: str) -> None:
    assert compared(pooled(dtype)) == []


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_an_operator_that_is_wrong_is_named(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, MAX_POOL_2D=pooling.average_pool_2d)
    with pytest.raises(
        ParityError, match=r"MAX_POOL_2D \(operator 1, makes 't2'\): expected a .*difference|relative"
    ):
        compared(pooled(dtype))


def test_booleans_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = build(Case("LESS", [X((3, 5)), X((3, 5))], [Y(dtype="bool")]), "float32")[0]
    assert compared(raw) == []
    replace(monkeypatch, LESS=elementwise.comparison("Greater"))
    with pytest.raises(ParityError, match="at most 0 steps"):
        compared(raw)


def test_a_scalar_is_compared() -> None:
    axes = np.array([0, 1], np.int32)
    raw = build(Case("REDUCE_MAX", [X((5, 7)), axes], [Y(same=True)], "ReducerOptions"), "float32")[0]
    assert compared(raw) == []


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case("DIV", [X((64, 64)), _DIVISOR], [Y()], "DivOptions"), "int8"),
        (Case("LOG", [X((64, 64), 0.1, 4)], [Y(-3, 2)]), "int16"),
        (Case("LESS_EQUAL", [X((64, 64)), X((64, 64), -1.1, 1)], [Y(dtype="bool")]), "int8"),
        (Case("EQUAL", [X((64, 64)), X((64, 64), -1.1, 1)], [Y(dtype="bool")]), "uint8"),
        (
            Case("REDUCE_PROD", [X((9, 8), 0, 1.5), np.array([1], np.int32)], [Y(0, 2)], "ReducerOptions"),
            "int8",
        ),
    ],
    ids=lambda value: getattr(value, "code", value),
)
def test_coarse_kernels_of_integers_are_taken_as_they_are(
    case: Case, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = build(case, dtype)[0]
    assert compared(raw) == []
    replace(monkeypatch, **{case.code: CONVERTERS["ABS" if case.outputs[0].dtype is None else "LESS"]})
    with pytest.raises(ParityError):
        compared(raw)


def test_few_large_numbers_among_many_small_ones_are_rounded_more(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 12, 12, 256))]
    scaled, grown = graph.tensor((1, 12, 12, 256)), graph.tensor((1, 12, 12, 256))
    graph.op("MUL", [graph.inputs[0], graph.constant(np.float32(2))], [scaled], "MulOptions")
    graph.op("EXP", [scaled], [grown])
    values = np.clip(np.random.default_rng(0).normal(0, 40, (8, 1, 1, 256)), -127, 127).astype(np.int8)
    weights = graph.constant(values, scales=[0.01])
    graph.outputs = [graph.tensor((1, 12, 12, 8))]
    options = {"StrideH": 1, "StrideW": 1, "DilationHFactor": 1, "DilationWFactor": 1}
    bias = graph.constant(np.zeros(8, np.float32))
    graph.op("CONV_2D", [grown, weights, bias], graph.outputs, "Conv2DOptions", **options)
    [note] = compared(write(graph))
    assert re.fullmatch(
        r"CONV_2D .*: LiteRT rounds its data to 8 bits, a noise of 0\.01\d; .* does not", note
    )
    monkeypatch.setattr(comparison, "_MORE_ROUNDING", 0.0)
    with pytest.raises(ParityError, match=r"at most 0\.01, got 0\.01"):
        compared(write(graph))


def test_a_transposed_integer_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds the data of such an operator, so the limit is wide, but not that wide."""
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((2, 16))]
    values = np.random.default_rng(2).integers(-127, 128, (16, 16)).astype(np.int8)
    w = graph.constant(values, scales=[0.01])
    graph.outputs = [graph.tensor()]
    graph.op("FULLY_CONNECTED", [0, w, -1], graph.outputs, "FullyConnectedOptions")
    assert compared(write(graph)) == []

    def transposed(op: Any) -> None:
        op.put_real(op.graph.node("MatMul", op.real(0), op.real(1)))

    replace(monkeypatch, FULLY_CONNECTED=transposed)
    with pytest.raises(ParityError, match="noise"):
        compared(write(graph))


def test_places_that_a_detector_leaves_empty_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = post_process(nms_score_threshold=0.9)
    assert compared(raw) == []

    def without_last(op: Any) -> None:
        detection.detection_post_process(op)
        boxes = op.scope.value(op.outputs[0])
        op.scope.put(op.outputs[0], op.graph.node("Mul", boxes, op.graph.constant(1.01, "float32")))

    custom = {detection.POST_PROCESS: without_last}
    monkeypatch.setattr("builder.importer.tflite.conversion.CUSTOM_CONVERTERS", custom)
    with pytest.raises(ParityError, match="TFLite_Detection_PostProcess"):
        compared(raw)


def accumulating(*, reads: bool) -> bytes:
    """A file whose loop adds the same steps three times; `reads`: whether the graph reads the steps, too."""
    main, cond, body = (FileSubgraph() for _ in range(3))
    main.inputs = [main.tensor((2, 3))]
    steps, counter, zeros = main.tensor((2, 3)), main.constant(0), main.constant(np.zeros((2, 3), np.float32))
    main.op("ABS", main.inputs, [steps])
    last, total, unchanged = main.tensor((), "int32"), main.tensor((2, 3)), main.tensor((2, 3))
    fields = {"CondSubgraphIndex": 1, "BodySubgraphIndex": 2}
    main.op("WHILE", [counter, zeros, steps], [last, total, unchanged], "WhileOptions", **fields)
    main.outputs = [total, unchanged] if reads else [total]
    for graph in (cond, body):
        graph.inputs = [graph.tensor((), "int32"), graph.tensor((2, 3)), graph.tensor((2, 3))]
    cond.outputs = [cond.tensor((), "bool")]
    cond.op("LESS", [0, cond.constant(3)], cond.outputs)
    body.outputs = [body.tensor((), "int32"), body.tensor((2, 3)), 2]
    body.op("ADD", [0, body.constant(1)], body.outputs[:1], "AddOptions")
    body.op("ADD", [1, 2], body.outputs[1:2], "AddOptions")
    return write(main, cond, body)


def test_what_a_loop_only_passes_on_and_nothing_reads_does_not_count() -> None:
    """The interpreter leaves zeros there, as in every recurrent layer that Keras converts to a loop."""
    assert compared(accumulating(reads=False)) == []


@pytest.mark.parametrize("reads", [True, False])
def test_a_loop_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    assert compared(accumulating(reads=reads)) == []

    def doubled(op: Operation, program: Program) -> None:
        STATIC["WHILE"](op, program)
        read = op.outputs[2 if reads else 1]
        op.scope.put(read, op.graph.node("Mul", op.scope.value(read), op.graph.constant(2.0, "float32")))

    monkeypatch.setattr("builder.importer.tflite.conversion.STATIC", {**STATIC, "WHILE": doubled})
    with pytest.raises(ParityError, match="WHILE"):
        compared(accumulating(reads=reads))


def test_boxes_of_equal_scores_come_in_any_order() -> None:
    scores = (np.arange(40) // 8 / 8).astype(np.float32)
    assert compared(suppression(40, 0.9, -1.0, None, scores)) == []


def test_boxes_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_the_second(op: Operation) -> None:
        detection.non_max_suppression(op)
        order = op.graph.constant([*range(1, 40), 0])
        op.scope.put(op.outputs[0], op.graph.node("Gather", op.scope.value(op.outputs[0]), order))

    replace(monkeypatch, NON_MAX_SUPPRESSION_V4=from_the_second)
    with pytest.raises(ParityError, match="NON_MAX_SUPPRESSION_V4"):
        compared(suppression(40, 0.9, -9.0, None))


def test_without_the_interpreter_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    [note] = compared(pooled())
    assert "not compared with LiteRT" in note and "pip install ai-edge-litert" in note


def test_a_file_that_the_interpreter_refuses_is_noted() -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((2, 3), "int64")]
    graph.outputs = [graph.tensor((), "int64")]
    graph.op("RELU", graph.inputs, graph.outputs)
    [note] = compared(write(graph))
    assert note.startswith("the import was not compared with LiteRT, which refused")


@pytest.mark.parametrize("shape", [(1 << 20, 5, 7, 3), (1 << 30, 1 << 30, 0)])
def test_inputs_that_would_take_minutes_are_not_compared(shape: tuple[int, ...]) -> None:
    graph = FileSubgraph()
    graph.inputs.append(graph.tensor(shape))
    graph.outputs.append(graph.tensor(shape))
    graph.op("ABS", graph.inputs, graph.outputs)
    raw, notes = write(graph), list[str]()
    model = read(raw, "file")
    compare(raw, model, convert(model, "file"), notes.append)
    assert "at most 67108864 are compared" in notes[0]


def test_an_interpreter_that_keeps_no_input_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = FileSubgraph()
    graph.inputs.append(graph.tensor((2, 3)))
    graph.outputs.append(graph.tensor((2, 3)))
    graph.op("ABS", graph.inputs, graph.outputs)
    raw, notes = write(graph), list[str]()
    made = {graph.outputs[0]: np.zeros((2, 3), np.float32)}
    monkeypatch.setattr(comparison, "is_installed", lambda: True)
    monkeypatch.setattr(comparison, "run_interpreter", lambda *_, **__: (made, ""))
    model = read(raw, "file")
    compare(raw, model, convert(model, "file"), notes.append)
    assert "it does not keep the tensor" in notes[0]


@pytest.mark.parametrize("which", damaged_archives.DAMAGED)
def test_tensors_that_cannot_be_read_are_a_reason(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path, _kernels: str) -> tuple[int, str]:
        damaged_archives.write(folder, which).rename(folder / "tensors.npz")
        return 0, ""

    monkeypatch.setattr(comparison, "start_interpreter", write)
    tensors, reason = comparison.run_interpreter(b"", {}, reference=True)
    assert tensors is None
    assert "whose tensors cannot be read" in reason
