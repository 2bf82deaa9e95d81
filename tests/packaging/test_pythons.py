"""The agent, the client and their tests under the Python of each Debian release that has a package.

Devices run Debian's own Python, and versions that differ only in their last number differ in behaviour: what
3.11.7 matches, 3.11.2 did not. On x86-64 the tests of messages, files, connections and the client run; under
an emulator those of messages.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from deb.release import RELEASES, Release

from tests.conftest import debian_mosquitto
from tests.packaging.conftest import PROJECT, Root

pytestmark = pytest.mark.arm

# What those tests import; the compiler makes the bundles that some of them read.
EXTRAS: Final = {"amd64": ("agent", "builder", "demo", "dev"), "arm64": ("agent", "cbor")}
TESTS: Final = {
    "amd64": ("tests/agent/wire", "tests/agent/bundle", "tests/agent/mqtt", "tests/edgebundle"),
    "arm64": ("tests/agent/wire/test_envelope.py", "tests/agent/wire/test_messages.py"),
}
RUNNERS: Final = ("pytest", "pytest-xdist", "hypothesis")
LIMIT_S: Final = 1800


def environment(release: Release) -> Path:
    """Return a folder with what tests import, for a release's Python; it is made once and kept."""
    with (PROJECT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(each for extra in EXTRAS[release.arch] for each in optional[extra])]
    wanted += [each for each in optional["dev"] if each.partition("==")[0] in RUNNERS]
    wanted = sorted({each for each in wanted if not each.startswith("edgebundle[")})
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(os.environ.get("EDGEBUNDLE_CACHE") or f"{home}/edgebundle")
    folder = cache / f"tests-{release.name}-{digest}"
    if not folder.exists():
        unfinished = cache / f".building-tests-{release.name}"
        subprocess.run(["rm", "-rf", unfinished], check=True)
        options = ["--quiet", "--no-compile", "--only-binary=:all:", *release.wheel_options()]
        command = [sys.executable, "-m", "pip", "install", "--target", unfinished, *options, *wanted]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        for old in cache.glob(f"tests-{release.name}-*"):
            subprocess.run(["rm", "-rf", old], check=True)
        unfinished.rename(folder)
    return folder


def bind(folder: Path, root: Root, inside: str) -> None:
    place = root.path / inside
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--bind", "-o", "ro", folder, place], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "release", [release for release in RELEASES if release.arch in TESTS], ids=lambda release: release.name
)
def test_agent_and_client_under_debians_own_python(
    release: Release, make_root: Callable[[str, str], Root]
) -> None:
    root = make_root(release.arch, release.suite)
    bind(PROJECT, root, "project")
    bind(environment(release), root, "packages")
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    if release.arch == "amd64":
        loader = debian_mosquitto(release.suite)
        kept = next(parent for parent in Path(loader[-1]).parents if parent.name.startswith("mosquitto-"))
        bind(kept, root, str(kept.relative_to("/")))
        program = root.path / "usr/local/sbin/mosquitto"
        program.write_text(f'#!/bin/sh\nexec {" ".join(loader)} "$@"\n')
        program.chmod(0o755)
        options += ["-n", "4", "--dist", "worksteal"]
    command = [
        *("env", "--chdir=/project", "PYTHONPATH=/project:/packages", "PYTHONDONTWRITEBYTECODE=1"),
        *("HOME=/root", "OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=PASSIVE", "CI=true"),
        *("PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR=/tmp"),
        *("python3", "-m", "pytest", *options, *TESTS[release.arch]),
    ]
    done = subprocess.run(
        root.command(*command),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]
