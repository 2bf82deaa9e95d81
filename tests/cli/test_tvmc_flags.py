"""For a TVMC flag that edgebundle does not have, a hint says what to do instead; the page agrees."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

import builder.cli as cli
from builder.cli.tvmc_flags import INSTEAD, instead_of

PAGE = Path(__file__).parents[2] / "docs" / "from-tvmc.md"


def flags() -> set[str]:
    [action] = [a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    verbs = (action.choices[verb] for verb in ("compile", "tune", "run"))
    return {flag for verb in verbs for part in verb._actions for flag in part.option_strings}


@pytest.mark.parametrize("arguments", [["--desired-layout", "NCHW"], ["--desired-layout=NCHW"]])
def test_hint_for_a_tvmc_flag_says_what_to_do_instead(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compile", "model.onnx", *arguments]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("edgebundle: error: unrecognized arguments: --desired-layout")
    assert hint == f"edgebundle: hint: --desired-layout is a TVMC flag: {INSTEAD['--desired-layout']}"


def test_other_unknown_flags_point_to_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "model.onnx", "--mad-max"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "edgebundle: hint: see `edgebundle compile --help`"
    assert instead_of(["model.onnx", "--mad-max"]) is None


def test_existing_flags_are_not_in_the_table() -> None:
    assert not flags() & set(INSTEAD)


def test_page_agrees_with_the_command() -> None:
    page = PAGE.read_text()
    for flag, advice in INSTEAD.items():
        assert f"| `{flag}` | {advice} |" in page
