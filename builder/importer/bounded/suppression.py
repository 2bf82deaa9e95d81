"""NonMaxSuppression with a fixed number of places: a node of ours, its definition, and its call in Relax.

The normalised model has a node `edgebundle.bounded.NonMaxSuppression`, and a local function that defines it
by ONNX's own operator. So ONNX Runtime's kernel is the reference for ours, which is
`builder.kernels.spaces.suppression`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx
from onnx import TensorProto, helper
from tvm import relax

from builder.calls.suppression import SuppressionCall

DOMAIN: Final = "edgebundle.bounded"
NAME: Final = "NonMaxSuppression"
# Places for chosen boxes; more would be absurd.
MAX_PLACES: Final = 1 << 20


def make_node(
    inputs: Sequence[str], outputs: Sequence[str], name: str, center_point_box: int, capacity: int
) -> onnx.NodeProto:
    """Return a node.

    `inputs`: boxes [batch, n, 4] and scores [batch, classes, n], FLOAT; the largest number of boxes of a
        class, INT64 [1]; the largest overlap and the lowest score, FLOAT [1]; how many boxes are real, INT64
        [1].
    `outputs`: the chosen boxes, INT64 [capacity, 3], as ONNX's operator returns them and then zeros; and how
        many there are, INT64 [1].
    `center_point_box`: whether boxes are centres with sizes, 1, or corners, 0.
    """
    return helper.make_node(
        NAME, inputs, outputs, name=name, domain=DOMAIN, center_point_box=center_point_box, capacity=capacity
    )


def output_types(node: onnx.NodeProto) -> list[tuple[int, tuple[int, ...]]]:
    """Return the type and shape of each output of a node."""
    return [(TensorProto.INT64, (_number(node, "capacity"), 3)), (TensorProto.INT64, (1,))]


def _number(node: onnx.NodeProto, name: str) -> int:
    return int(next(attribute.i for attribute in node.attribute if attribute.name == name))


def define(model: onnx.ModelProto) -> None:
    """Give a model the definition of its nodes of this kind, in place; without such nodes, none."""
    del model.functions[:]
    imports = [(entry.domain, entry.version) for entry in model.opset_import if entry.domain != DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*entry) for entry in imports)
    if not any(node.domain == DOMAIN for node in model.graph.node):
        return
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    model.functions.append(_definition(model.opset_import[0]))


def is_defined(model: onnx.ModelProto) -> bool:
    """Whether a file has nodes of this kind and our definition of them: a normalised model that was saved."""
    found = [function for function in model.functions if function.domain == DOMAIN]
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    return (
        len(found) == 1
        and bool(found[0].opset_import)
        and found[0] == _definition(found[0].opset_import[0])
        and all(map(_is_complete, nodes))
    )


def _is_complete(node: onnx.NodeProto) -> bool:
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    return (
        (len(node.input), len(node.output), len(node.attribute)) == (6, 2, 2)
        and numbers.keys() == {"center_point_box", "capacity"}
        and 1 <= numbers["capacity"] <= MAX_PLACES
    )


def _definition(opset: onnx.OperatorSetIdProto) -> onnx.FunctionProto:
    boxes, scores, valid = "boxes", "scores", "valid"
    nodes = [
        helper.make_node("Constant", [], ["zero"], value_ints=[0]),
        helper.make_node("Constant", [], ["one"], value_ints=[1]),
        helper.make_node("Constant", [], ["two"], value_ints=[2]),
        helper.make_node("Slice", [boxes, "zero", valid, "one"], ["real_boxes"]),
        helper.make_node("Slice", [scores, "zero", valid, "two"], ["real_scores"]),
        helper.make_node(
            "NonMaxSuppression", ["real_boxes", "real_scores", "most", "overlap", "lowest"], ["chosen"]
        ),
        helper.make_node("Shape", ["chosen"], ["count"], start=0, end=1),
        helper.make_node("Constant", [], ["capacity_"]),
        helper.make_node("Sub", ["capacity_", "count"], ["room_"]),
        helper.make_node("Constant", [], ["shape"], value_ints=[1]),
        helper.make_node("Reshape", ["room_", "shape"], ["room"]),
        helper.make_node("Concat", ["zero", "zero", "room", "zero"], ["pads"], axis=0),
        helper.make_node("Pad", ["chosen", "pads"], ["padded"]),
    ]
    nodes[5].attribute.append(_from_call("center_point_box", "center_point_box"))
    nodes[7].attribute.append(_from_call("value_int", "capacity"))
    return helper.make_function(
        DOMAIN,
        NAME,
        [boxes, scores, "most", "overlap", "lowest", valid],
        ["padded", "count"],
        nodes,
        [helper.make_opsetid("", opset.version)],
        ["center_point_box", "capacity"],
    )


def _from_call(name: str, source: str) -> onnx.AttributeProto:
    return onnx.AttributeProto(name=name, type=onnx.AttributeProto.INT, ref_attr_name=source)


def convert(bb: relax.BlockBuilder, node: onnx.NodeProto, inputs: Sequence[relax.Expr]) -> list[relax.Expr]:
    """Convert a node; return its outputs."""
    centred = bool(_number(node, "center_point_box"))
    made = SuppressionCall(tuple(inputs), _number(node, "capacity"), centred).emit(bb)
    return [bb.emit(relax.TupleGetItem(made, index)) for index in range(2)]
