"""Normalise an ONNX model for TVM's front end: static shapes, folded constants, operators that it supports.

Promises the same results as the original. ONNX and onnxslim do part of the work; the rest is in `rewrites`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import onnx
import onnxslim
from onnx import helper

from builder.errors import UnboundedError
from builder.importer import native
from builder.importer.axes import check_axes
from builder.importer.bounded.padding import pad_lengths
from builder.importer.bounded.suppression import define
from builder.importer.bounded_loops import bound_loops
from builder.importer.classic.kept import PLACEHOLDER_DOMAIN, is_kept, restore, with_placeholders
from builder.importer.constant_folding import fold_constants
from builder.importer.control_flow import has_control_flow, inline_constant_ifs
from builder.importer.duplicates import merge_duplicates
from builder.importer.function_bodies import Operator, expand, has_body
from builder.importer.half_precision import widen_halves
from builder.importer.large_models import inputs_for, is_too_large, with_inputs_for_weights
from builder.importer.narrow_types import use_bytes
from builder.importer.onnx_graph import OnnxGraph, ValueType, name_nodes, value_type
from builder.importer.opset import WITH_BLOCKS, convert_opset, raise_opset
from builder.importer.relax_module import supported_operators
from builder.importer.rewrites import apply_rewrites
from builder.importer.rewrites.microsoft import has_contrib, has_new_codes, needs_blocks, replace_contrib
from builder.importer.shapes import refuse_huge_values
from builder.importer.silence import FOREIGN_FAILURES, quiet
from builder.importer.static_inputs import Shapes, Values, fix_inputs
from builder.importer.weights import is_large

# A rewrite or an unrolled loop may produce nodes that another rewrite replaces; known chains end after 3.
MAX_PASSES: Final = 12
# What onnxslim leaves to us.
_OURS: Final = ["constant_folding", "subexpression_elimination", "weight_tying"]
# They take any factor that is as long as the channels for one of the channels, and multiply the weights of a
# Gemm by it though others read its result. `canonical` folds the factors of convolutions.
_WRONG: Final = ["FusionConvMul", "FusionConvTransposeMul", "FusionGemmMul"]


def normalise(
    model: onnx.ModelProto,
    shapes: Shapes,
    values: Values,
    progress: Callable[[str], None],
    max_iterations: int | None = None,
    failed: list[str] | None = None,
) -> onnx.ModelProto:
    """Normalise a prepared model.

    `model`: the result of `structure.prepare`.
    `max_iterations`: the largest number of steps of a Loop whose number is only known at run time; with None,
        such a Loop stays as it is.
    `failed`: receives a line for each node that stays because its rewrite failed.
    Result: a model with static shapes and the same inputs and outputs, except inputs in `values`.
    Raises `ShapeError` if shapes or values do not fit the inputs, or some are missing.
    Raises `ModelError` if shapes inside the model contradict each other, or its half-precision weights are
        too large.
    """
    fix_inputs(model, shapes, values, progress)
    use_bytes(model, progress)
    fold_constants(model, strict=False)
    check_axes(model)
    refuse_huge_values(model)
    while has_control_flow(model) and inline_constant_ifs(model):
        use_bytes(model, progress)
        fold_constants(model, strict=False)
    if has_contrib(model):
        # Before anything else: ONNX cannot infer the types of what reads these operators.
        model = convert_opset(model)
        blocks = needs_blocks(model)
        if blocks or has_new_codes(model):
            model = raise_opset(model, WITH_BLOCKS)
            if blocks and model.opset_import[0].version < WITH_BLOCKS:
                progress(
                    f"weights of MatMulNBits become float32: ONNX cannot convert this model to opset "
                    f"{WITH_BLOCKS}"
                )
        replace_contrib(model)
    widen_halves(model, progress)
    return simplify(convert_opset(model), progress, max_iterations, failed)


def simplify(
    model: onnx.ModelProto,
    progress: Callable[[str], None],
    max_iterations: int | None = None,
    failed: list[str] | None = None,
) -> onnx.ModelProto:
    """Rewrite, expand and fold a model with static inputs until nothing changes, then run onnxslim."""
    stay: list[str] = []
    for _ in range(MAX_PASSES):
        stay.clear()  # what failed in an earlier pass may have waited for a type
        # Not strict yet: ONNX's inference fails on some operators that are about to be rewritten.
        fold_constants(model, strict=False)
        changed = apply_rewrites(model, stay) + inline_constant_ifs(model)
        if not changed and max_iterations is not None and (bounded := bound_loops(model, max_iterations)):
            for name in bounded:
                progress(f"loop '{name}' takes at most {max_iterations} steps: floats beyond that become NaN")
            continue
        if not changed and _pad_lengths(model):
            continue
        if not changed:
            missing = _defined_by_others(model)
            if not missing or (expanded := expand(model, missing)) is model:
                break
            model = convert_opset(expanded)
    refuse_huge_values(model)
    model = _slim(convert_opset(model))
    merge_duplicates(model)
    fold_constants(model)
    name_nodes(model.graph)
    define(model)
    for line in stay:
        progress(f"a node stays as it is, its rewrite failed: {line}")
    if failed is not None:
        failed[:] = stay
    return model


def _pad_lengths(model: onnx.ModelProto) -> bool:
    """Pad lengths that are only known at run time; a model that cannot be padded is refused later."""
    try:
        return pad_lengths(model)
    except UnboundedError:
        return False


def _defined_by_others(model: onnx.ModelProto) -> set[Operator]:
    """Operators that ONNX defines in terms of others and that lack a converter or an output shape."""
    graph = OnnxGraph(model)
    known = supported_operators()
    return {
        (node.domain, node.op_type)
        for node in model.graph.node
        if (
            node.domain
            or node.op_type not in known
            or any(graph.shape_of(name) is None for name in node.output if name)
        )
        and has_body((node.domain, node.op_type), graph.opset)
        # Its definition is a loop whose length is as unknown as before.
        and (node.domain, node.op_type) != ("", "Range")
    }


def _slim(model: onnx.ModelProto) -> onnx.ModelProto:
    """Run onnxslim; keep the model as it is if onnxslim fails or changes the inputs or outputs.

    Constants are already folded and shapes known, so onnxslim, which is slower at both, does neither again.
    It merges no duplicates either: see `duplicates`.
    It would make Python lists of the trees in a model, so it gets placeholders for them.
    """
    if any(node.op_type == "Dropout" for node in model.graph.node):
        return model  # those that are left drop numbers at random: onnxslim would hide them from the refusal
    large = [t for t in model.graph.initializer if is_large(t)] if is_too_large(model) else []
    beside = {tensor.name for tensor in large}
    original = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    graph = original.graph
    graph.name = model.graph.name or "graph"
    graph.node.extend(with_placeholders(model.graph.node))
    graph.initializer.extend(t for t in model.graph.initializer if t.name not in beside)
    graph.input.extend([*model.graph.input, *inputs_for(large)])
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    if any(is_kept(node) for node in model.graph.node):
        original.opset_import.append(helper.make_opsetid(PLACEHOLDER_DOMAIN, 1))
    try:
        with quiet():
            slimmed = onnxslim.slim(
                original, no_shape_infer=True, skip_optimizations=_OURS, skip_fusion_patterns=_WRONG
            )
        native.check(with_inputs_for_weights(slimmed))
    except FOREIGN_FAILURES:
        return model
    before = _interface([*model.graph.input, *inputs_for(large)])
    after = _interface(slimmed.graph.input)
    if any(before.get(name) != kind for name, kind in after.items()):
        return model
    if [output.name for output in model.graph.output] != [output.name for output in slimmed.graph.output]:
        return model
    restore(slimmed.graph, model.graph.node)
    del slimmed.opset_import[:]
    slimmed.opset_import.extend(model.opset_import)
    # onnxslim drops unused inputs, but callers of the model still set them.
    del slimmed.graph.input[:]
    slimmed.graph.input.extend(model.graph.input)
    slimmed.graph.initializer.extend(tensor for tensor in large if tensor.name in after)
    return slimmed


def _interface(field: Iterable[onnx.ValueInfoProto]) -> dict[str, ValueType | None]:
    return {value.name: value_type(value) for value in field}
