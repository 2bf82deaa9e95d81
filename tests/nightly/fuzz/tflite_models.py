"""TensorFlow Lite models to damage: every operator in a small file, and graphs whose numbers are changed."""

from __future__ import annotations

import copy
import random
import struct
from typing import Any

import numpy as np

from tests.builder.importer.tflite.operator_cases import build, cases
from tests.builder.importer.tflite.operators.test_detection import post_process
from tests.builder.importer.tflite.tflite_file import TYPES, FileSubgraph, FileTensor, write
from tests.nightly.fuzz.mutations import NUMBERS, REALS, TEXTS

_MOST = 120


def sound_files() -> list[bytes]:
    """Files of one operator each."""
    found = list(cases())
    step = max(1, len(found) // _MOST)
    files = []
    for case, dtype, between, kind in found[::step]:
        if kind != "hybrid":
            files.append(build(case, dtype, between=between)[0])
    return [*files, post_process(), post_process("uint8")]


def _network(dtype: str) -> list[FileSubgraph]:
    """A convolution, a pooling, a product, a choice of classes."""
    graph = FileSubgraph()
    scale: dict[str, Any] = {} if dtype == "float32" else {"scales": [0.1], "zeros": [0]}
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> int:
        real = rng.standard_normal(shape)
        if dtype == "float32":
            return graph.constant(real.astype(np.float32))
        return graph.constant(np.round(real * 30).astype(np.int8), scales=[0.01], zeros=[0])

    x = graph.tensor((1, 8, 8, 3), dtype, signature=(-1, 8, 8, 3), **scale)
    made = [graph.tensor(shape, dtype, **scale) for shape in ((1, 4, 4, 4), (1, 2, 2, 4), (1, 16), (1, 5))]
    fields = {"StrideH": 2, "StrideW": 2, "Padding": 0, "FusedActivationFunction": 1}
    graph.op("CONV_2D", [x, weight(4, 3, 3, 3), -1], [made[0]], "Conv2DOptions", **fields)
    pool = {"StrideH": 2, "StrideW": 2, "FilterHeight": 2, "FilterWidth": 2, "Padding": 0}
    graph.op("AVERAGE_POOL_2D", [made[0]], [made[1]], "Pool2DOptions", **pool)
    graph.op("RESHAPE", [made[1], graph.constant([1, -1])], [made[2]])
    graph.op("FULLY_CONNECTED", [made[2], weight(5, 16), -1], [made[3]], "FullyConnectedOptions")
    graph.inputs, graph.outputs = [x], [made[3]]
    return [graph]


def _moves() -> list[FileSubgraph]:
    """Slices, pads, gathers, tiles and joins, with their constants."""
    graph = FileSubgraph()
    x = graph.tensor((2, 6, 4))
    values = [
        graph.tensor(shape) for shape in ((2, 3, 4), (3, 5, 4), (3, 2, 4), (6, 2, 4), (6, 4, 4), (6, 4))
    ]
    graph.op("SLICE", [x, graph.constant([0, 1, 0]), graph.constant([2, 3, 4])], [values[0]])
    graph.op("PAD", [values[0], graph.constant([[0, 1], [1, 1], [0, 0]])], [values[1]])
    graph.op("GATHER", [values[1], graph.constant([0, 4])], [values[2]], "GatherOptions", Axis=1)
    graph.op("TILE", [values[2], graph.constant([2, 1, 1])], [values[3]])
    graph.op("CONCATENATION", [values[3], values[3]], [values[4]], "ConcatenationOptions", Axis=1)
    reducer = {"KeepDims": False}
    graph.op("SUM", [values[4], graph.constant([2])], [values[5]], "ReducerOptions", **reducer)
    graph.inputs, graph.outputs = [x], [values[5]]
    return [graph]


def _loop() -> list[FileSubgraph]:
    """A WHILE that counts to three, and an IF."""
    main, test, body = FileSubgraph(), FileSubgraph(), FileSubgraph()
    one = {"dtype": "int32"}
    count = main.constant(np.array([0], np.int32))
    x = main.tensor((1, 4))
    ends = [main.tensor((1,), **one), main.tensor((1, 4))]
    main.op("WHILE", [count, x], ends, "WhileOptions", CondSubgraphIndex=1, BodySubgraphIndex=2)
    main.inputs, main.outputs = [x], [ends[1]]
    test.inputs = [test.tensor((1,), **one), test.tensor((1, 4))]
    test.outputs = [test.tensor((1,), "bool")]
    test.op("LESS", [test.inputs[0], test.constant(np.array([3], np.int32))], test.outputs)
    body.inputs = [body.tensor((1,), **one), body.tensor((1, 4))]
    body.outputs = [body.tensor((1,), **one), body.tensor((1, 4))]
    body.op("ADD", [body.inputs[0], body.constant(np.array([1], np.int32))], [body.outputs[0]], "AddOptions")
    body.op("MUL", [body.inputs[1], body.inputs[1]], [body.outputs[1]], "MulOptions")
    return [main, test, body]


def changed_graph(choice: random.Random) -> bytes:
    """A network with other shapes, types, scales, indices, operators or options than it should have."""
    maker = choice.choice([lambda: _network("float32"), lambda: _network("int8"), _moves, _loop])
    for _ in range(20):
        graphs = copy.deepcopy(maker())
        for _ in range(choice.choice([1, 1, 2, 3])):
            _change(choice.choice(graphs), choice)
        try:
            with np.errstate(over="ignore"):
                return write(*graphs)
        except (struct.error, ValueError, TypeError, OverflowError, AttributeError, AssertionError):
            continue  # the schema has no room for it
    return write(*maker())


def _change(graph: FileSubgraph, choice: random.Random) -> None:
    tensor = choice.choice(graph.tensors)
    small = [number for number in NUMBERS if -(2**31) <= number < 2**31]
    match choice.randrange(9):
        case 0:
            tensor.shape = _other(list(tensor.shape), small, choice)
        case 1:
            tensor.dtype = choice.choice(list(TYPES))
        case 2:
            tensor.scales = [choice.choice(REALS[:-2]) for _ in range(choice.choice([0, 1, 2, 4, 5]))]
            tensor.zeros = [choice.choice(small) for _ in tensor.scales]
            tensor.axis = choice.choice(small)
        case 3 if tensor.data is not None:
            tensor.data = _other_data(tensor, choice)
        case 4:
            operator = choice.choice(graph.operators)
            operator.inputs = _other(list(operator.inputs), [*small, *range(len(graph.tensors))], choice)
        case 5:
            operator = choice.choice(graph.operators)
            operator.outputs = _other(list(operator.outputs), [*small, *range(len(graph.tensors))], choice)
        case 6:
            operator = choice.choice(graph.operators)
            codes = ("STRIDED_SLICE", "IF", "WHILE", "TRANSPOSE_CONV", "UNPACK", "FILL", "RANGE", "ONE_HOT",
                     "BROADCAST_TO", "CUMSUM", "TOPK_V2", "HASHTABLE", "VAR_HANDLE", "CALL_ONCE", "SPLIT_V",
                     "UNIDIRECTIONAL_SEQUENCE_LSTM", "my_operator")  # fmt: skip
            operator.code = choice.choice(codes)
        case 7:
            operator = choice.choice(graph.operators)
            if operator.fields:
                name = choice.choice(list(operator.fields))
                operator.fields = {**operator.fields, name: choice.choice(small)}
        case _:
            graph.inputs = _other(graph.inputs, [-1, 0, 1, 2, len(graph.tensors)], choice)
            tensor.name = choice.choice([text for text in TEXTS if "\0" not in text])


def _other(values: list[int], numbers: list[int], choice: random.Random) -> list[int]:
    match choice.randrange(4) if values else 1:
        case 0:
            return values[: choice.randrange(len(values))]
        case 1:
            return [*values, *[choice.choice(numbers) for _ in range(choice.choice([1, 2, 8]))]]
        case _:
            place = choice.randrange(len(values))
            return [*values[:place], choice.choice(numbers), *values[place + 1 :]]


def _other_data(tensor: FileTensor, choice: random.Random) -> bytes:
    assert tensor.data is not None
    raw = tensor.data if isinstance(tensor.data, bytes) else np.ascontiguousarray(tensor.data).tobytes()
    hostile = struct.pack("<i", choice.choice([n for n in NUMBERS if -(2**31) <= n < 2**31]))
    place = 4 * choice.randrange(max(1, len(raw) // 4))
    return choice.choice([raw[:-1], raw * 2, b"", raw[:place] + hostile + raw[place + 4 :]])
