"""A network for tests of tuning: each operator is searched, built and compared, so it has only two."""

from __future__ import annotations

import onnx

from benchmarks.architectures.network import Network


def two_operators() -> onnx.ModelProto:
    """Return a convolution with tens of points, and a matrix product with a few."""
    net = Network("two-operators", 0)
    x = net.input("image", (1, 1, 8, 8))
    x = net.node("Relu", net.conv(x, "stem", (1, 16), 3, bias=True))
    x = net.node("Flatten", net.node("GlobalAveragePool", x), axis=1)
    net.output("output_0", net.gemm(x, "classifier", (16, 10), 0.3), (1, 10))
    return net.model(opset=17, ir_version=8)
