"""BERT (Devlin et al. 2018), in the form of the usual `transformers` export at opset 13.

It has everything that makes such a file hard to compile: INT64 inputs, dynamic batch and sequence, shapes
computed by Shape/Gather/Unsqueeze/Concat before each Reshape, positions sliced from a constant by a dynamic
Slice, the mask expanded through ConstantOfShape/Equal/Where/Expand, LayerNorm and GELU decomposed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from benchmarks.architectures.network import Network

LAYER_NORM_EPSILON: Final = 1e-12
TOKEN_TYPES: Final = 2
FEED_FORWARD: Final = 4
# Masked scores are set to torch.finfo(float32).min.
MASKED: Final = float(np.finfo(np.float32).min)


def bert(
    seed: int = 0,
    *,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocabulary: int = 30522,
    positions: int = 512,
) -> onnx.ModelProto:
    """Return a BERT encoder with pooler; the defaults are those of bert-base-uncased.

    Inputs `input_ids`, `attention_mask`, `token_type_ids`, INT64 [batch_size, sequence_length]; outputs
    `last_hidden_state` [batch_size, sequence_length, hidden] and `pooler_output` [batch_size, hidden].
    """
    if hidden % heads:
        raise ValueError(f"hidden: expected a multiple of {heads} heads, got {hidden}")
    net = Network("bert", seed)
    dims = ("batch_size", "sequence_length")
    ids = net.input("input_ids", dims, TensorProto.INT64)
    mask = net.input("attention_mask", dims, TensorProto.INT64)
    types = net.input("token_type_ids", dims, TensorProto.INT64)

    bias = _mask_bias(net, ids, mask)
    x = _embeddings(net, ids, types, hidden=hidden, vocabulary=vocabulary, positions=positions)
    for layer in range(layers):
        scope = f"encoder.layer.{layer}"
        attended = _attention(net, x, bias, scope, hidden=hidden, heads=heads)
        x = net.node("Add", attended, x, scope=f"/{scope}")
        x = _layer_norm(net, x, f"{scope}.attention.output.LayerNorm", hidden)
        inner = _linear(net, x, f"{scope}.intermediate.dense", hidden, FEED_FORWARD * hidden)
        inner = _gelu(net, inner, f"/{scope}/intermediate")
        inner = _linear(net, inner, f"{scope}.output.dense", FEED_FORWARD * hidden, hidden)
        x = _layer_norm(
            net, net.node("Add", inner, x, scope=f"/{scope}"), f"{scope}.output.LayerNorm", hidden
        )

    first = net.node("Gather", x, net.constant(0, np.int64, "/pooler"), scope="/pooler", axis=1)
    pooled = net.node(
        "Tanh", net.gemm(first, "pooler.dense", (hidden, hidden), hidden**-0.5), scope="/pooler"
    )
    net.output("last_hidden_state", x, (*dims, hidden))
    net.output("pooler_output", pooled, (dims[0], hidden))
    return net.model(opset=13, ir_version=7)


def _dim(net: Network, x: str, axis: int, scope: str) -> str:
    """Append `x.size(axis)` as traced: a 1-element shape tensor."""
    shape = net.node("Shape", x, scope=scope)
    size = net.node("Gather", shape, net.constant(axis, np.int64, scope), scope=scope, axis=0)
    return net.node("Unsqueeze", size, net.constant([0], np.int64, scope), scope=scope)


def _mask_bias(net: Network, ids: str, mask: str) -> str:
    """Append the mask, [batch, 1, sequence, sequence]: 0 for a visible token, else the lowest float."""
    scope = "/mask"
    x = net.node("Unsqueeze", mask, net.constant([1], np.int64, scope), scope=scope)
    x = net.node("Unsqueeze", x, net.constant([2], np.int64, scope), scope=scope)
    sequence = _dim(net, ids, 1, scope)
    one = net.constant([1], np.int64, scope)
    shape = net.node("Concat", _dim(net, ids, 0, scope), one, sequence, sequence, scope=scope, axis=0)
    # torch.Tensor.expand: -1 keeps a dimension, hence the Equal and the Where.
    rank = net.node("Shape", shape, scope=scope)
    fill = onnx.helper.make_tensor("value", TensorProto.INT64, [1], [1])
    ones = net.node("ConstantOfShape", rank, scope=scope, value=fill)
    kept = net.node("Mul", ones, net.constant(-1, np.int64, scope), scope=scope)
    is_kept = net.node("Equal", shape, kept, scope=scope)
    shape = net.node("Where", is_kept, ones, shape, scope=scope)
    x = net.node("Expand", x, shape, scope=scope)
    x = net.node("Cast", x, scope=scope, to=TensorProto.FLOAT)
    inverted = net.node("Sub", net.constant(1.0, np.float32, scope), x, scope=scope)
    hidden = net.node("Cast", inverted, scope=scope, to=TensorProto.BOOL)
    return net.node("Where", hidden, net.constant(MASKED, np.float32, scope), inverted, scope=scope)


def _embeddings(net: Network, ids: str, types: str, *, hidden: int, vocabulary: int, positions: int) -> str:
    scope = "/embeddings"
    buffer = net.weight("embeddings.position_ids", np.arange(positions, dtype=np.int64)[None, :])
    first, axis, step = (net.constant([value], np.int64, scope) for value in (0, 1, 1))
    where = net.node("Slice", buffer, first, _dim(net, ids, 1, scope), axis, step, scope=scope)
    tables = {
        name: net.weight(f"embeddings.{name}.weight", net.normal(rows, hidden, deviation=deviation))
        for name, rows, deviation in (
            ("word_embeddings", vocabulary, 1.0),
            ("position_embeddings", positions, 0.3),
            ("token_type_embeddings", TOKEN_TYPES, 0.3),
        )
    }
    x = net.node("Gather", tables["word_embeddings"], ids, scope=f"{scope}/word_embeddings")
    kind = net.node("Gather", tables["token_type_embeddings"], types, scope=f"{scope}/token_type_embeddings")
    x = net.node("Add", x, kind, scope=scope)
    place = net.node("Gather", tables["position_embeddings"], where, scope=f"{scope}/position_embeddings")
    return _layer_norm(net, net.node("Add", x, place, scope=scope), "embeddings.LayerNorm", hidden)


def _linear(net: Network, x: str, name: str, inward: int, outward: int) -> str:
    """Append torch.nn.Linear on 3 dimensions: MatMul by a transposed weight, then Add with the bias first."""
    weight = net.weight(f"onnx::MatMul_{name}", net.normal(inward, outward, deviation=inward**-0.5))
    bias = net.weight(f"{name}.bias", net.normal(outward, deviation=0.1))
    return net.node("Add", bias, net.node("MatMul", x, weight, scope=f"/{name}"), scope=f"/{name}")


def _split_heads(net: Network, x: str, scope: str, sizes: tuple[int, int], order: list[int]) -> str:
    batch, sequence = _dim(net, x, 0, scope), _dim(net, x, 1, scope)
    count, size = (net.constant([size], np.int64, scope) for size in sizes)
    shape = net.node("Concat", batch, sequence, count, size, scope=scope, axis=0)
    return net.node("Transpose", net.node("Reshape", x, shape, scope=scope), scope=scope, perm=order)


def _attention(net: Network, x: str, bias: str, scope: str, *, hidden: int, heads: int) -> str:
    name, scope = f"{scope}.attention", f"/{scope}/attention/self"
    sizes = (heads, hidden // heads)
    query = _linear(net, x, f"{name}.self.query", hidden, hidden)
    key = _linear(net, x, f"{name}.self.key", hidden, hidden)
    key = _split_heads(net, key, scope, sizes, [0, 2, 3, 1])
    value = _linear(net, x, f"{name}.self.value", hidden, hidden)
    value = _split_heads(net, value, scope, sizes, [0, 2, 1, 3])
    query = _split_heads(net, query, scope, sizes, [0, 2, 1, 3])
    scores = net.node("MatMul", query, key, scope=scope)
    scores = net.node("Div", scores, net.constant(sizes[1] ** 0.5, np.float32, scope), scope=scope)
    weights = net.node("Softmax", net.node("Add", scores, bias, scope=scope), scope=scope, axis=-1)
    context = net.node(
        "Transpose", net.node("MatMul", weights, value, scope=scope), scope=scope, perm=[0, 2, 1, 3]
    )
    batch, sequence = _dim(net, context, 0, scope), _dim(net, context, 1, scope)
    size = net.constant([hidden], np.int64, scope)
    shape = net.node("Concat", batch, sequence, size, scope=scope, axis=0)
    context = net.node("Reshape", context, shape, scope=scope)
    return _linear(net, context, f"{name}.output.dense", hidden, hidden)


def _layer_norm(net: Network, x: str, name: str, hidden: int) -> str:
    scope = f"/{name}"
    centred = net.node("Sub", x, net.node("ReduceMean", x, scope=scope, axes=[-1]), scope=scope)
    square = net.node("Pow", centred, net.constant(2.0, np.float32, scope), scope=scope)
    variance = net.node("ReduceMean", square, scope=scope, axes=[-1])
    variance = net.node("Add", variance, net.constant(LAYER_NORM_EPSILON, np.float32, scope), scope=scope)
    x = net.node("Div", centred, net.node("Sqrt", variance, scope=scope), scope=scope)
    gain = net.weight(f"{name}.weight", net.uniform(hidden, low=0.9, high=1.1))
    shift = net.weight(f"{name}.bias", net.normal(hidden, deviation=0.1))
    return net.node("Add", net.node("Mul", x, gain, scope=scope), shift, scope=scope)


def _gelu(net: Network, x: str, scope: str) -> str:
    erf = net.node(
        "Erf", net.node("Div", x, net.constant(2**0.5, np.float32, scope), scope=scope), scope=scope
    )
    grown = net.node("Add", erf, net.constant(1.0, np.float32, scope), scope=scope)
    return net.node(
        "Mul", net.node("Mul", x, grown, scope=scope), net.constant(0.5, np.float32, scope), scope=scope
    )
