"""The scales of a model's quantised inputs and outputs: what real numbers their integers stand for.

In ONNX, an input that DequantizeLinear reads, or an output that QuantizeLinear makes, directly or through
operators that only move values. In TensorFlow Lite, the tensor's own parameters. Promises one scale for the
whole tensor, or the reason why there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from agent.bundle.quantisation import NO_QUANTISATION, Quantisation, Quantised
from agent.bundle.tensor_spec import TensorSpec

if TYPE_CHECKING:
    import onnx

    from builder.importer.tflite.tensor import Tensor

# Operators whose first input and outputs have the same numbers, in other places or not all of them.
_MOVES: Final = frozenset(
    {
        "Clip", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Pad", "Reshape",
        "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
# Operators on integers, ONNX Runtime's own too -> places of their data; scale and zero point follow each.
_ONE, _TWO = (0,), (0, 3)
_READS: Final = {
    "DequantizeLinear": _ONE, "QLinearConv": _ONE, "QLinearSigmoid": _ONE, "QLinearLeakyRelu": _ONE,
    "QLinearSoftmax": _ONE, "QLinearAveragePool": _ONE, "QLinearGlobalAveragePool": _ONE,
    "QLinearMatMul": _TWO, "QLinearAdd": _TWO, "QLinearMul": _TWO, "QGemm": _TWO, "QLinearWhere": (1, 4),
    "QLinearConcat": range(2, 1 << 16, 3),
}  # fmt: skip
# Operator -> places of the scale and the zero point of its output.
_MAKES: Final = {
    "QuantizeLinear": (1, 2), "QLinearConv": (6, 7), "QLinearMatMul": (6, 7), "QLinearAdd": (6, 7),
    "QLinearMul": (6, 7), "QGemm": (7, 8), "QLinearWhere": (7, 8), "QLinearConcat": (0, 1),
    **dict.fromkeys(
        (
            "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearAveragePool",
            "QLinearGlobalAveragePool",
        ),
        (3, 4),
    ),
}  # fmt: skip
_SEVERAL: Final = "a scale for each slice of an axis"
_UNKNOWN: Final = "a scale that is no constant"
_DIFFERENT: Final = "several scales"


@dataclass(frozen=True, slots=True)
class EdgeScales:
    """The scales at a model's edges.

    Attributes
    ----------
    quantisation
        Tensors with one scale.
    obstacles
        Names of quantised inputs and outputs that have none -> what they have instead, for a message.
    """

    quantisation: Quantisation = NO_QUANTISATION
    obstacles: Mapping[str, str] = field(default_factory=dict)

    @property
    def declared(self) -> Quantisation | None:
        """The manifest's `quantisation`; None if no tensor is quantised."""
        found = self.quantisation
        return found if found.inputs or found.outputs else None

    def without(self, names: Sequence[str]) -> EdgeScales:
        """Return the scales of all other tensors."""
        inputs, outputs = (
            tuple(each for each in found if each.name not in names)
            for found in (self.quantisation.inputs, self.quantisation.outputs)
        )
        return EdgeScales(Quantisation(inputs, outputs), self.obstacles)


NO_SCALES: Final = EdgeScales()


def onnx_scales(model: onnx.ModelProto) -> EdgeScales:
    """Read the scales at the edges of an ONNX model."""
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    makers: dict[str, onnx.NodeProto] = {}
    for node in graph.node:
        for place, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, place))
        makers |= dict.fromkeys(node.output, node)

    obstacles: dict[str, str] = {}

    def one(name: str, found: Sequence[Quantised | str]) -> Iterator[Quantised]:
        if len(set(found)) > 1:
            obstacles[name] = next((each for each in found if isinstance(each, str)), _DIFFERENT)
        elif found and isinstance(found[0], str):
            obstacles[name] = found[0]
        elif found and isinstance(found[0], Quantised):
            yield found[0]

    inputs = [
        quantised
        for value in graph.input
        if value.name not in constants and _is_integer(value)
        for quantised in one(
            value.name,
            [
                _parameters(value.name, node, (place + 1, place + 2), constants)
                for node, place in _forward(value.name, readers)
            ],
        )
    ]
    outputs = [
        quantised
        for value in graph.output
        if _is_integer(value)
        for quantised in one(
            value.name,
            [
                _parameters(value.name, node, _MAKES[node.op_type], constants)
                for node in _backward(value.name, makers)
            ],
        )
    ]
    return EdgeScales(Quantisation(tuple(inputs), tuple(outputs)), obstacles)


