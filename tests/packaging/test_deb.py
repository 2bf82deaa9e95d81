"""The package as a file: its contents, its dependencies, and that it is reproducible."""

from __future__ import annotations

import re
import subprocess
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from deb.release import RELEASES, Release

from agent.config.keys import KEYS
from tests.packaging.conftest import EPOCH

pytestmark = pytest.mark.arm

MAX_PACKAGE_BYTES = 45_000_000
MAX_INSTALLED_BYTES = 140_000_000
# The libraries that each Debian package in our dependencies provides for the wheels.
LIBRARIES = {
    "libc6": r"lib(c|m|dl|pthread|rt)\.so\.\d|ld-linux-(aarch64|x86-64|armhf)\.so\.\d",
    "libgcc-s1": r"libgcc_s\.so\.1",
    "libstdc++6": r"libstdc\+\+\.so\.6",
    "zlib1g": r"libz\.so\.1",
}
each_release = pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)


def members(package: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=BytesIO(data(package))) as archive:
        return {member.name.removeprefix("."): member for member in archive}


def data(package: Path) -> bytes:
    return subprocess.run(["dpkg-deb", "--fsys-tarfile", package], check=True, capture_output=True).stdout


def field(package: Path, name: str) -> str:
    command = ["dpkg-deb", "--field", str(package), name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@each_release
def test_lintian_finds_no_error(build_deb: Callable[..., Path], release: Release) -> None:
    package = build_deb(release.suite, release.arch)
    command = ["lintian", "--allow-root", "--fail-on", "error", str(package)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@each_release
def test_a_package_is_for_one_python_and_within_its_size_limits(
    build_deb: Callable[..., Path], release: Release
) -> None:
    package = build_deb(release.suite, release.arch)
    found = members(package)
    installed = sum(member.size for member in found.values())
    print(f"{package.name}: {package.stat().st_size / 1e6:.1f} MB, {installed / 1e6:.1f} MB unpacked")
    assert package.stat().st_size <= MAX_PACKAGE_BYTES
    assert installed <= MAX_INSTALLED_BYTES
    assert f"python3 (>= {release.python}~), python3 (<< {release.python_next}~)" in field(package, "Depends")
    assert {match[1] for name in found if (match := re.search(r"\.cpython-(\d+)-", name))} == {
        release.python.replace(".", "")
    }


@each_release
def test_files_are_in_the_packages_own_folders_and_belong_to_root(
    build_deb: Callable[..., Path], release: Release
) -> None:
    places = (
        "/etc/edge-agent",
        "/usr/bin/edge-agent",
        "/usr/lib/edge-agent",
        "/usr/lib/systemd/system/edge-agent.service",
        "/usr/lib/systemd/system/edge-agent-enroll.service",
        "/usr/share/doc/edge-agent",
        "/usr/share/lintian/overrides/edge-agent",
        "/usr/share/man/man8/edge-agent",
    )
    for name, member in members(build_deb(release.suite, release.arch)).items():
        assert member.isdir() or name.startswith(places), name
        assert (member.uid, member.gid) == (0, 0), name
        assert member.issym() or not member.mode & 0o6022, f"{name} can be written or raised by others"
        assert "/tests/" not in name
        assert "__pycache__" not in name
        site = f"/usr/lib/edge-agent/shipped/lib/python{release.python}/site-packages"
        assert not name.startswith(
            tuple(f"{site}/{package}" for package in ("builder", "dashboard", "edgebundle/"))
        )


@each_release
def test_every_needed_library_is_included_or_in_a_dependency(
    build_deb: Callable[..., Path], release: Release, tmp_path: Path
) -> None:
    package = build_deb(release.suite, release.arch)
    with tarfile.open(fileobj=BytesIO(data(package))) as archive:
        archive.extractall(tmp_path, filter="tar")
    libraries = [path for path in tmp_path.rglob("*.so*") if path.is_file()]
    assert len(libraries) > 2
    inside = {path.name for path in libraries}
    depends = re.split(r"[ ,|]+", field(package, "Depends"))
    allowed = re.compile("|".join(LIBRARIES[name] for name in LIBRARIES if name in depends))
    for path in libraries:
        dynamic = subprocess.run(["readelf", "-dW", path], check=True, capture_output=True, text=True).stdout
        for needed in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic):
            assert needed in inside or allowed.fullmatch(needed), f"{path.name} needs {needed}"


def test_two_builds_of_one_commit_in_two_environments_are_identical(build_deb: Callable[..., Path]) -> None:
    first, second = build_deb("bookworm", "arm64"), build_deb("bookworm", "arm64", again=True)
    before, after = members(first), members(second)
    assert list(before) == list(after)
    assert [name for name in before if before[name].tobuf() != after[name].tobuf()] == []
    assert {member.mtime for member in after.values()} == {EPOCH}
    assert first.read_bytes() == second.read_bytes()


def test_the_configuration_explains_every_key(build_deb: Callable[..., Path]) -> None:
    with tarfile.open(fileobj=BytesIO(data(build_deb("bookworm", "arm64")))) as archive:
        file = archive.extractfile("./etc/edge-agent/agent.toml")
        assert file is not None
        text = file.read().decode()
    assert '\ndir = "/etc/edge-agent/keyring"\n' in text
    for key in KEYS:
        assert key.text in text


@pytest.mark.parametrize(
    ("machine", "found", "status", "output"),
    [
        (
            "armv6l",
            None,
            1,
            "expected an ARMv7 processor or newer, got an ARMv6 (as in the first Raspberry Pi and Zero)",
        ),
        ("armv7l", None, 0, ""),
        ("aarch64", "1\n", 0, ""),
        ("aarch64", "2\n", 1, "written by a newer edge-agent: expected format 1 at most, got 2"),
        ("aarch64", "garbage\n", 1, "expected format 1 at most, got unknown"),
        ("aarch64", "", 1, "expected format 1 at most, got unknown"),
    ],
)
def test_an_unsupported_processor_or_state_is_refused_before_unpacking(
    build_deb: Callable[..., Path],
    tmp_path: Path,
    machine: str,
    found: str | None,
    status: int,
    output: str,
) -> None:
    control = subprocess.run(
        ["dpkg-deb", "--ctrl-tarfile", build_deb("bookworm", "armhf")], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(control)) as archive:
        file = archive.extractfile("./preinst")
        assert file is not None
        script = file.read().decode()
    state = tmp_path / "format"
    if found is not None:
        state.write_text(found)
    assert "/var/lib/edge-agent/format" in script
    (tmp_path / "preinst").write_text(script.replace("/var/lib/edge-agent/format", str(state)))
    (tmp_path / "uname").write_text(f"#!/bin/sh\necho {machine}\n")
    (tmp_path / "uname").chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", tmp_path / "preinst", "upgrade", "9.9"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, output in done.stderr) == (status, True), done.stderr
