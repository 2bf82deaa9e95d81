"""Manual pages of both programs: complete, and without a warning of the programs that show them."""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import needed
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "packaging"))

import man_pages  # noqa: E402 - from packaging

TODAY = datetime.date(2026, 11, 24)


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return {
        name: text
        for program in man_pages.PROGRAMS
        for name, text in man_pages.pages_of(program, TODAY).items()
    }


def test_every_verb_has_a_page_with_its_flags(found: dict[str, str]) -> None:
    from agent.cli import _parser as agent
    from builder.cli import _parser as builder

    for parser, section in ((builder(), 1), (agent(), 8)):
        verbs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        overview = found[f"{parser.prog}.{section}"]
        for verb, inner in verbs[0].choices.items():
            page = found[f"{parser.prog}-{verb}.{section}"]
            assert verb.replace("-", "\\-") in overview
            assert page.startswith(f".TH {parser.prog.upper()}-{verb.upper()} {section} 2026-11-24 ")
            for action in inner._actions:
                if action.help is not argparse.SUPPRESS and action.option_strings:
                    assert action.option_strings[-1].replace("-", "\\-") in page


@pytest.mark.parametrize(
    "command", [["mandoc", "-T", "lint", "-W", "warning"], ["man", "--warnings", "-E", "UTF-8", "-l"]]
)
def test_pages_are_shown_without_a_warning(found: dict[str, str], tmp_path: Path, command: list[str]) -> None:
    needed(command[0])
    man_pages.write(tmp_path, found)
    for path in sorted(tmp_path.glob("man*/*")):
        done = subprocess.run(
            [*command, path], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.stderr == ""
        if command[0] == "mandoc":
            assert done.stdout == ""


def test_odd_texts_are_no_requests(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser(
        prog="odd",
        description=".so /etc/passwd\n\n'quoted' \\fB 5 µs – never",
        epilog="examples:\n  .ex\n  odd -- \\n\n\nlast words",
    )
    parser.add_argument("--percent", default=50, metavar="N%%", help=".of %(default)s %%")
    (page,) = man_pages.pages(parser, section=1, version="1", date=TODAY).values()
    assert page.isascii()
    assert "\\&.so /etc/passwd" in page
    assert "\\&'quoted' \\efB 5 \\[u00B5]s \\[u2013] never" in page
    assert ".nf\n\\&.ex\nodd \\-\\- \\en\n.fi\n.SH NOTES\nlast words\n" in page
    assert "\\&.of 50 %" in page
    if shutil.which("man"):
        man_pages.write(tmp_path, {"odd.1": page})
        command = ["man", "--warnings", "-E", "UTF-8", "-l", str(tmp_path / "man1/odd.1")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.stderr == ""
        assert "odd -- \\n" in done.stdout
