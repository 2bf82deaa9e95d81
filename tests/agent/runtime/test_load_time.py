from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agent.bundle.graph import Graph
from agent.errors import ExecutionError, InputError
from agent.runtime import graph_executor
from tests.fake_module import KERNELS, FakeModule, GraphBuilder, aligned, params

RNG = np.random.default_rng(7)
X = RNG.standard_normal((2, 3), dtype=np.float32)
W = RNG.standard_normal((3, 4), dtype=np.float32)
B = RNG.standard_normal((2, 4), dtype=np.float32)


def with_transform() -> tuple[Graph, FakeModule]:
    """x @ relu(double(w)) + b, of which relu(double(w)) can be computed at load time."""
    g = GraphBuilder()
    w, x, b = g.input("w", (3, 4)), g.input("x", (2, 3)), g.input("b", (2, 4))
    doubled = g.call("double", [w], (3, 4))
    packed = g.call("relu", [g.reshape(doubled, (12,))], (12,))
    dense = g.call("dense", [x, g.reshape(packed, (3, 4))], (2, 4))
    # A planner that does not know load-time nodes may reuse the transform's storage.
    return g.graph(g.call("add", [dense, b], (2, 4), storage=g.storage_of(doubled))), FakeModule()


TRANSFORMED = X @ np.maximum(W * 2, 0) + B


def test_nodes_that_read_only_weights_run_once() -> None:
    graph, fake = with_transform()
    module = graph_executor.create(graph, fake)
    module.load_params(params(w=W, b=B))
    assert fake.calls == {"double": 1, "relu": 1}
    for _ in range(3):
        module.run(x=X)
        np.testing.assert_allclose(module.get_output(0), TRANSFORMED, rtol=1e-6)
    assert fake.calls == {"double": 1, "relu": 1, "dense": 3, "add": 3}


def test_without_load_params_they_run_every_time_with_the_same_result() -> None:
    graph, fake = with_transform()
    module = graph_executor.create(graph, fake)
    module.set_input(w=W, b=B, x=X)
    module.run()
    module.run()
    np.testing.assert_allclose(module.get_output(0), TRANSFORMED, rtol=1e-6)
    assert fake.calls["double"] == 2


def test_load_time_results_are_not_in_a_runs_storage() -> None:
    blocks: dict[str, int] = {}

    def remember(name: str) -> Callable[..., None]:
        def kernel(*arrays: Any) -> None:
            blocks[name] = arrays[-1].base.nbytes
            KERNELS[name](*arrays)

        return kernel

    g = GraphBuilder()
    large, x = g.input("large", (1000,)), g.input("x", (3,))
    doubled = g.call("double", [large], (1000,))
    total = g.call("sum", [doubled], (1,), storage=g.storage_of(doubled))
    graph = g.graph(g.call("relu", [x], (3,), storage=g.storage_of(doubled)), total)
    module = graph_executor.create(graph, {name: remember(name) for name in KERNELS})
    module.load_params(params(large=np.ones(1000, np.float32)))
    module.run(x=np.ones(3, np.float32))
    assert module.get_output(1) == 2000
    assert blocks["double"] >= 4000
    assert blocks["relu"] < 100


def test_weights_that_only_load_time_nodes_read_are_freed() -> None:
    blocks: list[weakref.ref[np.ndarray]] = []

    def double(a: Any, out: Any) -> None:
        blocks.extend((weakref.ref(a.base), weakref.ref(out.base)))
        KERNELS["double"](a, out)

    graph, _ = with_transform()
    module = graph_executor.create(graph, KERNELS | {"double": double})
    module.load_params(params(w=W, b=B))
    gc.collect()
    assert [block() for block in blocks] == [None, None]
    with pytest.raises(InputError, match="weight 'w' was freed"):
        module.get_input("w")
    with pytest.raises(InputError, match="'w' was read by load-time nodes"):
        module.set_input("w", W)
    with pytest.raises(InputError, match="'w' was read by load-time nodes"):
        module.set_input_zero_copy("w", aligned(W))
    with pytest.raises(InputError, match="'w' was freed before"):
        module.load_params(params(b=B))


def test_a_weight_that_runs_also_read_is_kept() -> None:
    g = GraphBuilder()
    w, x = g.input("w", (3,)), g.input("x", (3,))
    once = g.call("double", [w], (3,))
    module = graph_executor.create(
        g.graph(g.call("add", [g.call("add", [once, x], (3,)), w], (3,))), FakeModule()
    )
    value, other = np.arange(3, dtype=np.float32), np.ones(3, np.float32)
    module.load_params(params(w=value))
    module.run(x=other)
    np.testing.assert_array_equal(module.get_output(0), value * 3 + 1)
    np.testing.assert_array_equal(module.get_input("w"), value)


def test_an_output_computed_at_load_time_needs_no_run() -> None:
    g = GraphBuilder()
    w = g.input("w", (3,))
    module = graph_executor.create(g.graph(g.call("double", [w], (3,)), w), FakeModule())
    module.load_params(params(w=np.ones(3, np.float32)))
    np.testing.assert_array_equal(module.get_output(0), 2 * np.ones(3))
    np.testing.assert_array_equal(module.get_output(1), np.ones(3))
    with pytest.raises(InputError, match="no kernel writes it"):
        module.set_output_zero_copy(0, aligned(np.zeros(3, np.float32)))


def test_weights_loaded_again_replace_the_first() -> None:
    graph, fake = with_transform()
    module = graph_executor.create(graph, fake)
    module.load_params(params(w=W, b=B))
    module.run(x=X)
    module.load_params(params(w=-W, b=B))
    module.run()
    np.testing.assert_allclose(module.get_output(0), X @ np.maximum(-W * 2, 0) + B, rtol=1e-6)


def test_a_failing_load_time_node_is_named() -> None:
    g = GraphBuilder()
    graph = g.graph(g.call("fail", [g.input("w", (3,))], (3,)))
    with pytest.raises(ExecutionError, match="kernel fail"):
        graph_executor.create(graph, FakeModule()).load_params(params(w=np.ones(3, np.float32)))
