"""The map in docs/README.md is complete and correct; CONTRIBUTING.md shows the import contract."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "README.md").read_text()
MAP = PAGE.partition("\n## Map\n")[2].partition("\n## ")[0]
CHANGES = PAGE.partition("\n## I want to change ...\n")[2]
# Their folders mirror those that they test, and need no rows of their own.
MIRRORS = ("tests/agent", "tests/builder", "tests/dashboard", "tests/edgebundle", "tests/benchmarks")


def rows(table: str) -> list[str]:
    return [
        row
        for row in table.splitlines()
        if row.startswith("| ") and not row.startswith(("| folder", "| what"))
    ]


def paths(text: str) -> set[str]:
    """Return the paths in backticks: all with a slash or a suffix."""
    return set(re.findall(r"`([\w.-]+(?:/[\w.-]*)+|[\w-]+\.(?:md|toml))`", text))


def folders_with_code() -> set[str]:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("this folder is not a git repository")
    return {str(Path(file).parent) for file in tracked if (ROOT / file).exists()}


def test_every_folder_with_code_is_in_the_map() -> None:
    mapped = {row.split("`")[1].rstrip("/") for row in rows(MAP)}
    mirrored = {folder for folder in folders_with_code() if folder.startswith(MIRRORS)}
    assert folders_with_code() - mirrored - mapped == set()


def test_folders_of_tests_mirror_the_folders_that_they_test() -> None:
    for folder in folders_with_code():
        if folder.startswith(MIRRORS):
            assert (ROOT / folder.removeprefix("tests/")).is_dir(), folder


def test_every_path_in_the_map_exists() -> None:
    named = paths(MAP + CHANGES)
    assert len(named) > 60
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_every_name_to_change_is_in_a_file_of_its_row() -> None:
    found = rows(CHANGES)
    assert len(found) > 20
    for row in found:
        files = [ROOT / path for path in paths(row) if (ROOT / path).is_file()]
        for name in re.findall(r"`([A-Z][A-Z_]+)`", row):
            assert any(re.search(rf"\b{name}\b", file.read_text()) for file in files), (name, row)


def test_arrows_in_contributing_are_those_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for program in ("builder", "agent"):
        [layers] = [c["layers"] for c in contracts if c.get("containers") == [program]]
        [arrows] = re.findall(rf"^{program} +(\w+ > .*)$", page, re.MULTILINE)
        assert arrows.split(" > ") == [layer.replace(" | ", ", ") for layer in layers]
