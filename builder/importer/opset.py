"""The opset, raised: TVM's front end knows the newer form of operators best, and often only that."""

from __future__ import annotations

from typing import Final

import onnx
from onnx import version_converter

from builder.importer.silence import FOREIGN_FAILURES, quiet
from builder.importer.weights import put_back, without_large_weights

# The oldest opset whose operators all have the form that the front end and our rewrites expect.
OPSET: Final = 17


def raise_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert the operators of a model to `OPSET`, where they are older.

    Returns
    -------
    onnx.ModelProto
        The converted model; the model itself where it is new enough, or where ONNX has no adapter for an operator: the
        import may succeed all the same, and says which node is at fault if it does not.
    """
    if model.opset_import[0].version >= OPSET:
        return model
    try:
        with quiet():
            converted = version_converter.convert_version(without_large_weights(model), OPSET)
    except FOREIGN_FAILURES:
        return model
    put_back(converted, model)
    return converted
