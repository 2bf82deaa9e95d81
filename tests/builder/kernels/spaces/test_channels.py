"""Channels that are sliced, shuffled, gathered and concatenated, between convolutions and elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from builder.kernels.spaces import channels
from tests.builder.kernels.machines import Randn, close, conv2d, crossed, machine, run

SIZES = {1: (5, 7), 2: (3, 2)}  # batch -> rows and columns
LANES = (4, 8, 16)


@dataclass(frozen=True)
class Step:
    """An operator in both notations; it takes the tensors so far, and adds one."""

    relax: Callable[[Sequence[relax.Expr]], relax.Expr]
    numpy: Callable[[Sequence[np.ndarray]], np.ndarray]


def sliced(at: int, begin: int, end: int) -> Step:
    return Step(
        lambda xs: relax.op.strided_slice(xs[at], [1], [begin], [end]), lambda xs: xs[at][:, begin:end]
    )


def shuffled(at: int, groups: int, shape: tuple[int, ...]) -> Step:
    n, c, h, w = shape
    inner, order = (n, groups, c // groups, h, w), (0, 2, 1, 3, 4)

    def build(xs: Sequence[relax.Expr]) -> relax.Expr:
        return relax.op.reshape(relax.op.permute_dims(relax.op.reshape(xs[at], inner), order), shape)

    return Step(build, lambda xs: xs[at].reshape(inner).transpose(order).reshape(shape))


def gathered(at: int, indices: Sequence[int]) -> Step:
    chosen = relax.const(np.array(indices, "int64"))
    return Step(lambda xs: relax.op.take(xs[at], chosen, axis=1), lambda xs: xs[at][:, list(indices)])


def concatenated(parts: Sequence[int]) -> Step:
    return Step(
        lambda xs: relax.op.concat([xs[i] for i in parts], 1),
        lambda xs: np.concatenate([xs[i] for i in parts], 1),
    )


def bent(at: int) -> Step:
    return Step(lambda xs: relax.op.nn.relu(xs[at]), lambda xs: np.maximum(xs[at], 0))


@st.composite
def routes(draw: st.DrawFn) -> tuple[int, list[int], list[Step]]:
    """Return a batch, the channels of the convolutions at the start, and the operators after them."""
    batch = draw(st.sampled_from(list(SIZES)))
    counts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    known, steps = list(counts), []
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(known) - 1))
        kind = draw(st.sampled_from(["slice", "shuffle", "gather", "concat", "relu"]))
        if kind == "slice":
            begin = draw(st.integers(0, known[at] - 1))
            end = draw(st.integers(begin + 1, known[at]))
            steps.append(sliced(at, begin, end))
            known.append(end - begin)
        elif kind == "shuffle":
            groups = draw(st.sampled_from([g for g in range(1, known[at] + 1) if known[at] % g == 0]))
            steps.append(shuffled(at, groups, (batch, known[at], *SIZES[batch])))
            known.append(known[at])
        elif kind == "gather":
            indices = draw(st.lists(st.integers(0, known[at] - 1), min_size=1, max_size=20))
            steps.append(gathered(at, indices))
            known.append(len(indices))
        elif kind == "concat":
            parts = draw(st.lists(st.integers(0, len(known) - 1), min_size=2, max_size=4))
            steps.append(concatenated(parts))
            known.append(sum(known[i] for i in parts))
        else:
            steps.append(bent(at))
            known.append(known[at])
    return batch, counts, steps


A, B, WIDE = (1, 2, 5, 7, 8), (1, 1, 5, 7, 8), (1, 3, 5, 7, 8)
BOTH = [(0, c) for c in range(16)] + [(1, c) for c in range(8)]
JOINED: dict[str, tuple[tuple[int, ...], list[tuple[int, ...]], list[channels.Pick], bool]] = {
    "whole tensors": (WIDE, [A, B], BOTH, True),
    "padding at the end": (WIDE, [A, B], BOTH[:-3], True),
    "one tensor": (A, [A], BOTH[:16], True),
    "a part of a tensor": (B, [A], BOTH[:8], False),
    "a tensor that is left over": (A, [A, B], BOTH[:16], False),
    "padding between": (WIDE, [A, B], BOTH[:15] + BOTH[16:], False),
    "another order": (WIDE, [A, B], BOTH[16:] + BOTH[:16], False),
    "channels that change places": (A, [A], BOTH[15::-1], False),
    "other blocks": (WIDE, [(1, 4, 5, 7, 4), B], BOTH, False),
    "other pixels": (WIDE, [A, (1, 1, 7, 5, 8)], BOTH, False),
    "a batch": ((2, *WIDE[1:]), [(2, *A[1:]), (2, *B[1:])], BOTH, False),
}


@pytest.mark.parametrize("case", JOINED)
def test_only_whole_tensors_one_after_another_are_joined(case: str) -> None:
    shape, sources, picked, joins = JOINED[case]
    assert channels.joins(shape, sources, picked) == joins


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(route=routes(), lanes=st.sampled_from(LANES), last=st.booleans())
def test_any_route(route: tuple[int, list[int], list[Step]], lanes: int, *, last: bool) -> None:
    batch, counts, steps = route
    state = np.random.RandomState(len(steps))
    x = state.randn(batch, 8, *SIZES[batch]).astype("f4")
    weights = [state.randn(count, 8, 1, 1).astype("f4") for count in counts]
    values = [conv2d(x, w) for w in weights]
    for step in steps:
        values.append(step.numpy(values))
    final = state.randn(5, values[-1].shape[1], 1, 1).astype("f4")

    def build(x: relax.Expr) -> relax.Expr:
        exprs = [relax.op.nn.conv2d(x, relax.const(w)) for w in weights]
        for step in steps:
            exprs.append(step.relax(exprs))
        return relax.op.nn.conv2d(exprs[-1], relax.const(final)) if last else exprs[-1]

    result = run(build, {"x": x}, machine(lanes))
    close(result.outputs[0], conv2d(values[-1], final) if last else values[-1])


def concatenation(widths: Sequence[int]) -> list[channels.Pick]:
    return [(source, channel) for source, width in enumerate(widths) for channel in range(width)]


@settings(max_examples=200, deadline=None)
@given(
    widths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    order=st.sampled_from(["as it is", "shuffled", "from the end", "each twice"]),
    phases=st.integers(1, 3),
    block=st.sampled_from(LANES),
    blocks=st.lists(st.sampled_from(LANES), min_size=4, max_size=4),
)
def test_runs_have_every_block_once_and_as_picked(
    widths: list[int], order: str, phases: int, block: int, blocks: list[int]
) -> None:
    picked = concatenation(widths)
    count = len(picked)
    picked = {
        "as it is": picked,
        "shuffled": [picked[i] for i in np.arange(count // 2 * 2).reshape(2, -1).T.ravel()] or picked,
        "from the end": picked[::-1],
        "each twice": [pick for pick in picked for _ in range(2)],
    }[order]
    picks = [[(source, channel + phase) for source, channel in picked] for phase in range(phases)]
    parts = [
        [channels._moves(phase[first : first + block], blocks) for phase in picks]
        for first in range(0, len(picked), block)
    ]
    seen = []
    for each in channels.runs(picks, block, blocks):
        for turn, k in itertools.product(range(each.rounds), range(each.period)):
            at = each.first + turn * each.period + k
            seen.append(at)
            moved = [
                tuple(
                    ((source, place + turn * shift), lanes)
                    for ((source, place), lanes), shift in zip(moves, shifts, strict=True)
                )
                for moves, shifts in zip(parts[each.first + k], each.shifts[k], strict=True)
            ]
            assert moved == parts[at]
    assert seen == list(range(len(parts)))


@pytest.mark.parametrize("width", [12, 32, 33])
def test_the_code_of_a_concatenation_grows_with_its_sources(width: int) -> None:
    """A dense block of DenseNet: one loop for each source, and blocks that are of two sources."""
    widths = [8 * width, *(width,) * 40]
    assert channels.loops([concatenation(widths)], 8, [8] * len(widths)) <= 2 * len(widths)


def test_the_code_of_a_shuffle_does_not_grow_with_the_channels() -> None:
    picked = [(half, channel) for channel in range(232) for half in range(2)]
    assert channels.loops([picked], 8, [8, 8]) == 2


def test_the_code_that_closes_gaps_does_not_grow_with_the_groups() -> None:
    picked = [(0, group * 24 + channel) for group in range(40) for channel in range(20)]
    assert channels.loops([picked], 8, [8]) == 5


def test_channels_in_no_order_are_not_routed(randn: Randn) -> None:
    """Each of its vectors would be a loop, and LLVM would take minutes."""
    count = 8 * (channels.MOST_LOOPS + 8)
    order = np.random.RandomState(1).permutation(count).tolist()
    x, weight, last = randn(1, 8, 2, 2), randn(count, 8, 1, 1), randn(8, count, 1, 1)

    def build(x: relax.Expr) -> relax.Expr:
        chosen = gathered(0, order).relax([relax.op.nn.conv2d(x, relax.const(weight))])
        return relax.op.nn.conv2d(chosen, relax.const(last))

    result = run(build, {"x": x}, machine(8))
    close(result.outputs[0], conv2d(conv2d(x, weight)[:, order], last))
    assert channels.KIND not in result.schedules


@pytest.mark.parametrize("lanes", LANES)
def test_a_shuffled_unit_copies_each_channel_once(randn: Randn, lanes: int) -> None:
    """Between two units of ShuffleNet are one slice, one shuffle and one concatenation: one kernel."""
    x, kept = randn(1, 16, 6, 6), 58
    first, second, third = randn(kept, 16, 1, 1), randn(kept, 16, 1, 1), randn(8, kept, 1, 1)

    def build(x: relax.Expr) -> relax.Expr:
        halves = [relax.op.nn.relu(relax.op.nn.conv2d(x, relax.const(w))) for w in (first, second)]
        xs = [relax.op.concat(halves, 1)]
        xs.append(shuffled(0, 2, (1, 2 * kept, 6, 6)).relax(xs))
        return relax.op.nn.conv2d(sliced(1, kept, 2 * kept).relax(xs), relax.const(third))

    result = run(build, {"x": x}, machine(lanes))
    both = np.maximum(np.concatenate([conv2d(x, first), conv2d(x, second)], 1), 0)
    mixed = both.reshape(1, 2, kept, 6, 6).transpose(0, 2, 1, 3, 4).reshape(1, 2 * kept, 6, 6)
    close(result.outputs[0], conv2d(mixed[:, kept:], third))
    kinds = [str(f.attrs["edge.schedule"]) for f in result.lowered.kernels.functions.values()]
    assert kinds.count(channels.KIND) == 1
    # The other kernels: convolutions, and the layouts of the input and the output.
    assert len(kinds) - kinds.count("conv2d") <= 3


def test_a_large_copy_is_shared_by_the_cores(randn: Randn) -> None:
    x, weight, last = randn(1, 8, 45, 40), randn(40, 8, 1, 1), randn(8, 30, 1, 1)
    order = list(itertools.chain(range(1, 40, 2), range(0, 20, 2)))

    def build(x: relax.Expr) -> relax.Expr:
        chosen = gathered(0, order).relax([relax.op.nn.conv2d(x, relax.const(weight))])
        return relax.op.nn.conv2d(relax.op.nn.relu(chosen), relax.const(last))

    result = run(build, {"x": x}, machine(8))
    close(result.outputs[0], conv2d(np.maximum(conv2d(x, weight)[:, order], 0), last))
    assert channels.KIND in result.schedules


@pytest.mark.parametrize("batch", [1, 2])
def test_a_large_concatenation_is_shared_by_the_cores(randn: Randn, batch: int) -> None:
    """Whole blocks are copied as one piece, parts of a block are put together."""
    x, counts = randn(batch, 8, 21, 20), (16, 8, 28, 24)
    weights = [randn(count, 8, 1, 1) for count in counts]
    last = randn(8, sum(counts), 1, 1)

    def build(x: relax.Expr) -> relax.Expr:
        parts = [relax.op.nn.relu(relax.op.nn.conv2d(x, relax.const(w))) for w in weights]
        return relax.op.nn.conv2d(relax.op.concat(parts, 1), relax.const(last))

    result = run(build, {"x": x}, machine(8))
    parts = [np.maximum(conv2d(x, w), 0) for w in weights]
    close(result.outputs[0], conv2d(np.concatenate(parts, 1), last))
    assert channels.KIND in result.schedules


@pytest.mark.parametrize(
    ("case", "order", "lanes"), crossed([(16, False), (3, False), (20, True)], ["CRD", "DCR"])
)
def test_channels_become_pixels(randn: Randn, case: tuple[int, bool], order: str, lanes: int) -> None:
    (outputs, cut), s, t = case, 2, 3
    x, weight, last = randn(2, 8, 5, 6), randn(outputs * s * t, 8, 1, 1), randn(6, outputs, 1, 1)
    bias = randn(outputs, 1, 1)
    inner, axes = {
        "CRD": ((2, outputs, s, t, 5, 6), (0, 1, 4, 2, 5, 3)),
        "DCR": ((2, s, t, outputs, 5, 6), (0, 3, 4, 1, 5, 2)),
    }[order]
    shape = (2, outputs, 5 * s, 6 * t)

    def build(x: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(x, relax.const(weight))
        y = relax.op.reshape(relax.op.permute_dims(relax.op.reshape(y, inner), axes), shape)
        if cut:
            y = relax.op.strided_slice(y, [2, 3], [1, 2], [9, 17])
        y = relax.op.nn.relu(relax.op.add(y, relax.const(bias)))
        return relax.op.nn.conv2d(y, relax.const(last))

    result = run(build, {"x": x}, machine(lanes))
    y = conv2d(x, weight).reshape(inner).transpose(axes).reshape(shape)
    y = np.maximum((y[:, :, 1:9, 2:17] if cut else y) + bias, 0)
    close(result.outputs[0], conv2d(y, last))
    # Bias and activation are fused with the first convolution.
    kinds = [str(f.attrs["edge.schedule"]) for f in result.lowered.kernels.functions.values()]
    assert kinds.count(channels.KIND) == 1
    assert len(kinds) <= kinds.count("conv2d") + 3
