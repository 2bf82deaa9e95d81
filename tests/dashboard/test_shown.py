"""What goes to a page is JSON that its browser reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from dashboard.shown import as_json

ROOM: Final = Path(__file__).parents[2] / "dashboard"


def constant(text: str) -> float:
    raise AssertionError(f"{text} is no JSON")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_does_not_have_is_null(value: float) -> None:
    text = as_json({"live": {"kitchen": [value, 2.5]}, "series": ((1, value),)})
    read = json.loads(text, parse_constant=constant)
    assert read == {"live": {"kitchen": [None, 2.5]}, "series": [[1, None]]}


def test_nothing_else_of_the_dashboard_writes_json() -> None:
    writers = [path.name for path in ROOM.rglob("*.py") if "json.dump" in path.read_text()]
    assert writers == ["shown.py"]
