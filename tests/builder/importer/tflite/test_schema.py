"""Reading `.tflite` files: typed values from good ones, one clear line for damaged ones."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from builder.errors import ModelError
from builder.importer.tflite.conversion import convert
from builder.importer.tflite.schema import read
from tests.builder.importer.tflite.operator_cases import build, cases
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write

FUZZED = 1500


def one_tensor(**fields: object) -> bytes:
    """A file whose input passes one RELU, with another tensor of the given fields beside it."""
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 2))]
    graph.outputs = [graph.tensor((1, 2))]
    graph.tensor(**fields)
    graph.op("RELU", graph.inputs, graph.outputs)
    return write(graph)


def test_what_is_read() -> None:
    graph = FileSubgraph()
    x = graph.tensor((1, 2), "int8", scales=[0.5], zeros=[3], name="input", signature=(-1, 2))
    w = graph.constant(
        np.arange(6, dtype=np.int8).reshape(3, 2), scales=[1.0, 2.0, 4.0], zeros=[0, 0, 0], axis=0
    )
    y = graph.tensor((1, 3), "int8", scales=[0.25], zeros=[-1], name="a;b\n\x00c")
    graph.op("FULLY_CONNECTED", [x, w, -1], [y], "FullyConnectedOptions", KeepNumDims=True)
    graph.inputs, graph.outputs = [x], [y]
    model = read(write(graph, metadata={"min_runtime_version": b"1.5"}), "file")

    [main] = model.subgraphs
    assert model.metadata == (("min_runtime_version", b"1.5"),)
    assert (main.inputs, main.outputs) == ((0,), (2,))
    first, weight, last = main.tensors
    assert (first.name, first.shape, first.dtype, first.is_static) == ("input", (1, 2), "int8", False)
    assert first.quantisation is not None
    assert [*first.quantisation.scales, *first.quantisation.zero_points] == [0.5, 3]
    assert weight.data is not None and weight.data.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert weight.quantisation is not None and weight.quantisation.is_per_axis
    assert last.name == "a;b__c"
    [operator] = main.operators
    assert (operator.name, operator.inputs, operator.outputs) == ("FULLY_CONNECTED", (0, 1, -1), (2,))
    assert operator.options.KeepNumDims()


def test_operators_are_read_from_the_newer_field() -> None:
    graph = FileSubgraph()
    x, y = graph.tensor((2,), "int8", scales=[0.5], zeros=[0]), graph.tensor((2,), "float32")
    graph.op("DEQUANTIZE", [x], [y])
    graph.inputs, graph.outputs = [x], [y]
    [operator] = read(write(graph, deprecated=False), "file").subgraphs[0].operators
    assert operator.name == "DEQUANTIZE"


def test_four_bits_are_unpacked_with_their_signs() -> None:
    packed = bytes([0x21, 0xF8, 0x07])
    model = read(one_tensor(shape=(5,), dtype="int4", data=packed, scales=[0.5]), "file")
    data = model.subgraphs[0].tensors[2].data
    assert data is not None and data.tolist() == [1, 2, -8, -1, 7]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"shape": (2, 3), "data": b"1234"}, "expected 24 bytes, got 4"),
        ({"shape": (3,), "dtype": "int4", "data": b"1"}, "expected 2 bytes, got 1"),
        ({"shape": (-2, 3)}, "expected a shape"),
        ({"shape": (1 << 20, 1 << 20)}, "at most 4 GiB"),
        ({"shape": (1,) * 17}, "at most 16 dimensions"),
        ({"shape": (2,), "dtype": "int8", "scales": [-1.0]}, "expected positive scales"),
        ({"shape": (2,), "dtype": "int8", "scales": [float("nan")]}, "expected positive scales"),
        ({"shape": (2,), "dtype": "int8", "scales": [1.0], "zeros": [400]}, "expected zero points of int8"),
        ({"shape": (2,), "dtype": "int8", "scales": [1.0, 1.0, 1.0]}, "a scale for each slice"),
        ({"shape": (2,), "dtype": "int8", "scales": [1.0, 1.0], "axis": 5}, "a scale for each slice"),
    ],
)
def test_a_tensor_that_contradicts_itself(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read(one_tensor(**fields), "file")


@pytest.mark.parametrize(
    "fields",
    [
        {"scales": [1.0] * 3, "axis": 3},
        {"scales": [1.0] * 3, "axis": -1},
        {"scales": [0.5]},
        {"scales": [1.0, 1.0]},
        {"scales": [1.0] * 3, "zeros": [0, 0]},
        {"scales": [-1.0] * 3},
    ],
)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_what_a_file_says_about_the_scales_of_a_bias_does_not_count(
    dtype: str, fields: dict[str, object]
) -> None:
    """They are the products of those of data and weights; the axis is often that of the weights."""
    tensor = read(one_tensor(shape=(3,), dtype=dtype, **fields), "file").subgraphs[0].tensors[2]
    assert tensor.quantisation is None


@pytest.mark.parametrize("raw", [b"", b"TFL3", b"\x1c\0\0\0TFL3", b"\x08\0\0\0ONNX" * 9, b"\xff" * 64])
def test_no_tflite_file(raw: bytes) -> None:
    with pytest.raises(ModelError, match="expected a TFLite model") as caught:
        read(raw, "model.tflite")
    assert "model.tflite" in str(caught.value) and caught.value.hint


def test_indices_outside_the_file() -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 2))]
    graph.outputs = [graph.tensor((1, 2))]
    graph.op("RELU", [7], graph.outputs)
    with pytest.raises(ModelError, match="expected tensors -1 to 1, got 7"):
        read(write(graph), "file")
    graph.operators.clear()
    graph.op("RELU", [0], [0])
    with pytest.raises(ModelError, match="made twice"):
        read(write(graph), "file")


def test_damaged_files_get_one_line() -> None:
    """Flipped bytes, cut files, hostile lengths and offsets: read, or refused in one line."""
    rng = random.Random(11)
    files = [build(*found[:2], between=found[2])[0] for found in list(cases())[::23]]
    hostile = (0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 1 << 28)
    refused = 0
    for _ in range(FUZZED):
        raw = bytearray(rng.choice(files))
        kind = rng.random()
        if kind < 0.4:
            for _ in range(rng.choice((1, 2, 8))):
                raw[rng.randrange(len(raw))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif kind < 0.5:
            raw = raw[: rng.randrange(len(raw))]
        else:
            for _ in range(rng.choice((1, 2))):
                place = rng.randrange(len(raw) - 8) & ~3
                raw[place : place + 4] = struct.pack("<I", rng.choice((*hostile, rng.randrange(len(raw)))))
        try:
            convert(read(bytes(raw), "damaged.tflite"), "damaged")
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 1000
    assert refused > FUZZED // 3
