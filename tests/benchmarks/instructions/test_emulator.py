"""Counting under qemu: marks are read in order; for a missing program, one line says what to install."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from benchmarks import bench_arm, guard, requirements
from benchmarks.instructions import emulator
from benchmarks.requirements import RequirementError, require_programs
from tests.needs import needed


def test_marks_are_read_in_order(tmp_path: Path) -> None:
    needed("gcc")
    fake = tmp_path / "emulator"
    fake.write_text('#!/bin/sh\nprintf "1 250\\n0 100\\n400\\n" > "$ICOUNT_OUT"\n')
    fake.chmod(0o755)
    assert emulator.counted([str(fake)], ["python", "program", "engine"], "") == [100, 250]


def test_bench_arm_without_qemu_says_in_one_line_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(emulator, "REGISTERED", tmp_path / "absent")
    monkeypatch.setattr(shutil, "which", lambda name: None if name.startswith("qemu") else f"/bin/{name}")
    assert bench_arm.main(["--output", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "error: qemu-aarch64, qemu-aarch64-static not found: apt-get install qemu-user qemu-user-static\n"
    )
    assert captured.out == ""


def test_guard_without_qemu_says_in_one_line_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(guard, "prepare", lambda _model, _core, folder: folder)
    assert guard.main(["--cores", guard.X86]) == 2
    assert capsys.readouterr().err == "error: gcc, qemu-x86_64 not found: apt-get install gcc qemu-user\n"


def test_counting_arm_programs_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(requirements, "takes_plugins", lambda _emulator: True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RequirementError, match="needs root: run it with sudo"):
        emulator.Emulator.prepare()


def test_an_emulator_without_plugins_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qemu-x86_64").write_text("#!/bin/sh\necho \"qemu: unknown option 'plugin'\" >&2\nexit 1\n")
    (tmp_path / "qemu-x86_64").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RequirementError, match="expected a qemu-x86_64 that loads plugins"):
        require_programs({"qemu-x86_64": "qemu-user"})
