"""Units of a float graph that are quantised as a whole: an operator with its bias and clamp, or a table.

A unit reads quantised tensors and makes tensors that may be quantised; nothing is quantised inside it. What
is not in a unit is never quantised: norms, softmax, products of two activations in attention, recurrent
layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from builder.importer.multiply_adds import multiply_adds_of
from builder.importer.onnx_graph import OnnxGraph, attributes, reads

# One number in, one number out: with scalar constants, a chain of these is a table of 256 entries.
_FUNCTIONS: Final = frozenset(
    {
        "Abs", "Celu", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish",
        "Neg", "PRelu", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh",
        "ThresholdedRelu",
    }
)  # fmt: skip
_BINARY: Final = frozenset({"Add", "Sub", "Mul", "Div", "Min", "Max", "Pow"})
# Operators whose results are values of their input, or lie between them: they keep its levels.
_MOVING: Final = frozenset(
    {
        "DepthToSpace", "Expand", "Flatten", "Gather", "GlobalMaxPool", "Identity", "MaxPool", "Pad",
        "ReduceMax", "Reshape", "Resize", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose",
        "Unsqueeze",
    }
)  # fmt: skip
_AVERAGING: Final = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean"})
_OF_TWO: Final = frozenset({"Add", "Sub", "Mul"})
_MULTIPLYING: Final = frozenset({"Conv", "Gemm", "MatMul"})


@dataclass(frozen=True, slots=True)
class Weights:
    """The constants of a convolution or matrix product.

    `weight`, `bias`: names of the constants; None without a bias.
    `axis`: axis of the weight that counts the output's channels.
    """

    weight: str
    bias: str | None
    axis: int


@dataclass(frozen=True, slots=True)
class Unit:
    """An operator, or several, with quantised tensors only at its edges.

    `kind`: its operators, such as `Conv` or `Sigmoid+Mul`.
    `data`: the tensors that it reads, without constants.
    `results`: the tensors that it makes and that others read.
    `clamp`: name of the node at its end that only clamps, or None.
    `keeps_levels`: whether its results have the levels of its input.
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    data: tuple[str, ...]
    results: tuple[str, ...]
    weights: Weights | None = None
    clamp: str | None = None
    keeps_levels: bool = False
    macs: int = 0


class Readers:
    """Who reads each value of a graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.outputs = {output.name for output in model.graph.output}
        self._nodes: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in sorted(reads(node)):
                self._nodes.setdefault(name, []).append(node)

    def of(self, name: str) -> list[onnx.NodeProto]:
        """The nodes that read a value, in the graph's order."""
        return self._nodes.get(name, [])

    def only(self, name: str) -> onnx.NodeProto | None:
        """The node that reads a value, if nothing else does and it is no output of the model."""
        found = self.of(name)
        return found[0] if len(found) == 1 and name not in self.outputs else None


def find_units(model: onnx.ModelProto) -> list[Unit]:
    """The units of a model, in the graph's order.

    `model`: a normalised model with unique node names, static shapes, and constants folded into weights.
    """
    finder = _Finder(model)
    for node in model.graph.node:
        if node.name not in finder.taken and not node.domain:
            finder.visit(node)
    order = {node.name: i for i, node in enumerate(model.graph.node)}
    return sorted([*finder.units, *finder.tables()], key=lambda unit: order[unit.nodes[0]])


