"""Explain why a model cannot be imported: list every operator at fault, with the names of its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from builder.errors import (
    VALUE_HINT,
    FrontEndError,
    ModelError,
    Obstacle,
    UnboundedError,
    UnsupportedOperatorError,
)
from builder.importer.advice import CHANGES
from builder.importer.bounded.padding import pad_lengths
from builder.importer.classic.kept import is_kept
from builder.importer.half_precision import HALVES
from builder.importer.onnx_graph import OnnxGraph, attributes, copy_node, names_of, subgraphs
from builder.importer.relax_module import supported_operators, to_relax
from builder.importer.rewrites.elementwise import drops_at_random
from builder.importer.rewrites.loops import MAX_UNROLLED_NODES, is_too_long, stays_true
from builder.importer.rewrites.microsoft import CONTRIB, DOMAIN
from builder.importer.rewrites.replacement import input_name
from builder.importer.rewrites.windows import misfit

# Each trial runs the front end on one node; of nodes that differ only in name, one is tried. If a graph has
# more different nodes than this limit, only the first ones are tried.
MAX_TRIALS: Final = 2000

# Operators whose change is also the hint of the whole refusal.
_HINTED: Final = frozenset({"Dropout", "If", "Loop", "NonMaxSuppression", "Scan"})
_MISFIT_HINT: Final = (
    "give the model a larger input (--input-shapes), or the node more padding or a smaller window"
)
_OTHER_HINT: Final = (
    "export the model without them, or with other operators: docs/importing.md says what is taken"
)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a node cannot be imported.

    `depends_on_values`: whether the cause is a value that is only known at run time, which the user may be
        able to fix.
    `is_misfit`: whether the cause is a window that is larger than its input.
    """

    text: str
    depends_on_values: bool = False
    is_misfit: bool = False


@dataclass(frozen=True, slots=True)
class _Refused:
    """An operator that cannot be imported, with its nodes.

    `operator`: its type, preceded by its domain if that is not ONNX's.
    """

    operator: str
    reason: Reason
    nodes: tuple[onnx.NodeProto, ...]


def refuse_unsupported(model: onnx.ModelProto) -> None:
    """Refuse a model with operators that the front end does not know, before the front end runs.

    Raises `UnsupportedOperatorError` if the model has such operators; the message also lists nodes of known
        operators that are refused.
    """
    known = supported_operators()
    graph = OnnxGraph(model)
    if all(_first_obstacle(node, graph, known) is None for node in model.graph.node):
        return
    raise explain(model, "")


def explain(model: onnx.ModelProto, reason: str) -> ModelError:
    """Find every node that the front end refuses, and return the error that names them.

    `reason`: the front end's reason for refusing the whole model, used if no single node is at fault.
    """
    found = list(_obstacles(model))
    if not found:
        return ModelError(f"the model cannot be imported: {reason or 'TVM gave no reason'}", hint=VALUE_HINT)
    hint = next((CHANGES[o.operator] for o in found if o.operator in _HINTED and _is_helped(o)), None)
    if hint is None and any(o.reason.is_misfit for o in found):
        hint = _MISFIT_HINT
    if hint is None and any(o.reason.depends_on_values for o in found):
        hint = VALUE_HINT
    if hint is None:
        hint = _OTHER_HINT
    obstacles = [Obstacle(o.operator, names_of(o.nodes), o.reason.text) for o in found]
    return UnsupportedOperatorError.listing(obstacles, hint=hint)


def _is_helped(refused: _Refused) -> bool:
    """Whether the operator's hint helps: a limit of steps is no help for a Loop whose count is known."""
    return refused.operator != "Loop" or refused.reason.depends_on_values


def refused_operators(model: onnx.ModelProto) -> set[str]:
    """Operators with a node that the front end refuses."""
    return {obstacle.operator for obstacle in _obstacles(model)}


