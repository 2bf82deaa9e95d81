"""Inline a model's own functions, whatever opset each of them is of.

ONNX's inliner converts functions only if it knows the types of what they read, which it does not know behind
another function. So operators that mean something else in the newest of a model's opsets get a domain of
their own before inlining, and are converted one by one after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import onnx
from onnx import defs, helper

from builder.errors import ModelError
from builder.importer import native
from builder.importer.control_flow import rename
from builder.importer.large_models import with_inputs_for_weights
from builder.importer.onnx_graph import DEFAULT_DOMAINS, copy_node, subgraphs, walk_nodes
from builder.importer.opset import convert_opset
from builder.importer.silence import FOREIGN_FAILURES, first_line
from builder.importer.weights import is_large

# Domain, name and overload.
FunctionKey: TypeAlias = tuple[str, str, str]
_OF_OPSET: Final = "edgebundle.opset"


def function_key(function: onnx.FunctionProto) -> FunctionKey:
    """What a call of a function names."""
    return _key(function.domain, function.name, function.overload)


def call_key(node: onnx.NodeProto) -> FunctionKey:
    """What a node calls, if the model has such a function."""
    return _key(node.domain, node.op_type, node.overload)


def _key(domain: str, name: str, overload: str) -> FunctionKey:
    return "" if domain in DEFAULT_DOMAINS else domain, name, overload


def inline(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model without functions, of the newest opset of the model and its functions.

    Raises `ModelError` if the functions cannot be inlined, or an operator cannot be converted to that opset.
    """
    newest = max(map(_opset, (model, *model.functions)))
    own = {function_key(function) for function in model.functions}
    for part in (model, *model.functions):
        nodes = walk_nodes(part.graph if isinstance(part, onnx.ModelProto) else part)
        _mark(nodes, _opset(part), newest, own)
    _import_all(model, newest)
    try:
        inlined = native.inline_functions(with_inputs_for_weights(model), convert=False)
    except FOREIGN_FAILURES as error:
        raise ModelError(
            f"the model's functions cannot be inlined: {first_line(error)}",
            hint="export the model again without functions, or inline them with onnx.inliner",
        ) from error
    large = {tensor.name: tensor for tensor in model.graph.initializer if is_large(tensor)}
    for index in reversed(range(len(inlined.graph.input))):
        if inlined.graph.input[index].name in large:
            del inlined.graph.input[index]
    _convert(inlined, newest)
    inlined.graph.initializer.extend(large.values())
    return inlined


def _opset(part: onnx.ModelProto | onnx.FunctionProto) -> int:
    """The version of ONNX's operators; 1, the oldest, if it uses none of them."""
    return max((entry.version for entry in part.opset_import if entry.domain in DEFAULT_DOMAINS), default=1)


def _mark(nodes: Iterable[onnx.NodeProto], opset: int, newest: int, own: set[FunctionKey]) -> None:
    """Give operators that changed between two opsets a domain that names the older one."""
    for node in nodes:
        if node.domain not in DEFAULT_DOMAINS or call_key(node) in own:
            continue
        if _since(node.op_type, opset) != _since(node.op_type, newest):
            node.domain = f"{_OF_OPSET}{opset}"


def _since(operator: str, opset: int) -> int | None:
    known = defs.has(operator, opset, "")
    return int(defs.get_schema(operator, opset, "").since_version) if known else None


def _import_all(model: onnx.ModelProto, newest: int) -> None:
    """Let the model and its functions import the newest of all domains that any of them imports."""
    versions: dict[str, int] = {"": newest}
    parts = (model, *model.functions)
    for entry in itertools.chain.from_iterable(part.opset_import for part in parts):
        if entry.domain not in DEFAULT_DOMAINS:
            versions[entry.domain] = max(entry.version, versions.get(entry.domain, 1))
    for part in parts:
        for node in walk_nodes(part.graph if isinstance(part, onnx.ModelProto) else part):
            if node.domain.startswith(_OF_OPSET):
                versions[node.domain] = 1
    for part in parts:
        del part.opset_import[:]
        part.opset_import.extend(helper.make_opsetid(*item) for item in versions.items())


def _convert(model: onnx.ModelProto, newest: int) -> None:
    """Convert the marked operators; those whose types follow from others only after these."""
    names = (f"opset/{number}" for number in itertools.count())
    while any(node.domain.startswith(_OF_OPSET) for node in walk_nodes(model.graph)):
        try:
            inferred = native.infer_shapes(model, strict=False).graph
        except FOREIGN_FAILURES:
            inferred = model.graph
        types = {info.name: info for info in (*inferred.value_info, *inferred.input)}
        failures: list[ModelError] = []
        converted = _convert_graph(model.graph, types, newest, names, failures)
        if not converted:
            raise failures[0]
    kept = [(e.domain, e.version) for e in model.opset_import if not e.domain.startswith(_OF_OPSET)]
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*item) for item in kept)


def _convert_graph(
    graph: onnx.GraphProto,
    types: dict[str, onnx.ValueInfoProto],
    newest: int,
    names: Iterator[str],
    failures: list[ModelError],
) -> int:
    """Convert the marked operators of a graph and of those in it, in place; return how many it could."""
    count = 0
    nodes: list[onnx.NodeProto] = []
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node in map(copy_node, graph.node):
        for inner in subgraphs(node):
            count += _convert_graph(inner, types, newest, names, failures)
        if not node.domain.startswith(_OF_OPSET):
            nodes.append(node)
            continue
        try:
            nodes += _converted(node, weights, types, newest, names)
            count += 1
        except ModelError as error:
            failures.append(error)
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return count


def _converted(
    node: onnx.NodeProto,
    weights: dict[str, onnx.TensorProto],
    types: dict[str, onnx.ValueInfoProto],
    newest: int,
    names: Iterator[str],
) -> Sequence[onnx.NodeProto]:
    """Convert one marked operator."""
    opset = int(node.domain.removeprefix(_OF_OPSET))
    single = copy_node(node)
    single.domain = ""
    read = [name for name in dict.fromkeys(node.input) if name]
    inputs = [types.get(name, onnx.ValueInfoProto(name=name)) for name in read if name not in weights]
    body = helper.make_graph(
        [single],
        "one",
        inputs,
        [types.get(name, onnx.ValueInfoProto(name=name)) for name in node.output if name],
        initializer=[weights[name] for name in read if name in weights],
    )
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    model = convert_opset(model)
    try:
        if model.opset_import[0].version < newest:
            model = native.convert_version(model, newest)
    except FOREIGN_FAILURES as error:
        raise ModelError(
            f"a function of opset {opset} in a model of opset {newest}: {node.op_type} cannot be converted: "
            f"{first_line(error)}",
            hint=f"export the model with one opset, such as {newest}",
        ) from error
    known = {*read, *node.output}
    new: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for tensor in model.graph.initializer:
        if tensor.name not in known:
            new[tensor.name] = next(names)
            nodes.append(helper.make_node("Constant", [], [tensor.name], value=tensor))
    nodes += [copy_node(made) for made in model.graph.node]
    for made in nodes:
        new |= {name: next(names) for name in made.output if name and name not in known and name not in new}
        rename(made, new)
    return nodes
