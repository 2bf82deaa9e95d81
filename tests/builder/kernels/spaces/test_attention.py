"""Attention as one kernel: against its definition, and only where nothing else reads what is inside it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from tvm import relax

from builder import resolve
from builder.kernels.spaces import attention
from tests.builder.kernels.machines import Randn, close, element_machine, in_turn, machine, run

op = relax.op
_HEAD_SWAP = (0, 2, 1, 3)


@pytest.fixture
def short_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel also where it does not pay, so that small sizes show its numbers."""
    monkeypatch.setattr(attention, "pays", lambda *_: True)


@dataclass(frozen=True)
class Case:
    """Sizes of an attention, and the shape of a mask that is added to the scores."""

    batch: int
    heads: int
    queries: int
    keys: int
    depth: int
    columns: int
    mask: tuple[int, ...] = ()

    def data(self, randn: Randn) -> dict[str, np.ndarray]:
        found = {
            "q": randn(self.batch, self.queries, self.heads * self.depth),
            "k": randn(self.batch, self.keys, self.heads * self.depth),
            "v": randn(self.batch, self.keys, self.heads * self.columns),
        }
        return found | ({"m": randn(*self.mask) * 3} if self.mask else {})

    def build(self, q: relax.Expr, k: relax.Expr, v: relax.Expr, m: relax.Expr | None = None) -> relax.Expr:
        sizes = (self.depth, self.depth, self.columns)
        parts = zip((q, k, v), sizes, strict=True)
        a, b, c = (op.reshape(t, (self.batch, -1, self.heads, n)) for t, n in parts)
        a, b, c = (
            op.permute_dims(a, _HEAD_SWAP),
            op.permute_dims(b, (0, 2, 3, 1)),
            op.permute_dims(c, _HEAD_SWAP),
        )
        scores = op.multiply(op.matmul(a, b), relax.const(np.float32(0.3)))
        if m is not None:
            scores = op.add(scores, m)
        context = op.permute_dims(op.matmul(op.nn.softmax(scores), c), _HEAD_SWAP)
        return op.reshape(context, (self.batch, self.queries, self.heads * self.columns))

    def want(self, data: dict[str, np.ndarray]) -> np.ndarray:
        a, b, c = (
            data[name].astype("f8").reshape(self.batch, -1, self.heads, n).transpose(_HEAD_SWAP)
            for name, n in (("q", self.depth), ("k", self.depth), ("v", self.columns))
        )
        context = softmax(a @ b.transpose(0, 1, 3, 2) * 0.3 + data.get("m", 0)) @ c
        return context.transpose(_HEAD_SWAP).reshape(self.batch, self.queries, -1)


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


CASES = [
    Case(2, 3, 13, 50, 16, 32, (2, 1, 1, 50)),
    Case(1, 2, 40, 48, 16, 16),
    Case(1, 2, 37, 37, 20, 20, (1, 1, 37, 37)),
    Case(1, 1, 5, 7, 3, 5),
    Case(1, 1, 9, 601, 8, 72, (9, 601)),
    Case(2, 2, 2, 17, 6, 8, (2, 2, 2, 17)),
]


@pytest.mark.slow
@pytest.mark.usefixtures("short_too")
@pytest.mark.parametrize(("case", "lanes"), in_turn(CASES))
def test_attention_is_one_kernel(case: Case, lanes: int, randn: Randn) -> None:
    data = case.data(randn)
    result = run(case.build, data, machine(lanes))
    close(result.outputs[0], case.want(data))
    assert result.schedules == {attention.KIND}
    assert len(result.lowered.kernels.functions) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("short_too")
@pytest.mark.parametrize("case", CASES[:3])
def test_attention_on_a_machine_that_multiplies_by_elements(case: Case, randn: Randn) -> None:
    data = case.data(randn)
    result = run(case.build, data, element_machine())
    close(result.outputs[0], case.want(data))
    assert result.schedules == {attention.KIND}


@pytest.mark.slow
@pytest.mark.usefixtures("short_too")
def test_keys_of_all_heads_and_a_mask_of_choices(randn: Randn) -> None:
    """Heads share keys and values, and a mask chooses between a score and a constant."""
    q, k, v = randn(1, 4, 12, 8), randn(1, 1, 10, 8), randn(1, 1, 10, 16)
    mask = np.arange(120).reshape(1, 1, 12, 10) % 3 > 0

    def build(*t: relax.Expr) -> relax.Expr:
        scores = op.matmul(t[0], op.permute_dims(t[1], (0, 1, 3, 2)))
        lowest = relax.const(np.float32(-1e9))
        return op.matmul(op.nn.softmax(op.where(t[3], op.tanh(scores), lowest)), t[2])

    result = run(build, {"q": q, "k": k, "v": v, "m": mask}, machine(8))
    scores = np.where(mask, np.tanh(q.astype("f8") @ k.transpose(0, 1, 3, 2)), -1e9)
    close(result.outputs[0], softmax(scores) @ v)
    assert result.schedules == {attention.KIND}


