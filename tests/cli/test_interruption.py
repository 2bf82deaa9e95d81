"""Ctrl-C at any moment of `compile`: exit code 130, and nothing left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from builder.codegen import kernel_object
from builder.errors import BuildError
from builder.target.device_target import resolve

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/digits/digits.onnx"
POINTS = (
    "cli/early_checks.py",
    "importer/onnx_import.py",
    "importer/native.py",
    "tvm:kernels/rewriter.py",
    "kernels/schedule.py",
    "codegen/lowering.py",
    "tvm:codegen/named_values.py",
    "tvm:codegen/workspaces.py",
    "link/linker.py",
    "compiling/parity.py",
    "agent/durable.py",
)


@pytest.mark.slow
def test_interrupted_compile_leaves_nothing_wherever_it_is(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.cli.interrupted", str(MODEL), str(tmp_path), *POINTS]
    done = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True)
    results = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    right = {"code": 130, "reached": True, "left": [], "said": []}
    assert results == dict.fromkeys(POINTS, right)


def test_failure_of_code_generation_without_a_text_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(kernel_object, "lower_kernels", fail)
    import tvm

    with pytest.raises(BuildError, match=r"code generation for .* failed: RuntimeError"):
        kernel_object.compile_object(tvm.IRModule(), resolve("host"))


def test_interrupt_of_a_program_stays_one_through_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    import tvm
    import tvm_ffi

    from builder.compiling import lower

    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lower, "fuse", tvm_ffi.convert(interrupted))
    with pytest.raises(KeyboardInterrupt):
        lower.lower(tvm.IRModule(), resolve("host"))
