"""Check that a graph is valid: every value is made once, before it is read, by an operator that exists.

`prepare` repairs common and harmless faults (nodes out of order, weights among the inputs, missing names) and
refuses the rest, naming the node at fault. ONNX's own checker runs last.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

import onnx
from google.protobuf.message import Message
from onnx import TensorProto, defs, helper

from builder.errors import ModelError, Obstacle, UnsupportedOperatorError
from builder.importer import native
from builder.importer.bounded import suppression
from builder.importer.classic import imputer
from builder.importer.inlining import FunctionKey, call_key, function_key, inline
from builder.importer.large_models import with_inputs_for_weights
from builder.importer.model_file import tensors
from builder.importer.model_path import EXPORT_HINT
from builder.importer.onnx_graph import (
    DEFAULT_DOMAINS,
    MAX_NODES,
    attributes,
    copy_node,
    describe,
    is_known_type,
    name_nodes,
    names_of,
    reads,
    subgraphs,
    walk_nodes,
)
from builder.importer.rewrites.microsoft import CONTRIB, DOMAIN, IN_ONNX_DOMAIN
from builder.importer.silence import FOREIGN_FAILURES, first_line

DAMAGED: Final = f"{EXPORT_HINT}: the file is damaged"

# Every model is set to this IR version. Before version 4, weights also had to be graph inputs, and some files
# mix the rules; ONNX Runtime lags a few versions behind. The differences do not concern graphs of tensors.
MODERN_IR: Final = 10
# Older files lack `opset_import`.
OLDEST_IR: Final = 3
MAX_SUBGRAPH_DEPTH: Final = 8  # exports have three or four
# Functions that call one another; exports of modules within modules have some ten levels.
MAX_FUNCTION_DEPTH: Final = 100
_GROUPS_BY_CHANNEL: Final = 21  # the opset since which GroupNormalization has a gain for each channel
# Domains of ONNX Runtime's operators on blocked layouts, whose block depends on the processor.
_LAYOUT_DOMAINS: Final = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})


def prepare(model: onnx.ModelProto) -> onnx.ModelProto:
    """Check a decoded model and bring it into a standard form.

    Result: the model with functions inlined, weights not among the inputs, nodes sorted and named, IR 10.
    Raises `ModelError` if the graph is not valid.
    Raises `UnsupportedOperatorError` if the graph has operators that ONNX does not define.
    """
    _check_versions(model)
    _check_depth(model.graph, 0)
    count = sum(1 for _ in walk_nodes(model.graph))
    if count > MAX_NODES:
        raise ModelError(
            f"expected a graph of at most {MAX_NODES} nodes, got {count}",
            hint="export the model without training, or in parts",
        )
    for tensor in tensors(model):
        if tensor.ByteSize():  # an attribute of another type has an empty one
            _check_weight(tensor)
    model = _inline_functions(model)
    _use_default_domain(model)
    _move_to_microsoft(model)
    _check_operators(model)
    if model.opset_import[0].version < _GROUPS_BY_CHANNEL:
        _without_gains_of_groups(model.graph)
    graph = model.graph
    graph.name = graph.name or "graph"
    _remove_weights_from_inputs(graph)
    _take_optional_inputs(graph)
    _check_values(graph)
    _make_outputs(graph)
    _sort(graph)
    name_nodes(graph)
    model.ir_version = MODERN_IR
    try:
        native.check(_with_types(with_inputs_for_weights(model)))  # the weights were checked above
    except FOREIGN_FAILURES as error:
        raise ModelError(
            f"not a valid ONNX model: {first_line(error)}", hint="export the model again"
        ) from error
    return model


def _with_types(shell: onnx.ModelProto) -> onnx.ModelProto:
    """Give inputs and outputs the types and shapes that the checker wants, and that many tools leave out.

    Types of outputs are inferred later, and shapes of inputs are asked of the user. Changes `shell` in place.
    """
    for value in (*shell.graph.input, *shell.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    typed = [output for output in shell.graph.output if output.type.WhichOneof("value")]
    _replace(shell.graph.output, typed)
    return shell


def _check_versions(model: onnx.ModelProto) -> None:
    if not OLDEST_IR <= model.ir_version <= onnx.IR_VERSION:
        raise ModelError(
            f"expected an ONNX file of IR version {OLDEST_IR} to {onnx.IR_VERSION}, got {model.ir_version}",
            hint="export the model again with a current exporter",
        )
    newest = defs.onnx_opset_version()
    versions = [entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAINS]
    if not versions and any(node.domain in DEFAULT_DOMAINS for node in model.graph.node):
        raise ModelError(
            "expected the version of ONNX's operators (opset_import), got none",
            hint="export it again with opset_version=17 or newer",
        )
    for version in versions:
        if not 1 <= version <= newest:
            raise ModelError(
                f"expected an opset from 1 to {newest}, got {version}",
                hint="export with an older opset, such as 17",
            )


def _check_depth(graph: onnx.GraphProto, depth: int) -> None:
    if depth > MAX_SUBGRAPH_DEPTH:
        raise ModelError(
            f"expected at most {MAX_SUBGRAPH_DEPTH} levels of nested graphs, got more",
            hint="export the model with fewer conditions and loops inside one another",
        )
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    _check_depth(inner, depth + 1)


def _inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Inline the functions that the file defines (PyTorch's newer exporter writes many)."""
    if not model.functions:
        return model
    _drop_overrides(model)
    _check_functions(model)
    _write_defaults(model)
    if suppression.is_defined(model):
        # A normalised model: these nodes are compiled as they are.
        kept = [function for function in model.functions if function.domain != suppression.DOMAIN]
        _replace(model.functions, kept)
    if not model.functions:
        return model
    imputer.without_branches(model)
    return inline(model)


