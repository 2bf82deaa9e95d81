"""What the dashboard loads: no compiler, no importer, and of the builder only what it does with a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.loading import loaded

HEAVY: Final = {"tvm", "tvm_ffi", "onnx", "onnxruntime", "onnxslim", "xgboost", "PIL", "cryptography", "rich"}


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
