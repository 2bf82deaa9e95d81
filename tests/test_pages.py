"""The pages in docs/ and the root name only files, folders and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(str(page.relative_to(ROOT)) for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = "agent|benchmarks|builder|dashboard|docs|edgebundle|examples|javascript|packaging|systemd|tests"
# A pattern for the names of several files.
PLACEHOLDERS = {"builder/records/CORE.json"}


@pytest.fixture(scope="module")
def tests_defined() -> set[str]:
    files = list((ROOT / "tests").rglob("test_*.py"))
    names = {name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text())}
    return names | {file.name for file in files}


@pytest.mark.parametrize("page", PAGES)
def test_every_named_path_exists(page: str) -> None:
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", (ROOT / page).read_text())) - PLACEHOLDERS
    missing = {path for path in named if not (ROOT / path).exists() and not list(ROOT.glob(f"{path}-*"))}
    assert missing == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_named_test_exists(page: str, tests_defined: set[str]) -> None:
    named = set(re.findall(r"`(?:tests/[\w/]+/)?(test_\w+(?:\.py)?)`", (ROOT / page).read_text()))
    assert named - tests_defined == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_of_code_has_a_line_of_its_own(page: str) -> None:
    """A paragraph that was filled again with the code in it shows the code as text."""
    lines = (ROOT / page).read_text().splitlines()
    fences = [line.strip() for line in lines if "```" in line]
    assert [line for line in fences if not re.fullmatch(r"```(\{[a-z-]+\}.*|[a-z]*)", line)] == []
    assert len(fences) % 2 == 0
