from __future__ import annotations

import numpy as np
import pytest

from agent.errors import InputError
from builder.running import debug_executor
from tests.fake_module import FakeModule, GraphBuilder, params

X = np.array([1, -2, 3, -4], np.float32)


def module(fake: FakeModule | None = None) -> debug_executor.GraphModuleDebug:
    """Nodes: 0 x, 1 w, 2 = w doubled at load time, 3 = x + 2, 4 relu, 5 reshape, 6 doubled in 3's storage."""
    g = GraphBuilder()
    x, w = g.input("x", (4,)), g.input("w", (4,))
    added = g.call("add", [x, g.call("double", [w], (4,))], (4,))
    square = g.reshape(g.call("relu", [added], (4,)), (2, 2))
    graph = g.graph(g.call("double", [square], (2, 2), storage=g.storage_of(added)))
    created = debug_executor.create(graph.to_json(), fake or FakeModule())
    created.load_params(params(w=np.ones(4, np.float32)))
    created.set_input("x", X)
    return created


EXPECTED = 2 * np.maximum(X + 2, 0).reshape(2, 2)


def test_the_debug_executor_gives_the_same_results() -> None:
    m = module()
    m.run()
    np.testing.assert_array_equal(m.get_output(0), EXPECTED)


def test_every_node_that_runs_is_timed_separately() -> None:
    fake = FakeModule()
    times = module(fake).run_individual(number=3, repeat=2)
    assert [len(each) for each in times] == [2] * 7
    assert [i for i, each in enumerate(times) if min(each) > 0] == [3, 4, 6]
    # One run, a warm-up and six timed calls; `double` ran at load time too.
    assert fake.calls == {"add": 8, "relu": 8, "double": 9}


def test_a_node_that_does_not_run_cannot_be_timed() -> None:
    m = module()
    assert m.run_individual_node(4, number=1, repeat=3).min > 0
    for index in (0, 2, 5, 9):
        with pytest.raises(InputError, match=r"a node that runs, one of \[3, 4, 6\]"):
            m.run_individual_node(index)


def test_output_of_a_node_is_returned_before_a_later_node_overwrites_it() -> None:
    m = module()
    np.testing.assert_array_equal(m.debug_get_output("add_3"), X + 2)
    np.testing.assert_array_equal(m.debug_get_output(2), 2 * np.ones(4))
    np.testing.assert_array_equal(m.debug_get_output(6), EXPECTED)
    out = np.zeros((2, 2), np.float32)
    assert m.debug_get_output(5, out) is out
    np.testing.assert_array_equal(out, EXPECTED / 2)
    for node, index in (("none", 0), (7, 0), (3, 1)):
        with pytest.raises(InputError, match="no output"):
            m.debug_get_output(node, index=index)
    with pytest.raises(InputError, match="freed"):
        m.debug_get_output("w")


def test_a_profile_has_a_row_for_each_call() -> None:
    fake = FakeModule()
    report = module(fake).profile(number=4, flops={"add": 4.0}, x=X)
    assert [(row.name, row.shapes) for row in report.rows] == [
        ("add", "float32[4], float32[4], float32[4]"),
        ("relu", "float32[4], float32[4]"),
        ("double", "float32[2, 2], float32[2, 2]"),
    ]
    assert fake.calls["add"] == 5
    assert all(row.duration_us > 0 for row in report.rows)
    assert report.total_us >= sum(row.duration_us for row in report.rows)
    assert report.rows[0].gflops is not None
    assert report.rows[1].gflops is None
    with pytest.raises(ValueError, match="number"):
        module().profile(number=0)
