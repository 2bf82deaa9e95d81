"""Builds an ONNX network: nodes in order, and weights drawn from one seeded generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper, numpy_helper

Dim = int | str
Attribute: TypeAlias = int | float | str | Sequence[int] | onnx.TensorProto
BATCH_NORM_EPSILON: Final = 1e-5
# He et al. 2015 (arXiv 1502.01852): half of the second moment passes a ReLU.
HE_GAIN: Final = 2.0**0.5
# Brock et al. 2021 (arXiv 2101.08692): the output of a ReLU has a mean, which random filters turn into an
# offset that drowns what depends on the picture. Filters with a mean of zero cancel it; this gain restores
# the variance.
CENTRED_GAIN: Final = (2.0 / (1.0 - 1.0 / np.pi)) ** 0.5


class Network:
    """A network under construction. A method that adds a layer returns the name of its output.

    Parameters
    ----------
    name
        The graph's name.
    seed
        Seed of all weights. They are drawn in the order of the calls.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._count = 0

    def input(self, name: str, shape: Sequence[Dim], dtype: int = TensorProto.FLOAT) -> str:
        """Declare an input of the graph; return its name."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, name: str, source: str, shape: Sequence[Dim], dtype: int = TensorProto.FLOAT) -> None:
        """Make a value an output of the graph, renamed to `name`."""
        for node in self._nodes:
            node.output[:] = [name if value == source else value for value in node.output]
            node.input[:] = [name if value == source else value for value in node.input]
        self._outputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))

    def node(self, op_type: str, *inputs: str, scope: str = "", **attributes: Attribute) -> str:
        """Append a node named as by PyTorch's exporter (`/layer1/Conv_12`); return its only output."""
        name = f"{scope}/{op_type}_{self._count}"
        self._count += 1
        output = f"{name}_output_0"
        self._nodes.append(helper.make_node(op_type, list(inputs), [output], name=name, **attributes))
        return output

    def weight(self, name: str, values: NDArray[Any]) -> str:
        """Add a weight; return its name."""
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def constant(self, values: ArrayLike, dtype: type[np.generic], scope: str = "") -> str:
        """Append a Constant node, as exporters write shapes and scalars."""
        return self.node("Constant", scope=scope, value=numpy_helper.from_array(np.array(values, dtype)))

    def normal(self, *shape: int, deviation: float, mean: float = 0.0) -> NDArray[np.float32]:
        """Draw normally distributed values, float32, of the given shape."""
        drawn = self._random.standard_normal(shape, dtype=np.float32)
        return drawn * np.float32(deviation) + np.float32(mean)

    def uniform(self, *shape: int, low: float, high: float) -> NDArray[np.float32]:
        """Draw uniformly distributed values, float32, of the given shape."""
        return self._random.uniform(low, high, shape).astype(np.float32)

    def conv(
        self,
        x: str,
        name: str,
        channels: tuple[int, int],
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        bias: bool = False,
        gain: float | None = None,
    ) -> str:
        """Append a convolution that keeps the variance from before the ReLU, unless `gain` is given."""
        inward, outward = channels
        fan_in = inward // groups * kernel * kernel
        gain = gain or (CENTRED_GAIN if groups == 1 else HE_GAIN)
        values = self.normal(outward, inward // groups, kernel, kernel, deviation=gain / fan_in**0.5)
        if groups == 1:
            values -= values.mean(axis=(1, 2, 3), keepdims=True)
        parameters = [self.weight(f"{name}.weight", values)]
        if bias:
            parameters.append(self.weight(f"{name}.bias", self.normal(outward, deviation=0.1)))
        return self.node(
            "Conv",
            x,
            *parameters,
            scope=f"/{name}",
            dilations=[1, 1],
            group=groups,
            kernel_shape=[kernel, kernel],
            pads=[kernel // 2] * 4,
            strides=[stride, stride],
        )

    def batch_norm(self, x: str, name: str, channels: int, gain: float = 1.0, **attributes: Attribute) -> str:
        """Append a batch normalisation with statistics near the identity; `gain` scales its output."""
        parameters = [
            self.weight(f"{name}.weight", self.uniform(channels, low=0.9 * gain, high=1.1 * gain)),
            self.weight(f"{name}.bias", self.normal(channels, deviation=0.1 * gain)),
            self.weight(f"{name}.running_mean", self.normal(channels, deviation=0.1)),
            self.weight(f"{name}.running_var", self.uniform(channels, low=0.8, high=1.2)),
        ]
        return self.node(
            "BatchNormalization",
            x,
            *parameters,
            scope=f"/{name}",
            epsilon=BATCH_NORM_EPSILON,
            momentum=0.9,
            **attributes,
        )

    def gemm(self, x: str, name: str, sizes: tuple[int, int], deviation: float) -> str:
        """Append a fully connected layer with a bias; `sizes` are its inputs and outputs."""
        inward, outward = sizes
        values = self.normal(outward, inward, deviation=deviation)
        weight = self.weight(f"{name}.weight", values - values.mean(axis=1, keepdims=True))
        bias = self.weight(f"{name}.bias", self.normal(outward, deviation=0.1))
        return self.node("Gemm", x, weight, bias, scope=f"/{name}", alpha=1.0, beta=1.0, transB=1)

    def model(self, opset: int, ir_version: int, *, weights_are_inputs: bool = False) -> onnx.ModelProto:
        """Return the model.

        Parameters
        ----------
        opset
            Version of the default operator set.
        ir_version
            Version of the file format.
        weights_are_inputs
            List the weights among the graph's inputs too, as files before IR version 4 had to.
        """
        inputs = list(self._inputs)
        if weights_are_inputs:
            inputs += [
                helper.make_tensor_value_info(w.name, w.data_type, list(w.dims)) for w in self._weights
            ]
        graph = helper.make_graph(self._nodes, self.name, inputs, self._outputs, initializer=self._weights)
        return helper.make_model(
            graph,
            producer_name="edgebundle-benchmarks",
            opset_imports=[helper.make_opsetid("", opset)],
            ir_version=ir_version,
        )