class _Finder:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = OnnxGraph(model)
        self.readers = Readers(model)
        self.taken: set[str] = set()
        self.units: list[Unit] = []
        self.roots: dict[str, str] = {}  # value -> value of which it is a function
        self.functions: dict[str, list[onnx.NodeProto]] = {}  # root -> nodes of its functions

    def visit(self, node: onnx.NodeProto) -> None:
        if not node.output or not all(self._is_float(name) for name in node.output if name):
            return
        if node.op_type in _MULTIPLYING:
            self._multiplying(node)
        elif self._is_function(node):
            root = self._roots_of(node).pop()
            self.roots[node.output[0]] = root
            self.functions.setdefault(root, []).append(node)
        elif node.op_type in _MOVING and self._is_data(node.input[0]) and _keeps_levels(node, self.graph):
            results = tuple(name for name in node.output if name)
            self._add(
                Unit(node.name, node.op_type, (node.name,), (node.input[0],), results, keeps_levels=True)
            )
        elif node.op_type in _AVERAGING and self._is_data(node.input[0]):
            self._add(Unit(node.name, node.op_type, (node.name,), (node.input[0],), (node.output[0],)))
        elif (node.op_type in _OF_TWO or node.op_type == "Concat") and all(map(self._is_data, node.input)):
            clamp = self._clamp(node.output[0]) if node.op_type in _OF_TWO else None
            self._add(_ending(node, [node], tuple(dict.fromkeys(node.input)), clamp))

    def _add(self, unit: Unit) -> None:
        self.units.append(unit)
        self.taken |= set(unit.nodes)

    def _is_float(self, name: str) -> bool:
        kind = self.graph.type_of(name)
        return kind is not None and kind.elem_type == TensorProto.FLOAT and kind.static_shape is not None

    def _is_data(self, name: str) -> bool:
        return bool(name) and self._is_float(name) and not self.graph.is_constant(name)

    def _scalar(self, name: str) -> float | None:
        value = self.graph.constant(name) if name else None
        return None if value is None or value.size != 1 else float(value.reshape(-1)[0])

    def _roots_of(self, node: onnx.NodeProto) -> set[str]:
        data = [name for name in node.input if name and not self.graph.is_constant(name)]
        return {self.roots.get(name, name) for name in data}

    def _is_function(self, node: onnx.NodeProto) -> bool:
        if node.op_type not in _FUNCTIONS | _BINARY or len(self._roots_of(node)) != 1:
            return False
        constants = [name for name in node.input if name and self.graph.is_constant(name)]
        shapes = {self.graph.shape_of(name) for name in (*node.output, *self._roots_of(node))}
        return len(shapes) == 1 and all(self._scalar(name) is not None for name in constants)

    def _multiplying(self, node: onnx.NodeProto) -> None:
        weights = self._weights(node)
        if weights is None or not self._is_data(node.input[0]):
            return
        nodes = [node]
        if node.op_type == "MatMul" and (added := self._bias_after(node, weights)) is not None:
            bias, add = added
            weights = Weights(weights.weight, bias, weights.axis)
            nodes.append(add)
        clamp = self._clamp(nodes[-1].output[0])
        self._add(_ending(node, nodes, (node.input[0],), clamp, weights, multiply_adds_of(node, self.graph)))

    def _weights(self, node: onnx.NodeProto) -> Weights | None:
        weight = self.graph.constant(node.input[1])
        if weight is None or weight.dtype != np.float32 or not np.isfinite(weight).all():
            return None
        bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
        values = self.graph.constant(bias) if bias else None
        options = attributes(node)
        if node.op_type == "Conv":
            axis = 0
        elif weight.ndim != 2 or options.get("transA", 0):
            return None
        else:
            axis = 0 if options.get("transB", 0) else 1
        if options.get("alpha", 1.0) != 1.0 or options.get("beta", 1.0) != 1.0:
            return None
        if bias is None:
            return Weights(node.input[1], None, axis)
        channels = weight.shape[axis]
        if values is None or values.dtype != np.float32 or not np.isfinite(values).all():
            return None
        if values.shape not in ((), (1,), (1, 1), (channels,), (1, channels)):
            return None
        return Weights(node.input[1], bias, axis)

    def _bias_after(self, node: onnx.NodeProto, weights: Weights) -> tuple[str, onnx.NodeProto] | None:
        """The constant that only an Add after a MatMul adds to its columns."""
        reader = self.readers.only(node.output[0])
        if reader is None or reader.op_type != "Add" or reader.domain:
            return None
        [name] = [n for n in reader.input if n != node.output[0]] or [""]
        values = self.graph.constant(name) if name else None
        columns = self.graph.shape_of(weights.weight)
        if values is None or columns is None or values.dtype != np.float32 or not np.isfinite(values).all():
            return None
        return (name, reader) if values.shape == (columns[weights.axis],) else None

    def _clamp(self, name: str) -> onnx.NodeProto | None:
        reader = self.readers.only(name)
        if reader is None or reader.domain or reader.op_type not in ("Relu", "Clip"):
            return None
        if any(bound and self._scalar(bound) is None for bound in reader.input[1:]):
            return None
        return reader

    def tables(self) -> Iterable[Unit]:
        """Chains of functions of one tensor, such as x * sigmoid(x)."""
        for root, nodes in self.functions.items():
            names = {node.name for node in nodes}
            results = [
                output
                for node in nodes
                for output in node.output
                if output in self.readers.outputs
                or any(reader.name not in names for reader in self.readers.of(output))
            ]
            kind = "+".join(node.op_type for node in nodes)
            if results:
                ordered = tuple(node.name for node in nodes)
                yield Unit(nodes[-1].name, kind, ordered, (root,), tuple(results))


def _ending(
    main: onnx.NodeProto,
    nodes: list[onnx.NodeProto],
    data: tuple[str, ...],
    clamp: onnx.NodeProto | None,
    weights: Weights | None = None,
    macs: int = 0,
) -> Unit:
    """A unit that ends with a clamp, if there is one."""
    ended = nodes if clamp is None else [*nodes, clamp]
    return Unit(
        main.name,
        main.op_type,
        tuple(node.name for node in ended),
        data,
        (ended[-1].output[0],),
        weights,
        None if clamp is None else clamp.name,
        macs=macs,
    )


def _keeps_levels(node: onnx.NodeProto, graph: OnnxGraph) -> bool:
    """Whether an operator that moves values makes none that its input's levels cannot represent."""
    options = attributes(node)
    if not all(graph.is_constant(name) for name in node.input[1:] if name):
        return False
    if node.op_type == "Resize":
        outside = options.get("coordinate_transformation_mode") == "tf_crop_and_resize"
        return options.get("mode", "nearest") in ("nearest", "linear") and not outside
    if node.op_type == "Pad" and options.get("mode", "constant") == "constant":
        value = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        return value is None or not value.any()
    return not (node.op_type == "MaxPool" and len(node.output) > 1)
