"""slim-320: the slim face detector of Ultra-Light-Fast-Generic-Face-Detector-1MB, as PyTorch exports it.

Seventeen depthwise separable layers on 240 x 320 pixels, four detection heads, boxes decoded in the graph.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.architectures.network import Network

STEM_CHANNELS: Final = 16
# Output channels and stride of each depthwise separable layer; heads read those of `HEAD_AFTER`.
LAYERS: Final = (
    (32, 1),
    (32, 2),
    (32, 1),
    (64, 2),
    (64, 1),
    (64, 1),
    (64, 1),
    (128, 2),
    (128, 1),
    (128, 1),
    (256, 2),
    (256, 1),
)
HEAD_AFTER: Final = (7, 10, 12)
EXTRA_CHANNELS: Final = 64
STRIDES: Final = (8, 16, 32, 64)
BOX_SIZES: Final = ((10, 16, 24), (32, 48), (64, 96), (128, 192, 256))
CENTRE_VARIANCE, SIZE_VARIANCE = 0.1, 0.2
SCORES, COORDINATES = 2, 4
HEAD_GAIN: Final = 0.5  # scores differ by a few units, and the exponential of a box's size stays near 1


def slim320(seed: int = 0, *, height: int = 240, width: int = 320) -> onnx.ModelProto:
    """Return slim-320: `input` [1, 3, height, width] to `scores` [1, n, 2] and `boxes` [1, n, 4]."""
    net = Network("slim-320", seed)
    x = net.input("input", (1, 3, height, width))
    x = net.conv(x, "base_net.0.0", (3, STEM_CHANNELS), 3, stride=2)
    x = net.node("Relu", net.batch_norm(x, "base_net.0.1", STEM_CHANNELS))
    inward = STEM_CHANNELS
    scores, boxes = [], []
    for index, (outward, stride) in enumerate(LAYERS, start=1):
        x = _separable(net, x, f"base_net.{index}", (inward, outward), stride)
        inward = outward
        if index in HEAD_AFTER:
            head = HEAD_AFTER.index(index)
            count = len(BOX_SIZES[head])
            scores.append(_head(net, x, f"classification_headers.{head}", inward, count * SCORES, SCORES))
            boxes.append(
                _head(net, x, f"regression_headers.{head}", inward, count * COORDINATES, COORDINATES)
            )
    x = net.node("Relu", net.conv(x, "extras.0.0", (inward, EXTRA_CHANNELS), 1, bias=True))
    x = _separable_head(net, x, "extras.0.2", (EXTRA_CHANNELS, inward), stride=2)
    x = net.node("Relu", x)
    count = len(BOX_SIZES[3])
    for kind, size, found in (
        ("classification", SCORES, scores),
        ("regression", COORDINATES, boxes),
    ):
        name = f"{kind}_headers.3"
        found.append(
            _rows(net, net.conv(x, name, (inward, count * size), 3, bias=True, gain=HEAD_GAIN), size)
        )
    classes = net.node("Softmax", net.node("Concat", *scores, axis=1), axis=2)
    corners = _decoded(net, net.node("Concat", *boxes, axis=1), priors(height, width))
    rows = priors(height, width).shape[0]
    net.output("scores", classes, (1, rows, SCORES))
    net.output("boxes", corners, (1, rows, COORDINATES))
    return net.model(opset=9, ir_version=4)


def priors(height: int, width: int) -> NDArray[np.float32]:
    """Return centre and size of every prior box, [n, 4], in fractions of the picture."""
    found = []
    for stride, sizes in zip(STRIDES, BOX_SIZES, strict=True):
        rows, columns = math.ceil(height / stride), math.ceil(width / stride)
        for row in range(rows):
            for column in range(columns):
                centre = ((column + 0.5) / (width / stride), (row + 0.5) / (height / stride))
                found += [(*centre, size / width, size / height) for size in sizes]
    return np.clip(np.array(found, np.float32), 0.0, 1.0)


def _separable(net: Network, x: str, scope: str, channels: tuple[int, int], stride: int) -> str:
    inward, outward = channels
    x = net.conv(x, f"{scope}.0", (inward, inward), 3, stride=stride, groups=inward)
    x = net.node("Relu", net.batch_norm(x, f"{scope}.1", inward))
    x = net.conv(x, f"{scope}.3", (inward, outward), 1)
    return net.node("Relu", net.batch_norm(x, f"{scope}.4", outward))


def _separable_head(net: Network, x: str, scope: str, channels: tuple[int, int], stride: int = 1) -> str:
    inward, outward = channels
    x = net.node(
        "Relu", net.conv(x, f"{scope}.0", (inward, inward), 3, stride=stride, groups=inward, bias=True)
    )
    return net.conv(x, f"{scope}.2", (inward, outward), 1, bias=True, gain=HEAD_GAIN)


def _head(net: Network, x: str, scope: str, inward: int, outward: int, size: int) -> str:
    return _rows(net, _separable_head(net, x, scope, (inward, outward)), size)


def _rows(net: Network, x: str, size: int) -> str:
    """Append a head's result as one row for each box; the graph computes its shape, as exporters do."""
    x = net.node("Transpose", x, perm=[0, 2, 3, 1])
    batch = net.node("Gather", net.node("Shape", x), net.constant(0, np.int64), axis=0)
    parts = [batch, net.constant(-1, np.int64), net.constant(size, np.int64)]
    shape = net.node("Concat", *(net.node("Unsqueeze", part, axes=[0]) for part in parts), axis=0)
    return net.node("Reshape", x, shape)


def _decoded(net: Network, x: str, prior: NDArray[np.float32]) -> str:
    """Append the corners of the boxes: the priors, shifted and scaled by the heads' results."""
    centres, sizes = prior[None, :, :2], prior[None, :, 2:]
    shift = net.node("Mul", _first(net, x), net.constant(CENTRE_VARIANCE, np.float32))
    shift = net.node("Mul", shift, net.constant(sizes, np.float32))
    centre = net.node("Add", shift, net.constant(centres, np.float32))
    grown = net.node("Exp", net.node("Mul", _last(net, x), net.constant(SIZE_VARIANCE, np.float32)))
    size = net.node("Mul", grown, net.constant(sizes, np.float32))
    both = net.node("Concat", centre, size, axis=2)
    half = [net.node("Div", _last(net, both), net.constant(2.0, np.float32)) for _ in range(2)]
    low = net.node("Sub", _first(net, both), half[0])
    high = net.node("Add", _first(net, both), half[1])
    return net.node("Concat", low, high, axis=2)


def _first(net: Network, x: str) -> str:
    return net.node("Slice", x, axes=[2], starts=[0], ends=[2])


def _last(net: Network, x: str) -> str:
    return net.node("Slice", x, axes=[2], starts=[2], ends=[2**63 - 1])
