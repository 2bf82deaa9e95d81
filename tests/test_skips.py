"""A skipped test hides nothing where CI runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
TEST = """
import pytest

def test_that_needs_something() -> None:
    pytest.skip({reason!r})
"""
FILE = """
import pytest

pytest.skip("lightgbm is not installed", allow_module_level=True)
"""


def run(folder: Path, ci: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", f"--rootdir={folder}"]
    return subprocess.run(
        [*command, *options, folder],
        env={**os.environ, "CI": ci, "PYTEST_ADDOPTS": "", "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ci", "reason", "status"),
    [
        ("true", "sshd is not installed", 1),
        ("true", "EDGEBUNDLE_MODELS is not set", 0),
        ("", "sshd is not installed", 0),
    ],
)
def test_ci_accepts_no_skipped_test_but_those_of_real_models(
    ci: str, reason: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "test_something.py").write_text(TEST.format(reason=reason))
    done = run(tmp_path, ci)
    assert done.returncode == status, done.stdout
    assert ("CI accepts no skipped tests: Skipped: sshd is not installed" in done.stdout) == bool(status)


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "status"), [("true", 1), ("", 0)])
def test_ci_accepts_no_file_that_is_skipped_as_a_whole(ci: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "test_something.py").write_text("def test_something() -> None:\n    pass\n")
    (tmp_path / "test_whole.py").write_text(FILE)
    for options in ((), ("-n", "2")):
        done = run(tmp_path, ci, "--continue-on-collection-errors", *options)
        assert done.returncode == status, done.stdout
        assert ("CI accepts no skipped tests: Skipped: lightgbm" in done.stdout) == bool(status)