def _drop_overrides(model: onnx.ModelProto) -> None:
    """Drop functions with the name of an operator: ONNX Runtime takes the operator (ONNX leaves it open)."""
    versions = {entry.domain: entry.version for entry in model.opset_import}
    kept = [
        function
        for function in model.functions
        if not (
            (function.domain == DOMAIN and function.name in CONTRIB)
            or defs.has(function.name, versions.get(function.domain, 1), function.domain)
        )
    ]
    _replace(model.functions, kept)


def _replace(field: Any, messages: Sequence[Message]) -> None:  # noqa: ANN401 - protobuf's repeated fields have no type
    """Replace the messages of a repeated field, which may be among the new ones."""
    copies = [type(message).FromString(message.SerializeToString()) for message in messages]
    del field[:]
    field.extend(copies)


def _write_defaults(model: onnx.ModelProto) -> None:
    """Give calls of functions the attributes that they leave out: ONNX's inliner does not know defaults."""
    defaults = {function_key(f): f.attribute_proto for f in model.functions if f.attribute_proto}
    if not defaults:
        return
    for node in itertools.chain.from_iterable(map(walk_nodes, (model.graph, *model.functions))):
        given = {attribute.name for attribute in node.attribute}
        missing = [a for a in defaults.get(call_key(node), ()) if a.name not in given]
        node.attribute.extend(missing)


def _check_functions(model: onnx.ModelProto) -> None:
    """Refuse functions that call themselves, or that become too many nodes: each may call the next twice."""
    bodies = {function_key(function): function for function in model.functions}
    counted: dict[FunctionKey, int] = {}
    called: set[FunctionKey] = set()

    def count(nodes: Iterable[onnx.NodeProto]) -> int:
        total = 0
        for node in nodes:
            key = call_key(node)
            total += 1 + sum(count(graph.node) for graph in subgraphs(node))
            if key not in bodies:
                continue
            if key not in counted:
                if key in called or len(called) > MAX_FUNCTION_DEPTH:
                    raise ModelError(
                        f"expected functions that do not call themselves, got '{node.op_type}'",
                        hint="export it again: a function of ONNX may not contain itself",
                    )
                called.add(key)
                counted[key] = count(bodies[key].node)
                called.discard(key)
            total += counted[key]
        return total

    total = count(model.graph.node)
    if total > MAX_NODES:
        raise ModelError(
            f"expected a graph of at most {MAX_NODES} nodes, got {total} with its functions",
            hint="export the model without training, or in parts",
        )


def _use_default_domain(model: onnx.ModelProto) -> None:
    """Replace every spelling of ONNX's own domain by the empty string."""
    for node in walk_nodes(model.graph):
        if node.domain in DEFAULT_DOMAINS:
            node.domain = ""
    versions = {entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAINS}
    others = [
        (entry.domain, entry.version) for entry in model.opset_import if entry.domain not in DEFAULT_DOMAINS
    ]
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", max(versions, default=defs.onnx_opset_version())))
    model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in others)


