"""The output of `make` before anything is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"help", "demo", "test", "test-fast", "test-models", "test-arm", "lint", "deb", "install", "clean"}
TARGETS |= {
    "test-frameworks",
    "test-home",
    "test-foreign",
    "coverage",
    "conformance",
    "bench",
    "bench-arm",
    "bench-odd",
    "bench-agent",
    "soak",
    "hostile",
    "herd",
    "man",
    "docs",
    "client",
    "lock",
    "release",
}
# Programs that the recipes need, besides Python.
TOOLS = ("sh", "bash", "env", "make", "sed", "expand", "echo", "test", "touch", "dirname", "sort", "id")


def make(folder: Path, *arguments: str, tools: Path) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "packaging", folder / "packaging", dirs_exist_ok=True)
    environment = {"PATH": str(tools), "HOME": str(folder)}
    return subprocess.run(
        [str(tools / "make"), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH that has no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (folder / tool).symlink_to(found)
    return folder


def put(tools: Path, name: str, script: str) -> None:
    (tools / name).write_text(f"#!/bin/sh\n{script}\n")
    (tools / name).chmod(0o755)


def test_make_without_a_target_lists_the_targets(tmp_path: Path, tools: Path) -> None:
    done = make(tmp_path, tools=tools)
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    assert first == "usage: make TARGET"
    assert {line.split()[0] for line in lines} == TARGETS
    assert all(len(line) < 110 for line in lines)


@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_missing_python_is_one_clear_line(tmp_path: Path, tools: Path, target: str) -> None:
    done = make(tmp_path, target, tools=tools)
    assert done.returncode == 2
    first = done.stderr.splitlines()[0]
    assert first.startswith("make: Python 3.11 or newer is needed and was not found")
    assert not (tmp_path / ".venv").exists()


def test_newest_python_is_used_when_the_first_is_too_old(tmp_path: Path, tools: Path) -> None:
    put(tools, "python3", "exit 1")  # as Python 3.9 fails the version check
    put(tools, "python3.12", 'case "$*" in *venv\\ .venv*) echo "used $0" >&2; exit 3;; esac; exit 0')
    done = make(tmp_path, "install", tools=tools)
    assert f"used {tools / 'python3.12'}" in done.stderr
    assert done.returncode == 2


def test_python_without_venv_names_the_missing_package(tmp_path: Path, tools: Path) -> None:
    put(tools, "python3", 'case "$*" in *ensurepip*) exit 1;; esac; exit 0')
    done = make(tmp_path, "install", tools=tools)
    assert done.returncode == 2
    assert "apt-get install python3-venv" in done.stderr.splitlines()[0]


def test_dependencies_are_installed_again_when_pyproject_changed(tmp_path: Path, tools: Path) -> None:
    put(tools, "python3", "exit 0")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    put(tmp_path / ".venv" / "bin", "python", f'echo "$@" >> {tmp_path}/pip.log')
    assert make(tmp_path, "install", tools=tools).returncode == 0
    os.utime(tmp_path / ".venv" / ".installed")
    # The copy of pyproject.toml is newer than the stamp.
    assert make(tmp_path, "--question", "install", tools=tools).returncode == 1
    log = (tmp_path / "pip.log").read_text()
    packages, product = log.splitlines()[-2:]
    assert packages.startswith("-m pip install ")
    assert packages.endswith("--require-hashes --no-deps -r packaging/locks/workstation.txt")
    assert product.startswith("-m pip install ")
    assert product.endswith("--editable .")


def test_counting_instructions_says_first_what_to_install(tmp_path: Path, tools: Path) -> None:
    (tools / "id").unlink()
    put(tools, "id", "echo 0")
    done = make(tmp_path, "bench-arm", tools=tools)
    assert done.returncode == 2
    first, *others = done.stdout.splitlines()
    assert first == "make: not installed, and what is left out without it:"
    assert "  qemu-user: counted instructions" in others
    assert others[-1].startswith("to install it: sudo apt-get install --no-install-recommends ")
    assert {"qemu-user", "qemu-user-static"} <= set(others[-1].split())
    assert not (tmp_path / ".venv-bench").exists()


@pytest.mark.parametrize("target", sorted(TARGETS - {"help", "clean"}))
def test_each_target_says_in_plain_lines_what_it_lacks(tmp_path: Path, tools: Path, target: str) -> None:
    done = make(tmp_path, target, tools=tools)
    assert done.returncode == 2
    said = done.stdout.splitlines() + done.stderr.splitlines()
    assert said[0].startswith("make: ")
    assert not [line for line in said if "No such file" in line or "command not found" in line]
    assert not list(tmp_path.glob(".venv*"))


@pytest.mark.parametrize("target", ["test-arm", "test-home", "bench-arm"])
def test_a_target_that_needs_root_says_so_first(tmp_path: Path, tools: Path, target: str) -> None:
    (tools / "id").unlink()
    put(tools, "id", "echo 1000")
    done = make(tmp_path, target, tools=tools)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"make: {target} must be run as root"
    assert not list(tmp_path.glob(".venv*"))


def test_tests_name_all_that_they_lack_at_the_start(tmp_path: Path, tools: Path) -> None:
    done = make(tmp_path, "needs-test", tools=tools)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert "  chromium: the dashboard, pages and the JavaScript client in a browser" in said
    (install,) = (line for line in said if line.startswith("to install it: "))
    assert "chromium" in install.split()
    assert said[-2:] == [
        f"make: left out: tests with the broker of Debian {s}" for s in ("bookworm", "trixie")
    ]
    assert any("because it needs root" in line for line in said) == (os.geteuid() != 0)


def test_nothing_is_said_of_what_is_there(tmp_path: Path, tools: Path) -> None:
    for name in ("qemu-aarch64", "qemu-aarch64-static", "gcc", "debootstrap"):
        put(tools, name, "exit 0")
    done = make(tmp_path, "needs-count", tools=tools)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
