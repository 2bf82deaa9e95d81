"""EfficientNet-B0 (Tan and Le 2019), as PyTorch exports it with batch norms kept."""

from __future__ import annotations

from typing import Final

import onnx

from benchmarks.architectures.inverted_residual import Block, Gate, inverted_residual, sigmoid, silu
from benchmarks.architectures.network import Network

# Table 1 of the paper: expansion, kernel, stride of the first, channels, repeats.
STAGES: Final = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
STEM_CHANNELS: Final = 32
LAST_CHANNELS: Final = 1280
LOGIT_GAIN: Final = 3.0
# A gate is near a half. Less, and nothing of the picture is left after 16 blocks.
GATED_GAIN: Final = 1.1


def efficientnet_b0(seed: int = 0, *, size: int = 224, classes: int = 1000) -> onnx.ModelProto:
    """Return EfficientNet-B0: `input` [1, 3, size, size] to `output` [1, classes]."""
    net = Network("efficientnet-b0", seed)
    x = net.input("input", (1, 3, size, size))
    x = net.conv(x, "features.0.0", (3, STEM_CHANNELS), 3, stride=2)
    x = silu(net, net.batch_norm(x, "features.0.1", STEM_CHANNELS), "/features.0.2")
    inward = STEM_CHANNELS
    for stage, (expansion, kernel, first_stride, outward, repeats) in enumerate(STAGES, 1):
        for repeat in range(repeats):
            stride = first_stride if repeat == 0 else 1
            # A quarter of the block's input, not of its width.
            gate = Gate(max(1, inward // 4), silu, sigmoid, GATED_GAIN)
            block = Block(inward, inward * expansion, outward, kernel, stride, silu, gate)
            x = inverted_residual(net, x, f"features.{stage}.{repeat}.block", block)
            inward = outward
    last = f"features.{len(STAGES) + 1}"
    x = net.conv(x, f"{last}.0", (inward, LAST_CHANNELS), 1)
    x = silu(net, net.batch_norm(x, f"{last}.1", LAST_CHANNELS), f"/{last}.2")
    x = net.node("Flatten", net.node("GlobalAveragePool", x, scope="/avgpool"), axis=1)
    x = net.gemm(x, "classifier.1", (LAST_CHANNELS, classes), LOGIT_GAIN / LAST_CHANNELS**0.5)
    net.output("output", x, (1, classes))
    return net.model(opset=17, ir_version=8)
