"""ResNet-18 and ResNet-50 (He et al. 2015, with the usual stride in the 3x3), and v2 (He et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx

from benchmarks.architectures.network import Network

WIDTH: Final = 64  # channels of the stem and of the first stage; each later stage doubles them
EXPANSION: Final = 4
# A residual branch adds a tenth of its input's variance: sixteen of them keep the sum at a sane scale.
BRANCH_GAIN: Final = 0.3
# Spread of the last weights, relative to 1/sqrt(inputs): logits differ by a few units, and by picture.
LOGIT_GAIN: Final = 12.0
PRE_ACTIVATION_LOGIT_GAIN: Final = 4.0


def resnet18(seed: int = 0, *, size: int = 224, classes: int = 1000, width: int = WIDTH) -> onnx.ModelProto:
    """Return ResNet-18 as PyTorch exports it, with batch norms (input `input`, output `output`, batch 1)."""
    return _version1(
        "resnet18", seed, (2, 2, 2, 2), bottleneck=False, size=size, classes=classes, width=width
    )


def resnet50(seed: int = 0, *, size: int = 224, classes: int = 1000, width: int = WIDTH) -> onnx.ModelProto:
    """Return ResNet-50 as PyTorch exports it, with batch norms (input `input`, output `output`, batch 1)."""
    return _version1("resnet50", seed, (3, 4, 6, 3), bottleneck=True, size=size, classes=classes, width=width)


def _version1(
    name: str, seed: int, depths: Sequence[int], *, bottleneck: bool, size: int, classes: int, width: int
) -> onnx.ModelProto:
    net = Network(name, seed)
    x = net.input("input", (1, 3, size, size))
    x = net.conv(x, "conv1", (3, width), 7, stride=2)
    x = net.node("Relu", net.batch_norm(x, "bn1", width), scope="/relu")
    x = net.node(
        "MaxPool", x, scope="/maxpool", ceil_mode=0, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]
    )
    inward = width
    for stage, depth in enumerate(depths, start=1):
        channels = width * 2 ** (stage - 1)
        for block in range(depth):
            scope = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            outward = channels * EXPANSION if bottleneck else channels
            shortcut = x
            if stride != 1 or inward != outward:
                shortcut = net.conv(x, f"{scope}.downsample.0", (inward, outward), 1, stride=stride)
                shortcut = net.batch_norm(shortcut, f"{scope}.downsample.1", outward, gain=0.5**0.5)
            branch = _branch(net, x, scope, (inward, channels, outward), stride, bottleneck=bottleneck)
            x = net.node("Relu", net.node("Add", branch, shortcut, scope=f"/{scope}"), scope=f"/{scope}/relu")
            inward = outward
    x = net.node("GlobalAveragePool", x, scope="/avgpool")
    x = net.node("Flatten", x, axis=1)
    x = net.gemm(x, "fc", (inward, classes), LOGIT_GAIN / inward**0.5)
    net.output("output", x, (1, classes))
    return net.model(opset=17, ir_version=8)


def _branch(
    net: Network, x: str, scope: str, channels: tuple[int, int, int], stride: int, *, bottleneck: bool
) -> str:
    inward, width, outward = channels
    if bottleneck:
        layers = [(inward, width, 1, 1), (width, width, 3, stride), (width, outward, 1, 1)]
    else:
        layers = [(inward, width, 3, stride), (width, outward, 3, 1)]
    for number, (before, after, kernel, step) in enumerate(layers, start=1):
        last = number == len(layers)
        x = net.conv(x, f"{scope}.conv{number}", (before, after), kernel, stride=step)
        x = net.batch_norm(x, f"{scope}.bn{number}", after, gain=BRANCH_GAIN if last else 1.0)
        if not last:
            x = net.node("Relu", x, scope=f"/{scope}/relu")
    return x


def resnet50_v2(
    seed: int = 0, *, size: int = 224, classes: int = 1000, width: int = WIDTH
) -> onnx.ModelProto:
    """Return ResNet-50 v2 in the form of the ONNX zoo's `resnet50-v2-7`.

    Input `data` [N, 3, size, size] with a symbolic batch, `classes` logits; pre-activation, so that many
    batch norms follow an addition and cannot be folded into a convolution; opset 7 and IR version 3, whose
    files list the weights among the graph's inputs; the flatten is a Reshape to (0, -1).
    """
    net = Network("resnet50-v2", seed)
    x = net.input("data", ("N", 3, size, size))
    x = net.batch_norm(x, "batchnorm0", 3)
    x = net.conv(x, "conv0", (3, width), 7, stride=2)
    x = net.node("Relu", net.batch_norm(x, "batchnorm1", width))
    x = net.node("MaxPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2])
    inward = width
    for stage, depth in enumerate((3, 4, 6, 3), start=1):
        channels = width * 2 ** (stage - 1)
        for block in range(depth):
            scope = f"stage{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            outward = channels * EXPANSION
            residual = x
            x = net.node("Relu", net.batch_norm(x, f"{scope}.batchnorm0", inward), scope=f"/{scope}")
            if block == 0:
                residual = net.conv(x, f"{scope}.downsample", (inward, outward), 1, stride=stride)
            x = net.conv(x, f"{scope}.conv0", (inward, channels), 1)
            x = net.node("Relu", net.batch_norm(x, f"{scope}.batchnorm1", channels), scope=f"/{scope}")
            x = net.conv(x, f"{scope}.conv1", (channels, channels), 3, stride=stride)
            x = net.node(
                "Relu", net.batch_norm(x, f"{scope}.batchnorm2", channels, BRANCH_GAIN), scope=f"/{scope}"
            )
            x = net.conv(x, f"{scope}.conv2", (channels, outward), 1)
            x = net.node("Add", x, residual, scope=f"/{scope}")
            inward = outward
    x = net.node("Relu", net.batch_norm(x, "batchnorm2", inward))
    x = net.node("GlobalAveragePool", x)
    # A weight, because at that opset a Constant node can hold only floats.
    shape = net.weight("flatten0_shape", np.array([0, -1], np.int64))
    x = net.node("Reshape", x, shape)
    x = net.gemm(x, "dense0", (inward, classes), PRE_ACTIVATION_LOGIT_GAIN / inward**0.5)
    net.output("dense0_fwd", x, ("N", classes))
    return net.model(opset=7, ir_version=3, weights_are_inputs=True)
