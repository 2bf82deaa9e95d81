from __future__ import annotations

from xml.etree import ElementTree

import pytest

from builder.tuning.views.svg_charts import Bar, Slice, curve, paired_bars, stacked


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


def test_a_curve_marks_failed_points_and_draws_the_compared_times() -> None:
    svg = curve([3e-5, None, 1e-5, 2e-5], before_s=3e-5, after_s=2.5e-5)
    assert svg.count("<circle") == 3
    assert "×" in texts(svg)
    lines = {line.attrib["class"]: line.attrib for line in ElementTree.fromstring(svg).iter("line")}
    dots = [float(dot.attrib["cy"]) for dot in ElementTree.fromstring(svg).iter("circle")]
    assert float(lines["dash"]["y1"]) < float(lines["best"]["y1"]) < min(dots[1:])  # further down is faster


@pytest.mark.parametrize("seconds", [[], [None, None]])
def test_a_curve_without_results_says_so(seconds: list[float | None]) -> None:
    assert texts(curve(seconds, 1e-5, 1e-5)) == ["nothing ran"]


def test_labels_are_escaped() -> None:
    assert "a<b" in texts(paired_bars([Bar("a<b", 2.0, 1.0)]))
    assert "a<b" in texts(stacked([("row", [Slice("a<b", 1.0)])]))


def test_equal_labels_have_equal_colours() -> None:
    svg = stacked([("untuned", [Slice("x", 2.0), Slice("y", 1.0)]), ("tuned", [Slice("x", 1.0)])])
    fills = [element.attrib["fill"] for element in ElementTree.fromstring(svg).iter("rect")]
    assert fills[0] == fills[2] != fills[1]
