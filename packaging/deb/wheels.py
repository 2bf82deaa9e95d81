"""The wheels that go into a package: the project's own, and those of its locked dependencies.

A lock file (packaging/locks/SUITE-ARCH.txt) lists every dependency with its version and digest, so that
builds are reproducible and no wheel is added unnoticed. pip reads it with `--require-hashes --no-deps`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

from deb.release import Release

TVM_FFI: Final = "apache-tvm-ffi"
# Wheels without native code.
_PURE: Final = ("paho-mqtt", "cbor2", "prometheus-client")


def _pip(*arguments: str | Path, epoch: int | None = None) -> None:
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore")
    if epoch is not None:
        environment["SOURCE_DATE_EPOCH"] = str(epoch)
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--quiet"]
    subprocess.run(command, check=True, env=environment, stdin=subprocess.DEVNULL)


def build_wheel(project: Path, into: Path, epoch: int) -> Path:
    """Build the project's wheel from a copy of its sources.

    In the original folder, setuptools would leave a `build` folder, and pack the remains of earlier builds.

    Parameters
    ----------
    project
        The folder that holds pyproject.toml.
    into
        An existing folder for the wheel.
    epoch
        Time stamp of the wheel's members, in seconds since 1970.

    Returns
    -------
    Path
        The wheel's path.
    """
    copy = into / ".source"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (project / name).exists():
            shutil.copy(project / name, copy / name)
    for name in ("agent", "builder", "edgebundle"):
        shutil.copytree(project / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    _pip("wheel", "--no-deps", "--wheel-dir", into, copy, epoch=epoch)
    shutil.rmtree(copy)
    (wheel,) = into.glob("edgebundle-*.whl")
    return wheel


def agent_dependencies(project: Path) -> list[str]:
    """Return the agent's requirements from pyproject.toml, including the optional ones."""
    with (project / "pyproject.toml").open("rb") as file:
        document = tomllib.load(file)["project"]
    optional = document["optional-dependencies"]
    return [*document["dependencies"], *optional["agent"], *optional["cbor"], *optional["prometheus"]]


def write_lock(release: Release, project: Path, lock: Path, scratch: Path) -> None:
    """Resolve the agent's dependencies for `release` and write them with their digests to `lock`."""
    found = scratch / release.name
    found.mkdir()
    options: list[str | Path] = ["--dest", found, "--only-binary=:all:", *release.wheel_options()]
    requirements = agent_dependencies(project)
    if release.from_debian:
        sources = [name for name in requirements if _name(name) == TVM_FFI]
        _pip("download", "--dest", found, "--no-deps", f"--no-binary={TVM_FFI}", *sources)
        # Those that Debian does not have, and the one that tvm-ffi needs.
        requirements = [name for name in requirements if _name(name) in _PURE] + ["typing-extensions>=4.13"]
    _pip("download", *options, *requirements)
    lines = [f"# The agent's dependencies on Debian {release.number} {release.arch}. Made by"]
    lines.append("# packaging/build_deb.py --lock; edit pyproject.toml instead.")
    for file in sorted(found.iterdir(), key=lambda path: path.name.lower()):
        name, version = file.name.removesuffix(".tar.gz").split("-")[:2]
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        lines.append(f"{_name(name)}=={version} --hash=sha256:{digest}")
    lock.write_text("\n".join(lines) + "\n")


def download_locked(release: Release, lock: Path, into: Path) -> None:
    """Download the files listed in `lock` into the folder `into`; a wrong digest ends the build."""
    options: list[str | Path] = ["--dest", into, "--no-deps", "--require-hashes"]
    if not release.from_debian:
        _pip("download", *options, "--only-binary=:all:", "-r", lock, *release.wheel_options())
        return
    # The rest is the same for every architecture: wheels without native code, and sources.
    _pip("download", *options, f"--no-binary={TVM_FFI}", "-r", lock)


def unpack(release: Release, wheels: list[Path], into: Path) -> None:
    """Unpack `wheels`, made for `release`, into the folder `into`, without running their code."""
    # Otherwise pip would check the wheels against its own Python.
    options = ["--ignore-requires-python", "--no-index", "--no-deps", "--no-compile", "--only-binary=:all:"]
    _pip("install", "--target", into, *options, *release.wheel_options(), *wheels)


def _name(requirement: str) -> str:
    """Return the normalised project name (PEP 503) at the beginning of a requirement or file name."""
    match = re.match(r"[A-Za-z0-9._-]*[A-Za-z0-9]", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()
