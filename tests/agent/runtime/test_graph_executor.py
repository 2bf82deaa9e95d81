from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from agent.bundle.graph import Graph
from agent.bundle.node import NodeEntry
from agent.errors import ExecutionError, FormatError, IncompatibleError, InputError
from agent.runtime import graph_executor, memory
from agent.runtime.storage import Array, Block, allocate, view
from tests.fake_module import KERNELS, FakeModule, GraphBuilder, aligned, params

RNG = np.random.default_rng(7)
X = RNG.standard_normal((2, 3), dtype=np.float32)
W = RNG.standard_normal((3, 4), dtype=np.float32)
B = RNG.standard_normal((2, 4), dtype=np.float32)


def dense_relu() -> Graph:
    g = GraphBuilder()
    x, w, b = g.input("x", (2, 3)), g.input("w", (3, 4)), g.input("b", (2, 4))
    dense = g.call("dense", [x, w], (2, 4))
    added = g.call("add", [dense, b], (2, 4))
    return g.graph(g.call("relu", [added], (2, 4), storage=g.storage_of(dense)))


def ready() -> graph_executor.GraphModule:
    module = graph_executor.create(dense_relu().to_json(), FakeModule())
    module.load_params(params(w=W, b=B))
    return module


EXPECTED = np.maximum(X @ W + B, 0)


def test_a_graph_computes_what_its_kernels_compute() -> None:
    module = ready()
    module.set_input("x", X)
    module.run()
    np.testing.assert_allclose(module.get_output(0), EXPECTED, rtol=1e-6)


def test_the_result_is_the_same_if_weights_are_set_as_inputs() -> None:
    module = graph_executor.create(dense_relu().to_json(), FakeModule())
    module.set_input(x=X, w=W, b=B)
    module.run()
    np.testing.assert_allclose(module.get_output(0), EXPECTED, rtol=1e-6)


def test_outputs_behave_as_in_the_classic_executor() -> None:
    module = ready()
    module.run(x=X)
    first: Any = module.get_output(0)
    module.run(x=-X)
    np.testing.assert_allclose(first.numpy(), EXPECTED, rtol=1e-6)
    assert type(first.numpy()) is np.ndarray
    out = np.empty((2, 4), np.float32)
    module.run(x=X)
    assert module.get_output("relu_5", out) is out
    np.testing.assert_allclose(out, EXPECTED, rtol=1e-6)


def test_inputs_are_counted_and_described_as_in_the_classic_executor() -> None:
    module = ready()
    assert (module.get_num_inputs(), module.get_num_outputs()) == (3, 1)
    assert [module.get_input_index(name) for name in ("x", "w", "b", "y")] == [0, 1, 2, -1]
    assert module.get_input_info() == ({"x": (2, 3)}, {"x": "float32"})
    module.set_input(0, X)
    np.testing.assert_array_equal(module.get_input("x"), X)
    np.testing.assert_array_equal(module.get_input(1), W)


def test_plain_numbers_become_the_inputs_dtype() -> None:
    module = ready()
    module.set_input("x", X.tolist())
    np.testing.assert_array_equal(module.get_input("x"), X)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("y", X, "expected one of the inputs 'x', got 'y'"),
        (9, X, "expected one of the inputs 'x', got 9"),
        ("x", X.astype(np.float64), r"input 'x': expected float32\[2,3\], got float64\[2,3\]"),
        ("x", X.astype(">f4"), "got >f4"),
        ("x", X[:1], r"expected float32\[2,3\], got float32\[1,3\]"),
        ("x", X.ravel(), r"got float32\[6\]"),
        ("x", "cat", "input 'x': expected float32, got str"),
        ("x", [[1, 2, 3], [4]], "input 'x': expected float32, got list"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(name: str | int, value: object, words: str) -> None:
    module = ready()
    module.set_input("x", X)
    with pytest.raises(InputError, match=words):
        module.set_input(name, value)
    np.testing.assert_array_equal(module.get_input("x"), X)


def test_an_output_that_does_not_exist_or_does_not_fit_is_refused() -> None:
    module = ready()
    with pytest.raises(InputError, match="expected an output from 0 to 0, got 1"):
        module.get_output(1)
    with pytest.raises(InputError, match=r"out: expected float32\[2,4\], got int32\[2,4\]"):
        module.get_output(0, np.zeros((2, 4), np.int32))


def test_weights_that_do_not_fit_the_graph_are_refused() -> None:
    module = graph_executor.create(dense_relu(), FakeModule())
    with pytest.raises(FormatError, match=r"expected w FP32\[3,4\], got w FP32\[4,3\]"):
        module.load_params(params(w=W.T.copy()))


def test_weights_that_the_graph_does_not_have_are_skipped() -> None:
    module = graph_executor.create(dense_relu(), FakeModule())
    module.load_params(params(w=W, b=B, unknown=X))
    module.run(x=X)
    np.testing.assert_allclose(module.get_output(0), EXPECTED, rtol=1e-6)


def test_a_missing_kernel_is_named_before_anything_runs() -> None:
    g = GraphBuilder()
    graph = g.graph(g.call("absent", [g.input("x", (1,))], (1,)))
    with pytest.raises(FormatError, match="kernel 'absent', which does not exist"):
        graph_executor.create(graph, FakeModule())


def test_another_device_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="cuda"):
        graph_executor.create(dense_relu(), FakeModule(), "cuda")


