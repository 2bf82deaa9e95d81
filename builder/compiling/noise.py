"""How far rounding moves a model's outputs: what a difference must not exceed if it is to be rounding.

Some models amplify rounding: their float32 results depend on the order of their sums, and two correct
implementations differ by more than the tolerance. How much a model does is measured on the reference itself.
It runs several times, each time with other errors of a few units in the last place: on what sums and products
read, and on what they and functions such as `Exp` make. A correct implementation differs about as much as
these runs do, element by element.

Nothing is put on operators whose float32 result is defined to the last bit, such as Add and Sub: to leave out
`(x + c) - c` is another function, although both are the same for real numbers. So this acquits only what
another order of sums, a fused multiply-add or another approximation of a function explains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from builder.compiling.parity import ALLOWED, Noise, differences, run_session, scale_of, session
from builder.errors import ModelError
from builder.importer.large_models import is_too_large
from builder.importer.onnx_graph import OnnxGraph

Array = npt.NDArray[Any]
Arrays = Mapping[str, npt.NDArray[np.generic]]

RUNS: Final = 8
# Of a single operand or result, relative. Winograd's and Strassen's algorithms round more often than a direct
# sum, which ONNX Runtime uses.
AMPLITUDE: Final = 2.0**-22
# Operators that make the same bits wherever they are computed as the standard says.
_EXACT: Final = frozenset(
    {"Abs", "Add", "ArgMax", "ArgMin", "Cast", "Ceil", "Clip", "Compress", "Concat", "Constant",
     "ConstantOfShape", "DepthToSpace", "DequantizeLinear", "Dropout", "Expand", "Flatten", "Floor", "Gather",
     "GatherElements", "GatherND", "GlobalMaxPool", "Identity", "If", "LeakyRelu", "Loop", "Max", "MaxPool",
     "Min", "Neg", "NonZero", "Pad", "PRelu", "ReduceMax", "ReduceMin", "Relu", "Reshape", "ReverseSequence",
     "Round", "Scan", "ScatterElements", "ScatterND", "Sign", "Slice", "SpaceToDepth", "Split", "Squeeze",
     "Sub", "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu", "Unique", "Unsqueeze", "Where"}
)  # fmt: skip
# Operators that add many terms: what they read is moved, too, since their sum may cancel.
_SUMS: Final = frozenset(
    {"AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "CumSum", "Einsum", "GRU", "Gemm",
     "GlobalAveragePool", "GroupNormalization", "InstanceNormalization", "LSTM", "LayerNormalization",
     "LinearClassifier", "LinearRegressor", "MatMul", "MeanVarianceNormalization", "Normalizer",
     "RMSNormalization", "RNN", "ReduceMean", "ReduceSum", "ReduceSumSquare", "SVMClassifier", "SVMRegressor",
     "Sum"}
)  # fmt: skip


def noise_of(model: onnx.ModelProto, inputs: Arrays, reference: Sequence[Array]) -> list[Array] | None:
    """Return how far rounding moves each element of the outputs.

    Result: for each output the largest movement of each element, infinite where an integer changed; None if
        ONNX Runtime cannot run the model with noise, or an output changes its shape.
    """
    if is_too_large(model):
        return None
    moved = [np.zeros(output.shape) for output in reference]
    try:
        noisy = session(_with_noise(model))
        for _ in range(RUNS):
            for place, output in enumerate(run_session(noisy, None, inputs)):
                if output.shape != reference[place].shape:
                    return None
                moved[place] = np.maximum(moved[place], differences(output, reference[place]))
    except ModelError:
        return None
    return moved


def compare_with_noise(
    outputs: Sequence[Array],
    reference: Sequence[Array],
    noise: Sequence[Array],
    tolerance: float,
    *,
    by_element: bool = False,
) -> Noise:
    """Compare outputs with the reference's, in terms of what rounding explains.

    `tolerance`: the relative error that needs no explanation.
    `by_element`: as in `builder.compiling.parity.compare`.
    """
    error = ratio = beyond = 0.0
    for ours, theirs, moved in zip(outputs, reference, noise, strict=True):
        far = differences(ours, theirs)
        if not far.any():
            continue
        if theirs.dtype.kind != "f":
            beyond = max(beyond, float((far > moved).any()))
            continue
        scale = scale_of(theirs)
        granted = tolerance * scale_of(theirs, by_element=by_element)
        error = max(error, float((far / scale).max()))
        beyond = max(beyond, float((far > ALLOWED * moved + granted).mean()))
        ratio = max(ratio, _root_mean_square(far) / (_root_mean_square(moved) + _root_mean_square(granted)))
    return Noise(error, ratio, beyond)


def _root_mean_square(array: Array) -> float:
    return math.sqrt(float(np.square(array).mean()))


def _with_noise(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model that makes other rounding errors each time it runs."""
    noisy = onnx.ModelProto()
    noisy.CopyFrom(model)
    graph = OnnxGraph(noisy)
    floats = {
        name for node in noisy.graph.node for name in (*node.input, *node.output) if _is_float(graph, name)
    }
    nodes: list[onnx.NodeProto] = []
    count = 0

    def move(source: str, target: str) -> list[onnx.NodeProto]:
        nonlocal count
        count += 1
        factor = graph.fresh(f"{target}/factor")
        low, high = 1 - AMPLITUDE, 1 + AMPLITUDE
        random = helper.make_node(
            "RandomUniformLike", [source], [factor], low=low, high=high, seed=float(count)
        )
        return [random, helper.make_node("Mul", [source, factor], [target])]

    for node in noisy.graph.node:
        if node.op_type in _SUMS:
            for place, name in enumerate(node.input):
                if name in floats:
                    moved = graph.fresh(f"{name}/moved")
                    nodes += move(name, moved)
                    node.input[place] = moved
        nodes.append(node)
        if node.op_type not in _EXACT:
            for place, name in enumerate(node.output):
                if name in floats:
                    before = graph.fresh(f"{name}/before")
                    node.output[place] = before
                    nodes += move(before, name)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del noisy.graph.node[:]
    noisy.graph.node.extend(copies)
    return noisy


def _is_float(graph: OnnxGraph, name: str) -> bool:
    found = graph.type_of(name) if name else None
    return found is not None and found.elem_type == TensorProto.FLOAT
