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
    branches,
    convolution,
    einsum,
    elementwise,
    features,
    fourier,
    indices,
    layout,
    linear_models,
    loops,
    normalisation,
    pooling,
    quantised,
    recurrent,
    resize,
    scatter,
)
from builder.importer.rewrites.replacement import Rewrite, rewritten
from builder.importer.rewrites.sequences import resolve_sequences

REWRITES: Final[Mapping[str, Rewrite]] = {
    "AveragePool": pooling.pool,
    "BatchNormalization": normalisation.batch_normalization,
    "BitShift": elementwise.bit_shift,
    "Cast": elementwise.cast,
    "CastLike": elementwise.cast_like,
    "Clip": elementwise.clip,
    "Col2Im": scatter.column_to_image,
    "Compress": scatter.compress,
    "Concat": features.concat,
    "Conv": convolution.conv,
    "ConvInteger": quantised.conv_integer,
    "ConvTranspose": convolution.conv_transpose,
    "Cosh": elementwise.cosh,
    "CumProd": scatter.cumulative_product,
    "CumSum": scatter.cumulative_sum,
    "DFT": fourier.dft,
    "DeformConv": scatter.deformable_convolution,
    "DequantizeLinear": quantised.dequantise_blocks,
    "Det": scatter.determinant,
    "Celu": elementwise.celu,
    "Dropout": elementwise.dropout,
    "Einsum": einsum.einsum,
    "DynamicQuantizeLinear": quantised.dynamic_quantize_linear,
    "Equal": elementwise.equal,
    "EyeLike": elementwise.eye_like,
    "GRU": recurrent.prepare,
    "Gather": indices.gather,
    "GatherElements": indices.gather_elements,
    "GatherND": indices.clip_coordinates,
    "GridSample": layout.grid_sample,
    "GroupNormalization": normalisation.group_normalization,
    "If": branches.select_branch,
    "IsInf": elementwise.is_inf,
    "LSTM": recurrent.prepare,
    "LayerNormalization": normalisation.layer_normalization,
    "Loop": loops.unroll_loop,
    "LpNormalization": normalisation.lp_normalization,
    "LpPool": pooling.pool,
    "MatMulInteger": quantised.matmul_integer,
    "MaxPool": pooling.max_pool,
    "MaxUnpool": scatter.max_unpool,
    "MeanVarianceNormalization": normalisation.mean_variance_normalization,
    "Mod": elementwise.modulo,
    "OneHot": indices.one_hot,
    "OptionalGetElement": elementwise.optional_get_element,
    "OptionalHasElement": elementwise.optional_has_element,
    "PRelu": elementwise.prelu,
    "Pad": layout.pad,
    "Pow": elementwise.power,
    "QLinearConv": quantised.qlinear_conv,
    "QLinearMatMul": quantised.qlinear_matmul,
    "QuantizeLinear": quantised.quantise_blocks,
    "RMSNormalization": normalisation.rms_normalization,
    "RNN": recurrent.prepare,
    "ReduceL1": elementwise.reduce_nothing,
    "ReduceL2": elementwise.reduce_nothing,
    "ReduceLogSum": elementwise.reduce_nothing,
    "ReduceLogSumExp": elementwise.reduce_log_sum_exp,
    "ReduceMax": elementwise.reduce_nothing,
    "ReduceMean": elementwise.reduce_mean,
    "ReduceMin": elementwise.reduce_nothing,
    "ReduceProd": elementwise.reduce_nothing,
    "ReduceSum": indices.reduce_sum,
    "ReduceSumSquare": elementwise.reduce_nothing,
    "Resize": resize.resize,
    "ReverseSequence": layout.reverse_sequence,
    "RoiAlign": pooling.roi_align,
    "STFT": fourier.stft,
    "Scan": linear_models.scan,
    "ScatterElements": indices.scatter_elements,
    "ScatterND": indices.scatter_nd,
    "Shrink": elementwise.shrink,
    "Sign": elementwise.sign,
    "Sinh": elementwise.sinh,
    "Slice": indices.slice_of_one,
    "SpaceToDepth": layout.space_to_depth,
    "Split": layout.split_without_empty,
    "Squeeze": elementwise.squeeze,
    "SwiGLU": elementwise.swish,
    "Swish": elementwise.swish,
    "TensorScatter": scatter.tensor_scatter,
    "ThresholdedRelu": elementwise.thresholded_relu,
    "TopK": indices.top_k,
    "TfIdfVectorizer": scatter.tf_idf,
    "Unsqueeze": layout.unsqueeze,
}

# The same for classic models; trees and support vector machines are compiled as they are (`classic/kept.py`).
CLASSIC_DOMAIN: Final = "ai.onnx.ml"
CLASSIC_REWRITES: Final[Mapping[str, Rewrite]] = {
    "ArrayFeatureExtractor": features.array_feature_extractor,
    "Binarizer": features.binarizer,
    "FeatureVectorizer": features.feature_vectorizer,
    "Imputer": features.imputer,
    "LabelEncoder": features.label_encoder,
    "LinearClassifier": linear_models.linear_classifier,
    "LinearRegressor": linear_models.linear_regressor,
    "Normalizer": features.normalizer,
    "OneHotEncoder": features.one_hot_encoder,
    "Scaler": features.scaler,
}

_TABLES: Final[Mapping[str, Mapping[str, Rewrite]]] = {
    "": REWRITES,
    CLASSIC_DOMAIN: CLASSIC_REWRITES,
    "com.microsoft": {"CDist": linear_models.distances},
}


def apply_rewrites(model: onnx.ModelProto, failed: list[str] | None = None) -> int:
    """Rewrite every node whose operator is in the table, once, in place.

    `failed`: receives a line for each node whose rewrite failed, which stays as it is.
    Result: how many nodes were replaced; their replacements may need rewriting too.
    """
    graph = OnnxGraph(model)

    def replace(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        rewrite = _TABLES.get(node.domain, {}).get(node.op_type)
        return None if rewrite is None else rewritten(rewrite, node, graph, failed)

    return graph.rewrite(replace) + resolve_sequences(OnnxGraph(model))