def _obstacles(model: onnx.ModelProto) -> list[_Refused]:
    graph = OnnxGraph(model)
    known = supported_operators()
    groups: dict[tuple[str, Reason], list[onnx.NodeProto]] = {}
    tried: dict[bytes, Reason | None] = {}
    # Values of unknown type that a refused node makes: what reads them is not at fault.
    obscure: set[str] = set()
    for node in model.graph.node:
        reason = _first_obstacle(node, graph, known)
        if reason is not None and not any(subgraphs(node)):
            unknown = {name for name in node.output if name and graph.shape_of(name) is None}
            follows = any(name in obscure for name in node.input)
            obscure |= unknown
            if follows and not node.domain and node.op_type in known:
                continue
        if reason is None:
            key = _likeness(node, graph)
            if key not in tried and len(tried) < MAX_TRIALS:
                tried[key] = _try(node, graph)
            reason = tried.get(key)
        if reason is not None:
            operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            groups.setdefault((operator, reason), []).append(node)
    if (unbounded := _unbounded(model)) is not None:
        # The length itself is no fault, nor is what follows: only what cannot take it, or does not bound it.
        groups = {key: nodes for key, nodes in groups.items() if not key[1].depends_on_values}
        reason = Reason(unbounded.reason, depends_on_values=True)
        groups.setdefault((unbounded.node.op_type, reason), []).append(unbounded.node)
    ordered = sorted(groups.items(), key=lambda group: (group[0][0], group[0][1].text))
    return [_Refused(operator, reason, tuple(nodes)) for (operator, reason), nodes in ordered]


def _unbounded(model: onnx.ModelProto) -> UnboundedError | None:
    """Why lengths that are only known at run time cannot be padded; None if there are none."""
    try:
        pad_lengths(model)
    except UnboundedError as error:
        return error
    return None


def _first_obstacle(node: onnx.NodeProto, graph: OnnxGraph, known: frozenset[str]) -> Reason | None:
    """Why a node cannot be imported, without running the front end; None if no reason is found."""
    if node.op_type == "Dropout" and drops_at_random(node, graph):
        return Reason("expected training_mode to be false: in training, it drops numbers at random")
    if node.domain == DOMAIN and node.op_type in CONTRIB:
        return Reason("its attributes, or its optional inputs or outputs, are not supported")
    if node.domain and not is_kept(node):
        return Reason(f"the importer knows no operators of the domain '{node.domain}'")
    if node.op_type == "Loop" and (count := _too_many_steps(node, graph)):
        size = len(attributes(node)["body"].node)
        return Reason(f"its {count} steps of {size} nodes are more than {MAX_UNROLLED_NODES} nodes")
    if any(subgraphs(node)):
        return Reason(
            "its condition or length depends on values that are only known at run time",
            depends_on_values=True,
        )
    if node.op_type not in known and not node.domain:
        return Reason("there is no converter")
    if node.op_type == "BitCast" and not _keeps_size(node, graph):
        return Reason("bits of half precision cannot be cast, because the model is computed in float32")
    if node.op_type == "RoiAlign" and attributes(node).get("mode", "avg") != "avg":
        return Reason("expected the mode avg: TVM's maximum is not ONNX's")
    for name in node.output:
        if not name:
            continue
        found = graph.type_of(name)
        if found is None:
            return Reason("expected a tensor as output, got a sequence or an optional")
        if found.static_shape is None:
            if (why := misfit(node, graph)) is not None:
                return Reason(why, is_misfit=True)
            return Reason(
                "the shape of its output depends on values that are only known at run time",
                depends_on_values=True,
            )
    return None


def _too_many_steps(node: onnx.NodeProto, graph: OnnxGraph) -> int:
    """The number of steps of a Loop that never ends earlier and is too long to be written out; else 0."""
    trips = graph.constant(name) if (name := input_name(node, 0)) else None
    if trips is None or trips.size != 1 or not stays_true(node, graph):
        return 0
    count = int(trips.reshape(()))
    return count if is_too_long(node, count) else 0


def _keeps_size(node: onnx.NodeProto, graph: OnnxGraph) -> bool:
    """Whether a BitCast's input has as many bits as its output, and neither was half precision."""
    found, to = graph.type_of(node.input[0]), int(attributes(node)["to"])
    sizes = (
        [] if found is None else [helper.tensor_dtype_to_np_dtype(k).itemsize for k in (found.elem_type, to)]
    )
    return len(set(sizes)) == 1 and to not in HALVES


def _likeness(node: onnx.NodeProto, graph: OnnxGraph) -> bytes:
    """A key that is equal for nodes that the front end treats alike."""
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


def _try(node: onnx.NodeProto, graph: OnnxGraph) -> Reason | None:
    """Run the front end on a model of only this node; return its reason if it refuses."""
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
    except FrontEndError as error:
        return Reason(str(error).removesuffix("."), error.depends_on_values)
    except ModelError as error:
        return Reason(str(error))
    return None
