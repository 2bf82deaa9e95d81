"""Chains of one operator, each of which reads the result of the one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
# Adds the operator's nodes to a chain: from one value to the next.
Link = Callable[["Chain", str, str], None]


class Chain:
    """A graph under construction."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []

    def weight(self, array: Array | list[int] | list[float]) -> str:
        """Add a weight and return its name."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def op(self, kind: str, *inputs: str, to: str = "", **attributes: object) -> str:
        """Add a node and return its result: `to`, or a new name."""
        name = to or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name


def _resize(mode: str) -> Link:
    def link(g: Chain, x: str, y: str) -> None:
        g.op("Resize", x, "", g.weight(np.array([1, 1, 2, 1], "f4")), to=y, mode=mode)

    return link


def _pad(mode: str) -> Link:
    def link(g: Chain, x: str, y: str) -> None:
        g.op("Pad", x, g.weight([0, 0, 0, 2, 0, 0, 0, 3]), to=y, mode=mode)

    return link


def _gather(g: Chain, x: str, y: str) -> None:
    g.op("Gather", x, g.weight([3, 1, 2, 0, 4, 7, 6, 5]), to=y, axis=3)


def _slice_concat(g: Chain, x: str, y: str) -> None:
    ends = [(0, 3), (3, 8)]
    parts = [g.op("Slice", x, g.weight([a]), g.weight([b]), g.weight([3])) for a, b in ends]
    g.op("Concat", *reversed(parts), to=y, axis=3)


def _tile(g: Chain, x: str, y: str) -> None:
    wide = g.op("Tile", x, g.weight([1, 1, 1, 2]))
    g.op("Slice", wide, g.weight([3]), g.weight([11]), g.weight([3]), to=y)


def _scatter(g: Chain, x: str, y: str) -> None:
    places = g.weight(np.zeros((1, 1, 8, 8), "i8"))
    g.op("ScatterElements", x, places, g.weight(np.ones((1, 1, 8, 8), "f4")), to=y, axis=1)


def _cumsum(g: Chain, x: str, y: str) -> None:
    g.op("CumSum", x, g.weight(np.array(3)), to=y)


def _where(g: Chain, x: str, y: str) -> None:
    g.op("Where", g.op("Greater", x, g.weight(np.array(0.5, np.float32))), g.op("Neg", x), x, to=y)


def _reorder(g: Chain, x: str, y: str) -> None:
    flat = g.op("Reshape", g.op("Transpose", x, perm=[0, 3, 1, 2]), g.weight([1, 16, 4, 4]))
    g.op("Reshape", g.op("Transpose", flat, perm=[0, 2, 3, 1]), g.weight([1, 4, 8, 8]), to=y)


def _elementwise(g: Chain, x: str, y: str) -> None:
    g.op("Add", g.op("Mul", g.op("Sigmoid", x), x), g.weight(np.array(0.1, np.float32)), to=y)


def _topk(g: Chain, x: str, y: str) -> None:
    g.nodes.append(helper.make_node("TopK", [x, g.weight([8])], [y, f"{y}_places"], axis=3))


def _softmax(g: Chain, x: str, y: str) -> None:
    g.op("Softmax", x, to=y, axis=3)


def _grid_sample(g: Chain, x: str, y: str) -> None:
    grid = np.random.default_rng(0).uniform(-1, 1, (1, 8, 8, 2)).astype("f4")
    g.op("GridSample", x, g.weight(grid), to=y, mode="bilinear", padding_mode="reflection")


def _roi_align(g: Chain, x: str, y: str) -> None:
    box, batch = g.weight(np.array([[0, 0, 7, 7]], "f4")), g.weight([0])
    g.op("RoiAlign", x, box, batch, to=y, output_height=8, output_width=8, sampling_ratio=2)


def _convolution(g: Chain, x: str, y: str) -> None:
    g.op("Conv", x, g.weight(np.full((4, 4, 3, 3), 0.1, "f4")), to=y, pads=[1, 1, 1, 1])


def _broadcast(g: Chain, x: str, y: str) -> None:
    g.op("Sub", x, g.op("ReduceMax", x, axes=[3]), to=y)


def _split_channels(g: Chain, x: str, y: str) -> None:
    wide = g.op("SpaceToDepth", x, blocksize=2)
    g.op("DepthToSpace", wide, to=y, blocksize=2)


def _roll(g: Chain, x: str, y: str) -> None:
    """As torch.roll is written: a part of both axes moves to the other end."""
    for axis in (2, 3):
        parts = [
            g.op("Slice", x, g.weight([a]), g.weight([b]), g.weight([axis])) for a, b in ((0, 3), (3, 8))
        ]
        x = g.op("Concat", *reversed(parts), axis=axis, to=y if axis == 3 else "")


def _lstm(g: Chain, x: str, y: str) -> None:
    weights = g.weight(np.full((1, 32, 8), 0.1, "f4")), g.weight(np.full((1, 32, 8), 0.2, "f4"))
    rows = g.op("Reshape", x, g.weight([32, 1, 8]))
    g.op("Reshape", g.op("LSTM", rows, *weights, hidden_size=8), g.weight([1, 4, 8, 8]), to=y)


def _resized_bytes(g: Chain, x: str, y: str) -> None:
    resized = g.op("Resize", x, "", g.weight(np.array([1, 1, 2, 1], "f4")), mode="linear")
    for source, target, kind in ((resized, f"{y}_bytes", "INT8"), (f"{y}_bytes", y, "FLOAT")):
        g.nodes.append(helper.make_node("Cast", [source], [target], to=TensorProto.DataType.Value(kind)))


LINKS: Final[Mapping[str, Link]] = {
    "reflecting pads": _pad("reflect"),
    "edge pads": _pad("edge"),
    "wrapping pads": _pad("wrap"),
    "cubic resizes": _resize("cubic"),
    "linear resizes": _resize("linear"),
    "nearest resizes": _resize("nearest"),
    "gathers": _gather,
    "slices joined": _slice_concat,
    "rolls": _roll,
    "tiles": _tile,
    "scattered elements": _scatter,
    "running sums": _cumsum,
    "choices": _where,
    "transpositions": _reorder,
    "blocks of pixels": _split_channels,
    "elementwise": _elementwise,
    "sorted rows": _topk,
    "softmaxes": _softmax,
    "grid samples": _grid_sample,
    "boxes": _roi_align,
    "convolutions": _convolution,
    "differences": _broadcast,
    "LSTMs": _lstm,
    "resized bytes": _resized_bytes,
}


def chain(kind: str, count: int) -> onnx.ModelProto:
    """Return a chain of `count` operators of a kind of `LINKS`."""
    graph = Chain()
    for step in range(count):
        LINKS[kind](graph, f"x{step}", f"x{step + 1}")
    info = helper.make_tensor_value_info
    proto = helper.make_graph(
        graph.nodes,
        "chain",
        [info("x0", TensorProto.FLOAT, [1, 4, 8, 8])],
        [info(f"x{count}", TensorProto.FLOAT, None)],
        graph.weights,
    )
    return helper.make_model(
        proto, opset_imports=[helper.make_opsetid("", 19 if "wrap" in kind else 16)], ir_version=8
    )
