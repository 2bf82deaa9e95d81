"""Indices that are linear in the loop variables become so, and others stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from builder.codegen import linear_indices
from builder.codegen.linear_indices import simplify_indices
from builder.codegen.lowering import to_loops
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import close, machine, run

Index = Callable[[tirx.Var, tirx.Var], tirx.Expr]


def simplified(index: Index, rounds: int = 6, lanes: int = 8) -> str:
    """Return the loops of a copy, from the places of `index`, after the simplification."""
    data = tirx.decl_buffer((4096,), "float32", name="data")
    out = tirx.decl_buffer((rounds * lanes,), "float32", name="out")
    i, v = tirx.Var("i", "int32"), tirx.Var("v", "int32")
    body: tirx.Stmt = tirx.BufferStore(out, tirx.BufferLoad(data, [index(i, v)]), [i * lanes + v])
    body = tirx.For(v, 0, lanes, tirx.ForKind.VECTORIZED, body)
    body = tirx.For(i, 0, rounds, tirx.ForKind.SERIAL, body)
    func = tirx.PrimFunc([data, out], body)
    return str(simplify_indices(tvm.IRModule({"main": func}))["main"].body)


@pytest.mark.parametrize(
    ("index", "linear"),
    [
        (lambda i, v: (i * 8 + v) // 20 * 20 + (i * 8 + v) % 20, True),
        (lambda i, v: i // 2 * 16 + (i % 2 * 8 + v) // 4 * 4 + (i * 8 + v) % 4, True),
        (lambda i, v: (i * 8 + v) // 12 * 13 + (i * 8 + v) % 12, False),  # rows of 13, of which 12 are read
        (lambda i, v: (i * 8 + v) % 20, False),
        (lambda i, v: (i + v) // 100 + 47 - v, True),
    ],
)
def test_an_index_becomes_linear_if_all_its_values_are(index: Index, *, linear: bool) -> None:
    text = simplified(index)
    assert ("//" not in text and "%" not in text) == linear


def test_an_index_with_too_many_values_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def index(i: tirx.Var, v: tirx.Var) -> tirx.Expr:
        return (i * 8 + v) // 20 * 20 + (i * 8 + v) % 20

    monkeypatch.setattr(linear_indices, "MOST_VALUES", 47)
    assert "//" in simplified(index)
    monkeypatch.setattr(linear_indices, "MOST_VALUES", 48)
    assert "//" not in simplified(index)


def test_an_index_that_is_read_from_memory_stays() -> None:
    places = tirx.decl_buffer((6,), "int32", name="places")
    text = simplified(lambda i, v: tirx.BufferLoad(places, [i]) + (i * 8 + v) % 5)
    assert "places" in text
    assert "% 5" in text


# Vectors cross rows of 20, 31, 43 and 51 columns; the last two shapes are not whole vectors.
SHAPES = [
    (1, 48, 16, 20), (1, 28, 26, 51), (1, 142, 44, 43), (1, 162, 56, 31), (2, 64, 7, 8), (1, 37, 13, 17),
    (1, 3, 5, 7),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_elements_are_read_as_vectors_whatever_the_columns(shape: tuple[int, ...], lanes: int) -> None:
    random = np.random.RandomState(0)
    x, y = (random.randn(*shape).astype("f4") for _ in range(2))
    target: DeviceTarget = machine(lanes)
    result = run(
        lambda a, b: relax.op.add(relax.op.multiply(a, relax.op.sigmoid(a)), b), {"x": x, "y": y}, target
    )
    close(result.outputs[0], x / (1 + np.exp(-x.astype("f8"))) + y, 1e-6)
    lines = to_loops(result.lowered.kernels).script().splitlines()
    stores = [after for line, after in itertools.pairwise(lines) if "T.vectorized" in line]
    assert stores or np.prod(shape) < lanes
    assert not [store for store in stores if "//" in store or "%" in store]
