"""What a program loads, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.patience import PATIENCE_S

ROOT: Final = Path(__file__).parents[1]


def loaded(program: str) -> set[str]:
    """Return the modules that a process has loaded after a program, by their first two words."""
    script = f"{program}\nimport sys\nprint(*{{'.'.join(name.split('.')[:2]) for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())
