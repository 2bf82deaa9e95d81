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
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", f"--rootdir={tmp_path}", tmp_path],
        env={**os.environ, "CI": ci, "PYTEST_ADDOPTS": "", "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout
    assert ("CI accepts no skipped tests: Skipped: sshd is not installed" in done.stdout) == bool(status)
