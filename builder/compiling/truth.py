"""A model's outputs in double precision: how far rounding may take a float32 result.

Some models amplify rounding: their float32 results depend on the order of their sums. There, two correct
implementations differ by more than the tolerance, and only the distance of each from the exact result says
which of them is right. ONNX's reference evaluator computes it, with every float32 tensor of the model in
double precision, and without rounding float16 outputs. It is slow, so it is asked only if a comparison in
float32 fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from builder.importer.large_models import model_bytes

Arrays = Mapping[str, npt.NDArray[np.generic]]

# The evaluator takes about a second for a hundred million multiply-adds, and some operators are Python loops.
LARGEST_MODEL_BYTES: Final = 1 << 30

# What the evaluator raises: its own errors for operators that it lacks, and NumPy's for those it gets wrong.
_EVALUATOR_ERRORS: Final = (
    NotImplementedError,
    RuntimeError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
)


def exact_outputs(model: onnx.ModelProto, inputs: Arrays) -> list[npt.NDArray[np.generic]] | None:
    """Run a model in double precision.

    Parameters
    ----------
    model
        The normalised model, whose floats are float32.
    inputs
        Input name -> array.

    Returns
    -------
    list or None
        The outputs in the model's order, all floats as float64; None if the evaluator lacks an operator, or
        if the model is larger than `LARGEST_MODEL_BYTES`.
    """
    if model_bytes(model) > LARGEST_MODEL_BYTES:
        return None
    wide = {
        name: array.astype(np.float64) if array.dtype == np.float32 else array
        for name, array in inputs.items()
    }
    try:
        outputs: list[npt.NDArray[np.generic]] = ReferenceEvaluator(_widened(model)).run(None, wide)
    except _EVALUATOR_ERRORS:
        return None
    return [np.asarray(output) for output in outputs]


def _widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` with float64 in place of float32."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    _keep_outputs_exact(wide.graph)
    _widen_graph(wide.graph)
    return wide


def _keep_outputs_exact(graph: GraphProto) -> None:
    """Let the Casts that make float16 outputs round no more."""
    halves = {o.name: o for o in graph.output if o.type.tensor_type.elem_type == TensorProto.FLOAT16}
    for node in graph.node:
        if node.op_type == "Cast" and node.output[0] in halves:
            node.attribute[0].i = TensorProto.FLOAT
            halves[node.output[0]].type.tensor_type.elem_type = TensorProto.FLOAT


def _widen_graph(graph: GraphProto) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for node in graph.node:
        _widen_node(node)


def _widen_node(node: NodeProto) -> None:
    if node.op_type == "Constant" and any(a.name.startswith("value_float") for a in node.attribute):
        numbers = np.asarray(helper.get_attribute_value(node.attribute[0]), np.float64)
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(numbers)))
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            _widen_tensor(attribute.t)
        elif attribute.type == AttributeProto.GRAPH:
            _widen_graph(attribute.g)
        elif attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.DOUBLE


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        numbers = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))
