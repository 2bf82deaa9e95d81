"""Any ONNX model made one that TVM's front end takes: static, folded, at one opset, of operators that it knows.

Promises the same numbers as the original. ONNX and onnxslim do what they do well; what is left to us is in `rewrites`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import onnx
import onnxslim

from builder.errors import ModelError
from builder.importer.constant_folding import fold_constants
from builder.importer.control_flow import has_control_flow, inline_constant_ifs
from builder.importer.onnx_graph import ValueType, value_type
from builder.importer.opset import raise_opset
from builder.importer.rewrites import apply_rewrites
from builder.importer.silence import FOREIGN_FAILURES, first_line, quiet
from builder.importer.static_inputs import Shapes, Values, fix_inputs

# A rewrite may make what another one takes apart, and unrolled bodies hold more of both; known chains end after three.
MAX_PASSES: Final = 12


def normalise(
    model: onnx.ModelProto, shapes: Shapes, values: Values, notes: Callable[[str], None]
) -> onnx.ModelProto:
    """Normalise a prepared model.

    Parameters
    ----------
    model
        A model that `structure.prepare` returned.
    shapes, values, notes
        As `fix_inputs` takes them.

    Returns
    -------
    onnx.ModelProto
        A model of static shapes with the same inputs (but for those in `values`) and outputs.

    Raises
    ------
    ShapeError
        The inputs do not fit.
    ModelError
        The shapes inside do not fit one another.
    """
    fix_inputs(model, shapes, values, notes)
    fold_constants(model)
    while has_control_flow(model) and inline_constant_ifs(model):
        fold_constants(model)
    model = raise_opset(model)
    for _ in range(MAX_PASSES):
        fold_constants(model)
        if not apply_rewrites(model) and not inline_constant_ifs(model):
            break
    model = _slim(model)
    fold_constants(model)
    try:
        onnx.checker.check_model(model)
    except FOREIGN_FAILURES as error:
        raise ModelError(f"not a valid ONNX model: {first_line(error)}", hint="export the model again") from error
    return model


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
