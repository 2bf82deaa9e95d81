"""One function writes to a terminal: what others chose cannot control it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from agent.terminal import note, printable, prompt, redraw, say, say_json, say_text

OWNED = "\x1b]0;owned\x07\x1b[2J"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("kitchen, 20 °C, 東京", "kitchen, 20 °C, 東京"),
        (OWNED, "?]0;owned??[2J"),
        ("\x9b2J", "?2J"),  # the eight-bit form of ESC [
        ("cat\nedgebundle: error: forged", "cat edgebundle: error: forged"),
        ("100 %\rdone\tsoon\x08", "100 % done soon?"),
        ("a\u202eb\u2066c\u2028d\x85e", "a?b?c d e"),
        ("\u00a0東京\u3000駅", " 東京 駅"),
        ("می\u200cخواهم 👩\u200d🔬", "می\u200cخواهم 👩\u200d🔬"),
        ("lone \udcff half", "lone ? half"),
        ("del\x7f", "del?"),
    ],
)
def test_a_text_cannot_control_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_each_argument_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\nb", 3)
    note(f"c{OWNED}", "d")
    prompt("sure?\x1b[A ")
    redraw("not on a terminal")
    taken = capsys.readouterr()
    assert taken.out == "a b\n3\n"
    assert taken.err == "c?]0;owned??[2J\nd\nsure??[A "


def test_a_text_of_several_lines_keeps_them(capsys: pytest.CaptureFixture[str]) -> None:
    say_text("head\n\n  row\x1b[0m\n")
    assert capsys.readouterr().out == "head\n\n  row?[0m\n"


def test_numbers_that_json_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    nan, inf = float("nan"), float("inf")
    say_json({"a": nan, "b": [1.5, (inf, -inf), {"c": np.float64("nan")}], "d": "NaN"})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"a": None, "b": [1.5, [None, None], {"c": None}], "d": "NaN"}


def test_json_is_escaped_and_stays_the_same_value(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"label": f"{OWNED}\x7f\x9b\u202e"}
    say_json(value)
    text = capsys.readouterr().out
    assert text.strip().isprintable()
    assert json.loads(text) == value
