"""A room that grows beyond its budget is named."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packaging"))

from line_budget import complaints, lines_of


def test_rooms_are_counted_with_all_below_them(tmp_path: Path) -> None:
    files = {
        "agent/mqtt/engine.py": 3,
        "agent/mqtt/tls/keys.py": 4,
        "agent/cli.py": 2,
        "edgebundle/view/model.py": 5,
        "builder/mqtt/notes.txt": 9,
        "agent/mqtt/__pycache__/engine.py": 9,
    }
    for name, lines in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * lines)
    assert lines_of(tmp_path) == {"agent/mqtt": 7, "agent": 2, "edgebundle": 5}


def test_what_is_above_its_budget_or_has_none_is_named() -> None:
    assert complaints({"agent/mqtt": 7, "agent": 2}, {"agent/mqtt": 7, "agent": 2}) == []
    assert complaints({"agent/mqtt": 8, "builder": 1}, {"agent/mqtt": 7, "agent/old": 1}) == [
        "agent/mqtt: expected at most 7 lines, got 8",
        "builder: expected a budget, got none",
        "agent/old: expected a room with a budget, got no lines",
    ]
