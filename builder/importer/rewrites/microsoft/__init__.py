"""Replace the operators that ONNX Runtime's optimisers, Olive and exporters to them write: com.microsoft.

`CONTRIB` is the table. Unlike the rest of the rewrites, these run before anything else, because ONNX cannot
infer the shapes of these operators, nor of what reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx
from onnx import TensorProto, defs, helper, numpy_helper, shape_inference

from builder.importer.constant_folding import fold_constants
from builder.importer.onnx_graph import OnnxGraph, reads, value_type
from builder.importer.rewrites.microsoft import (
    activations,
    attention,
    grouped_attention,
    norms,
    products,
    quantised,
    quantised_layers,
    rotary,
)
from builder.importer.rewrites.replacement import Rewrite, input_name, rewritten
from builder.importer.silence import FOREIGN_FAILURES, quiet

DOMAIN: Final = "com.microsoft"

CONTRIB: Final[Mapping[str, Rewrite]] = {
    "Attention": attention.attention,
    "BiasGelu": activations.gelu_node,
    "DynamicQuantizeLSTM": quantised_layers.dynamic_lstm,
    "EmbedLayerNormalization": norms.embed_layer_normalization,
    "DequantizeLinear": quantised.same_in_onnx,
    "DynamicQuantizeMatMul": quantised.dynamic_matmul,
    "ExpandDims": products.expand_dims,
    "FastGelu": activations.fast_gelu_node,
    "FusedConv": products.fused_conv,
    "FusedGemm": products.fused_gemm,
    "FusedMatMul": products.fused_matmul,
    "GatherBlockQuantized": quantised_layers.gather_blocks,
    "GatherND": products.same_operator,
    "Gelu": activations.gelu_node,
    "GridSample": products.grid_sample,
    "GroupQueryAttention": grouped_attention.group_query_attention,
    "LayerNormalization": norms.layer_normalization,
    "MatMulIntegerToFloat": quantised.matmul_to_float,
    "MatMulNBits": quantised.matmul_n_bits,
    "MultiHeadAttention": attention.multi_head_attention,
    "NhwcConv": products.nhwc_conv,
    "NhwcFusedConv": products.nhwc_conv,
    "NhwcMaxPool": products.nhwc_max_pool,
    "Pad": products.pad,
    "QAttention": quantised_layers.attention,
    "QEmbedLayerNormalization": quantised_layers.embed_layer_normalization,
    "QGemm": quantised.gemm,
    "QLinearAdd": quantised.binary("Add"),
    "QLinearAveragePool": quantised.unary(quantised.average_pool),
    "QLinearConcat": quantised.concat,
    "QLinearConv": quantised.conv,
    "QLinearGlobalAveragePool": quantised.unary(quantised.global_average_pool),
    "QLinearLeakyRelu": quantised.unary(quantised.leaky_relu),
    "QLinearMul": quantised.binary("Mul"),
    "QLinearSigmoid": quantised.unary(quantised.sigmoid),
    "QLinearSoftmax": quantised.unary(quantised.softmax),
    "QLinearWhere": quantised.where,
    "QuantizeLinear": quantised.same_in_onnx,
    "QuickGelu": activations.quick_gelu,
    "Range": products.same_operator,
    "RotaryEmbedding": rotary.rotary_embedding,
    "SimplifiedLayerNormalization": norms.simplified_layer_normalization,
    "SkipLayerNormalization": norms.skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": norms.skip_simplified_layer_normalization,
    "TransposeMatMul": products.fused_matmul,
    "Trilu": products.same_operator,
}

# Operators that ONNX Runtime registers in ONNX's own domain, some for opsets that do not define them.
IN_ONNX_DOMAIN: Final = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})

_NEW_CODES: Final = frozenset({TensorProto.INT16, TensorProto.UINT16, TensorProto.INT4, TensorProto.UINT4})


def has_contrib(model: onnx.ModelProto) -> bool:
    """Whether a model has operators that `replace_contrib` may replace."""
    return any(node.domain == DOMAIN and node.op_type in CONTRIB for node in model.graph.node)


def needs_blocks(model: onnx.ModelProto) -> bool:
    """Whether a model has weights in blocks, which ONNX itself has only since opset 21."""
    return any(node.domain == DOMAIN and node.op_type == "MatMulNBits" for node in model.graph.node)


def has_new_codes(model: onnx.ModelProto) -> bool:
    """Whether a model quantises to 16 or 4 bits, which ONNX itself has only since opset 21."""
    graph = OnnxGraph(model)
    kinds = (
        graph.type_of(name)
        for node in model.graph.node
        if node.domain == DOMAIN and node.op_type in ("QuantizeLinear", "DequantizeLinear")
        for name in (node.input[0], input_name(node, 2))
    )
    return any(kind is not None and kind.elem_type in _NEW_CODES for kind in kinds)


def replace_contrib(model: onnx.ModelProto) -> None:
    """Replace operators of com.microsoft, in place, as far as their shapes are known.

    `model`: the model, with static inputs and an opset of at least 17.
    """
    _drop_unread_outputs(model.graph)
    while has_contrib(model) and _replace_once(model):
        fold_constants(model, strict=False)


def _drop_unread_outputs(graph: onnx.GraphProto) -> None:
    """Take the names of outputs that nothing reads: some exporters name all that an operator has."""
    read = {output.name for output in graph.output}.union(*map(reads, graph.node))
    for node in graph.node:
        if node.domain == DOMAIN:
            node.output[:] = [name if name in read else "" for name in node.output]


def _replace_once(model: onnx.ModelProto) -> int:
    """Replace the nodes whose inputs have known types; infer the types of what they and others make."""
    graph = OnnxGraph(model)

    def replace(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if node.domain != DOMAIN or node.op_type not in CONTRIB:
            if not node.domain and any(graph.shape_of(name) is None for name in node.output if name):
                _infer(node, graph)
            return None
        new = rewritten(CONTRIB[node.op_type], node, graph)
        if new is None:
            return None
        for made in new:
            _infer(made, graph)
        return new

    return graph.rewrite(replace)


def _infer(node: onnx.NodeProto, graph: OnnxGraph) -> None:
    """Record the types of what a node makes, as far as ONNX can infer them from the node's inputs."""
    if node.domain or not defs.has(node.op_type, graph.opset, ""):
        return
    kinds, data = {}, {}
    for name in dict.fromkeys(name for name in node.input if name):
        found = graph.type_of(name)
        if found is None:
            return
        kinds[name] = helper.make_tensor_type_proto(found.elem_type, found.shape)
        if graph.is_constant(name) and (value := graph.constant(name)) is not None and value.ndim <= 1:
            data[name] = numpy_helper.from_array(value, name)
    schema = defs.get_schema(node.op_type, graph.opset, "")
    try:
        with quiet():
            made = shape_inference.infer_node_outputs(
                schema, node, kinds, data, opset_imports=list(graph.model.opset_import)
            )
    except FOREIGN_FAILURES:
        return
    for name, kind in made.items():
        known = value_type(onnx.ValueInfoProto(name=name, type=kind))
        if known is not None and known.static_shape is not None:
            graph.set_type(name, known.elem_type, known.static_shape)
