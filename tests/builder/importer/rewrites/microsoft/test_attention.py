"""Attention of com.microsoft, in the forms that ONNX Runtime runs on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from builder.errors import ModelError
from builder.importer import import_onnx
from tests.builder.importer.rewrites.microsoft.contrib import (
    Node,
    bits,
    check,
    imported_outputs,
    randn,
    run_unoptimised,
)

BATCH, STEPS, HEADS, WIDTH, KEYS = 2, 5, 4, 8, 6
HIDDEN = HEADS * WIDTH
Arrays = list[NDArray[Any] | None]


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("mask", ["none", "keys", "queries and keys", "lengths", "ends and begins"])
def test_attention(causal: int, past: int, mask: str) -> None:
    total = STEPS + past
    masks: dict[str, NDArray[Any] | None] = {
        "none": None,
        "keys": bits(BATCH, total),
        "queries and keys": bits(BATCH, STEPS, total),
        "lengths": np.array([3, 5], "i4") + past,
        "ends and begins": np.array([4, 5, 1, 0], "i4"),
    }
    inputs: Arrays = [randn(BATCH, STEPS, HIDDEN), randn(HIDDEN, 3 * HIDDEN) * 0.3, randn(3 * HIDDEN)]
    inputs += [masks[mask], randn(2, BATCH, HEADS, past, WIDTH) if past else None]
    how = {"num_heads": HEADS, "unidirectional": causal}
    check(Node("Attention", inputs, (1, 2), outputs=(0, 1) if past else (0,), attributes=how))


def test_attention_with_values_of_another_width_and_a_bias() -> None:
    sizes = [HIDDEN, HIDDEN, 3 * HEADS]
    inputs: Arrays = [randn(BATCH, STEPS, HIDDEN), randn(HIDDEN, sum(sizes)) * 0.3, randn(sum(sizes))]
    inputs += [None, None, randn(1, HEADS, STEPS, STEPS)]
    how = {"num_heads": HEADS, "qkv_hidden_sizes": sizes, "scale": 0.3}
    check(Node("Attention", inputs, (1, 2), attributes=how))


Q, K = (BATCH, STEPS, HIDDEN), (BATCH, KEYS, HIDDEN)
CACHE = (BATCH, HEADS, 3, WIDTH)
FORMS: dict[str, tuple[Arrays, tuple[int, ...], dict[str, Any]]] = {
    "plain": ([randn(*Q), randn(*K), randn(*K)], (0,), {}),
    "biased": ([randn(*Q), randn(*K), randn(*K), randn(3 * HIDDEN)], (0, 1, 2), {}),
    "narrow values": ([randn(*Q), randn(*K), randn(BATCH, KEYS, 12), randn(2 * HIDDEN + 12)], (0,), {}),
    "mask of keys": ([randn(*Q), randn(*K), randn(*K), None, bits(BATCH, KEYS)], (0,), {}),
    "mask of pairs": ([randn(*Q), randn(*K), randn(*K), None, bits(BATCH, STEPS, KEYS)], (0,), {}),
    "lengths": ([randn(*Q), randn(*K), randn(*K), None, np.array([3, 6], "i4")], (0,), {}),
    "additive": (
        [randn(*Q), randn(*K), randn(*K), None, bits(BATCH, KEYS), randn(BATCH, 1, STEPS, KEYS)], (0,), {}
    ),
    "past": ([randn(*Q)] * 3 + [None] * 3 + [randn(*CACHE), randn(*CACHE)], (0, 1, 2), {"unidirectional": 1}),
    "causal": ([randn(*Q), randn(*Q), randn(*Q)], (0,), {"unidirectional": 1, "scale": 0.2}),
    "cached": ([randn(*Q), randn(2, HEADS, KEYS, WIDTH), randn(2, HEADS, KEYS, WIDTH)], (0,), {}),
    "scores": ([randn(*Q), randn(*K), randn(*K)], (0, 3), {}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_multi_head_attention(form: str) -> None:
    inputs, outputs, how = FORMS[form]
    check(Node("MultiHeadAttention", inputs, outputs=outputs, attributes={"num_heads": HEADS, **how}))


def test_packed_operands_are_taken_apart() -> None:
    q, k, v = randn(*K), randn(*K), randn(*K)
    plain = Node("MultiHeadAttention", [q, k, v], attributes={"num_heads": HEADS})
    wanted = run_unoptimised(plain.model(), plain.feeds())
    parts = [a.reshape(BATCH, KEYS, HEADS, 1, WIDTH) for a in (q, k, v)]
    for inputs in ([np.concatenate(parts, 3)], [q, np.concatenate(parts[1:], 3)]):
        check(Node("MultiHeadAttention", inputs, attributes={"num_heads": HEADS}), wanted)


GROUPS, WIDE = 2, 16  # ONNX Runtime rotates heads of 16, 32 ...


def grouped(
    *,
    past: int = 0,
    buffer: int = -1,
    batch: int = 1,
    steps: int = STEPS,
    ends: list[int] | None = None,
    more: Arrays | None = None,
    static: bool = True,
    **how: Any,
) -> Node:
    """A GroupQueryAttention after `past` steps, in a cache with room for `buffer` steps."""
    total = past + steps
    buffer = past if buffer < 0 else buffer
    lengths = np.array([total - 1] * batch if ends is None else ends, "i4")
    cache = (batch, GROUPS, buffer, WIDE)
    operands: Arrays = [randn(batch, steps, heads * WIDE) for heads in (HEADS, GROUPS, GROUPS)]
    if how.pop("packed", False):
        operands = [randn(batch, steps, (HEADS + 2 * GROUPS) * WIDE), None, None]
    angle = randn(32, WIDE // 2)
    tables: Arrays = [np.cos(angle), np.sin(angle)] if how.get("do_rotary") else [None, None]
    caches: Arrays = [randn(*cache), randn(*cache)] if buffer else [None, None]
    inputs = [*operands, *caches, lengths, np.array(total, "i4"), *tables, *(more or [])]
    attributes = {"num_heads": HEADS, "kv_num_heads": GROUPS, **how}
    return Node(
        "GroupQueryAttention", inputs, (6, 7, 8) if static else (7, 8), (0, 1, 2), attributes=attributes
    )


GROUPED = {
    "prompt": grouped(),
    "prompt of unknown length": grouped(static=False),
    "packed prompts": grouped(packed=True, batch=2),
    "rotated": grouped(do_rotary=1),
    "rotated neighbours": grouped(do_rotary=1, rotary_interleaved=1),
    "next": grouped(do_rotary=1, past=4, steps=1),
    "next three": grouped(do_rotary=1, past=4, steps=3),
    "two at once": grouped(do_rotary=1, past=4, steps=1, batch=2),
    "two of different length": grouped(do_rotary=1, past=4, buffer=5, steps=1, batch=2, ends=[2, 4]),
    "window": grouped(do_rotary=1, past=6, steps=3, local_window_size=4),
    "window in a prompt": grouped(steps=9, local_window_size=4),
    "softcap": grouped(softcap=2.0, scale=0.3),
    "smooth": grouped(smooth_softmax=1),
    "sinks": grouped(more=[None, None, randn(HEADS)]),
    "additive": grouped(past=3, steps=2, more=[None, randn(1, 1, 2, 5)]),
    "positions": grouped(do_rotary=1, past=3, steps=1, more=[np.array([[7]])]),
    "not causal": grouped(causal=0),
}


@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_group_query_attention(case: str) -> None:
    check(GROUPED[case])


@pytest.mark.parametrize(("past", "steps"), [(0, 5), (4, 1), (4, 3)])
def test_a_cache_with_room_keeps_what_is_behind_the_end(past: int, steps: int) -> None:
    node = grouped(do_rotary=1, past=past, steps=steps, buffer=9)
    wanted = run_unoptimised(node.model(), node.feeds())
    found = imported_outputs(node, wanted)
    end = past + steps
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    for index in (1, 2):
        np.testing.assert_allclose(found[index][:, :, :end], wanted[index][:, :, :end], rtol=1e-4, atol=1e-5)
        cache = np.asarray(node.inputs[index + 2])
        np.testing.assert_array_equal(found[index][:, :, end:], cache[:, :, end:])


def test_a_cache_with_room_is_filled_step_by_step() -> None:
    """One row whose length is an input: a decoder whose caches are states of fixed shape."""
    most = 5
    node = grouped(do_rotary=1, past=most - 1, buffer=most, steps=1, static=False)
    results = run_unoptimised(node.model(), node.feeds())
    imported = import_onnx(node.model(results), input_values={"i6": most})
    assert [spec.name for spec in imported.inputs] == ["i0", "i1", "i2", "i3", "i4", "i5"]
    ours = theirs = {name: np.zeros_like(node.feeds()[name]) for name in ("i3", "i4")}
    for step in range(most):
        given = {f"i{k}": randn(*node.feeds()[f"i{k}"].shape) for k in range(3)}
        given["i5"] = np.array([step], "i4")
        total = {"i6": np.array(step + 1, "i4")}
        wanted = run_unoptimised(node.model(results), given | theirs | total)
        got = run_unoptimised(imported.onnx, given | ours)
        np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4, atol=1e-5)
        ours, theirs = (dict(zip(("i3", "i4"), each[1:], strict=True)) for each in (got, wanted))


@pytest.mark.filterwarnings("error")
def test_heads_without_a_number_are_refused() -> None:
    inputs: Arrays = [randn(1, 2, 3), randn(3, 9), randn(9)]
    with pytest.raises(ModelError):
        import_onnx(Node("Attention", inputs, (1, 2), attributes={"num_heads": 4}).model())
