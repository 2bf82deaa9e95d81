"""Layers of com.microsoft whose weights are bytes or four bits, as ONNX Runtime's quantisers write them.

`quantize_dynamic` writes QAttention, QEmbedLayerNormalization and DynamicQuantizeLSTM; the model builder for
language models writes GatherBlockQuantized. Source: ONNX Runtime's docs/ContribOperators.md.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from onnx import TensorProto, helper

from builder.importer.onnx_graph import ValueType
from builder.importer.rewrites.microsoft.attention import Places, attend_to
from builder.importer.rewrites.microsoft.quantised import codes_of
from builder.importer.rewrites.replacement import Nodes, Replacement

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


def attention(new: Replacement) -> Nodes | None:
    """QAttention of x, weights, bias, x_scale, weight_scale, mask, x_zero, weight_zero and past."""
    x, weight, bias, x_scale, weight_scale = new.inputs[:5]
    found = new.type_of(x)
    x_zero = new.input(6) or new.constant(0, found.dtype)
    weight_zero = new.input(7)
    zeros = [x_zero, weight_zero] if weight_zero else [x_zero]
    sums = new.cast(new.op("MatMulInteger", x, weight, *zeros), TensorProto.FLOAT)
    projected = new.op("Add", new.op("Mul", sums, new.op("Mul", x_scale, weight_scale)), bias)
    real = ValueType(TensorProto.FLOAT, None)
    return attend_to(new, projected, real, Places(mask=5, past=8, added=9))


def embed_layer_normalization(new: Replacement) -> Nodes:
    """QEmbedLayerNormalization: the same with tables of bytes, each with one scale and one zero point."""
    tables = []
    for place in range(_TABLES):
        table = new.input(2 + place)
        parts = [table, new.input(8 + place), new.input(13 + place)]
        tables.append(new.op("DequantizeLinear", *filter(None, parts)) if table else "")
    whole = helper.make_node(
        "EmbedLayerNormalization",
        [*new.inputs[:2], *tables, new.input(7)],
        list(new.outputs),
        name=new.node.name,
        domain=new.node.domain,
    )
    whole.attribute.extend(new.node.attribute)
    return [*new.nodes, whole]


def dynamic_lstm(new: Replacement) -> Nodes | None:
    """DynamicQuantizeLSTM as an LSTM with the numbers that its weights stand for.

    ONNX Runtime also rounds the steps of the sequence to bytes, so its answers differ by about one percent.
    """
    weights = []
    for weight, scale in ((1, 8), (2, 10)):
        names = (new.inputs[weight], new.inputs[scale], new.inputs[scale + 1])
        codes, scales, zeros = (new.graph.constant(name) for name in names)
        if codes is None or scales is None or zeros is None or codes.ndim != 3:
            return None
        # Of a layer or of each column; ONNX's LSTM has the columns first.
        form = (codes.shape[0], 1, -1)
        real = (codes.astype(np.float32) - zeros.astype(np.float32).reshape(form)) * scales.reshape(form)
        weights.append(new.constant(np.ascontiguousarray(real.transpose(0, 2, 1)), np.float32))
    inputs = [new.inputs[0], *weights, *(new.input(place) for place in range(3, 8))]
    whole = helper.make_node("LSTM", inputs, list(new.outputs), name=new.node.name)
    whole.attribute.extend(option for option in new.node.attribute if option.name in _LSTM_OPTIONS)
    return [whole]


def gather_blocks(new: Replacement) -> Nodes | None:
    """GatherBlockQuantized of codes, indices, scales and zero points: rows of a matrix, dequantised.

    Only the chosen rows become float32.
    """
    options = new.attributes
    bits, block = int(options.get("bits", 4)), int(options.get("block_size", 128))
    codes, scales = new.graph.constant(new.inputs[0]), new.graph.constant(new.inputs[2])
    zeros = new.graph.constant(zero) if (zero := new.input(3)) else None
    kind, indices = new.type_of(new.inputs[0]), new.shape_of(new.inputs[1])
    if codes is None or scales is None or (zero and zeros is None):
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
    places = new.constant(np.arange(codes.shape[1]) // block, np.int64)

    def rows(part: np.ndarray, dtype: type[np.generic]) -> str:
        found = new.op("Gather", new.constant(part.astype(dtype), dtype), new.inputs[1], axis=0)
        return found if dtype is np.float32 else new.cast(found, TensorProto.FLOAT)

    def spread(name: str) -> str:
        return new.op("Gather", name, places, axis=len(indices))

    zero_rows = new.constant(offset, np.float32) if zeros is None else spread(rows(zeros, narrow))
    steps = new.op("Sub", rows(codes, narrow), zero_rows)
    return new.result("Mul", steps, spread(rows(scales, np.float32)))
