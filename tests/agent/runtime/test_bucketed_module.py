"""Padding, cutting and sharing, with kernels in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent.bundle.buckets import Buckets, Dimension, InputAxis, OutputAxis
from agent.bundle.graph import Graph
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError, InputError
from agent.runtime import bucketed_module
from agent.runtime.bucketed_module import BucketedModule, staged_bytes
from tests.fake_module import FakeModule, GraphBuilder, params

W = np.arange(12, dtype=np.float32).reshape(3, 4)
SIZES = (2, 8)


def graph(rows: int) -> Graph:
    """relu(x) @ double(w), whose last product can only be computed with all of `rows`."""
    g = GraphBuilder()
    w, x = g.input("w", (3, 4)), g.input("x", (rows, 3))
    return g.graph(
        g.call("dense", [g.call("relu", [x], (rows, 3)), g.call("double", [w], (3, 4))], (rows, 4))
    )


def make(pad: str = "constant", value: float = 0.0) -> tuple[BucketedModule, FakeModule]:
    fake = FakeModule()
    buckets = Buckets(
        (Dimension("rows", 1, 8, SIZES),),
        (InputAxis("x", 0, "rows", pad, value),),
        (OutputAxis("y", 0, "rows"),),
    )
    specs = TensorSpec("x", "FP32", (8, 3)), TensorSpec("y", "FP32", (8, 4))
    module = BucketedModule(buckets, specs[:1], specs[1:], [graph(n) for n in SIZES], fake)
    module.load_params(params(w=W))
    return module, fake


def test_each_size_is_computed_by_its_bucket_and_cut() -> None:
    module, fake = make()
    for n in (1, 8, 2, 3, 5, 1):
        x = np.random.default_rng(n).standard_normal((n, 3)).astype(np.float32)
        np.testing.assert_allclose(module.compute({"x": x})["y"], np.maximum(x, 0) @ (2 * W), rtol=1e-5)
        assert module.modules.index(module.module) == (0 if n <= 2 else 1)
        assert module.bucket == ((2,) if n <= 2 else (8,))
    assert fake.calls["double"] == 1  # by both graphs


@pytest.mark.parametrize(("pad", "value", "added"), [("constant", 5.0, 5.0), ("edge", 0.0, 1.0)])
def test_what_is_added_is_the_declared_value_and_nothing_of_the_request_before(
    pad: str, value: float, added: float
) -> None:
    module, _ = make(pad, value)
    module.compute({"x": np.full((8, 3), 77, np.float32)})
    module.compute({"x": np.ones((3, 3), np.float32)})
    padded = module.module.input_view("x")
    assert (padded[:3] == 1).all()
    assert (padded[3:] == added).all()


def test_what_a_request_needs_is_made_once_for_its_sizes_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucketed_module, "_MOST_VIEWS", 4)
    module, _ = make()
    made: list[tuple[int, ...]] = []
    make_plan = module._made_plan

    def counted(sizes: tuple[int, ...]) -> object:
        made.append(sizes)
        return make_plan(sizes)

    monkeypatch.setattr(module, "_made_plan", counted)
    for n in (3, 7, 3, 7, 1, 7, 3):
        x = np.random.default_rng(n).standard_normal((n, 3)).astype(np.float32)
        np.testing.assert_allclose(module.compute({"x": x})["y"], np.maximum(x, 0) @ (2 * W), rtol=1e-5)
        assert len(module._plans) <= 2
    assert made == [(3,), (7,), (1,), (3,)]


def test_graphs_share_inputs_activations_and_weights() -> None:
    module, _ = make()
    small, large = module.modules
    for n in SIZES:
        module.compute({"x": np.ones((n, 3), np.float32)})
    assert small.input_view("x").ctypes.data == large.input_view("x").ctypes.data
    assert small.output_view(0).ctypes.data == large.output_view(0).ctypes.data


@pytest.mark.parametrize(
    ("shape", "dtype"), [((9, 3), "f4"), ((0, 3), "f4"), ((2, 4), "f4"), ((2, 3), "f8"), ((3,), "f4")]
)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], dtype: str) -> None:
    module, _ = make()
    with pytest.raises(InputError):
        module.compute({"x": np.zeros(shape, dtype)})
    with pytest.raises(InputError, match="expected an input 'x'"):
        module.compute({})


def test_an_input_that_is_not_the_beginning_of_its_padded_memory() -> None:
    buckets = Buckets(
        (Dimension("n", 1, 6, (3, 6)),),
        (InputAxis("x", 1, "n", value=9.0),),
        (OutputAxis("y", 1, "n"),),
    )
    wide = [GraphBuilder() for _ in range(2)]
    graphs = [
        b.graph(b.call("relu", [b.input("x", (4, n))], (4, n))) for b, n in zip(wide, (3, 6), strict=True)
    ]
    specs = TensorSpec("x", "FP32", (4, 6)), TensorSpec("y", "FP32", (4, 6))
    module = BucketedModule(buckets, specs[:1], specs[1:], graphs, FakeModule())
    module.load_params(params())
    for n in (2, 5, 6, 1):
        x = np.random.default_rng(n).standard_normal((4, n)).astype(np.float32)
        np.testing.assert_array_equal(module.compute({"x": x})["y"], np.maximum(x, 0))
        assert (module.module.input_view("x")[:, n:] == 9).all()
    # A whole input is written in place, others beside it first.
    assert (
        sum(block.nbytes for block in module._staging.values()) <= staged_bytes(buckets, specs[:1]) <= 96 + 64
    )


def test_an_input_that_is_written_in_place_takes_no_other_memory() -> None:
    module, _ = make()
    for n in (5, 1):
        module.compute({"x": np.ones((n, 3), np.float32)})
    assert not module._staging
    assert not staged_bytes(module.buckets, [TensorSpec("x", "FP32", (8, 3))])
    both = Buckets(
        (Dimension("a", 1, 8, SIZES), Dimension("b", 1, 3, (3,))),
        (InputAxis("x", 0, "a"), InputAxis("x", 1, "b")),
        (),
    )
    assert staged_bytes(both, [TensorSpec("x", "FP32", (8, 3))]) == 8 * 3 * 4 + 64


def test_graphs_that_are_not_those_of_their_buckets() -> None:
    fake = FakeModule()
    buckets = Buckets(
        (Dimension("rows", 1, 8, SIZES),), (InputAxis("x", 0, "rows"),), (OutputAxis("y", 0, "rows"),)
    )
    specs: tuple[Any, ...] = (TensorSpec("x", "FP32", (8, 3)), TensorSpec("y", "FP32", (8, 4)))
    module = BucketedModule(buckets, specs[:1], specs[1:], [graph(3), graph(8)], fake)
    with pytest.raises(FormatError, match=r"graph of bucket \[2\] does not match"):
        module.load_params(params(w=W))
