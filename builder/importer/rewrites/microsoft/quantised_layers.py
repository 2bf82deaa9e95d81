"""Layers of com.microsoft whose weights are bytes or four bits, as ONNX Runtime's quantisers write them.

`quantize_dynamic` writes QAttention, QEmbedLayerNormalization and DynamicQuantizeLSTM; the model builder for
language models writes GatherBlockQuantized. Source: ONNX Runtime's docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder.importer.onnx_graph import OnnxGraph, ValueType, attributes
from builder.importer.rewrites.microsoft.attention import Places, attend_to
from builder.importer.rewrites.microsoft.quantised import codes_of
from builder.importer.rewrites.replacement import Replacement, input_name

_LSTM_OPTIONS: Final = (
    "activation_alpha",
    "activation_beta",
    "activations",
    "clip",
    "direction",
    "hidden_size",
    "input_forget",
)
_TABLES: Final = 5  # of embeddings: words, positions, segments, gamma, beta


def attention(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """QAttention of x, weights, bias, x_scale, weight_scale, mask, x_zero, weight_zero and past."""
    x, weight, bias, x_scale, weight_scale = node.input[:5]
    found = graph.type_of(x)
    if found is None:
        return None
    new = Replacement(node, graph)
    x_zero = input_name(node, 6) or new.constant(0, found.dtype)
    weight_zero = input_name(node, 7)
    zeros = [x_zero, weight_zero] if weight_zero else [x_zero]
    sums = new.cast(new.op("MatMulInteger", x, weight, *zeros), TensorProto.FLOAT)
    projected = new.op("Add", new.op("Mul", sums, new.op("Mul", x_scale, weight_scale)), bias)
    real = ValueType(TensorProto.FLOAT, None)
    return attend_to(new, node, graph, projected, real, Places(mask=5, past=8, added=9))


def embed_layer_normalization(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto]:
    """QEmbedLayerNormalization: the same with tables of bytes, each with one scale and one zero point."""
    new = Replacement(node, graph)
    tables = []
    for place in range(_TABLES):
        table = input_name(node, 2 + place)
        parts = [table, input_name(node, 8 + place), input_name(node, 13 + place)]
        tables.append(new.op("DequantizeLinear", *filter(None, parts)) if table else "")
    whole = helper.make_node(
        "EmbedLayerNormalization",
        [*node.input[:2], *tables, input_name(node, 7)],
        list(node.output),
        name=node.name,
        domain=node.domain,
    )
    whole.attribute.extend(node.attribute)
    return [*new.nodes, whole]


def dynamic_lstm(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """DynamicQuantizeLSTM as an LSTM with the numbers that its weights stand for.

    ONNX Runtime also rounds the steps of the sequence to bytes, so its answers differ by about one percent.
    """
    new = Replacement(node, graph)
    weights = []
    for weight, scale in ((1, 8), (2, 10)):
        names = (node.input[weight], node.input[scale], node.input[scale + 1])
        codes, scales, zeros = (graph.constant(name) for name in names)
        if codes is None or scales is None or zeros is None or codes.ndim != 3:
            return None
        # Of a layer or of each column; ONNX's LSTM has the columns first.
        form = (codes.shape[0], 1, -1)
        real = (codes.astype(np.float32) - zeros.astype(np.float32).reshape(form)) * scales.reshape(form)
        weights.append(new.constant(np.ascontiguousarray(real.transpose(0, 2, 1)), np.float32))
    inputs = [node.input[0], *weights, *(input_name(node, place) for place in range(3, 8))]
    whole = helper.make_node("LSTM", inputs, list(node.output), name=node.name)
    whole.attribute.extend(option for option in node.attribute if option.name in _LSTM_OPTIONS)
    return [whole]


def gather_blocks(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """GatherBlockQuantized of codes, indices, scales and zero points: rows of a matrix, dequantised.

    Only the chosen rows become float32.
    """
    options = attributes(node)
    bits, block = int(options.get("bits", 4)), int(options.get("block_size", 128))
    codes, scales = graph.constant(node.input[0]), graph.constant(node.input[2])
    zeros = graph.constant(zero) if (zero := input_name(node, 3)) else None
    kind, indices = graph.type_of(node.input[0]), graph.shape_of(node.input[1])
    if codes is None or scales is None or (zero and zeros is None) or kind is None or indices is None:
        return None
    if (
        codes.ndim != 2
        or int(options.get("gather_axis", 0)) % 2
        or int(options.get("quantize_axis", 1)) % 2 != 1
    ):
        return None
    offset = 0
    if kind.elem_type == TensorProto.UINT8:  # as bytes, of which some hold two codes
        codes, offset = codes_of(codes, bits), 1 << bits - 1
        zeros = None if zeros is None else codes_of(zeros, bits)[:, : scales.shape[1]]
    narrow = np.uint8 if codes.min(initial=0) >= 0 else np.int8
    new = Replacement(node, graph)
    places = new.constant(np.arange(codes.shape[1]) // block, np.int64)

    def rows(part: np.ndarray, dtype: type[np.generic]) -> str:
        found = new.op("Gather", new.constant(part.astype(dtype), dtype), node.input[1], axis=0)
        return found if dtype is np.float32 else new.cast(found, TensorProto.FLOAT)

    def spread(name: str) -> str:
        return new.op("Gather", name, places, axis=len(indices))

    zero_rows = new.constant(offset, np.float32) if zeros is None else spread(rows(zeros, narrow))
    steps = new.op("Sub", rows(codes, narrow), zero_rows)
    new.op("Mul", steps, spread(rows(scales, np.float32)), to=node.output[0])
    return new.nodes
