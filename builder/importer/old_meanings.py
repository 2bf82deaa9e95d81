"""Operators whose meaning changed with an opset, and which ONNX's converter passes on as they are.

- Resize and Upsample before opset 11 map pixels as `asymmetric` does (ONNX operator specification,
  Upsample-9, Resize-10); the default has been `half_pixel` since. Of two nearest pixels, ONNX Runtime takes
  the lower one if the picture grows, and the upper one if it shrinks.
- Hardmax before opset 13 takes all axes from `axis` on for one (Hardmax-11).

Others are brought into a form that the converter takes, before it converts:

- The second operand of Add and its kin before opset 7 begins at the attribute `axis` (Add-6), and a slope of
  PRelu stands for a channel (PRelu-6).
- BatchNormalization before opset 9 may have statistics for each place (`spatial` 0).
- The mask of a Dropout before opset 12 is false outside of training, as ONNX Runtime has it, and before opset
  10 of the input's type; from opset 12 on it is true.

Of some old operators, the converter has no newer form: Cast and Tile before opset 6, recurrent layers before
opset 7, Pad and Split before opset 2. They are given today's form, and kept from the converter (`HELD`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from builder.importer.onnx_graph import (
    OnnxGraph,
    attributes,
    constant_node_value,
    copy_node,
    set_attributes,
    subgraphs,
    walk_nodes,
)

# The domain of nodes that the converter must not touch.
HELD: Final = "held"
_CAST: Final = 6
_TILE: Final = 6
_PAD_AND_SPLIT: Final = 2
_BROADCAST: Final = 7
_RECURRENT: Final = 7
_SPATIAL: Final = 9
_MASK_IS_BOOL: Final = 10
_MASK_IS_TRUE: Final = 12
_ALIGNED: Final = frozenset(
    {"Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "PRelu", "Pow", "Sub", "Xor"}
)
_RESIZE: Final = 11
_HARDMAX: Final = 13


def bring_up(model: onnx.ModelProto) -> None:
    """Give nodes of old opsets a form that ONNX's converter takes, in place.

    `model`: a model with known types, in its own opset.
    """
    version = model.opset_import[0].version
    graph = OnnxGraph(model)

    def replace(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        options = attributes(node)
        if node.domain:
            return None
        if (held := _held(node, graph, options)) is not None:
            return held
        if node.op_type in _ALIGNED and version < _BROADCAST:
            return _aligned(node, graph, options)
        if node.op_type == "BatchNormalization" and version < _SPATIAL and not options.get("spatial", 1):
            return _for_each_place(node, graph, float(options.get("epsilon", 1e-5)))
        if node.op_type == "Dropout" and _BROADCAST <= version < _MASK_IS_TRUE and any(node.output[1:]):
            return _without_mask(node, graph)
        return None

    if version < _MASK_IS_TRUE:
        graph.rewrite(replace)
    if any(node.domain == HELD for node in model.graph.node):
        model.opset_import.append(helper.make_opsetid(HELD, 1))


def release(model: onnx.ModelProto) -> None:
    """Give the nodes that were kept from the converter ONNX's domain again, in place."""
    for node in walk_nodes(model.graph):
        if node.domain == HELD:
            node.domain = ""
    kept = [opset for opset in model.opset_import if opset.domain != HELD]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _held(node: onnx.NodeProto, graph: OnnxGraph, options: dict[str, Any]) -> list[onnx.NodeProto] | None:
    """Return an operator that the converter lacks in today's form; None for others.

    A node whose values contradict the specification stays, and is refused by name.
    """
    if node.op_type not in _TODAY:
        return None
    since, rewrite = _TODAY[node.op_type]
    if graph.opset >= since:
        return None
    new = copy_node(node)
    if not rewrite(new, graph, options):
        return None
    new.domain = HELD
    return [new]


def _cast(node: onnx.NodeProto, _graph: OnnxGraph, options: dict[str, Any]) -> bool:
    """Cast to a type that is a name."""
    to = options.get("to")
    if isinstance(to, str):
        names = dict(onnx.TensorProto.DataType.items())
        if to not in names:
            return False
        set_attributes(node, [], {"to": names[to]})
    return True


def _recurrent(node: onnx.NodeProto, _graph: OnnxGraph, _options: dict[str, Any]) -> bool:
    """A recurrent layer that says whether it has a sequence of outputs."""
    set_attributes(node, ["output_sequence"], {})
    return True


