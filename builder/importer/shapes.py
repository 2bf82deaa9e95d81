"""Types and shapes of all values, by ONNX's own inference."""

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
        The model; the shapes of its inputs are known.
    strict
        Refuse a graph whose operators contradict one another; else leave unknown what cannot be inferred.

    Raises
    ------
    ModelError
        If with `strict`: a node cannot take the types and shapes that it gets.
    """
    shell = without_large_weights(model)
    try:
        inferred = shape_inference.infer_shapes(shell, check_type=strict, strict_mode=strict, data_prop=True)
    except FOREIGN_FAILURES as error:
        reason = first_line(error).removeprefix("[ShapeInferenceError] ").removeprefix("Inference error(s): ")
        raise ModelError(
            f"the model's shapes do not fit one another: {reason}",
            hint="check --input-shapes: the model may only take some sizes",
        ) from error
    del model.graph.value_info[:]
    model.graph.value_info.extend(inferred.graph.value_info)
    known = {output.name: output for output in inferred.graph.output}
    for output in model.graph.output:
        output.CopyFrom(known[output.name])
