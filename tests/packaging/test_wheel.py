"""Wheel and sdist are complete: what is installed from them runs without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import PROGRAM_PATIENCE_S

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[2]
DIGITS = PROJECT / "examples/digits"


def run(*words: str | Path, folder: Path, site: Path | None = None) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if site is not None:
        # This environment provides the dependencies, but also the repository's project: the first entry wins.
        variables["PYTHONPATH"] = str(site)
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_PATIENCE_S,
        cwd=folder,
        env=variables,
        check=False,
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout}{done.stderr}"
    return done.stdout


def build(folder: Path) -> None:
    """Make an sdist of a clean copy of the repository's files, and the wheel from that sdist."""
    copy = folder / "copy"
    parts = ("agent", "builder", "dashboard", "edgebundle", "pyproject.toml", "README.md", "LICENSE")
    listed = subprocess.run(
        ["git", "-C", PROJECT, "ls-files", "-z", *parts], check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (PROJECT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((PROJECT / name).read_bytes())
    run("-m", "build", "--quiet", "--outdir", folder / "out", copy, folder=folder)


@pytest.fixture
def wheel(shared_file: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    [path] = (shared_file("dist", build) / "out").glob("*.whl")
    return path


def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    command = ["git", "-C", str(PROJECT), "ls-files", "agent", "builder", "dashboard", "edgebundle"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    tracked = {name for name in listed if (PROJECT / name).is_file()}
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert tracked - inside == set()
    assert not any(name.startswith(("tests/", "benchmarks/", "packaging/")) for name in inside)


def test_an_installed_wheel_compiles_runs_and_enrolls_without_the_repository(
    wheel: Path, tmp_path: Path
) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    run("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel, folder=work)
    where = run(
        "-P", "-c", "import agent, builder; print(agent.__file__, builder.__file__)", folder=work, site=site
    )
    assert all(path.startswith(str(site)) for path in where.split())

    run("-P", "-m", "builder", "keygen", "keys", folder=work, site=site)
    run(
        *(
            "-P",
            "-m",
            "builder",
            "compile",
            DIGITS / "digits.onnx",
            "--preprocess",
            DIGITS / "preprocess.toml",
        ),
        *("--postprocess", "softmax,top3", "--labels", DIGITS / "labels.txt"),
        *("--sign-key", "keys/signing.key", "-o", "digits.bundle"),
        folder=work,
        site=site,
    )
    output = run(
        *("-P", "-m", "builder", "run", "digits.bundle", "--inputs", DIGITS / "seven.png"),
        folder=work,
        site=site,
    )
    assert "seven" in output
    enroll = (
        "enroll",
        "--config",
        "etc",
        "--device",
        "k",
        "--broker",
        "mqtt://b",
        "--trust",
        "keys/signing.pub",
    )
    run("-P", "-m", "agent", *enroll, "--no-connect", folder=work, site=site)
    assert (work / "etc/agent.toml").exists()
