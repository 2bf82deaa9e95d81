"""The views of a run, fed with made-up progress."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from builder.boards.interface import BoardStatus
from builder.records.meta_json import BoardTime
from builder.tuning.views.live import JsonLines, Lines, duration, micros, render, shortened, watch
from builder.tuning.views.progress import Progress, TaskProgress

CONVOLUTION = TaskProgress(0, "fused_conv2d", "conv2d", 2, 12, 64, 20e-6, 1.25, False, 80.0, "4x7x2")
PRODUCT = TaskProgress(1, "fused_matmul", "matmul", 1, 1, 36, None, None, False, None)
PROGRESS = Progress(
    "searching",
    (CONVOLUTION, PRODUCT),
    (BoardStatus("pi:9091", "measuring", BoardTime(125.0, measured=13, failed=1)),),
    active=0,
    elapsed_s=130.0,
    left_s=3700.0,
    peak_gflops=100.0,
)


def test_a_line_has_the_time_the_phase_and_the_rate() -> None:
    out = io.StringIO()
    view = Lines(out)
    view.update(PROGRESS)
    assert out.getvalue() == (
        "[2 min 10 s, 1 h 1 min left] searching; task 0 12/64, 80.0 GFLOP/s (80% of peak); 13/100 trials; "
        "operators 0.040 ms untuned, at least 8 us less by 1 confirmed\n"
    )


def test_a_line_is_not_repeated_and_notes_are_printed() -> None:
    out = io.StringIO()
    view = Lines(out)
    view.update(PROGRESS)
    view.update(replace(PROGRESS, elapsed_s=140.0))
    view.note("a note")
    assert len(out.getvalue().splitlines()) == 2
    assert out.getvalue().endswith("a note\n")


def test_json_lines_are_objects() -> None:
    out = io.StringIO()
    view = JsonLines(out)
    view.update(PROGRESS)
    view.note("x")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert [task["name"] for task in first["progress"]["tasks"]] == ["fused_conv2d", "fused_matmul"]
    assert second == {"note": "x"}


def test_the_live_table_shows_tasks_boards_and_time_left() -> None:
    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(PROGRESS))
    text = console.export_text()
    assert "13 of 100 trials, 2 min 10 s, about 1 h 1 min left" in text
    assert "board pi:9091: measuring, 13 measured in 2 min 5 s, 1 failed" in text
    for shown in ("fused_conv2d", "12/64", "20.0", "1.25x", "80%", "4x7x2", "fused_matmul"):
        assert shown in text


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with watch(quiet=True, as_json=False) as view:
        view.update(PROGRESS)
        view.note("a note")
    assert capsys.readouterr() == ("", "")


def test_numbers_and_names_are_short() -> None:
    assert [duration(s) for s in (0, 59.6, 3599, 7260)] == ["0 s", "1 min 0 s", "59 min 59 s", "2 h 1 min"]
    assert [micros(s) for s in (None, 12.34e-6, 2.5e-3)] == ["", "12.3", "2500"]
    assert shortened("fused_conv2d_add_relu", 11) == "fused…_relu"


def test_a_gain_that_is_not_confirmed_is_not_shown() -> None:
    out = io.StringIO()
    Lines(out).update(replace(PROGRESS, tasks=(replace(CONVOLUTION, gain=None), PRODUCT)))
    assert "operators 0.040 ms untuned, no gain confirmed yet" in out.getvalue()
