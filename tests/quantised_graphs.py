"""Small random models with QuantizeLinear and DequantizeLinear around each operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_LIMITS: Final = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-32768, 32767)}


@dataclass
class QuantisedGraph:
    """Builds a model, operator by operator; tensors are real numbers between two operators.

    Attributes
    ----------
    rng
        Where weights, scales and zero points come from.
    activations, weights
        Dtypes.
    per_channel
        Whether each output channel of weights has a scale of its own.
    """

    rng: np.random.Generator
    activations: str = "uint8"
    weights: str = "int8"
    per_channel: bool = True
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    parameters: dict[str, tuple[str, str]] = field(default_factory=dict)

    def fresh(self, name: str) -> str:
        return f"{name}_{len(self.nodes)}_{len(self.constants)}"

    def constant(self, array: np.ndarray | np.generic, name: str = "constant") -> str:
        name = self.fresh(name)
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def op(self, kind: str, *inputs: str, shape: tuple[int, ...], **attributes: object) -> str:
        output = self.fresh(kind)
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        self.shapes[output] = shape
        return output

    def input(self, *shape: int) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        self.shapes[name] = shape
        return self.quantise(name, 3.0)

    def quantise(self, x: str, largest: float, like: str | None = None) -> str:
        """Quantise and dequantise `x`, whose values are about as large as `largest`; or as `like` was."""
        lowest, highest = _LIMITS[self.activations]
        if like is None:
            low = -largest * self.rng.choice([0.0, 0.5, 1.0])
            step = np.float32((largest - low) / (highest - lowest))
            zero = np.clip(np.rint(lowest - low / step), lowest, highest).astype(self.activations)
            parameters = (self.constant(step, "scale"), self.constant(zero, "zero"))
        else:
            parameters = self.parameters[like]
        shape = self.shapes[x]
        q = self.op("QuantizeLinear", x, *parameters, shape=shape)
        d = self.op("DequantizeLinear", q, *parameters, shape=shape)
        self.parameters[d] = parameters
        return d

    def weight(self, shape: tuple[int, ...], axis: int) -> str:
        """Return dequantised weights whose products keep the size of what they multiply."""
        lowest, highest = _LIMITS[self.weights]
        codes = self.rng.integers(lowest, highest + 1, shape).astype(self.weights)
        count = shape[axis] if self.per_channel else 1
        depth = np.prod(shape) / shape[axis]
        scale = (self.rng.uniform(0.5, 1.5, count) / (74 * np.sqrt(depth))).astype("float32")
        zero = np.full(count, (lowest + highest + 1) // 2, self.weights)
        if not self.per_channel:
            scale = scale.reshape(())
            off = int(self.rng.integers(-28, 28)) if self.weights == "uint8" else 0
            zero = (zero.reshape(()) + np.array(off)).astype(self.weights)
        names = [self.constant(codes, "weight"), self.constant(scale, "scale"), self.constant(zero, "zero")]
        return self.op("DequantizeLinear", *names, shape=shape, axis=axis)

    def bias(self, count: int) -> str:
        return self.constant(self.rng.standard_normal(count).astype("float32"), "bias")

    def model(self, *outputs: str, opset: int = 21) -> onnx.ModelProto:
        values = [helper.make_tensor_value_info(o, TensorProto.FLOAT, self.shapes[o]) for o in outputs]
        graph = helper.make_graph(self.nodes, "quantised", self.inputs, values, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        onnx.checker.check_model(model)
        return model


Layer = Callable[[QuantisedGraph, str], str]


def convolution(g: QuantisedGraph, x: str) -> str:
    """Add a convolution of any kind, with or without bias and activation, and quantise it."""
    rng = g.rng
    n, c, h, w = g.shapes[x]
    kernel = int(rng.choice([1, 1, 3, 3, 5])) if min(h, w) > 5 else 1
    dilation = int(rng.choice([1, 1, 2])) if kernel == 3 and min(h, w) > 6 else 1
    stride = int(rng.choice([1, 1, 2]))
    kind = str(rng.choice(["dense", "dense", "depthwise", "grouped"]))
    groups = {"dense": 1, "depthwise": c, "grouped": 2 if c % 2 == 0 else 1}[kind]
    out = c if kind == "depthwise" else int(rng.integers(1, 40)) * groups
    pads = [int(rng.integers(0, kernel // 2 + 1)) for _ in range(4)]
    span = (kernel - 1) * dilation + 1
    oh = (h + pads[0] + pads[2] - span) // stride + 1
    ow = (w + pads[1] + pads[3] - span) // stride + 1
    operands = [x, g.weight((out, c // groups, kernel, kernel), 0)]
    if rng.random() < 0.7:
        operands.append(g.bias(out))
    y = g.op(
        "Conv", *operands, shape=(n, out, oh, ow), kernel_shape=[kernel, kernel], strides=[stride] * 2,
        pads=pads, dilations=[dilation] * 2, group=groups,
    )  # fmt: skip
    return g.quantise(activation(g, y), 3.0)


def activation(g: QuantisedGraph, y: str) -> str:
    """Perhaps add an activation."""
    kind = str(g.rng.choice(["", "Relu", "Clip", "Sigmoid", "HardSwish", "LeakyRelu"]))
    shape = g.shapes[y]
    if not kind:
        return y
    if kind == "Clip":
        return g.op("Clip", y, g.constant(np.float32(0)), g.constant(np.float32(2)), shape=shape)
    return g.op(kind, y, shape=shape)


def residual(g: QuantisedGraph, x: str) -> str:
    """Add a 1x1 convolution to its own input."""
    n, c, h, w = g.shapes[x]
    y = g.op("Conv", x, g.weight((c, c, 1, 1), 0), g.bias(c), shape=(n, c, h, w), kernel_shape=[1, 1])
    y = g.quantise(y, 3.0)
    return g.quantise(g.op(str(g.rng.choice(["Add", "Mul", "Sub"])), x, y, shape=(n, c, h, w)), 4.0)


def pool(g: QuantisedGraph, x: str) -> str:
    """Add a pooling; a maximum keeps scale and zero point."""
    n, c, h, w = g.shapes[x]
    if min(h, w) < 3:
        return x
    kind = str(g.rng.choice(["MaxPool", "AveragePool"]))
    shape = (n, c, (h - 1) // 2 + 1, (w - 1) // 2 + 1)
    y = g.op(kind, x, shape=shape, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    return g.quantise(y, 3.0, like=x if kind == "MaxPool" else None)


def branches(g: QuantisedGraph, x: str) -> str:
    """Concatenate a convolution with its input, with one scale or several."""
    n, c, h, w = g.shapes[x]
    out = int(g.rng.integers(1, 20))
    y = g.op("Conv", x, g.weight((out, c, 1, 1), 0), shape=(n, out, h, w), kernel_shape=[1, 1])
    y = g.quantise(y, 3.0, like=x if g.rng.random() < 0.5 else None)
    return g.quantise(g.op("Concat", x, y, shape=(n, c + out, h, w), axis=1), 3.0, like=y)


def move(g: QuantisedGraph, x: str) -> str:
    """Move elements: enlarge, slice or shuffle channels."""
    n, c, h, w = g.shapes[x]
    kind = int(g.rng.integers(0, 3))
    if kind == 0 and h * w <= 400:
        sizes = g.constant(np.array([1, 1, 2, 2], np.float32))
        y = g.op("Resize", x, "", sizes, shape=(n, c, 2 * h, 2 * w), mode="nearest",
                 coordinate_transformation_mode="asymmetric", nearest_mode="floor")  # fmt: skip
    elif kind == 1 and c > 3:
        ends = [g.constant(np.array([v])) for v in (1, c - 1, 1)]
        y = g.op("Slice", x, *ends, shape=(n, c - 2, h, w))
    elif c % 2 == 0:
        a = g.op("Reshape", x, g.constant(np.array([n, 2, c // 2, h, w])), shape=(n, 2, c // 2, h, w))
        b = g.op("Transpose", a, shape=(n, c // 2, 2, h, w), perm=[0, 2, 1, 3, 4])
        y = g.op("Reshape", b, g.constant(np.array([n, c, h, w])), shape=(n, c, h, w))
    else:
        return x
    return g.quantise(y, 3.0, like=x)


LAYERS: tuple[Layer, ...] = (convolution, convolution, convolution, residual, pool, branches, move)


def head(g: QuantisedGraph, x: str) -> str:
    """End with a product, as classifiers do."""
    n, c, _, _ = g.shapes[x]
    y = g.quantise(g.op("GlobalAveragePool", x, shape=(n, c, 1, 1)), 2.0)
    y = g.op("Flatten", y, shape=(n, c))
    out = int(g.rng.integers(1, 30))
    if g.rng.random() < 0.5:
        y = g.op("MatMul", y, g.weight((c, out), 1), shape=(n, out))
        return g.quantise(g.op("Add", y, g.bias(out), shape=(n, out)), 3.0)
    y = g.op("Gemm", y, g.weight((out, c), 0), g.bias(out), shape=(n, out), transB=1)
    return g.op("Softmax", g.quantise(y, 3.0), shape=(n, out), axis=-1)


def random_model(
    seed: int, layers: int = 3, activations: str = "uint8", weights: str = "int8", per_channel: bool = True
) -> onnx.ModelProto:
    """Return a random model of images."""
    rng = np.random.default_rng(seed)
    g = QuantisedGraph(rng, activations, weights, per_channel)
    x = g.input(
        int(rng.choice([1, 1, 2])),
        int(rng.integers(1, 40)),
        int(rng.integers(4, 22)),
        int(rng.integers(4, 22)),
    )
    for _ in range(layers):
        x = LAYERS[int(rng.integers(len(LAYERS)))](g, x)
    outputs = [x]
    if rng.random() < 0.5:
        outputs = [head(g, x)]
    return g.model(*outputs)
