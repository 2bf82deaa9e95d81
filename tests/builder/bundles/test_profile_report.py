from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from agent.bundle.layer import Layer
from builder.bundles.profile_report import Report, Row, Stage

CONV = Layer.of([("Conv", "/a/conv"), ("Relu", "/a/relu")], "3x3 /2", [(1, 3, 8, 8)], [(1, 4, 4, 4)])
REPORT = Report(
    (
        Row("fused_conv2d1_add2", 30.0, 3e4, "float32[1]", layers=(CONV,)),
        Row("tir_exp", 5.0, None, "float32[1, 4], float32[1, 4]"),
        Row("fused_conv2d1_add2", 50.0, 3e4, "float32[1]", layers=(Layer.of([("Conv", "/b/conv")]),)),
    ),
    100.0,
    (Stage("postprocess", 7.0),),
)


def test_a_reports_table_is_sorted_and_summed() -> None:
    lines = [line.split() for line in REPORT.table(width=160).splitlines()]
    assert " ".join(lines[0]) == "Time (us) % Count Kernel ONNX nodes Shapes Window GFLOP/s"
    assert " ".join(lines[1]) == "80.0 80.0 2 conv2d add /a/conv, /b/conv 1x3x8x8 > 1x4x4x4 3x3 /2 0.8"
    assert lines[2] == ["5.0", "5.0", "1", "exp", "1x4"]
    assert lines[4] == ["85.0", "85.0", "3", "sum", "of", "the", "kernels"]
    assert lines[5] == ["100.0", "1", "a", "whole", "run"]
    assert lines[6] == ["7.0", "1", "postprocess"]
    calls = REPORT.table(sort=False, aggregate=False, col_sums=False, width=160).splitlines()[1:]
    assert [line.split()[0] for line in calls] == ["30.0", "5.0", "50.0"]
    assert "/a/conv +1" in calls[0]
    assert str(REPORT) == REPORT.table()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_table_fits_its_width_whatever_the_names(width: int) -> None:
    long = Layer.of(
        [("Conv", "/model.0/" * 30 + f"conv{i}") for i in range(9)],
        "11x11 /2 d3 g1024",
        [(1, 9999, 99, 99)] * 9,
    )
    rows = tuple(
        Row(
            f"fused_conv2d_add_relu_{layer.window[:2]}" * 8,
            1e7,
            1e12,
            "float32[1, 2, 3, 4, 5], " * 20 + "float32[1]",
            layers=(layer,),
        )
        for layer in (long, Layer())
    )
    table = Report(rows, 3e7, (Stage("postprocess", 1e7),)).table(width=width)
    assert max(map(len, table.splitlines())) <= width
    assert "/mo" in table
    document = json.loads(Report(rows, 2.0).json())
    assert document["calls"][0]["Name"] == rows[0].name
    assert rows[0].name in Report(rows, 2.0).csv()


def test_a_reports_json_and_csv_hold_every_call() -> None:
    document = json.loads(REPORT.json())
    assert [call["Name"] for call in document["calls"]] == [
        "fused_conv2d1_add2",
        "tir_exp",
        "fused_conv2d1_add2",
    ]
    assert document["calls"][0]["Duration (us)"] == {"microseconds": 30.0}
    assert document["calls"][0]["Percent"] == {"percent": 30.0}
    assert document["calls"][0]["Layers"] == [CONV.to_attrs()]
    assert document["calls"][1]["GFLOP/s"] is None
    rows = list(csv.DictReader(io.StringIO(REPORT.csv())))
    assert [(row["Count"], row["GFLOP/s"], row["ONNX Nodes"]) for row in rows] == [
        ("1", "1", "Conv /a/conv; Relu /a/relu"),
        ("1", "", ""),
        ("1", "0.6", "Conv /b/conv"),
    ]


def test_no_name_of_the_model_is_a_formula_in_csv() -> None:
    layer = replace(CONV, nodes=('=HYPERLINK("http://x")', "b"))
    row = Row("@kernel", 2.0, None, "-1+1", 1, (layer,))
    text = Report((row, replace(row, layers=())), 4.0).csv()
    found = list(csv.DictReader(io.StringIO(text)))
    assert found[0]["ONNX Nodes"].startswith("'=HYPERLINK")
    assert [(each["Name"], each["Argument Shapes"]) for each in found] == [("'@kernel", "'-1+1")] * 2
    assert found[0]["Duration (us)"] == "2"


def test_a_report_comes_back_from_its_json() -> None:
    assert Report.from_dict(json.loads(REPORT.json())) == REPORT


@pytest.mark.parametrize("change", [{"calls": 3}, {"calls": [{}]}, {"device_metrics": []}, {"stages": [1]}])
def test_a_document_that_is_no_report_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected a report of `edgebundle profile --json`"):
        Report.from_dict({**REPORT.to_dict(), **change})
