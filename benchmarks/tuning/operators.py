"""Four operators of common networks, as one-operator models and as TVM's plain computations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import te, topi

KERNEL: Final = "kernel"


@dataclass(frozen=True, slots=True)
class Operator:
    """A convolution with bias and ReLU, or a matrix product with weights and a bias.

    Attributes
    ----------
    name
        The operator's name on the command line.
    shape
        The shape of the input: NCHW, or rows and columns.
    outputs
        Output channels or columns.
    window, stride
        Of a convolution; the window is 0 for a product.
    """

    name: str
    shape: tuple[int, ...]
    outputs: int
    window: int = 0
    stride: int = 1

    def model(self) -> onnx.ModelProto:
        """Return the operator as an ONNX model."""
        rng = np.random.default_rng(0)
        inputs = self.shape[1]
        if self.window:
            weight_shape: tuple[int, ...] = (self.outputs, inputs, self.window, self.window)
            size = (self.shape[2] - 1) // self.stride + 1
            out_shape: tuple[int, ...] = (1, self.outputs, size, size)
        else:
            weight_shape, out_shape = (inputs, self.outputs), (self.shape[0], self.outputs)
        weight = (rng.standard_normal(weight_shape) / np.sqrt(np.prod(weight_shape[1:]))).astype("float32")
        constants = [
            numpy_helper.from_array(weight, "weight"),
            numpy_helper.from_array(rng.standard_normal(self.outputs).astype("float32"), "bias"),
        ]
        if self.window:
            pad = self.window // 2
            nodes = [
                helper.make_node(
                    "Conv", ["x", "weight", "bias"], ["sum"],
                    kernel_shape=[self.window] * 2, strides=[self.stride] * 2, pads=[pad] * 4,
                ),
                helper.make_node("Relu", ["sum"], ["y"]),
            ]  # fmt: skip
        else:
            nodes = [
                helper.make_node("MatMul", ["x", "weight"], ["product"]),
                helper.make_node("Add", ["product", "bias"], ["y"]),
            ]
        graph = helper.make_graph(
            nodes,
            self.name,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, out_shape)],
            constants,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def plain(self) -> tuple[tvm.IRModule, tuple[tuple[str, tuple[int, ...]], ...]]:
        """Return the computation that TVM's users would tune, NHWC or row-major, and its arguments."""
        if self.window:
            _, channels, height, width = self.shape
            pad = self.window // 2
            x = te.placeholder((1, height, width, channels), name="x")
            weight = te.placeholder((self.window, self.window, channels, self.outputs), name="weight")
            y = topi.nn.conv2d_nhwc(x, weight, self.stride, (pad, pad), 1)
        else:
            x = te.placeholder(self.shape, name="x")
            weight = te.placeholder((self.shape[1], self.outputs), name="weight")
            y = topi.matmul(x, weight)
        bias = te.placeholder((self.outputs,), name="bias")
        out = topi.add(y, bias)
        if self.window:
            out = topi.nn.relu(out)
        func = te.create_prim_func([x, weight, bias, out]).with_attr("global_symbol", "main")
        arguments = tuple((str(t.dtype), tuple(int(d) for d in t.shape)) for t in (x, weight, bias, out))
        return tvm.IRModule({"main": func}), arguments


OPERATORS: Final[Mapping[str, Operator]] = {
    operator.name: operator
    for operator in (
        Operator("conv-3x3-stride-2", (1, 64, 56, 56), 128, 3, 2),  # ResNet-18
        Operator("conv-1x1-narrow", (1, 24, 56, 56), 144, 1),  # MobileNetV2
        Operator("conv-1x1-wide", (1, 96, 14, 14), 576, 1),  # MobileNetV2
        Operator("matmul", (128, 768), 768),  # BERT-base
    )
}
