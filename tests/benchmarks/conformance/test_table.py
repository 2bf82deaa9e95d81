"""The table that the documentation shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.conformance import table
from benchmarks.conformance.verdict import Verdict

FOUND = [
    Verdict("a", "Add", "right"),
    Verdict("b", "Add", "right, fixed"),
    Verdict("c", "Resize", "refused", "Resize 'up': expected 2 of [1, 2], got 3"),
    Verdict("d", "Resize", "refused", "Resize 'down': expected 4 of [3], got 5"),
    Verdict("e", "Bernoulli", "apart", "random numbers"),
    Verdict("f", "Div", "dead", "status -8"),
]


def test_each_source_has_a_row() -> None:
    lines = table.table({"one": FOUND, "two": FOUND[:1]}, {"one": "First", "two": "Second"}).splitlines()
    assert lines[2] == "| First | 5 | 2 | 1 | 2 (40.0%) | 0 | 0 | 1 | 0 | 0 | 1 |"
    assert lines[3] == "| Second | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |"
    assert lines[4].startswith("| all | 6 | 3 |")


def test_equal_reasons_count_together() -> None:
    lines = table.reasons(FOUND).splitlines()
    assert lines[2:] == ["| 2 | Resize '...': expected N of [...], got N | Resize |"]


def test_the_page_is_changed_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.write(page, "new")
    assert page.read_text() == f"before\n{table.BEGIN}\n\nnew\n\n{table.END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="expected the marks"):
        table.write(page, "new")
