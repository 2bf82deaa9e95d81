"""Infer the types and shapes of all values with ONNX's own inference."""

from __future__ import annotations

import onnx
from onnx import shape_inference

from builder.errors import ModelError
from builder.importer.silence import FOREIGN_FAILURES, first_line
from builder.importer.weights import without_large_weights


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
