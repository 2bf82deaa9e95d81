"""Run the command line as a tutorial does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.patience import PROGRAM_PATIENCE_S


def edgebundle(*arguments: str | Path, cwd: Path) -> str:
    """Run the command line and return what it printed to stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "builder", *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=PROGRAM_PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
