"""MobileNetV2 (Sandler et al. 2018), width 1.0, as PyTorch exports it with batch norms kept."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx

from benchmarks.architectures.network import Network

# Table 2 of the paper: expansion, channels, repeats, stride of the first.
BLOCKS: Final = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM_CHANNELS: Final = 32
LAST_CHANNELS: Final = 1280
# He's scale assumes that a ReLU halves the variance, but none follows the linear bottleneck.
PROJECTION_GAIN: Final = 0.7
LOGIT_GAIN: Final = 3.0


def mobilenetv2(seed: int = 0, *, size: int = 224, classes: int = 1000) -> onnx.ModelProto:
    """Return MobileNetV2: `input` [1, 3, size, size] to `output` [1, classes]. ReLU6 is a Clip."""
    net = Network("mobilenetv2", seed)
    x = net.input("input", (1, 3, size, size))
    x = net.conv(x, "features.0.0", (3, STEM_CHANNELS), 3, stride=2)
    x = _relu6(net, net.batch_norm(x, "features.0.1", STEM_CHANNELS), "features.0.2")
    inward = STEM_CHANNELS
    index = 1
    for expansion, outward, repeats, first_stride in BLOCKS:
        for repeat in range(repeats):
            stride = first_stride if repeat == 0 else 1
            x = _inverted_residual(
                net, x, f"features.{index}.conv", (inward, outward), expansion=expansion, stride=stride
            )
            inward = outward
            index += 1
    x = net.conv(x, f"features.{index}.0", (inward, LAST_CHANNELS), 1)
    x = _relu6(net, net.batch_norm(x, f"features.{index}.1", LAST_CHANNELS), f"features.{index}.2")
    x = net.node("GlobalAveragePool", x)
    x = net.node("Flatten", x, axis=1)
    x = net.gemm(x, "classifier.1", (LAST_CHANNELS, classes), LOGIT_GAIN / LAST_CHANNELS**0.5)
    net.output("output", x, (1, classes))
    return net.model(opset=17, ir_version=8)


def _inverted_residual(
    net: Network, x: str, scope: str, channels: tuple[int, int], *, expansion: int, stride: int
) -> str:
    inward, outward = channels
    shortcut, layer = x, 0
    width = inward * expansion
    if expansion != 1:
        x = net.conv(x, f"{scope}.{layer}.0", (inward, width), 1)
        x = _relu6(net, net.batch_norm(x, f"{scope}.{layer}.1", width), f"{scope}.{layer}.2")
        layer += 1
    x = net.conv(x, f"{scope}.{layer}.0", (width, width), 3, stride=stride, groups=width)
    x = _relu6(net, net.batch_norm(x, f"{scope}.{layer}.1", width), f"{scope}.{layer}.2")
    x = net.conv(x, f"{scope}.{layer + 1}", (width, outward), 1)
    x = net.batch_norm(x, f"{scope}.{layer + 2}", outward, gain=PROJECTION_GAIN)
    if stride == 1 and inward == outward:
        x = net.node("Add", shortcut, x, scope=f"/{scope}")
    return x


def _relu6(net: Network, x: str, scope: str) -> str:
    low = net.constant(0.0, np.float32, f"/{scope}")
    high = net.constant(6.0, np.float32, f"/{scope}")
    return net.node("Clip", x, low, high, scope=f"/{scope}")