def _tile(node: onnx.NodeProto, graph: OnnxGraph, _options: dict[str, Any]) -> bool:
    """Tile along one axis."""
    shape, values = graph.shape_of(node.input[0]), [graph.constant(name) for name in node.input[1:]]
    if shape is None or len(values) != 2 or any(value is None or value.size != 1 for value in values):
        return False
    tiles, axis = (int(np.asarray(value).item()) for value in values)
    repeats = [tiles if place == axis else 1 for place in range(len(shape))]
    node.input[1:] = [graph.add_constant(np.array(repeats, np.int64), f"{node.name}/repeats")]
    return True


def _pad(node: onnx.NodeProto, graph: OnnxGraph, options: dict[str, Any]) -> bool:
    """Pad whose sizes are called `paddings`."""
    pads = np.array(options["paddings"], np.int64)
    value = np.array(options.get("value", 0.0), np.float32)
    node.input.extend(
        graph.add_constant(array, f"{node.name}/{part}") for part, array in (("pads", pads), ("value", value))
    )
    set_attributes(node, ["paddings", "value"], {})
    return True


def _split(node: onnx.NodeProto, graph: OnnxGraph, options: dict[str, Any]) -> bool:
    """Split whose sizes are an input or an attribute."""
    if "split" in options:
        sizes = np.array(options["split"], np.int64)
        node.input[1:] = [graph.add_constant(sizes, f"{node.name}/sizes")]
    set_attributes(node, ["split"], {"axis": int(options.get("axis", 0))})
    return True


# Operator -> the first opset whose form the converter has, and what brings an older node into today's form,
# in place, or returns false.
_TODAY: Final[Mapping[str, tuple[int, Callable[[onnx.NodeProto, OnnxGraph, dict[str, Any]], bool]]]] = {
    "Cast": (_CAST, _cast),
    "GRU": (_RECURRENT, _recurrent),
    "LSTM": (_RECURRENT, _recurrent),
    "RNN": (_RECURRENT, _recurrent),
    "Tile": (_TILE, _tile),
    "Pad": (_PAD_AND_SPLIT, _pad),
    "Split": (_PAD_AND_SPLIT, _split),
}


def _aligned(node: onnx.NodeProto, graph: OnnxGraph, options: dict[str, Any]) -> list[onnx.NodeProto] | None:
    """Give the second operand axes of extent 1 behind those that it has."""
    left, right = (graph.shape_of(name) for name in node.input)
    if left is None or right is None:
        return None
    if node.op_type == "PRelu":
        axis = 1 if len(right) == 1 and right != (1,) and len(left) > 1 else None
    else:
        axis = int(options["axis"]) % len(left) if options.get("broadcast") and "axis" in options else None
    more = 0 if axis is None else len(left) - axis - len(right)
    if axis is None or more < 0:
        return None
    if not more:
        return None
    new = copy_node(node)
    kept = [attribute for attribute in node.attribute if attribute.name != "axis"]
    del new.attribute[:]
    new.attribute.extend(kept)
    new.input[1] = graph.fresh(f"{node.name}/aligned")
    axes = list(range(len(right), len(right) + more))
    widened = helper.make_node(
        "Unsqueeze", [node.input[1]], [new.input[1]], name=f"{node.name}/Unsqueeze", axes=axes
    )
    return [widened, new]


def _for_each_place(node: onnx.NodeProto, graph: OnnxGraph, epsilon: float) -> list[onnx.NodeProto] | None:
    """BatchNormalization with a scale and a shift for each place of a sample."""
    values = [graph.constant(name) for name in node.input[1:5]]
    if any(value is None for value in values):
        return None
    scale, bias, mean, variance = (np.asarray(value, np.float64) for value in values)
    factor = scale / np.sqrt(variance + epsilon)
    names = [
        graph.add_constant(value.astype(np.float32), f"{node.name}/{part}")
        for part, value in (("factor", factor), ("shift", bias - mean * factor))
    ]
    scaled = graph.fresh(f"{node.name}/scaled")
    how = {"broadcast": 1} if graph.opset < _BROADCAST else {}
    return [
        helper.make_node("Mul", [node.input[0], names[0]], [scaled], name=f"{node.name}/Mul", **how),
        helper.make_node("Add", [scaled, names[1]], [node.output[0]], name=f"{node.name}/Add", **how),
    ]


