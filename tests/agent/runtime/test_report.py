from __future__ import annotations

import csv
import io
import json

from agent.runtime.report import Report, Row

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


def test_a_long_name_is_shortened_only_in_the_table() -> None:
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
