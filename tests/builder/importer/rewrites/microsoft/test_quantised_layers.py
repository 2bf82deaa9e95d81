"""Layers with weights of bytes and four bits, as ONNX Runtime's quantisers write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.builder.importer.rewrites.microsoft.contrib import Node, bits, check, randn, run_unoptimised

BATCH, STEPS, HEADS, HIDDEN = 2, 5, 4, 16
Arrays = list[NDArray[Any] | None]


def bytes_of(*shape: int, signed: bool = False) -> NDArray[Any]:
    state = np.random.RandomState(3)
    return (
        state.randint(-60, 60, shape).astype("i1") if signed else state.randint(60, 200, shape).astype("u1")
    )


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("past", [0, 3])
def test_attention(causal: int, columns: bool, past: int) -> None:
    scale = np.abs(randn(3 * HIDDEN)) * np.float32(0.02) if columns else np.array(0.01, "f4")
    inputs: Arrays = [bytes_of(BATCH, STEPS, HIDDEN), bytes_of(HIDDEN, 3 * HIDDEN, signed=True)]
    inputs += [randn(3 * HIDDEN), np.array(0.03, "f4"), scale, None if past else bits(BATCH, STEPS)]
    inputs += [np.array(128, "u1"), np.zeros(scale.shape, "i1")]
    if past:
        inputs.append(randn(2, BATCH, HEADS, past, HIDDEN // HEADS))
    how = {"num_heads": HEADS, "unidirectional": causal}
    check(Node("QAttention", inputs, range(1, 8), (0, 1) if past else (0,), attributes=how))


def test_embeddings() -> None:
    ids = np.random.RandomState(1).randint(0, 9, (BATCH, STEPS)).astype("i4")
    tables = [bytes_of(rows, HIDDEN) for rows in (9, 8, 2)] + [bytes_of(HIDDEN), bytes_of(HIDDEN)]
    scales, zeros = [np.array(0.01, "f4")] * 5, [np.array(zero, "u1") for zero in (120, 130, 9, 0, 128)]
    inputs: Arrays = [ids, ids % 2, *tables, None, *scales, *zeros]
    check(Node("QEmbedLayerNormalization", inputs, range(2, 18), (0, 1)))


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_an_lstm_has_the_numbers_of_its_weights(columns: bool, direction: str) -> None:
    """ONNX Runtime also rounds the data, so the definition is an LSTM of real numbers."""
    layers, width, hidden = (1 if direction == "forward" else 2), 6, 4
    form = (layers, 4 * hidden) if columns else (layers,)
    codes = [bytes_of(layers, rows, 4 * hidden, signed=True) for rows in (width, hidden)]
    scales = [np.abs(randn(*form)) * np.float32(0.02) for _ in codes]
    zeros = [np.full(form, zero, "i1") for zero in (0, 3)]
    bias, x = randn(layers, 8 * hidden), randn(7, BATCH, width)
    own = {"hidden_size": hidden, "direction": direction}
    wide = [
        np.ascontiguousarray(
            ((c.astype("f4") - z.reshape(layers, 1, -1)) * s.reshape(layers, 1, -1)).transpose(0, 2, 1)
        )
        for c, s, z in zip(codes, scales, zeros, strict=True)
    ]
    plain = Node("LSTM", [x, *wide, bias], (1, 2, 3), (0, 1, 2), domain="", attributes=own)
    wanted = run_unoptimised(plain.model(), plain.feeds())
    inputs: Arrays = [x, *codes, bias, *[None] * 4, scales[0], zeros[0], scales[1], zeros[1]]
    check(Node("DynamicQuantizeLSTM", inputs, range(1, 12), (0, 1, 2), attributes=own), wanted)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("columns", [32, 40])
def test_rows_of_a_table_in_blocks(zeros: bool, columns: int) -> None:
    """Two codes in a byte; the last block may be incomplete."""
    state = np.random.RandomState(2)
    codes, blocks = state.randint(0, 256, (12, columns // 2)).astype("u1"), -(-columns // 16)
    ids = state.randint(0, 12, (2, 3)).astype("i8")
    scales = np.abs(randn(12, blocks))
    packed = state.randint(0, 256, (12, -(-blocks // 2))).astype("u1") if zeros else None
    inputs: Arrays = [codes, ids, scales, packed]
    how = {"gather_axis": 0, "quantize_axis": 1, "block_size": 16, "bits": 4}
    each = np.stack([codes & 15, codes >> 4], -1).reshape(12, -1).astype("f4")
    zero = np.full((12, blocks), 8.0, "f4")
    if packed is not None:
        zero = np.stack([packed & 15, packed >> 4], -1).reshape(12, -1)[:, :blocks].astype("f4")
    spread = np.arange(columns) // 16
    wanted = ((each - zero[:, spread]) * scales[:, spread])[ids]
    node = Node("GatherBlockQuantized", inputs, (0, 2, 3) if zeros else (0, 2), opset=21, attributes=how)
    check(node, [wanted])