def test_a_failing_kernel_is_named_in_one_line() -> None:
    g = GraphBuilder()
    x = g.input("x", (1,))
    graph = g.graph(g.call("fail", [g.call("relu", [x], (1,))], (1,)))
    module = graph_executor.create(graph, FakeModule())
    with pytest.raises(ExecutionError, match="node 'fail_2', kernel fail: this kernel always fails"):
        module.run()


def test_every_buffer_is_aligned_and_kept_over_runs() -> None:
    seen: list[set[int]] = []

    def record(*arrays: np.ndarray) -> None:
        seen.append({array.ctypes.data for array in arrays})

    module = graph_executor.create(dense_relu(), dict.fromkeys(KERNELS, record))
    module.run()
    module.run()
    assert seen[:3] == seen[3:]
    assert all(address % 64 == 0 for addresses in seen for address in addresses)


def test_tensors_of_one_storage_share_memory_and_no_others_do() -> None:
    seen: list[tuple[int, ...]] = []

    def record(*arrays: np.ndarray) -> None:
        seen.append(tuple(array.ctypes.data for array in arrays))

    graph_executor.create(dense_relu(), dict.fromkeys(KERNELS, record)).run()
    (x, w, dense), (dense_again, b, added), (added_again, relu) = seen
    assert dense == dense_again == relu
    assert added == added_again
    assert len({x, w, b, dense, added}) == 5


def test_a_reshape_costs_no_call_and_no_memory() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 3))
    graph = g.graph(g.reshape(g.call("double", [g.reshape(x, (6,))], (6,)), (3, 2)))
    fake = FakeModule()
    module = graph_executor.create(graph, fake)
    module.run(x=X)
    np.testing.assert_array_equal(module.get_output(0), (X * 2).reshape(3, 2))
    assert fake.calls == {"double": 1}


def test_a_node_with_two_outputs_and_a_head_that_is_an_input() -> None:
    g = GraphBuilder()
    x = g.input("x", (4,))
    split = g.call("split", [x], (2,), (2,))
    module = graph_executor.create(g.graph(NodeEntry(split.node_id, 1), split, x), FakeModule())
    value = np.arange(4, dtype=np.float32)
    module.run(x=value)
    np.testing.assert_array_equal(module.get_output(0), value[2:])
    np.testing.assert_array_equal(module.get_output(1), value[:2])
    np.testing.assert_array_equal(module.get_output(2), value)
    with pytest.raises(InputError, match="no kernel writes it"):
        module.set_output_zero_copy(2, view(allocate(16), "float32", (4,)))


def test_flattened_arguments_and_copies_between_devices_work_as_in_the_classic() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 3))
    g.call("double", [x], (2, 3))
    g.call("__copy", [NodeEntry(1)], (2, 3))
    graph = g.graph(NodeEntry(2))
    text = graph.to_json().replace(b'"flatten_data":"0"', b'"flatten_data":"1"', 1)
    dims = []

    def double(a: np.ndarray, out: np.ndarray) -> None:
        dims.append((a.ndim, out.ndim))
        KERNELS["double"](a, out)

    module = graph_executor.create(text, {"double": double})
    module.run(x=X)
    np.testing.assert_array_equal(module.get_output(0), X * 2)
    assert dims == [(1, 1)]


