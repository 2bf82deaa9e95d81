"""Why a model cannot be imported: every operator at fault, with the names of its nodes, in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from builder.errors import FrontEndError, ModelError, UnsupportedOperatorError
from builder.importer.onnx_graph import OnnxGraph, copy_node, describe, subgraphs
from builder.importer.relax_module import supported_operators, to_relax

# Each trial is one run of the front end on one node. Nodes that differ in name alone are tried once; in a
# graph with more different ones than this, those found by then are named.
MAX_TRIALS: Final = 2000

_HINTS: Final[Mapping[str, str]] = {
    "NonMaxSuppression": "export without it, and let --postprocess detect do its work",
    "Loop": "export with a fixed number of steps, unrolled",
    "Scan": "export with a fixed number of steps, unrolled",
    "If": "if the condition is an input, fix it with --input-values NAME=VALUE",
}
_VALUE_HINT: Final = "if a shape or an axis arrives as an input, fix it with --input-values NAME=VALUE"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """An operator that cannot be imported.

    Attributes
    ----------
    operator
        Its type, with its domain where it is not ONNX's.
    reason
        Why, in one line.
    nodes
        The nodes concerned.
    """

    operator: str
    reason: str
    nodes: tuple[onnx.NodeProto, ...]


def refuse_unsupported(model: onnx.ModelProto) -> None:
    """Find operators that the front end does not know, before it is asked.

    Raises
    ------
    UnsupportedOperatorError
        If there are some. Those that it knows but refuses in the form at hand are listed along with them.
    """
    known = supported_operators()
    graph = OnnxGraph(model)
    if all(_first_obstacle(node, graph, known) is None for node in model.graph.node):
        return
    raise explain(model, "")


def explain(model: onnx.ModelProto, reason: str) -> ModelError:
    """Find every node that the front end refuses.

    Parameters
    ----------
    model
        The normalised model, all types and shapes recorded.
    reason
        What the front end said of the whole, for when no node alone is at fault.
    """
    found = list(_obstacles(model))
    if not found:
        return ModelError(f"the model cannot be imported: {reason or 'TVM gave no reason'}", hint=_VALUE_HINT)
    listed = "; ".join(f"{o.operator} ({describe(o.nodes)}): {o.reason}" for o in found)
    hint = next((_HINTS[o.operator] for o in found if o.operator in _HINTS), None)
    if hint is None and any("depends on values" in o.reason or "ynamic" in o.reason for o in found):
        hint = _VALUE_HINT
    noun = "operator" if len(found) == 1 else "operators"
    return UnsupportedOperatorError(f"{len(found)} {noun} cannot be imported: {listed}", hint=hint)


def refused_operators(model: onnx.ModelProto) -> set[str]:
    """Operators of ONNX's own domain that have a converter, which refuses some node at hand."""
    return {obstacle.operator for obstacle in _obstacles(model)}


def _obstacles(model: onnx.ModelProto) -> list[Obstacle]:
    graph = OnnxGraph(model)
    known = supported_operators()
    groups: dict[tuple[str, str], list[onnx.NodeProto]] = {}
    tried: dict[bytes, str | None] = {}
    for node in model.graph.node:
        reason = _first_obstacle(node, graph, known)
        if reason is None:
            key = _likeness(node, graph)
            if key not in tried and len(tried) < MAX_TRIALS:
                tried[key] = _try(node, graph)
            reason = tried.get(key)
        if reason is not None:
            operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            groups.setdefault((operator, reason), []).append(node)
    return [Obstacle(op, reason, tuple(nodes)) for (op, reason), nodes in sorted(groups.items())]


def _first_obstacle(node: onnx.NodeProto, graph: OnnxGraph, known: frozenset[str]) -> str | None:
    """What can be said without running the front end."""
    if node.domain:
        return f"domain '{node.domain}' is not ONNX's"
    if any(subgraphs(node)):
        return "its condition or length depends on values that are only known at run time"
    if node.op_type not in known:
        return "there is no converter"
    for name in node.output:
        if not name:
            continue
        found = graph.type_of(name)
        if found is None:
            return "it makes a sequence or an optional, not a tensor"
        if found.static_shape is None:
            return "the shape of its output depends on values that are only known at run time"
    return None


def _likeness(node: onnx.NodeProto, graph: OnnxGraph) -> bytes:
    """Equal for nodes that the front end must treat alike."""
    copy = copy_node(node)
    copy.ClearField("name")
    copy.ClearField("doc_string")
    copy.ClearField("output")
    types = []
    for name in node.input:
        value = graph.constant(name) if graph.is_constant(name) else None
        small = value is not None and value.size <= 64
        types.append(f"{graph.type_of(name)}{value.tolist() if small and value is not None else ''}")
    copy.input[:] = types
    key: bytes = copy.SerializeToString(deterministic=True)
    return key


def _try(node: onnx.NodeProto, graph: OnnxGraph) -> str | None:
    """Run the front end on a model of this node alone; its reason when it refuses."""
    inputs, weights = [], []
    for name in dict.fromkeys(name for name in node.input if name):
        found = graph.type_of(name)
        if found is None or found.static_shape is None:
            return None
        if graph.is_constant(name):
            value = graph.constant(name)
            weights.append(numpy_helper.from_array(np.asarray(value), name))
        else:
            inputs.append(helper.make_tensor_value_info(name, found.elem_type, list(found.static_shape)))
    outputs = []
    for name in node.output:
        found = graph.type_of(name) if name else None
        if found is not None:
            outputs.append(helper.make_tensor_value_info(name, found.elem_type, found.static_shape))
    single = helper.make_model(
        helper.make_graph([copy_node(node)], "one", inputs, outputs, initializer=weights),
        opset_imports=graph.model.opset_import,
        ir_version=graph.model.ir_version,
    )
    try:
        to_relax(single)
    except (FrontEndError, ModelError) as error:
        return str(error).removesuffix(".")
    return None
