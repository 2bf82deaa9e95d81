"""Wheel and sdist are complete: what is installed from them runs without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
        timeout=600,
        cwd=folder,
        env=variables,
        check=False,
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist of a clean copy of the repository's files, and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "copy"
    listed = subprocess.run(
        [
            "git",
            "-C",
            PROJECT,
            "ls-files",
            "-z",
            "agent",
            "builder",
            "pyproject.toml",
            "README.md",
            "LICENSE",
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (PROJECT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((PROJECT / name).read_bytes())
    run("-m", "build", "--quiet", "--outdir", folder / "out", copy, folder=folder)
    (sdist,), (wheel,) = (folder / "out").glob("*.tar.gz"), (folder / "out").glob("*.whl")
    return sdist, wheel


def test_every_file_of_the_packages_is_in_the_wheel(built: tuple[Path, Path]) -> None:
    listed = subprocess.run(
        ["git", "-C", PROJECT, "ls-files", "agent", "builder"], check=True, capture_output=True, text=True
    ).stdout.split()
    tracked = {name for name in listed if (PROJECT / name).is_file()}
    with zipfile.ZipFile(built[1]) as archive:
        inside = set(archive.namelist())
    assert tracked - inside == set()
    assert not any(name.startswith(("tests/", "benchmarks/", "packaging/")) for name in inside)


def test_an_installed_wheel_compiles_runs_and_enrolls_without_the_repository(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    run("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, built[1], folder=work)
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