def _without_mask(node: onnx.NodeProto, graph: OnnxGraph) -> list[onnx.NodeProto]:
    """Dropout outside of training whose mask is false everywhere."""
    x, mask = node.input[0], node.output[1]
    new = copy_node(node)
    del new.output[1:]
    if graph.opset >= _MASK_IS_BOOL:
        return [new, helper.make_node("Less", [x, x], [mask], name=f"{node.name}/mask")]
    false = graph.fresh(f"{mask}/false")
    kind = graph.type_of(x)
    to = onnx.TensorProto.FLOAT if kind is None else kind.elem_type
    return [
        new,
        helper.make_node("Less", [x, x], [false], name=f"{node.name}/Less"),
        helper.make_node("Cast", [false], [mask], name=f"{node.name}/mask", to=to),
    ]


def keep_old_meanings(model: onnx.ModelProto, version: int) -> None:
    """Let converted nodes do what they did, in place.

    `version`: the opset that it was converted from.
    """
    if version < _RESIZE:
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        for node in walk_nodes(model.graph):
            if node.op_type == "Constant" and node.attribute:
                value = constant_node_value(node)
                if value is not None:
                    constants[node.output[0]] = value
        _split_resizes(model.graph, constants)
        for node in walk_nodes(model.graph):
            if node.op_type == "Resize" and not node.domain:
                _keep_resize(node, constants)
    if version < _HARDMAX:
        _keep_hardmax(model.graph)


def _split_resizes(graph: onnx.GraphProto, constants: dict[str, NDArray[np.generic]]) -> None:
    """Split a Resize that shrinks one axis and grows another: a node has only one rounding mode."""
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for subgraph in subgraphs(node):
            _split_resizes(subgraph, constants)
        nodes.append(copy_node(node))
        if node.op_type != "Resize" or node.domain or attributes(node).get("mode", "nearest") != "nearest":
            continue
        scales = constants.get(node.input[2]) if len(node.input) > 2 else None
        if scales is None or not ((np.asarray(scales) < 1).any() and (np.asarray(scales) > 1).any()):
            continue
        output = node.output[0]
        between = f"{output}/shrunk"
        grow = copy_node(node)
        grow.name = f"{node.name}/grow"
        grow.input[0] = between
        nodes[-1].output[0] = between
        whole = np.asarray(scales)
        for part, kept in ((nodes[-1], np.minimum(whole, 1)), (grow, np.maximum(whole, 1))):
            name = f"{output}/scales{len(constants)}"
            constants[name] = kept
            graph.initializer.append(numpy_helper.from_array(kept, name))
            part.input[2] = name
        nodes.append(grow)
    if len(nodes) != len(graph.node):
        del graph.node[:]
        graph.node.extend(nodes)


def _keep_resize(node: onnx.NodeProto, constants: dict[str, NDArray[np.generic]]) -> None:
    own = {"coordinate_transformation_mode": "asymmetric"}
    if attributes(node).get("mode", "nearest") == "nearest":
        scales = constants.get(node.input[2]) if len(node.input) > 2 else None
        shrinks = scales is not None and bool((np.asarray(scales) < 1).any())
        own["nearest_mode"] = "ceil" if shrinks else "floor"
    set_attributes(node, [], own)


def _keep_hardmax(graph: onnx.GraphProto) -> None:
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for subgraph in subgraphs(node):
            _keep_hardmax(subgraph)
        if node.op_type != "Hardmax" or node.domain:
            nodes.append(copy_node(node))
            continue
        x, y = node.input[0], node.output[0]
        axis = int(attributes(node).get("axis", 1))
        flat, chosen, shape = (f"{y}/{part}" for part in ("flat", "chosen", "shape"))
        nodes += [
            helper.make_node("Flatten", [x], [flat], name=f"{node.name}/Flatten", axis=axis),
            helper.make_node("Hardmax", [flat], [chosen], name=node.name, axis=1),
            helper.make_node("Shape", [x], [shape], name=f"{node.name}/Shape"),
            helper.make_node("Reshape", [chosen, shape], [y], name=f"{node.name}/Reshape"),
        ]
    if len(nodes) != len(graph.node):
        del graph.node[:]
        graph.node.extend(nodes)