def _move_to_microsoft(model: onnx.ModelProto) -> None:
    """Move operators that ONNX Runtime's optimiser adds to ONNX's own domain to com.microsoft."""
    opset = model.opset_import[0].version
    for node in walk_nodes(model.graph):
        if not node.domain and node.op_type in IN_ONNX_DOMAIN and not defs.has(node.op_type, opset, ""):
            node.domain = DOMAIN
    used = any(node.domain == DOMAIN for node in walk_nodes(model.graph))
    # ONNX Runtime does not insist on the version of its own domain, and its tools leave it out.
    if used and all(entry.domain != DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def _without_gains_of_groups(graph: onnx.GraphProto) -> None:
    """Write GroupNormalization of opsets 18 to 20, with a gain for each group, as normal instances.

    ONNX's checker refuses it as deprecated; ONNX Runtime computes it.
    """
    nodes = []
    for node in graph.node:
        for inner in subgraphs(node):
            _without_gains_of_groups(inner)
        if node.domain or node.op_type != "GroupNormalization":
            nodes.append(node)
            continue
        x, (y,), options = node.input[0], node.output, attributes(node)
        grouped, normal, sizes, shape = (f"{y}/{part}" for part in ("grouped", "normal", "sizes", "shape"))
        epsilon = options.get("epsilon", 1e-5)
        nodes += [
            helper.make_node("Constant", [], [sizes], value_ints=[0, options["num_groups"], -1]),
            helper.make_node("Reshape", [x, sizes], [grouped]),
            helper.make_node("InstanceNormalization", [grouped, *node.input[1:]], [normal], epsilon=epsilon),
            helper.make_node("Shape", [x], [shape]),
            helper.make_node("Reshape", [normal, shape], [y], name=node.name),
        ]
    if len(nodes) != len(graph.node):
        _replace(graph.node, nodes)


def _check_operators(model: onnx.ModelProto) -> None:
    local = [node for node in walk_nodes(model.graph) if node.domain in _LAYOUT_DOMAINS]
    if local:
        raise UnsupportedOperatorError(
            f"expected a portable model, got one in a layout that ONNX Runtime made for one processor: "
            f"{local[0].domain}.{local[0].op_type} ({describe(local)})",
            obstacles=[Obstacle(f"{local[0].domain}.{local[0].op_type}", names_of(local), "its layout")],
            hint="compile the original model, or save it with SessionOptions.graph_optimization_level = "
            "ORT_ENABLE_EXTENDED instead of ORT_ENABLE_ALL",
        )
    opset = model.opset_import[0].version
    unknown: dict[str, list[onnx.NodeProto]] = {}
    for node in walk_nodes(model.graph):
        if node.domain == "" and not defs.has(node.op_type, opset, ""):
            unknown.setdefault(node.op_type, []).append(node)
    if unknown:
        listed = "; ".join(f"{op} ({describe(nodes)})" for op, nodes in sorted(unknown.items()))
        raise UnsupportedOperatorError(
            f"unknown operators in ONNX opset {opset}: {listed}",
            obstacles=[
                Obstacle(op, names_of(nodes), "ONNX does not define it") for op, nodes in unknown.items()
            ],
            hint="export the model again: the exporter used custom operators or wrote the wrong opset",
        )


def _remove_weights_from_inputs(graph: onnx.GraphProto) -> None:
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    if len(inputs) != len(graph.input):
        _replace(graph.input, inputs)


def _take_optional_inputs(graph: onnx.GraphProto) -> None:
    """Make inputs that are optional tensors tensors: a request has all of them."""
    for value in graph.input:
        if value.type.optional_type.elem_type.HasField("tensor_type"):
            value.type.CopyFrom(
                onnx.TypeProto.FromString(value.type.optional_type.elem_type.SerializeToString())
            )


def _check_values(graph: onnx.GraphProto) -> None:
    """Check that every value is made once, and that every value that is read exists."""
    if graph.sparse_initializer:
        raise ModelError(
            f"expected dense weights, got the sparse weight '{graph.sparse_initializer[0].values.name}'",
            hint="export the model with dense weights: call to_dense() on those of PyTorch",
        )
    made = Counter(value.name for value in graph.input)
    made.update({tensor.name for tensor in graph.initializer})
    made.update(name for node in graph.node for name in node.output if name)
    twice = next((name for name, count in made.items() if count > 1), None)
    if twice is not None:
        raise ModelError(
            f"expected every value to be made once, got '{twice}' made {made[twice]} times", hint=DAMAGED
        )
    for node in graph.node:
        missing = sorted(name for name in reads(node) if name not in made)
        if missing:
            raise ModelError(
                f"node '{node.name}' ({node.op_type}) reads '{missing[0]}', "
                "which is not an input, a weight or the output of a node",
                hint="export the model again, with its weights",
            )
    for output in graph.output:
        if output.name not in made:
            raise ModelError(f"no node makes the output '{output.name}'", hint=DAMAGED)


def _make_outputs(graph: onnx.GraphProto) -> None:
    """Let a node make each output that is a weight; rename one that is listed twice, or that is an input."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    known = {value.name for value in graph.input} | weights.keys()
    known.update(name for node in walk_nodes(graph) for name in (*node.input, *node.output))
    taken = {value.name for value in graph.input}

    def fresh(stem: str) -> str:
        name = next(name for name in (f"{stem}_{n}" for n in itertools.count(2)) if name not in known)
        known.add(name)
        return name

    for output in graph.output:
        name = output.name
        if name in taken:
            output.name = fresh(name)
            graph.node.append(helper.make_node("Identity", [name], [output.name], name=output.name))
        elif name in weights:
            source = fresh(f"{name}/weight")
            for node in walk_nodes(graph):
                node.input[:] = [source if read == name else read for read in node.input]
            weights[name].name = source
            graph.node.append(helper.make_node("Identity", [source], [name], name=source))
        taken.add(name)


def _check_weight(tensor: onnx.TensorProto) -> None:
    """Check a tensor's datatype and size: NumPy would refuse it much later, with an unrelated message."""
    name = f"weight '{tensor.name}'"
    if not is_known_type(tensor.data_type):
        raise ModelError(f"{name} has no known datatype", hint=DAMAGED)
    if any(dim < 0 for dim in tensor.dims):
        raise ModelError(f"{name} has a negative dimension: {list(tensor.dims)}", hint=DAMAGED)
    count = math.prod(tensor.dims)
    bits = _BITS.get(tensor.data_type, 8)
    if tensor.HasField("raw_data") and tensor.data_type != TensorProto.STRING:
        size = 1 if bits < 8 else helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        what, expected, got = "bytes", (count * bits * size + 7) // 8, len(tensor.raw_data)
    else:
        # Types of few bits share a number; complex ones take two.
        field = helper.tensor_dtype_to_field(tensor.data_type)
        parts = 2 if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1
        what, expected, got = "values", (count * bits * parts + 7) // 8, len(getattr(tensor, field))
    if got != expected:
        raise ModelError(
            f"{name} of shape {list(tensor.dims)}: expected {expected} {what}, got {got}",
            hint="download or export the model again: the file is truncated or damaged",
        )


_BITS: Final = {
    getattr(TensorProto, name): bits
    for name, bits in (("INT4", 4), ("UINT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2), ("UINT2", 2))
    if hasattr(TensorProto, name)
}


def _sort(graph: onnx.GraphProto) -> None:
    """Sort the nodes so that each comes after those it reads from, also in the graphs of nodes."""
    for node in graph.node:
        for inner in subgraphs(node):
            _sort(inner)
    maker = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    sorter = TopologicalSorter(
        {
            i: sorted({maker[name] for name in reads(node) if name in maker})
            for i, node in enumerate(graph.node)
        }
    )
    try:
        order = list(sorter.static_order())
    except CycleError as error:
        cycle = [graph.node[index] for index in error.args[1][:-1]]
        raise ModelError(
            f"expected a graph without cycles, got nodes that depend on one another: {describe(cycle)}",
            hint=DAMAGED,
        ) from error
    if all(
        maker_index < index
        for index, node in enumerate(graph.node)
        for maker_index in (maker[name] for name in reads(node) if name in maker)
    ):
        return  # keep the exporter's order
    nodes = [copy_node(graph.node[index]) for index in order]
    del graph.node[:]
    graph.node.extend(nodes)
