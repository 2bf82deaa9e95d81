"""The zoo in small: for each class of architectures a network of a few layers, whose steps CI counts.

They are written down here, because PyTorch, which exports the zoo itself, is not installed where tests run.
Extents are ragged where those of the architectures are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from benchmarks.architectures.network import Network

OPSET, IR_VERSION = 18, 8


def vocoder() -> onnx.ModelProto:
    """Return a generator of sound: transposed and dilated convolutions of one dimension (HiFi-GAN)."""
    net = Network("small-vocoder", 0)
    x = _convolve(net, net.input("input", (1, 40, 23)), 40, 60, (7,), pads=[3, 3])
    for channels, size, stride in ((60, 16, 8), (30, 4, 2)):
        x = net.node("LeakyRelu", x, alpha=0.1)
        pads = [(size - stride) // 2] * 2
        x = _convolve(net, x, channels, channels // 2, (size,), "ConvTranspose", strides=[stride], pads=pads)
        dilated = net.node("LeakyRelu", x, alpha=0.1)
        dilated = _convolve(net, dilated, channels // 2, channels // 2, (3,), dilations=[3], pads=[3, 3])
        x = net.node("Add", x, dilated)
    x = net.node("Tanh", _convolve(net, x, 15, 1, (7,), pads=[3, 3]))
    return _model(net, x, (1, 1, 368))


def video() -> onnx.ModelProto:
    """Return a network over three dimensions: 3x3x3, 1x3x3 then 3x1x1 (R(2+1)D), pooling."""
    net = Network("small-video", 0)
    x = net.input("input", (1, 3, 6, 18, 18))
    x = net.node("Relu", _convolve(net, x, 3, 20, (3, 3, 3), pads=[1] * 6))
    x = net.node("MaxPool", x, kernel_shape=[1, 2, 2], strides=[1, 2, 2])
    x = net.node("Relu", _convolve(net, x, 20, 24, (1, 3, 3), pads=[0, 1, 1] * 2))
    x = net.node("Relu", _convolve(net, x, 24, 24, (3, 1, 1), pads=[1, 0, 0] * 2))
    x = net.node("GlobalAveragePool", x)
    return _model(net, x, (1, 24, 1, 1, 1))


def groups() -> onnx.ModelProto:
    """Return groups of 6 and 24 channels, 1x7, 7x1, and a large depthwise window (RegNet, Inception)."""
    net = Network("small-groups", 0)
    x = net.node("Relu", _convolve(net, net.input("input", (1, 3, 33, 33)), 3, 48, (3, 3), strides=[2, 2]))
    x = net.node("Relu", _convolve(net, x, 48, 48, (3, 3), group=8, pads=[1] * 4))
    x = net.node("Relu", _convolve(net, x, 48, 48, (3, 3), group=2, pads=[1] * 4))
    x = net.node("Relu", _convolve(net, x, 48, 40, (1, 7), pads=[0, 3] * 2))
    x = net.node("Relu", _convolve(net, x, 40, 44, (7, 1), pads=[3, 0] * 2))
    x = _convolve(net, x, 44, 44, (7, 7), group=44, pads=[6] * 4, dilations=[2, 2])
    return _model(net, x, (1, 44, 16, 16))


def vocabulary() -> onnx.ModelProto:
    """Return the head of a masked language model: a product with many columns (BERT)."""
    net = Network("small-vocabulary", 0)
    x = net.node("Gelu", net.input("input", (1, 5, 48)))
    x = net.node("MatMul", x, net.weight("w", net.normal(48, 10_177, deviation=0.1)))
    x = net.node("Add", x, net.weight("b", net.normal(10_177, deviation=0.1)))
    return _model(net, net.node("LogSoftmax", x, axis=-1), (1, 5, 10_177), opset=20)


def recurrent() -> onnx.ModelProto:
    """Return an LSTM in both directions and a GRU after it, of 45 and 30 numbers."""
    net = Network("small-recurrent", 0)
    x = net.input("input", (19, 1, 37))
    weights = (net.normal(2, 180, 37, deviation=0.2), net.normal(2, 180, 45, deviation=0.2))
    names = [net.weight(f"lstm.{k}", each) for k, each in enumerate(weights)]
    x = net.node("LSTM", x, *names, hidden_size=45, direction="bidirectional")
    x = net.node("Transpose", x, perm=[0, 2, 1, 3])
    x = net.node("Reshape", x, net.constant([19, 1, 90], np.int64))
    weights = (net.normal(1, 90, 90, deviation=0.2), net.normal(1, 90, 30, deviation=0.2))
    names = [net.weight(f"gru.{k}", each) for k, each in enumerate(weights)]
    x = net.node("GRU", x, *names, hidden_size=30, linear_before_reset=1)
    return _model(net, x, (19, 1, 1, 30))


def dense() -> onnx.ModelProto:
    """Return layers that normalise before they convolve, and append to what they read (DenseNet)."""
    net = Network("small-dense", 0)
    x = _convolve(net, net.input("input", (1, 3, 24, 24)), 3, 24, (3, 3), pads=[1] * 4)
    for channels in (24, 36, 48):
        y = net.node("Relu", net.batch_norm(x, f"{channels}.0", channels))
        y = net.node("Relu", net.batch_norm(_convolve(net, y, channels, 40, (1, 1)), f"{channels}.1", 40))
        x = net.node("Concat", x, _convolve(net, y, 40, 12, (3, 3), pads=[1] * 4), axis=1)
    x = net.node("Relu", net.batch_norm(x, "last", 60))
    x = net.node("AveragePool", _convolve(net, x, 60, 30, (1, 1)), kernel_shape=[2, 2], strides=[2, 2])
    return _model(net, x, (1, 30, 12, 12))


def shuffled() -> onnx.ModelProto:
    """Return blocks that split channels, convolve a half and shuffle both (ShuffleNetV2)."""
    net = Network("small-shuffled", 0)
    x = net.node("Relu", _convolve(net, net.input("input", (1, 3, 28, 28)), 3, 58, (3, 3), pads=[1] * 4))
    for _ in range(2):
        bounds = [net.constant([number], np.int64) for number in (0, 29, 58, 1)]
        kept, y = (net.node("Slice", x, *bounds[k : k + 2], bounds[3]) for k in range(2))
        y = net.node("Relu", _convolve(net, y, 29, 29, (1, 1)))
        y = _convolve(net, y, 29, 29, (3, 3), group=29, pads=[1] * 4)
        y = net.node("Relu", _convolve(net, y, 29, 29, (1, 1)))
        x = net.node("Reshape", net.node("Concat", kept, y, axis=1), _shape(net, 1, 2, 29, 28, 28))
        x = net.node("Transpose", x, perm=[0, 2, 1, 3, 4])
        x = net.node("Reshape", x, _shape(net, 1, 58, 28, 28))
    return _model(net, _convolve(net, x, 58, 20, (1, 1)), (1, 20, 28, 28))


def segmentation() -> onnx.ModelProto:
    """Return a network that goes down and up again, with a class for each pixel (U-Net, DeepLab)."""
    net = Network("small-segmentation", 0)
    top = net.node("Relu", _convolve(net, net.input("input", (1, 3, 36, 36)), 3, 18, (3, 3), pads=[1] * 4))
    x = net.node("MaxPool", top, kernel_shape=[2, 2], strides=[2, 2])
    x = net.node("Relu", _convolve(net, x, 18, 36, (3, 3), pads=[2] * 4, dilations=[2, 2]))
    x = _convolve(net, x, 36, 18, (2, 2), "ConvTranspose", strides=[2, 2])
    x = net.node("Relu", _convolve(net, net.node("Concat", top, x, axis=1), 36, 20, (3, 3), pads=[1] * 4))
    scales = net.constant([1, 1, 2, 2], np.float32)
    x = net.node("Resize", _convolve(net, x, 20, 7, (1, 1)), "", scales, mode="linear")
    return _model(net, net.node("Softmax", x, axis=1), (1, 7, 72, 72))


def norms() -> onnx.ModelProto:
    """Return norms of instances, groups and channels, reflected borders, PReLU (style transfer)."""
    net = Network("small-norms", 0)
    pads = net.constant([0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    x = net.node("Pad", net.input("input", (1, 3, 27, 27)), pads, mode="reflect")
    x = _convolve(net, x, 3, 40, (3, 3))
    x = net.node("InstanceNormalization", x, *_scale_and_shift(net, "instance", 40))
    x = net.node("PRelu", x, net.weight("slopes", net.uniform(40, 1, 1, low=0.0, high=0.5)))
    x = _convolve(net, x, 40, 40, (3, 3), pads=[1] * 4)
    groups = net.node("Reshape", x, _shape(net, 1, 8, -1))
    ones = [net.weight("ones", np.ones(8, np.float32)), net.weight("zeros", np.zeros(8, np.float32))]
    groups = net.node("InstanceNormalization", groups, *ones)
    x = net.node("Relu", net.node("Reshape", groups, _shape(net, 1, 40, 27, 27)))
    x = net.node("Transpose", _convolve(net, x, 40, 40, (7, 7), group=40, pads=[3] * 4), perm=[0, 2, 3, 1])
    x = net.node("LayerNormalization", x, *_scale_and_shift(net, "channels", 40), axis=-1)
    return _model(net, net.node("Transpose", x, perm=[0, 3, 1, 2]), (1, 40, 27, 27))


def decoder() -> onnx.ModelProto:
    """Return causal attention of six heads that share two keys, with RMS norm and a gated layer (Llama)."""
    net = Network("small-decoder", 0)
    tokens, size, heads, shared = 21, 17, 6, 2
    width = heads * size
    table = net.weight("table", net.normal(50, width, deviation=1.0))
    x = net.node("Gather", table, net.input("tokens", (1, tokens), TensorProto.INT64))
    y = _root_mean_square(net, x, width)
    queries = _heads(net, _linear(net, y, "queries", width, width), tokens, heads, size)
    keys, values = (
        _repeated(
            net,
            _heads(net, _linear(net, y, name, width, shared * size), tokens, shared, size),
            (1, shared, heads // shared, tokens, size),
        )
        for name in ("keys", "values")
    )
    scores = net.node("MatMul", queries, net.node("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = net.node("Mul", scores, net.constant(size**-0.5, np.float32))
    mask = np.where(np.tri(tokens, dtype=bool), 0, -3.4e38).astype(np.float32)[None, None]
    scores = net.node("Softmax", net.node("Add", scores, net.weight("mask", mask)), axis=-1)
    y = net.node("Transpose", net.node("MatMul", scores, values), perm=[0, 2, 1, 3])
    y = net.node("Reshape", y, _shape(net, 1, tokens, width))
    x = net.node("Add", x, _linear(net, y, "attended", width, width))
    y = _root_mean_square(net, x, width)
    gate, up = (_linear(net, y, name, width, 150) for name in ("gate", "up"))
    gate = net.node("Mul", gate, net.node("Sigmoid", gate))
    y = _linear(net, net.node("Mul", gate, up), "down", 150, width)
    return _model(net, net.node("Add", x, y), (1, tokens, width))


def speech() -> onnx.ModelProto:
    """Return strided convolutions of sound, GELU, and logarithms of energies (wav2vec 2.0, log-mel)."""
    net = Network("small-speech", 0)
    x = net.input("input", (1, 1, 800))
    for channels, size, stride in ((1, 10, 5), (30, 3, 2)):
        x = net.node("Gelu", _convolve(net, x, channels, 30, (size,), strides=[stride]))
    energy = net.node(
        "ReduceMean", net.node("Pow", x, net.constant(2.0, np.float32)), net.constant([1], np.int64)
    )
    energy = net.node("Log", net.node("Add", energy, net.constant(1e-3, np.float32)))
    return _model(net, net.node("Concat", x, energy, axis=1), (1, 31, 79), opset=20)


def windows() -> onnx.ModelProto:
    """Return attention inside of windows of an image, which is rolled first (Swin)."""
    net = Network("small-windows", 0)
    rows, window, width = 14, 7, 40
    x = net.input("input", (1, rows, rows, width))
    y = net.node("LayerNormalization", x, *_scale_and_shift(net, "norm", width), axis=-1)
    for axis in (1, 2):
        begin, middle, end, axes = (net.constant([k], np.int64) for k in (0, 3, rows, axis))
        y = net.node(
            "Concat",
            net.node("Slice", y, middle, end, axes),
            net.node("Slice", y, begin, middle, axes),
            axis=axis,
        )
    y = net.node("Reshape", y, _shape(net, rows // window, window, rows // window, window, width))
    y = net.node("Reshape", net.node("Transpose", y, perm=[0, 2, 1, 3, 4]), _shape(net, 4, window**2, width))
    queries, keys, values = (_linear(net, y, name, width, width) for name in ("queries", "keys", "values"))
    scores = net.node("Softmax", net.node("Einsum", queries, keys, equation="bqc,bkc->bqk"), axis=-1)
    y = net.node("Einsum", scores, values, equation="bqk,bkc->bqc")
    return _model(net, _linear(net, y, "last", width, width), (4, window**2, width))


NETWORKS: Final[Mapping[str, Callable[[], onnx.ModelProto]]] = {
    each.__name__: each
    for each in (
        vocoder,
        video,
        groups,
        vocabulary,
        recurrent,
        dense,
        shuffled,
        segmentation,
        norms,
        decoder,
        speech,
        windows,
    )
}


def _model(net: Network, result: str, shape: Sequence[int], opset: int = OPSET) -> onnx.ModelProto:
    net.output("output", result, shape)
    return net.model(opset=opset, ir_version=IR_VERSION)


def _convolve(
    net: Network,
    x: str,
    inward: int,
    outward: int,
    window: Sequence[int],
    op: str = "Conv",
    *,
    group: int = 1,
    **how: Sequence[int],
) -> str:
    """Append a convolution of as many dimensions as `window` has, with a bias."""
    shape = (inward, outward // group) if op == "ConvTranspose" else (outward, inward // group)
    deviation = (2.0 / (inward // group * int(np.prod(window)))) ** 0.5
    name = f"after {x}"
    weight = net.weight(f"{name}.weight", net.normal(*shape, *window, deviation=deviation))
    bias = net.weight(f"{name}.bias", net.normal(outward, deviation=0.1))
    return net.node(op, x, weight, bias, scope="", kernel_shape=list(window), group=group, **how)


def _linear(net: Network, x: str, name: str, inward: int, outward: int) -> str:
    return net.node(
        "MatMul", x, net.weight(f"{name}.weight", net.normal(inward, outward, deviation=inward**-0.5))
    )


def _heads(net: Network, x: str, tokens: int, heads: int, size: int) -> str:
    """Reshape (1, tokens, heads * size) to (1, heads, tokens, size)."""
    x = net.node("Reshape", x, _shape(net, 1, tokens, heads, size))
    return net.node("Transpose", x, perm=[0, 2, 1, 3])


def _repeated(net: Network, x: str, shape: tuple[int, int, int, int, int]) -> str:
    """Repeat each key or value for its queries, as `repeat_kv` of transformers does.

    `shape` is (1, keys, queries of a key, tokens, size); the result's is (1, queries, tokens, size).
    """
    x = net.node("Expand", net.node("Unsqueeze", x, net.constant([2], np.int64)), _shape(net, *shape))
    return net.node("Reshape", x, _shape(net, 1, shape[1] * shape[2], *shape[3:]))


def _root_mean_square(net: Network, x: str, width: int) -> str:
    square = net.node("Pow", x, net.constant(2.0, np.float32))
    mean = net.node("ReduceMean", square, net.constant([-1], np.int64))
    root = net.node("Sqrt", net.node("Add", mean, net.constant(1e-5, np.float32)))
    name = f"rms.{root}"
    return net.node("Mul", net.node("Div", x, root), net.weight(name, net.uniform(width, low=0.9, high=1.1)))


def _scale_and_shift(net: Network, name: str, channels: int) -> list[str]:
    scale = net.weight(f"{name}.scale", net.uniform(channels, low=0.9, high=1.1))
    return [scale, net.weight(f"{name}.shift", net.normal(channels, deviation=0.1))]


def _shape(net: Network, *extents: int) -> str:
    return net.constant(extents, np.int64)
