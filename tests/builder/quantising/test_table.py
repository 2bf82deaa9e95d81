"""Rows of a report in a terminal."""

from __future__ import annotations

from builder.quantising import table


def test_texts_stand_below_each_other() -> None:
    rows = [("size", "1 MiB"), ("agreement", "99 %")]
    assert table.lines(rows) == ["  size            1 MiB", "  agreement       99 %"]
    assert table.lines(rows, width=10) == ["  size      1 MiB", "  agreement 99 %"]
