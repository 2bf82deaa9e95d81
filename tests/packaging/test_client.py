"""`make client`: what another computer installs, in an environment that has nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.needs import needed
from tests.patience import PROGRAM_PATIENCE_S

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[2]


def build(folder: Path) -> None:
    program = PROJECT / "packaging/build_client.py"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1750000000"}
    subprocess.run([sys.executable, program, "-o", folder], check=True, env=environment)


@pytest.fixture
def built(shared_file: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    return shared_file("client", build)


def run(*command: str | Path, folder: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        cwd=folder,
        env=variables,
        timeout=PROGRAM_PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path, *install: str | Path) -> Path:
    """Make a virtual environment with only these packages; return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", "env", folder=folder)
    python = folder / "env/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", *install, folder=folder)
    return python


def test_wheel_installs_the_client_and_nothing_of_the_compiler(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    python = environment(tmp_path, wheel)
    listed = run(sys.executable, "-m", "pip", "--python", python, "list", "--format=freeze", folder=tmp_path)
    names = {line.partition("==")[0] for line in listed.split()}
    assert names == {"edgebundle", "numpy", "paho-mqtt"}
    program = (
        "from edgebundle import Client, UnknownAgentError, BrokerError\n"
        "try:\n"
        "    Client('mqtt://127.0.0.1:1').model('kitchen', 'faces')(image=b'\\xff\\xd8\\xff')\n"
        "except BrokerError as error:\n"
        "    print('asked:', error)\n"
    )
    assert run(python, "-c", program, folder=tmp_path).startswith("asked: ")
    assert "usage: edgebundle infer" in run(
        python.with_name("edgebundle"), "infer", "--help", folder=tmp_path
    )


def test_npm_installs_a_client_that_finds_mqtt(built: Path, tmp_path: Path) -> None:
    (package,) = built.glob("*.tgz")
    mqtt = tmp_path / "node_modules/mqtt"
    mqtt.mkdir(parents=True)
    (mqtt / "package.json").write_text('{"name": "mqtt", "version": "5.10.0", "main": "mqtt.js"}')
    (mqtt / "mqtt.js").write_text("exports.connect = () => {}")
    shutil.unpack_archive(package, tmp_path / "unpacked", "gztar")  # as npm does, without its registry
    (tmp_path / "unpacked/package").rename(tmp_path / "node_modules/edgebundle")
    script = 'import { Client } from "edgebundle"; console.log(typeof Client)'
    assert run(needed("node"), "--input-type=module", "-e", script, folder=tmp_path) == "function\n"


def test_program_beside_the_clone_finds_the_client(tmp_path: Path) -> None:
    clone = tmp_path / "edgebundle"
    for name in ("agent", "builder", "dashboard", "edgebundle"):
        shutil.copytree(PROJECT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, clone)
    flags = next(
        line.partition(":=")[2].split()
        for line in (PROJECT / "Makefile").read_text("utf-8").splitlines()
        if line.startswith("EDITABLE :=")
    )
    python = environment(tmp_path, "--no-deps", *flags, clone)
    (tmp_path / "script.py").write_text("from edgebundle import Client; print(Client.__name__)")
    assert run(python, "script.py", folder=tmp_path) == "Client\n"
