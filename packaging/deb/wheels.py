"""The wheels that go into a package: the project's own, and those of its locked dependencies.

A lock file (packaging/locks/SUITE-ARCH.txt) lists every dependency with its version and digest, so that
builds are reproducible and no wheel is added unnoticed. pip reads it with `--require-hashes --no-deps`. What
builds the project's own wheel is locked too, in packaging/locks/workstation.txt, and sees nothing of the
environment of the person who builds.
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
BUILD_SYSTEM: Final = "setuptools"
_BUILD: Final = """\
import sys
sys.path.insert(0, sys.argv[1])
from setuptools.build_meta import build_wheel
build_wheel(sys.argv[2])
"""
# Wheels without native code.
_PURE: Final = ("paho-mqtt", "cbor2", "prometheus-client")


def _pip(*arguments: str | Path) -> None:
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore")
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--quiet"]
    subprocess.run(command, check=True, env=environment, stdin=subprocess.DEVNULL)


def build_wheel(project: Path, into: Path, epoch: int) -> Path:
    """Build the project's wheel from a copy of its sources, with the locked build system.

    In the original folder, setuptools would leave a `build` folder, and pack the remains of earlier builds.
    The copy has the same modes whatever the umask of the checkout, and the build sees neither the home folder
    nor the variables of the person who builds.

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
    for name in ("agent", "builder", "dashboard", "edgebundle"):
        shutil.copytree(project / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    system = into / ".build-system"
    install_build_system(project / "packaging/locks/workstation.txt", system)
    subprocess.run(
        [sys.executable, "-s", "-P", "-c", _BUILD, str(system), str(into)],
        check=True,
        cwd=copy,
        env={
            "PATH": os.defpath,
            "HOME": str(system),
            "LC_ALL": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "SOURCE_DATE_EPOCH": str(epoch),
        },
        umask=0o022,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    shutil.rmtree(copy)
    shutil.rmtree(system)
    (wheel,) = into.glob("edgebundle-*.whl")
    return wheel


def locked(lock: Path) -> dict[str, list[str]]:
    """Return the lines of each package in a lock file, by its name: the version first, then the digests."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in lock.read_text("utf-8").splitlines():
        if line.startswith(" "):
            found[name].append(line)
        elif line and not line.startswith("#"):
            name = _name(line)
            found.setdefault(name, []).append(line)
    return found


def install_build_system(lock: Path, into: Path) -> None:
    """Install what builds the project's wheel, as `lock` names it, into the folder `into`."""
    into.mkdir()
    requirements = into / "requirements.txt"
    requirements.write_text("\n".join(locked(lock)[BUILD_SYSTEM]) + "\n", "utf-8")
    options = ("--require-hashes", "--no-deps", "--no-compile", "--only-binary=:all:")
    _pip("install", "--target", into, *options, "-r", requirements)


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
    lines.append("# packaging/lock.sh; edit pyproject.toml instead.")
    for file in sorted(found.iterdir(), key=lambda path: path.name.lower()):
        name, version = file.name.removesuffix(".tar.gz").split("-")[:2]
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        lines.append(f"{_name(name)}=={version} --hash=sha256:{digest}")
    lock.write_text("\n".join(lines) + "\n", "utf-8")


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
