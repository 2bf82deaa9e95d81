"""Texts of agents on a terminal."""

from __future__ import annotations

import pytest

from builder.fleet.printable import MAX_CHARACTERS, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Raspberry Pi 5", "Raspberry Pi 5"),
        ("küche", "küche"),
        ("\x1b[2Jgone", "?[2Jgone"),
        ("two\nlines\r", "two lines "),
        ("\u202eright to left", "?right to left"),
        ("x" * (MAX_CHARACTERS + 1), "x" * MAX_CHARACTERS),
    ],
)
def test_what_controls_a_terminal_is_replaced(text: str, shown: str) -> None:
    assert printable(text) == shown