@pytest.mark.slow
@pytest.mark.usefixtures("short_too")
def test_heads_without_a_batch_as_older_exporters_store_them(randn: Randn) -> None:
    """[steps, 1, width] becomes [heads, steps, width] by a reshape and a transpose, and back."""
    steps, heads, width = 19, 2, 8
    q, k, v = (randn(steps, 1, heads * width) for _ in range(3))

    def build(*t: relax.Expr) -> relax.Expr:
        a, b, c = (op.permute_dims(op.reshape(x, (steps, heads, width)), (1, 0, 2)) for x in t)
        a, b, c = (op.reshape(x, (1, heads, steps, width)) for x in (a, b, c))
        scores = op.matmul(a, op.permute_dims(b, (0, 1, 3, 2)))
        context = op.permute_dims(op.matmul(op.nn.softmax(scores), c), (2, 0, 1, 3))
        return op.reshape(context, (steps, heads * width))

    result = run(build, {"q": q, "k": k, "v": v}, machine(16))
    a, b, c = (x.astype("f8").reshape(steps, heads, width).transpose(1, 0, 2) for x in (q, k, v))
    want = softmax(a @ b.transpose(0, 2, 1)) @ c
    close(result.outputs[0], want.transpose(1, 0, 2).reshape(steps, heads * width))
    assert result.schedules == {attention.KIND}


@pytest.mark.slow
@pytest.mark.usefixtures("short_too")
def test_masked_keys_count_nothing_and_a_row_without_keys_is_nan(randn: Randn) -> None:
    case = Case(1, 1, 6, 20, 8, 8, (6, 20))
    data = case.data(randn)
    data["m"][:] = 0
    data["m"][:3, 5:], data["m"][4] = -np.inf, -np.inf
    data["v"][0, 0] = 3
    got = run(case.build, data, machine(4)).outputs[0][0]
    cut = data | {"k": data["k"][:, :5], "v": data["v"][:, :5], "m": data["m"][:, :5]}
    cut["m"] = np.zeros((6, 5), "f4")
    close(got[:3], Case(1, 1, 6, 5, 8, 8, (6, 5)).want(cut)[0, :3])
    assert np.isnan(got[4]).all()
    assert np.isfinite(got[[3, 5]]).all()


@pytest.mark.slow
@pytest.mark.usefixtures("short_too")
def test_scores_that_the_model_returns_are_not_fused(randn: Randn) -> None:
    q, k, v = randn(1, 2, 8, 4), randn(1, 2, 4, 12), randn(1, 2, 12, 8)

    def build(*t: relax.Expr) -> relax.Expr:
        weights = op.nn.softmax(op.matmul(t[0], t[1]))
        return relax.Tuple([weights, op.matmul(weights, t[2])])

    result = run(build, {"q": q, "k": k, "v": v}, machine(8))
    weights = softmax(q.astype("f8") @ k)
    close(result.outputs[0], weights)
    close(result.outputs[1], weights @ v)
    assert attention.KIND not in result.schedules


def test_short_sequences_keep_separate_kernels_where_vectors_are_short(randn: Randn) -> None:
    case = CASES[1]
    for target in (machine(8), element_machine()):
        data = case.data(randn)
        result = run(case.build, data, target)
        close(result.outputs[0], case.want(data))
        assert attention.KIND not in result.schedules


def test_one_kernel_pays_when_scores_leave_the_cache() -> None:
    pi4 = resolve("rpi4")
    assert not attention.pays((1, 12, 128, 128), pi4)
    assert attention.pays((1, 12, 512, 512), pi4)
    assert attention.pays((1, 6, 1500, 1500), pi4)
    assert attention.pays((1, 12, 128, 128), machine(16))


def test_scores_of_the_rows_of_a_core_fit_its_cache() -> None:
    for lanes in (4, 8, 16):
        target = machine(lanes)
        for heads, length in ((6, 1500), (12, 197), (12, 50), (1, 20)):
            tiles = attention.tiles_of(heads, length, length, 64, target)
            assert 8 * tiles.rows * length <= target.core.l2_bytes // 2
            assert tiles.rows % tiles.scores == 0 or tiles.rows == length


def test_the_last_rows_of_a_head_are_not_few() -> None:
    """A part of one row costs as much as a whole one: 257 tokens were 256 and one."""
    for lanes in (4, 8, 16):
        for heads, length in itertools.product((1, 6, 12, 48), range(2, 600)):
            tiles = attention.tiles_of(heads, length, length, 64, machine(lanes))
            parts = -(-length // tiles.rows)
            assert parts * tiles.rows - length <= parts * tiles.scores, (lanes, heads, length)