def tflite_scales(inputs: Sequence[tuple[str, Tensor]], outputs: Sequence[tuple[str, Tensor]]) -> EdgeScales:
    """Return the scales that a file of TensorFlow Lite gives its inputs and outputs, by their names."""
    obstacles = {}
    found: list[list[Quantised]] = [[], []]
    for place, edges in zip(found, (inputs, outputs), strict=True):
        for name, tensor in edges:
            if tensor.quantisation is None or not tensor.is_quantised:
                continue
            if tensor.quantisation.is_per_axis:
                obstacles[name] = _SEVERAL
                continue
            scale, zero = float(tensor.quantisation.scales[0]), int(tensor.quantisation.zero_points[0])
            place.append(Quantised(name, scale, zero))
    return EdgeScales(Quantisation(tuple(found[0]), tuple(found[1])), obstacles)


def fitting(scales: EdgeScales, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> EdgeScales:
    """Return the scales of those tensors that a compiled model has, as integers."""
    kept = []
    for found, specs in ((scales.quantisation.inputs, inputs), (scales.quantisation.outputs, outputs)):
        integers = {spec.name for spec in specs if "INT" in spec.datatype}
        kept.append(tuple(each for each in found if each.name in integers))
    return EdgeScales(Quantisation(*kept), scales.obstacles)


def _is_integer(value: onnx.ValueInfoProto) -> bool:
    import onnx

    kind = value.type.tensor_type.elem_type
    names = ("INT8", "UINT8", "INT16", "UINT16", "INT32")
    return kind in [onnx.TensorProto.DataType.Value(name) for name in names]


def _forward(
    name: str, readers: Mapping[str, Sequence[tuple[onnx.NodeProto, int]]]
) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Yield the nodes that read an input's integers as real numbers, and the place where they do."""
    names, seen = [name], {name}
    while names:
        for node, place in readers.get(names.pop(), ()):
            if place in _READS.get(node.op_type, ()):
                yield node, place
            elif node.op_type in _MOVES and place == 0:
                names += [each for each in node.output if each not in seen]
                seen.update(node.output)


def _backward(name: str, makers: Mapping[str, onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that make an output's integers of real numbers."""
    names, seen = [name], {name}
    while names:
        node = makers.get(names.pop())
        if node is None:
            continue
        if node.op_type in _MAKES:
            yield node
        elif node.op_type in _MOVES or node.op_type == "Concat":
            several = node.input if node.op_type == "Concat" else node.input[:1]
            names += [each for each in several if each not in seen]
            seen.update(several)


def _parameters(
    name: str, node: onnx.NodeProto, places: tuple[int, int], constants: Mapping[str, onnx.TensorProto]
) -> Quantised | str:
    """Return how a node quantises a tensor, or what stands in the way."""
    from onnx import numpy_helper

    names = [node.input[place] if place < len(node.input) else "" for place in places]
    values = [numpy_helper.to_array(constants[each]) if each in constants else None for each in names]
    scale, zero = values
    if scale is None or not scale.size or (names[1] and (zero is None or not zero.size)):
        return _UNKNOWN
    # The same scale for all slices is one.
    if any(value is not None and (value != value.flat[0]).any() for value in values):
        return _SEVERAL
    number = float(scale.flat[0])
    if not (math.isfinite(number) and number > 0):
        return f"a scale of {number}"
    return Quantised(name, number, 0 if zero is None else int(zero.flat[0]))
