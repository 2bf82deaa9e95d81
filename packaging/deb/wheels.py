"""The wheels that go into a package: the project's own, and those of its dependencies, locked.

A lock file (packaging/locks/SUITE-ARCH.txt) names every dependency with its version and digest, so that a
package built twice is the same, and so that no wheel comes in unnoticed. pip reads it with
``--require-hashes --no-deps``.
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

from deb.release import Release


def _pip(*arguments: str | Path, epoch: int | None = None) -> None:
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore")
    if epoch is not None:
        environment["SOURCE_DATE_EPOCH"] = str(epoch)
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--quiet"]
    subprocess.run(command, check=True, env=environment, stdin=subprocess.DEVNULL)


def build_wheel(project: Path, into: Path, epoch: int) -> Path:
    """Build the project's wheel from a copy of its sources.

    A copy, because setuptools leaves a ``build`` folder beside the sources and packs what an earlier build
    left there.

    Parameters
    ----------
    project
        The folder that holds pyproject.toml.
    into
        An existing folder that gets the wheel.
    epoch
        The time stamp of the wheel's members, seconds since 1970.

    Returns
    -------
    The wheel's path.
    """
    copy = into / ".source"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (project / name).exists():
            shutil.copy(project / name, copy / name)
    for name in ("agent", "builder"):
        shutil.copytree(project / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    _pip("wheel", "--no-deps", "--wheel-dir", into, copy, epoch=epoch)
    shutil.rmtree(copy)
    (wheel,) = into.glob("edgebundle-*.whl")
    return wheel


def agent_dependencies(project: Path) -> list[str]:
    """Return the requirements of the agent, as pyproject.toml has them."""
    with (project / "pyproject.toml").open("rb") as file:
        dependencies: list[str] = tomllib.load(file)["project"]["dependencies"]
    return dependencies


def write_lock(release: Release, project: Path, lock: Path, scratch: Path) -> None:
    """Resolve the agent's dependencies for `release` and write them with their digests to `lock`."""
    found = scratch / release.name
    found.mkdir()
    _pip("download", "--dest", found, *release.wheel_options(), *agent_dependencies(project))
    lines = [f"# The agent's dependencies on Debian {release.number} {release.arch}. Made by"]
    lines.append("# packaging/build_deb.py --lock; edit pyproject.toml instead.")
    for wheel in sorted(found.glob("*.whl"), key=lambda path: path.name.lower()):
        name, version = wheel.name.split("-")[:2]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{re.sub('[-_.]+', '-', name).lower()}=={version} --hash=sha256:{digest}")
    lock.write_text("\n".join(lines) + "\n")


def download_locked(release: Release, lock: Path, into: Path) -> None:
    """Download exactly the wheels of `lock` into the folder `into`; a wrong digest ends the build."""
    _pip("download", "--dest", into, "--no-deps", "--require-hashes", "-r", lock, *release.wheel_options())


def unpack(release: Release, wheels: list[Path], into: Path) -> None:
    """Unpack `wheels`, made for `release`, into the folder `into`, without running anything of them."""
    # pip would hold wheels given as files against the Python that it runs on itself.
    options = [
        "--ignore-requires-python",
        "--no-index",
        "--no-deps",
        "--no-compile",
        *release.wheel_options(),
    ]
    _pip("install", "--target", into, *options, *wheels)
