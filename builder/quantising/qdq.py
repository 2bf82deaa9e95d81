"""Write a placement as a model in QDQ form: QuantizeLinear and DequantizeLinear around quantised units.

Promises a model of ONNX's own operators with the float model's inputs and outputs. Each quantised tensor has
one pair, with one scale and zero point. Weights are int8 constants and biases int32 constants, each followed
by a DequantizeLinear along the axis of the output's channels.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from builder.importer.onnx_graph import OnnxGraph, copy_node, remove_dead_nodes
from builder.quantising.placement import Placement
from builder.quantising.ranges import Levels
from builder.quantising.units import Readers, Unit
from builder.quantising.weight_levels import best_scales, quantise_weights

Activations: TypeAlias = Literal["uint8", "int8"]
Corrections: TypeAlias = Mapping[str, NDArray[np.float64]]
Scales: TypeAlias = MutableMapping[str, NDArray[np.float64]]

# The oldest opset in which DequantizeLinear has an axis.
OLDEST: Final = 13


@dataclass(frozen=True, slots=True)
class QdqModel:
    """A model in QDQ form.

    `raised`: unit -> how many of its channels have a raised scale, so that sums fit int32.
    `widened`: unit whose sums of four products fit 16 bits -> how much larger its scales are for that, on
        average.
    """

    model: onnx.ModelProto
    raised: Mapping[str, int]
    widened: Mapping[str, float]


def write_qdq(
    model: onnx.ModelProto,
    placement: Placement,
    activations: Activations,
    corrections: Corrections | None = None,
    scales: Scales | None = None,
    *,
    in_words: bool = False,
) -> QdqModel:
    """Quantise a model.

    `model`: the float model, which is not changed.
    `corrections`: unit -> what is subtracted from its bias, float64, shape [channels]; None corrects nothing.
    `scales`: unit -> the best scales of its weights. What is missing is computed and added: they are the same
        wherever a model is quantised.
    `in_words`: whether sums of four products must fit 16 bits, where the device can gain from it.
    """
    quantised = onnx.ModelProto()
    quantised.CopyFrom(model)
    del quantised.graph.value_info[:]  # conversions would have to be added for nothing: it is inferred again
    writer = _Writer(quantised, placement, activations, corrections, {} if scales is None else scales)
    writer.in_words = in_words
    return QdqModel(writer.write(), writer.raised, writer.widened)


class _Writer:
    def __init__(
        self,
        model: onnx.ModelProto,
        placement: Placement,
        activations: Activations,
        corrections: Corrections | None,
        scales: Scales,
    ) -> None:
        self.raised: dict[str, int] = {}
        self.widened: dict[str, float] = {}
        self.in_words = False
        self._graph = OnnxGraph(model)
        self._model = model
        self._levels = placement.levels
        self._corrections = corrections or {}
        self._scales = scales
        self._dtype = np.dtype(activations)
        self._unit_of = {node: unit for unit in placement.units for node in unit.nodes}
        self._maker = {name: unit for unit in placement.units for name in unit.results}
        self._dequantised = {name: self._graph.fresh(f"{name}_dequantised") for name in self._levels}
        self._constants: dict[tuple[float, int], tuple[str, str]] = {}
        self._readers = Readers(model)

    def write(self) -> onnx.ModelProto:
        nodes: list[onnx.NodeProto] = []
        for value in self._model.graph.input:
            nodes += self._pair(value.name)
        for node in self._model.graph.node:
            unit = self._unit_of.get(node.name)
            if unit is not None and node.name == unit.clamp and self._is_implied(unit, node):
                # The range of the levels does what the clamp did.
                clamped = next(made for made in reversed(nodes) if node.input[0] in made.output)
                clamped.output[0] = node.output[0]
            else:
                nodes += self._constants_of(unit, node)
                nodes.append(self._reading(unit, node))
            for name in node.output:
                nodes += self._pair(name)
        copies = [copy_node(node) for node in nodes]
        del self._model.graph.node[:]
        self._model.graph.node.extend(copies)
        remove_dead_nodes(self._model.graph)
        return self._model

    def _reading(self, unit: Unit | None, node: onnx.NodeProto) -> onnx.NodeProto:
        """A copy of a node that reads levels where there are some."""
        copy = copy_node(node)
        for index, name in enumerate(copy.input):
            if name not in self._levels:
                continue
            if name in self._maker or (unit is not None and name in unit.data):
                copy.input[index] = self._dequantised[name]
        return copy

    def _pair(self, name: str) -> list[onnx.NodeProto]:
        levels = self._levels.get(name)
        if levels is None:
            return []
        scale, zero_point = self._parameters(levels)
        between = self._graph.fresh(f"{name}_quantised")
        out = self._dequantised[name]
        return [
            helper.make_node("QuantizeLinear", [name, scale, zero_point], [between], name=between),
            helper.make_node("DequantizeLinear", [between, scale, zero_point], [out], name=out),
        ]

    def _parameters(self, levels: Levels) -> tuple[str, str]:
        """Names of the constants for a scale and a zero point; equal ones are written once."""
        key = (float(levels.scale), levels.zero_point)
        if key not in self._constants:
            offset = 0 if self._dtype == np.uint8 else 128
            self._constants[key] = (
                self._graph.add_constant(np.asarray(levels.scale, np.float32), "scale"),
                self._graph.add_constant(np.asarray(levels.zero_point - offset, self._dtype), "zero_point"),
            )
        return self._constants[key]

    def _constants_of(self, unit: Unit | None, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Replace the constants of a unit's first node, and return what dequantises them."""
        if unit is None or unit.weights is None or node.name != unit.name:
            return []
        names = unit.weights
        weight = self._graph.constant(names.weight)
        bias = self._graph.constant(names.bias) if names.bias else None
        assert weight is not None
        scale = self._levels[unit.data[0]].scale
        if unit.name not in self._scales:
            self._scales[unit.name] = best_scales(weight, names.axis)
        in_words = self.in_words and _gains_from_words(node, weight, names.axis)
        correction, scales = self._corrections.get(unit.name), self._scales[unit.name]
        made = quantise_weights(weight, names.axis, bias, scale, correction, scales, in_words=in_words)
        if in_words:
            self.widened[unit.name] = made.widened
        if made.raised:
            self.raised[unit.name] = made.raised
        nodes: list[onnx.NodeProto] = []
        new_weight = self._dequantise(made.weight, made.scales, names.axis, f"{unit.name}_weight", nodes)
        node.input[1] = new_weight
        if made.bias is None:
            return nodes
        new_bias = self._dequantise(made.bias, made.bias_scales, 0, f"{unit.name}_bias", nodes)
        if node.op_type == "MatMul":
            add = next(n for n in self._model.graph.node if n.name == unit.nodes[1])
            for index, name in enumerate(add.input):
                if name == names.bias:
                    add.input[index] = new_bias
        else:
            del node.input[2:]
            node.input.append(new_bias)
        return nodes

    def _dequantise(
        self,
        levels: NDArray[Any],
        scales: NDArray[np.float32],
        axis: int,
        stem: str,
        nodes: list[onnx.NodeProto],
    ) -> str:
        values = self._graph.add_constant(levels, f"{stem}_quantised")
        scale = self._graph.add_constant(scales, f"{stem}_scale")
        inputs = [values, scale]
        if levels.dtype != np.int32:  # which has no zero point (DequantizeLinear-13)
            inputs.append(self._graph.add_constant(np.zeros(len(scales), levels.dtype), f"{stem}_zero_point"))
        out = self._graph.fresh(f"{stem}_dequantised")
        nodes.append(helper.make_node("DequantizeLinear", inputs, [out], name=out, axis=axis))
        return out

    def _is_implied(self, unit: Unit, node: onnx.NodeProto) -> bool:
        """Whether the levels of a clamp's output reach no further than the clamp lets pass."""
        name = node.output[0]
        levels = self._levels.get(name)
        if levels is None or name in self._readers.outputs:
            return False
        readers = self._readers.of(name)
        if not readers or self._maker.get(name) is not unit:
            return False
        low, high = (0.0, np.inf) if node.op_type == "Relu" else self._bounds(node)
        # Half a level of tolerance: beyond the clamp's bound the next level would be nearer.
        return levels.low >= low and levels.high <= high + 0.5 * float(levels.scale)

    def _bounds(self, node: onnx.NodeProto) -> tuple[float, float]:
        """The bounds of a Clip-11."""
        bounds = [-np.inf, np.inf]
        for index, name in enumerate(node.input[1:3]):
            value = self._graph.constant(name) if name else None
            if value is not None:
                bounds[index] = float(value.reshape(-1)[0])
        return bounds[0], bounds[1]


def _gains_from_words(node: onnx.NodeProto, weight: NDArray[Any], axis: int) -> bool:
    """Whether a device without dot products of bytes adds four of this operator's products in 16 bits.

    It adds rows of a depthwise convolution, and computes the first layer in float32. Large pictures with 3x3
    windows use Winograd's algorithm, but their size may be chosen after quantising.
    """
    if node.op_type != "Conv":
        return weight.ndim == 2 and weight.shape[1 - axis] % 8 == 0
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return bool(given.get("group", 1) == 1 and weight.shape[1] > 4)
