"""Replace operators that ONNX defines in terms of others by their definitions."""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import defs, helper, inliner

from builder.importer.silence import FOREIGN_FAILURES
from builder.importer.weights import put_back, without_large_weights


def has_body(operator: str, opset: int) -> bool:
    """Whether ONNX defines an operator of its own domain as a function of other operators."""
    if not defs.has(operator, opset, ""):
        return False
    schema = defs.get_schema(operator, opset, "")
    return bool(schema.has_function or schema.has_context_dependent_function)


def expand(model: onnx.ModelProto, operators: Collection[str]) -> onnx.ModelProto:
    """Replace all nodes of some operators by their definitions.

    Returns
    -------
    onnx.ModelProto
        The expanded model, or the model itself if ONNX cannot build a definition for its nodes.
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
        expanded = inliner.inline_selected_functions(
            shell, [("", operator) for operator in sorted(operators)], inline_schema_functions=True
        )
    except FOREIGN_FAILURES:
        return model
    put_back(expanded, model)
    return expanded
