"""LSTM, GRU and RNN as one kernel, compared with the formulas in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from builder.calls.recurrent import DIRECTIONS, GATES, RecurrentCall
from builder.kernels.spaces.recurrent import Layer, Panels, pack
from tests.builder.importer.recurrent_reference import run as reference
from tests.builder.kernels.machines import REGISTERS, Result, close, in_turn, machine, run

Arrays = dict[str, np.ndarray]


def compute(kind: str, direction: str, sizes: tuple[int, int, int], lanes: int) -> tuple[Result, list[Any]]:
    steps, batch, hidden = sizes
    directions = len(DIRECTIONS[direction])
    random = np.random.RandomState(sum(sizes))
    inputs = {"x": random.randn(steps, batch, directions * GATES[kind] * hidden).astype("f4")}
    inputs["h"] = random.randn(directions, batch, hidden).astype("f4")
    if kind == "LSTM":
        inputs["c"] = random.randn(directions, batch, hidden).astype("f4")
    elif kind == "GRU":
        inputs["bias"] = random.randn(directions, hidden).astype("f4")
    weights = (random.randn(directions, GATES[kind] * hidden, hidden) / np.sqrt(hidden)).astype("f4")

    def build(*params: relax.Var) -> relax.Expr:
        bb = relax.BlockBuilder.current()
        return RecurrentCall(kind, direction, params, relax.const(weights)).emit(bb)

    result = run(build, inputs, machine(lanes))
    return result, reference(kind, direction, *inputs.values(), weights)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lanes"), in_turn(GATES))
def test_states_and_cells_are_those_of_the_formulas(kind: str, lanes: int) -> None:
    result, expected = compute(kind, "bidirectional", (5, 3, 21), lanes)
    for got, want in zip(result.outputs, expected, strict=True):
        close(got, want)
    assert result.schedules == {"recurrent"}


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(list(GATES)),
    direction=st.sampled_from(list(DIRECTIONS)),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 21)),
    lanes=st.sampled_from(list(REGISTERS)),
)
def test_any_size(kind: str, direction: str, sizes: tuple[int, int, int], lanes: int) -> None:
    result, expected = compute(kind, direction, sizes, lanes)
    for got, want in zip(result.outputs, expected, strict=True):
        close(got, want)


@pytest.mark.slow
def test_a_layer_of_many_hidden_units_is_shared_among_the_cores() -> None:
    for hidden, shared in ((32, False), (400, True)):
        result, _ = compute("LSTM", "forward", (2, 1, hidden), 8)
        (kernel,) = result.lowered.kernels.functions.values()
        assert ("T.parallel" in kernel.script()) == shared


def test_panels_hold_all_gates_of_their_units_and_end_in_zeros() -> None:
    layer = Layer("LSTM", 2, 1, 1, 5, (False,))
    weights = np.arange(4 * 5 * 5, dtype="f4").reshape(1, 20, 5) + 1
    packed = pack(weights, layer, Panels(4, 1, 1))
    assert packed.shape == (1, 2, 5, 4, 4)
    assert packed[0, 1, 2].tolist() == [[weights[0, 5 * gate + 4, 2], 0, 0, 0] for gate in range(4)]
