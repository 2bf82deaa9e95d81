"""Replace operators that ONNX defines in terms of others by their definitions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, TypeAlias

import onnx
from onnx import defs, helper

from builder.importer import native
from builder.importer.onnx_graph import OnnxGraph
from builder.importer.silence import FOREIGN_FAILURES
from builder.importer.weights import put_back, without_large_weights

# A domain and a name in it.
Operator: TypeAlias = tuple[str, str]

_DOMAIN: Final = "edgebundle.definitions"
# Domains besides ONNX's own whose operators ONNX defines.
_PREVIEW: Final = frozenset({"ai.onnx.preview"})


def has_body(operator: Operator, opset: int) -> bool:
    """Whether ONNX defines an operator as a function of other operators."""
    schema = _schema(operator, opset)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def _schema(operator: Operator, opset: int) -> defs.OpSchema | None:
    domain, name = operator
    if domain and domain not in _PREVIEW:
        return None
    version = opset if not domain else 1
    return defs.get_schema(name, version, domain) if defs.has(name, version, domain) else None


def expand(model: onnx.ModelProto, operators: Collection[Operator]) -> onnx.ModelProto:
    """Replace all nodes of some operators by their definitions.

    Result: the expanded model, or the model itself if ONNX cannot build a definition for its nodes.
    """
    if not operators:
        return model
    shell = without_large_weights(model)
    # A definition may depend on the types of its inputs, including weights.
    shell.graph.value_info.extend(model.graph.value_info)
    shell.graph.value_info.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in shell.graph.initializer
    )
    try:
        expanded = native.inline_operators(shell, operators)
    except FOREIGN_FAILURES:
        # ONNX's inliner fails on a definition that depends on types if an optional input is absent.
        del shell.graph.value_info[:]
        shell.graph.value_info.extend(model.graph.value_info)
        if not _define(shell, OnnxGraph(model), operators):
            return model
        try:
            expanded = native.inline_functions(shell, convert=True)
        except FOREIGN_FAILURES:
            return model
    put_back(expanded, model)
    return expanded


def _define(shell: onnx.ModelProto, graph: OnnxGraph, operators: Collection[Operator]) -> int:
    """Add a local function for each node of some operators, and call it; return how many."""
    count = 0
    for node in shell.graph.node:
        operator = (node.domain, node.op_type)
        schema = _schema(operator, graph.opset) if operator in operators else None
        if schema is None or not schema.has_context_dependent_function:
            continue
        kinds = []
        for name in node.input:
            found = graph.type_of(name) if name else None
            if name and found is None:
                break
            known = None if found is None else helper.make_tensor_type_proto(found.elem_type, found.shape)
            kinds.append(b"" if known is None else known.SerializeToString())
        if len(kinds) != len(node.input):
            continue
        try:
            body = schema.get_context_dependent_function(node.SerializeToString(), kinds)
        except FOREIGN_FAILURES:
            continue
        function = onnx.FunctionProto.FromString(body)
        count += 1
        function.domain, function.name = _DOMAIN, f"{node.op_type}_{count}"
        del function.attribute[:], function.attribute_proto[:]
        shell.functions.append(function)
        node.domain, node.op_type = function.domain, function.name
    if count:
        shell.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    return count
