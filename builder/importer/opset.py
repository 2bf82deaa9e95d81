"""Convert the opset: TVM's front end needs newer forms of operators, and ONNX Runtime lacks the newest."""

from __future__ import annotations

from typing import Final

import onnx
from onnx import defs, helper

from builder.errors import ModelError
from builder.importer import native
from builder.importer.old_meanings import bring_up, keep_old_meanings, release
from builder.importer.onnx_graph import walk_nodes
from builder.importer.silence import FOREIGN_FAILURES, first_line
from builder.importer.weights import put_back, without_large_weights

# The oldest opset whose operators all have the form that the front end and the rewrites expect.
OLDEST: Final = 17
# Scatters of the largest and the smallest; PyTorch writes them into older opsets, too.
_WITH_EXTREMES: Final = 18
# No operator has changed its meaning from this one to `OLDEST`.
_SAME_MEANINGS: Final = 13
# The first opset with blocks in DequantizeLinear.
WITH_BLOCKS: Final = 21
# The newest opset that ONNX Runtime promises to run (26 in version 1.31).
NEWEST: Final = 26
_IR_OF_OPSET_21: Final = 10
# An operator whose newest form ONNX Runtime lacks -> the last opset with the form before it.
_BEFORE: Final = {"RoiAlign": 21}


def convert_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert the operators of a model to an opset from `OLDEST` to `NEWEST`.

    Result: the converted model; the model itself if it is in that range, or if ONNX cannot convert it and it
        is of opset 13 or newer, whose operators mean what they mean in opset 17.
    Raises `ModelError` if ONNX cannot convert an older model.
    """
    version = model.opset_import[0].version
    newest = min([NEWEST, *(_BEFORE.get(node.op_type, NEWEST) for node in walk_nodes(model.graph))])
    if version > newest:
        if not _means_the_same(model, newest):
            return _converted(model, newest)
        model.opset_import[0].CopyFrom(helper.make_opsetid("", newest))
    oldest = _WITH_EXTREMES if any(map(_is_extreme, walk_nodes(model.graph))) else OLDEST
    if version >= oldest:
        return model
    bring_up(model)
    try:
        converted = native.convert_version(without_large_weights(model), oldest)
    except FOREIGN_FAILURES as error:
        if version >= _SAME_MEANINGS:
            return model
        raise _too_old(version, first_line(error).rpartition("failed: ")[2]) from error
    put_back(converted, model)
    release(converted)
    keep_old_meanings(converted, version)
    if [value.type for value in converted.graph.input] != [value.type for value in model.graph.input]:
        raise _too_old(version, "its Scan reads a batch")
    return converted


def _is_extreme(node: onnx.NodeProto) -> bool:
    return node.op_type in ("ScatterElements", "ScatterND") and any(
        attribute.name == "reduction" and attribute.s in (b"max", b"min") for attribute in node.attribute
    )


def _too_old(version: int, reason: str) -> ModelError:
    return ModelError(
        f"opset {version} cannot be converted to {OLDEST}: {reason}",
        hint=f"export the model with opset {OLDEST} or newer",
    )


def raise_opset(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Convert a model to a newer opset.

    Returns
    -------
    onnx.ModelProto
        The converted model, or the model itself if it is as new, or if ONNX cannot convert an operator.
    """
    if model.opset_import[0].version >= version:
        return model
    converted = _converted(model, version)
    converted.ir_version = max(converted.ir_version, _IR_OF_OPSET_21)
    return converted


def _converted(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Convert a model; the model itself if ONNX cannot convert an operator."""
    try:
        converted = native.convert_version(without_large_weights(model), version)
    except FOREIGN_FAILURES:
        return model
    put_back(converted, model)
    same = [value.type for value in converted.graph.input] == [value.type for value in model.graph.input]
    return converted if same else model


def _means_the_same(model: onnx.ModelProto, version: int) -> bool:
    """Whether every operator of the model is the same in an older opset."""
    current = model.opset_import[0].version
    operators = {node.op_type for node in walk_nodes(model.graph) if not node.domain}
    return all(
        defs.has(operator, version, "") and defs.get_schema(operator, current, "").since_version <= version
        for operator in operators
    )
