"""Infer the types and shapes of all values with ONNX's own inference."""

from __future__ import annotations

import math

import onnx
from onnx import shape_inference

from agent.bundle.tensor_spec import MAX_TENSOR_BYTES
from builder.errors import ModelError
from builder.importer.onnx_graph import value_type
from builder.importer.silence import FOREIGN_FAILURES, first_line
from builder.importer.weights import without_large_weights


def refuse_huge_values(model: onnx.ModelProto) -> None:
    """Refuse a model with a value that no device can hold: a small file may ask for any size.

    Raises
    ------
    ModelError
        If the recorded shape of a value takes more than a tensor of a bundle may.
    """
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        found = value_type(value)
        shape = None if found is None else found.static_shape
        if found is None or shape is None or found.elem_type == onnx.TensorProto.STRING:
            continue
        if math.prod(shape) * found.dtype.itemsize > MAX_TENSOR_BYTES:
            raise ModelError(
                f"expected values of at most {MAX_TENSOR_BYTES} bytes, got '{value.name}' of {list(shape)}",
                hint="check the sizes at the export: a constant may be wrong",
            )


def infer_shapes(model: onnx.ModelProto, *, strict: bool = True) -> None:
    """Record the type and shape of every value in the model, in place.

    Parameters
    ----------
    model
        The model, with known input shapes.
    strict
        Whether to refuse a graph whose shapes contradict each other; otherwise they stay unknown.

    Raises
    ------
    ModelError
        If `strict` is true and a node cannot take the types and shapes that it gets.
    """
    shell = without_large_weights(model)
    try:
        inferred = shape_inference.infer_shapes(shell, check_type=strict, strict_mode=strict, data_prop=True)
    except FOREIGN_FAILURES as error:
        reason = first_line(error).removeprefix("[ShapeInferenceError] ").removeprefix("Inference error(s): ")
        raise ModelError(
            f"the model's shapes contradict each other: {reason}",
            hint="check --input-shapes: the model may accept only some sizes",
        ) from error
    del model.graph.value_info[:]
    model.graph.value_info.extend(inferred.graph.value_info)
    known = {output.name: output for output in inferred.graph.output}
    for output in model.graph.output:
        output.CopyFrom(known[output.name])
