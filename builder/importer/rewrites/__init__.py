"""Replace operators that TVM's front end lacks or gets wrong by operators that it gets right.

`REWRITES` is the table: each operator of ONNX's own domain with the function that replaces its nodes.
Operators that ONNX defines in terms of others need no entry: `function_bodies` expands them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx

from builder.importer.onnx_graph import OnnxGraph
from builder.importer.rewrites import (
    convolution,
    elementwise,
    fourier,
    indices,
    layout,
    loops,
    normalisation,
    quantised,
    recurrent,
    resize,
)
from builder.importer.rewrites.replacement import Rewrite
from builder.importer.rewrites.sequences import resolve_sequences

REWRITES: Final[Mapping[str, Rewrite]] = {
    "BatchNormalization": normalisation.batch_normalization,
    "Cast": elementwise.cast,
    "CastLike": elementwise.cast_like,
    "Concat": layout.concat_without_empty,
    "ConvInteger": quantised.conv_integer,
    "ConvTranspose": convolution.conv_transpose,
    "DFT": fourier.dft,
    "Dropout": elementwise.dropout,
    "EyeLike": elementwise.eye_like,
    "GRU": recurrent.prepare,
    "Gather": indices.gather,
    "GatherElements": indices.clip_along_axis,
    "GatherND": indices.clip_coordinates,
    "IsInf": elementwise.is_inf,
    "LSTM": recurrent.prepare,
    "Loop": loops.unroll_loop,
    "LpNormalization": normalisation.lp_normalization,
    "MatMulInteger": quantised.matmul_integer,
    "MeanVarianceNormalization": normalisation.mean_variance_normalization,
    "OptionalGetElement": elementwise.optional_get_element,
    "OptionalHasElement": elementwise.optional_has_element,
    "Pow": elementwise.power,
    "QLinearConv": quantised.qlinear_conv,
    "QLinearMatMul": quantised.qlinear_matmul,
    "RMSNormalization": normalisation.rms_normalization,
    "RNN": recurrent.prepare,
    "Resize": resize.resize,
    "ReverseSequence": layout.reverse_sequence,
    "STFT": fourier.stft,
    "Scan": loops.unroll_scan,
    "ScatterElements": indices.clip_along_axis,
    "ScatterND": indices.clip_coordinates,
    "SpaceToDepth": layout.space_to_depth,
    "Split": layout.split_without_empty,
}


# Raised by a rewrite of a node whose inputs or attributes contradict the specification. The node stays, and
# ONNX's own strict inference explains what is wrong with it.
_MALFORMED: Final = (ArithmeticError, LookupError, TypeError, ValueError)


def apply_rewrites(model: onnx.ModelProto) -> int:
    """Rewrite every node whose operator is in the table, once, in place.

    Returns
    -------
    int
        How many nodes were replaced; their replacements may need rewriting too.
    """
    graph = OnnxGraph(model)

    def replace(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        rewrite = None if node.domain else REWRITES.get(node.op_type)
        if rewrite is None:
            return None
        try:
            new = rewrite(node, graph)
        except _MALFORMED:
            return None
        return None if new is None else list(new)

    return graph.rewrite(replace) + resolve_sequences(OnnxGraph(model))
