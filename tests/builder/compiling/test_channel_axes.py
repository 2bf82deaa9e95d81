"""Which axis of an output has the channels, and what a preset does where the shape does not tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from agent.bundle.detection import Objects
from agent.bundle.processing import Postprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.placement import Placement
from agent.runtime.postprocess import Postprocessor
from builder.compiling.declarations import postprocess
from builder.compiling.declared import declare
from builder.compiling.hints import Hints
from builder.compiling.options import Options
from builder.compiling.outline import Outline, read_outline
from builder.compiling.output_presets import step_of
from builder.compiling.recognition import recognise
from builder.compiling.signature import Signature
from builder.errors import ModelError
from builder.importer import load
from tests.agent.runtime.test_masks import decoded
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write

SIDE, CELLS = 128, 256 + 64 + 16
IMAGE = TensorSpec("images", "FP32", (1, 3, SIDE, SIDE))
ROWS = TensorSpec("output0", "FP32", (1, 4 + 2 + 32, CELLS))
MAPS = TensorSpec("output1", "FP32", (1, 32, 32, 32))
ORDERS = ("channels_first", "channels_last")


def onnx_file(path: Path, *, permutations: list[list[int]]) -> None:
    """A convolution with SiLU and transpositions, as the prototypes of a segmenter."""
    make, value = helper.make_node, helper.make_tensor_value_info
    nodes = [
        make("Conv", ["images", "w"], ["c"], strides=[4, 4]),
        make("Sigmoid", ["c"], ["s"]),
        make("Mul", ["c", "s"], ["p0"]),
        *(make("Transpose", [f"p{i}"], [f"p{i + 1}"], perm=perm) for i, perm in enumerate(permutations)),
    ]
    nodes[-1].output[0] = "output1"
    weights = [
        helper.make_tensor("w", TensorProto.FLOAT, [32, 3, 4, 4], [0.0] * 1536),
        helper.make_tensor("output0_", TensorProto.FLOAT, ROWS.shape, [0.0] * (38 * CELLS)),
    ]
    nodes.append(make("Identity", ["output0_"], ["output0"]))
    outputs = [value(spec.name, TensorProto.FLOAT, spec.shape) for spec in (ROWS, MAPS)]
    image = value("images", TensorProto.FLOAT, IMAGE.shape)
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [image], outputs, weights)), path)


def tflite_file(path: Path, *, permutations: list[list[int]]) -> None:
    graph = FileSubgraph()
    image = graph.tensor((1, SIDE, SIDE, 3), name="images")
    weights = graph.constant(np.zeros((32, 4, 4, 3), np.float32))
    bias = graph.constant(np.zeros(32, np.float32))
    made = graph.tensor((1, 32, 32, 32))
    graph.op("CONV_2D", [image, weights, bias], [made], "Conv2DOptions", StrideW=4, StrideH=4)
    for permutation in permutations:
        moved = graph.tensor((1, 32, 32, 32))
        graph.op("TRANSPOSE", [made, graph.constant(np.array(permutation, np.int32))], [moved])
        made = moved
    prototypes, rows, zero = graph.tensor((1, 32, 32, 32)), graph.tensor(ROWS.shape), graph.tensor((1, 1, 1))
    graph.op("LOGISTIC", [made], [prototypes])
    axes = graph.constant(np.array([1, 2], np.int32))
    mean = graph.tensor((1, 3))
    graph.op("MEAN", [image, axes], [mean], "ReducerOptions")
    part = graph.tensor((1, 1))
    begin, size = (graph.constant(np.array(each, np.int32)) for each in ([0, 0], [1, 1]))
    graph.op("SLICE", [mean, begin, size], [part])
    graph.op("RESHAPE", [part, graph.constant(np.array([1, 1, 1], np.int32))], [zero], "ReshapeOptions")
    graph.op("MUL", [zero, graph.constant(np.zeros(ROWS.shape, np.float32))], [rows], "MulOptions")
    graph.inputs, graph.outputs = [image], [rows, prototypes]
    path.write_bytes(write(graph))


@pytest.mark.parametrize("suffix", ["onnx", "tflite"])
@pytest.mark.parametrize(
    "permutations", [[], [[0, 2, 3, 1]], [[0, 3, 1, 2]], [[0, 2, 3, 1], [0, 3, 1, 2]], [[0, 2, 3, 1]] * 2]
)
def test_the_graph_tells_where_the_factors_are(
    tmp_path: Path, suffix: str, permutations: list[list[int]]
) -> None:
    path = tmp_path / f"m.{suffix}"
    (onnx_file if suffix == "onnx" else tflite_file)(path, permutations=permutations)
    outline = read_outline(path)
    assert outline is not None
    [name] = [spec.name for spec in outline.outputs if len(spec.shape) == 4]
    # What moves the channels to the last axis of one layout moves those of the other to a side.
    axis = {"onnx": 1, "tflite": 3}[suffix]
    for permutation in permutations:
        axis = permutation.index(axis)
    expected = {} if axis == 2 else {name: axis == 3}
    assert outline.hints.channels_last == expected
    proposal = recognise(outline.inputs, outline.outputs, outline.hints)
    if expected:
        assert proposal is not None
        assert proposal.postprocess == f"yolov8-seg,prototype_order={ORDERS[axis == 3]}"
        assert postprocess(proposal.postprocess, outline.outputs, outline.inputs)
    else:
        assert proposal is None


@pytest.mark.parametrize(
    ("suffix", "permutations", "order"),
    [
        ("onnx", [], "channels_first"),
        ("onnx", [[0, 2, 3, 1]], "channels_last"),
        ("onnx", [[0, 2, 3, 1]] * 2, None),  # the channels are a side of the map
        ("tflite", [], "channels_last"),
        ("tflite", [[0, 3, 1, 2]], "channels_first"),
        ("tflite", [[0, 2, 3, 1]], None),
    ],
)
def test_a_declared_segmenter_has_the_order_of_the_graph(
    tmp_path: Path, suffix: str, permutations: list[list[int]], order: str | None
) -> None:
    path, options = tmp_path / f"m.{suffix}", Options(postprocess="yolov8-seg")
    (onnx_file if suffix == "onnx" else tflite_file)(path, permutations=permutations)
    early = read_outline(path)
    assert early is not None
    for outline in (early, Outline.of(load(path))):
        if order is None:
            with pytest.raises(ModelError, match="which axis of the prototypes"):
                declare(outline, options)
            continue
        after = declare(outline, options).postprocess
        assert after is not None and isinstance(after.steps[0], Objects)
        assert after.steps[0].prototype_order == order


def test_an_order_that_nothing_tells_is_asked_for() -> None:
    assert recognise([IMAGE], [ROWS, MAPS]) is None
    with pytest.raises(ModelError, match="which axis of the prototypes has the factors") as caught:
        postprocess("yolov8-seg", [ROWS, MAPS], [IMAGE])
    assert caught.value.hint is not None and all(order in caught.value.hint for order in ORDERS)


@pytest.mark.parametrize("order", ORDERS)
def test_masks_are_read_in_the_declared_order(order: str) -> None:
    declared = postprocess(f"yolov8-seg,prototype_order={order}", [ROWS, MAPS], [IMAGE])
    rows, maps = np.zeros(ROWS.shape, np.float32), np.zeros((1, 32, 32, 32), np.float32)
    rows[0, :6, 5] = 64, 64, 128, 128, 0.9, 0
    rows[0, 6 + 7, 5] = 1
    maps[0, 7] = np.where(np.arange(32) < 8, 1, -1)[:, None]
    if order == "channels_last":
        maps = np.moveaxis(maps, 1, -1)
    placement = Placement(SIDE, SIDE, 1.0, 1.0, 0, 0, SIDE, SIDE)
    found = Postprocessor(declared, [ROWS, MAPS], ())({"output0": rows, "output1": maps}, placement)
    masks: Any = found["masks"]
    mask = decoded(masks[0], (SIDE, SIDE))
    assert mask[:28].all() and not mask[36:].any()


@pytest.mark.parametrize(
    ("size", "shape", "expected"),
    [
        ((256, 128), (1, 32, 64, 32), "channels_first"),
        ((128, 256), (1, 32, 64, 32), "channels_last"),
    ],
)
def test_sides_of_the_input_decide(size: tuple[int, int], shape: tuple[int, ...], expected: str) -> None:
    image = TensorSpec("images", "FP32", (1, 3, *size))
    count = sum(size[0] // s * (size[1] // s) for s in (8, 16, 32))
    outputs = [TensorSpec("output0", "FP32", (1, 38, count)), TensorSpec("output1", "FP32", shape)]
    step = step_of("yolov8-seg", Signature.of([image], outputs))
    assert getattr(step, "prototype_order", None) == expected
    assert Postprocessor(Postprocess((step,)), outputs, ())


@pytest.mark.parametrize(
    ("size", "shape", "expected"),
    [
        ((512, 512), (1, 128, 128, 150), True),
        ((512, 512), (1, 150, 128, 128), False),
        ((512, 256), (1, 150, 128, 64), False),
        ((512, 256), (1, 128, 64, 150), True),
        ((512, 256), (1, 128, 64, 19), True),
        ((500, 333), (1, 63, 42, 19), True),  # whose sides are rounded
    ],
)
def test_classes_of_a_map_are_not_its_sides(
    size: tuple[int, int], shape: tuple[int, ...], *, expected: bool
) -> None:
    image = TensorSpec("x", "FP32", (1, 3, *size))
    step = step_of("segmentation", Signature.of([image], [TensorSpec("y", "FP32", shape)]))
    assert getattr(step, "channels_last", None) == expected
    assert recognise([image], [TensorSpec("y", "FP32", shape)], Hints()) is not None
