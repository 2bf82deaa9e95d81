"""Any ONNX model made one that TVM's front end takes: static, folded, of operators and forms that it knows.

Promises the same numbers as the original. ONNX and onnxslim do what they do well; the rest is in `rewrites`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import onnx
import onnxslim

from builder.importer.constant_folding import fold_constants
from builder.importer.control_flow import has_control_flow, inline_constant_ifs
from builder.importer.function_bodies import expand, has_body
from builder.importer.onnx_graph import OnnxGraph, ValueType, name_nodes, value_type
from builder.importer.opset import convert_opset
from builder.importer.relax_module import supported_operators
from builder.importer.rewrites import apply_rewrites
from builder.importer.silence import FOREIGN_FAILURES, quiet
from builder.importer.static_inputs import Shapes, Values, fix_inputs

# A rewrite may make what another takes apart, and unrolled bodies hold more of both; known chains end after
# 3.
MAX_PASSES: Final = 12


def normalise(
    model: onnx.ModelProto, shapes: Shapes, values: Values, progress: Callable[[str], None]
) -> onnx.ModelProto:
    """Normalise a prepared model.

    Parameters
    ----------
    model
        A model that `structure.prepare` returned.
    shapes, values, progress
        As `fix_inputs` takes them.

    Returns
    -------
    onnx.ModelProto
        A model of static shapes with the same inputs (but for those in `values`) and outputs.

    Raises
    ------
    ShapeError
        If the inputs do not fit.
    ModelError
        If the shapes inside do not fit one another.
    """
    fix_inputs(model, shapes, values, progress)
    fold_constants(model, strict=False)
    while has_control_flow(model) and inline_constant_ifs(model):
        fold_constants(model, strict=False)
    return simplify(convert_opset(model))


def simplify(model: onnx.ModelProto) -> onnx.ModelProto:
    """Rewrite, expand and fold a model of static inputs until nothing changes, then tidy it up."""
    for _ in range(MAX_PASSES):
        # Not strict yet: ONNX's inference fails on some operators that are about to be taken apart.
        fold_constants(model, strict=False)
        changed = apply_rewrites(model) + inline_constant_ifs(model)
        if not changed:
            missing = _defined_by_others(model)
            if not missing or (expanded := expand(model, missing)) is model:
                break
            model = expanded
    model = _slim(model)
    fold_constants(model)
    name_nodes(model.graph)
    return model


def _defined_by_others(model: onnx.ModelProto) -> set[str]:
    """Operators defined by others that have no converter, or whose shapes ONNX cannot infer as they are."""
    graph = OnnxGraph(model)
    known = supported_operators()
    return {
        node.op_type
        for node in model.graph.node
        if not node.domain
        and (node.op_type not in known or any(graph.shape_of(name) is None for name in node.output if name))
        and has_body(node.op_type, graph.opset)
    }


def _slim(model: onnx.ModelProto) -> onnx.ModelProto:
    """Let onnxslim fuse and tidy up; where it stumbles, or changes more than it may, do without."""
    original = onnx.ModelProto()
    original.CopyFrom(model)
    try:
        with quiet():
            slimmed = onnxslim.slim(original)
            onnx.checker.check_model(slimmed)
    except FOREIGN_FAILURES:
        return model
    before, after = _interface(model.graph.input), _interface(slimmed.graph.input)
    if any(before.get(name) != kind for name, kind in after.items()):
        return model
    if [output.name for output in model.graph.output] != [output.name for output in slimmed.graph.output]:
        return model
    # Inputs that nothing reads are dropped there; whoever runs the model still sets them.
    del slimmed.graph.input[:]
    slimmed.graph.input.extend(model.graph.input)
    return slimmed


def _interface(field: list[onnx.ValueInfoProto]) -> dict[str, ValueType | None]:
    return {value.name: value_type(value) for value in field}
