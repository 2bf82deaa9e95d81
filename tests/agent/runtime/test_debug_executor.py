from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

from agent.errors import InputError
from agent.runtime import debug_executor
from agent.runtime.benchmark import BenchmarkResult, time_calls
from agent.runtime.report import Report, Row
from tests.fake_module import FakeModule, GraphBuilder, params

X = np.array([1, -2, 3, -4], np.float32)


def module(fake: FakeModule | None = None) -> debug_executor.GraphModuleDebug:
    """Nodes: 0 x, 1 w, 2 w doubled at load time, 3 x + it, 4 relu, 5 reshape, 6 doubled over 3's storage."""
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


def test_the_debug_executor_gives_the_same_answers() -> None:
    m = module()
    m.run()
    np.testing.assert_array_equal(m.get_output(0), EXPECTED)


def test_every_node_that_runs_is_timed_alone() -> None:
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


def test_what_a_node_wrote_is_seen_before_a_later_one_writes_over_it() -> None:
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


REPORT = Report(
    (Row("conv", 30.0, 3e4, "f32[1]"), Row("relu", 5.0, None, "f32[1]"), Row("conv", 50.0, 3e4, "f32[1]")),
    100.0,
)


def test_a_reports_table_is_sorted_and_summed() -> None:
    lines = [line.split() for line in REPORT.table().splitlines()]
    assert lines[0] == [
        "Name",
        "Duration",
        "(us)",
        "Percent",
        "GFLOP/s",
        "Device",
        "Count",
        "Argument",
        "Shapes",
    ]
    assert lines[1] == ["conv", "80.00", "80.00", "0.8", "cpu", "2", "f32[1]"]
    assert lines[2] == ["relu", "5.00", "5.00", "cpu", "1", "f32[1]"]
    assert lines[3] == ["----------"]
    assert lines[4] == ["Sum", "85.00", "85.00", "3"]
    assert lines[5] == ["Total", "100.00", "cpu", "1"]
    plain = REPORT.table(sort=False, aggregate=False, col_sums=False).splitlines()
    assert [line.split()[0] for line in plain[1:]] == ["conv", "relu", "conv"]
    assert str(REPORT) == REPORT.table()


def test_a_long_name_loses_its_middle_in_the_table_only() -> None:
    name = "fused_conv2d_add_relu_" * 8 + "last"
    report = Report((Row(name, 1.0, None, "f32[1]"), Row("n" * 48, 1.0, None, "f32[1]")), 2.0)
    heads, first, second = report.table(col_sums=False).splitlines()
    assert heads.index("Duration") == 50
    assert first[:48] == "fused_conv2d_add_relu_f...d_conv2d_add_relu_last"
    assert second[:48] == "n" * 48
    assert json.loads(report.json())["calls"][0]["Name"] == name
    assert name in report.csv()


def test_a_reports_json_and_csv_hold_every_call() -> None:
    document = json.loads(REPORT.json())
    assert [call["Name"] for call in document["calls"]] == ["conv", "relu", "conv"]
    assert document["calls"][0]["Duration (us)"] == {"microseconds": 30.0}
    assert document["calls"][0]["Percent"] == {"percent": 30.0}
    assert document["calls"][1]["GFLOP/s"] is None
    rows = list(csv.DictReader(io.StringIO(REPORT.csv())))
    assert [(row["Name"], row["Count"], row["GFLOP/s"]) for row in rows] == [
        ("conv", "1", "1"),
        ("relu", "1", ""),
        ("conv", "1", "0.6"),
    ]


def test_a_timing_result_is_in_seconds_and_prints_milliseconds() -> None:
    result = BenchmarkResult((0.001, 0.002, 0.006))
    assert result.mean == pytest.approx(0.003)
    assert (result.median, result.min, result.max) == (0.002, 0.001, 0.006)
    assert result.std == pytest.approx(np.std([0.001, 0.002, 0.006]))
    assert str(result) == (
        "Execution time summary:\n"
        " mean (ms)   median (ms)    max (ms)     min (ms)     std (ms)\n"
        "   3.0000       2.0000       6.0000       1.0000       2.1602"
    )


def test_a_repeat_lasts_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    calls = [0]

    def call() -> None:
        calls[0] += 1
        now[0] += 0.001

    result = time_calls(call, number=1, repeat=2, min_repeat_ms=10)
    # One to warm up, one too short, then twice eleven.
    assert calls[0] == 1 + 1 + 11 + 11
    np.testing.assert_allclose(result.results, 0.001)
    with pytest.raises(ValueError, match="at least 1"):
        time_calls(call, number=0, repeat=1)


def test_a_call_that_takes_no_time_is_not_repeated_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    calls = [0]

    def call() -> None:
        calls[0] += 1

    time_calls(call, number=1, repeat=1, min_repeat_ms=1, limit_zero_time_iterations=5)
    assert calls[0] < 100
