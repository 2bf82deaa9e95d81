"""MobileNetV3-Large (Howard et al. 2019), as PyTorch exports it with batch norms kept."""

from __future__ import annotations

from typing import Final

import onnx

from benchmarks.architectures.inverted_residual import (
    PROJECTION_GAIN,
    Block,
    Gate,
    hard_sigmoid,
    hard_swish,
    inverted_residual,
    relu,
)
from benchmarks.architectures.network import Network

# Table 1 of the paper: kernel, expansion, channels, gate, hard swish, stride.
BLOCKS: Final = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)
STEM_CHANNELS: Final = 16
LAST_CHANNELS, HIDDEN = 960, 1280
LOGIT_GAIN: Final = 3.0


def mobilenetv3(seed: int = 0, *, size: int = 224, classes: int = 1000) -> onnx.ModelProto:
    """Return MobileNetV3-Large: `input` [1, 3, size, size] to `output` [1, classes]."""
    net = Network("mobilenetv3", seed)
    x = net.input("input", (1, 3, size, size))
    x = net.conv(x, "features.0.0", (3, STEM_CHANNELS), 3, stride=2)
    x = hard_swish(net, net.batch_norm(x, "features.0.1", STEM_CHANNELS), "/features.0.2")
    inward = STEM_CHANNELS
    for index, (kernel, width, outward, is_gated, is_swish, stride) in enumerate(BLOCKS, 1):
        gate = Gate(_multiple_of_8(width // 4), relu, hard_sigmoid, PROJECTION_GAIN) if is_gated else None
        activate = hard_swish if is_swish else relu
        block = Block(inward, width, outward, kernel, stride, activate, gate)
        x = inverted_residual(net, x, f"features.{index}.block", block)
        inward = outward
    last = f"features.{len(BLOCKS) + 1}"
    x = net.conv(x, f"{last}.0", (inward, LAST_CHANNELS), 1)
    x = hard_swish(net, net.batch_norm(x, f"{last}.1", LAST_CHANNELS), f"/{last}.2")
    x = net.node("Flatten", net.node("GlobalAveragePool", x, scope="/avgpool"), axis=1)
    x = net.gemm(x, "classifier.0", (LAST_CHANNELS, HIDDEN), (2.0 / LAST_CHANNELS) ** 0.5)
    x = hard_swish(net, x, "/classifier.1")
    x = net.gemm(x, "classifier.3", (HIDDEN, classes), LOGIT_GAIN / HIDDEN**0.5)
    net.output("output", x, (1, classes))
    return net.model(opset=17, ir_version=8)


def _multiple_of_8(channels: int) -> int:
    """Return the nearest multiple of 8 that is not less than 0.9 of `channels`."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
