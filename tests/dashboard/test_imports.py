"""What the dashboard loads: no compiler, no importer, and of the builder only what it does with a fleet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.patience import PATIENCE_S

ROOT: Final = Path(__file__).parents[2]
HEAVY: Final = {"tvm", "tvm_ffi", "onnx", "onnxruntime", "onnxslim", "xgboost", "PIL", "cryptography", "rich"}


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


def test_the_server_loads_no_compiler_and_of_the_builder_only_the_fleet() -> None:
    found = loaded("import dashboard.server")
    assert found & HEAVY == set()
    of_the_builder = {name for name in found if name.startswith("builder.")}
    assert of_the_builder == {"builder.errors", "builder.fleet", "builder.loopback"}


def test_the_verb_serves_without_a_compiler(tmp_path: Path) -> None:
    """Up to the broker, which is not there: all is loaded by then."""
    command = ["dashboard", "--broker", "mqtt://127.0.0.1:1", "--listen", "0"]
    found = loaded(f"from builder.cli import main\nassert main({command}) == 4")
    assert "dashboard.server" in found
    assert found & HEAVY == set()