def test_zero_copy_inputs_and_outputs_use_the_callers_memory() -> None:
    module = ready()
    module.run(x=X)
    mine, out = aligned(-X), aligned(np.zeros((2, 4), np.float32))
    module.set_input_zero_copy("x", mine)
    module.set_output_zero_copy(0, out)
    module.run()
    np.testing.assert_allclose(out, np.maximum(-X @ W + B, 0), rtol=1e-6)
    mine[...] = X
    module.run()
    np.testing.assert_allclose(out, EXPECTED, rtol=1e-6)
    assert module.output_view(0).ctypes.data == out.ctypes.data


def test_views_of_memory_are_made_once_and_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ready()
    module.run(x=X)
    module.get_output(0)
    made: list[object] = []

    def counted(block: Block, dtype: str, shape: tuple[int, ...]) -> Array:
        made.append(shape)
        return view(block, dtype, shape)

    monkeypatch.setattr(memory, "view", counted)
    for _ in range(3):
        module.set_input("x", X)
        module.run()
        np.testing.assert_allclose(module.get_output(0), EXPECTED, rtol=1e-6)
    assert not made
    module.output_view(0).shape = (8,)
    assert module.get_output(0).shape == (2, 4)
    # Other memory needs other views.
    mine = aligned(2 * X)
    module.set_input_zero_copy("x", mine)
    assert made
    np.testing.assert_array_equal(module.get_input("x"), mine)
    module.set_input("x", X)
    np.testing.assert_array_equal(mine, X)


def test_zero_copy_reaches_through_reshapes() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 3))
    graph = g.graph(g.reshape(g.call("double", [g.reshape(x, (6,))], (6,)), (3, 2)))
    module = graph_executor.create(graph, FakeModule())
    out = aligned(np.zeros((3, 2), np.float32))
    module.set_input_zero_copy("x", aligned(X))
    module.set_output_zero_copy(0, out)
    module.run()
    np.testing.assert_array_equal(out, (X * 2).reshape(3, 2))


def _misaligned() -> np.ndarray:
    return allocate(32)[4:28].view(np.float32).reshape(2, 3)


def _read_only() -> np.ndarray:
    array = aligned(X)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (_misaligned(), "aligned to 64 bytes"),
        (aligned(np.zeros((3, 2), np.float32)).T, "contiguous"),
        (aligned(X)[:1], r"got float32\[1,3\]"),
        (aligned(X.astype(np.int32)), "got int32"),
        (_read_only(), "writable"),
    ],
)
def test_memory_that_a_kernel_cannot_use_is_refused(value: np.ndarray, words: str) -> None:
    module = ready()
    with pytest.raises(InputError, match=words):
        module.set_input_zero_copy("x", value)


def test_benchmark_runs_and_prints_the_classic_summary() -> None:
    fake = FakeModule()
    module = graph_executor.create(dense_relu(), fake)
    module.load_params(params(w=W, b=B))
    result = module.benchmark("cpu", repeat=3, number=4, end_to_end=True, x=X)
    assert fake.calls["dense"] == 13
    assert len(result.results) == 3
    lines = str(result).splitlines()
    assert lines[0] == "Execution time summary:"
    assert lines[1] == " mean (ms)   median (ms)    max (ms)     min (ms)     std (ms)"
    assert len(lines[2].split()) == 5


@pytest.mark.parametrize("name", ["relu", "fail"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_run_flushes_denormal_numbers_and_leaves_the_thread_as_it_was(name: str, before: int) -> None:
    state, seen = [before], []

    def flush(on: int) -> int:
        state.append(on)
        return state[-2]

    def kernel(*arrays: Any) -> None:
        seen.append(state[-1])
        KERNELS[name](*arrays)

    class Flushing(FakeModule):
        def __getitem__(self, wanted: str) -> Any:
            return flush if wanted == "edge_flush_denormals" else super().__getitem__(wanted)

    g = GraphBuilder()
    graph = g.graph(g.call(name, [g.input("x", (1,))], (1,)))
    module = graph_executor.create(graph, Flushing({name: kernel}))
    with contextlib.suppress(ExecutionError):
        module.run()
    assert seen == [1]
    assert state[-1] == before
