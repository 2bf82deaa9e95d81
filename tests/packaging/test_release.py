"""What a release consists of beside its packages: locks with digests, contents, and signed checksums."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from deb import sbom, wheels
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from builder.bundles import key_files
from tests.needs import needed
from tests.packaging.conftest import EPOCH, PROJECT

LOCKS = PROJECT / "packaging/locks"


def required() -> list[Requirement]:
    """Return what `make` installs, extras of the project itself resolved."""
    document = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))
    extras = document["project"]["optional-dependencies"]
    texts = [*document["build-system"]["requires"], *document["project"]["dependencies"]]
    for extra in ("agent", "builder", "demo", "dev"):
        texts += [text for text in extras[extra] if not text.startswith("edgebundle[")]
    return [Requirement(text) for text in texts]


def test_lock_of_the_workstation_has_all_that_pyproject_requires() -> None:
    locked = wheels.locked(LOCKS / "workstation.txt")
    for requirement in required():
        name = canonicalize_name(requirement.name)
        assert name in locked, f"{requirement}: run make lock"
        (version,) = (line.split(" ")[0].partition("==")[2] for line in locked[name] if "==" in line)
        assert version in requirement.specifier, f"{requirement}, got {version}: run make lock"


@pytest.mark.parametrize("lock", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.stem)
def test_every_package_is_locked_with_its_digest_and_from_no_other_place(lock: Path) -> None:
    locked = wheels.locked(lock)
    assert locked
    for name, lines in locked.items():
        text = " ".join(line.removesuffix("\\") for line in lines)
        assert re.fullmatch(
            rf"({name}==[\w.+]+( ; [\w.\s<>=!']+)?(\s+--hash=sha256:[0-9a-f]{{64}})+\s*)+", text
        ), text


def test_make_installs_only_what_the_lock_names() -> None:
    text = (PROJECT / "Makefile").read_text("utf-8")
    recipe = text.partition("\n$(STAMP): ")[2].partition("\n\n")[0]
    installs = [line for line in recipe.splitlines() if "pip install" in line]
    assert len(installs) == 2
    assert "--require-hashes --no-deps -r $(LOCK)" in installs[0]
    assert "--no-deps --no-build-isolation" in installs[1]


def wheel_with_libraries(folder: Path) -> Path:
    wheel = folder / "some_codec-2.0-cp313-cp313-manylinux_2_28_x86_64.whl"
    inside = {
        "components": [
            {"type": "library", "name": "libz", "version": "1.3.1", "purl": "pkg:generic/libz@1.3.1"},
            {"type": "library", "name": "libz", "version": "1.3.1", "purl": "pkg:generic/libz@1.3.1"},
            {"type": "library", "name": "some_codec", "purl": "pkg:pypi/some_codec@2.0"},
        ]
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_codec-2.0.dist-info/sboms/auditwheel.cdx.json", json.dumps(inside))
    return wheel


def test_contents_name_the_archives_by_their_digests_and_the_libraries_inside(tmp_path: Path) -> None:
    wheel = wheel_with_libraries(tmp_path)
    package = tmp_path / "edge-agent_0.1.0+deb13_arm64.deb"
    package.write_bytes(b"a package")
    about = sbom.deb("0.1.0+deb13", "arm64", 13)
    document = json.loads(sbom.write(package, about, [sbom.of_archive(wheel)], EPOCH).read_text("utf-8"))
    main = document["metadata"]["component"]
    assert main["purl"] == "pkg:deb/edgebundle/edge-agent@0.1.0%2Bdeb13?arch=arm64&distro=debian-13"
    assert main["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"a package").hexdigest()}]
    (listed,) = document["components"]
    assert (listed["name"], listed["version"]) == ("some-codec", "2.0")
    assert listed["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert [(each["name"], each["version"]) for each in listed["components"]] == [("libz", "1.3.1")]
    again = sbom.write(package, about, [sbom.of_archive(wheel)], EPOCH).read_bytes()
    assert json.loads(again) == document


def sign(folder: Path, *flags: str | Path) -> subprocess.CompletedProcess[str]:
    program = PROJECT / "packaging/sign_release.py"
    return subprocess.run(
        [sys.executable, program, "-o", folder, *flags], capture_output=True, text=True, check=False
    )


def verify(folder: Path) -> int:
    """Run the command of docs/install.md, and return its exit status."""
    text = (PROJECT / "docs/install.md").read_text("utf-8")
    (command,) = (line.strip() for line in text.splitlines() if line.strip().startswith("openssl dgst"))
    return subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, check=False).returncode


def test_documented_command_accepts_signed_packages_and_nothing_that_was_changed(tmp_path: Path) -> None:
    needed("openssl")
    keys, other = (key_files.generate(tmp_path / name) for name in ("keys", "other"))
    dist = tmp_path / "dist"
    dist.mkdir()
    package = dist / "edge-agent_0.1.0+deb13_arm64.deb"
    package.write_bytes(b"a package")
    (dist / f"{package.name}.cdx.json").write_text("{}")
    (dist / "release.pub").write_bytes(keys.public.read_bytes())
    done = sign(dist, "--key", keys.private)
    assert done.returncode == 0, done.stderr
    assert verify(dist) == 0
    (dist / f"{package.name}.cdx.json").unlink()  # who downloads one file verifies one file
    assert verify(dist) == 0

    package.write_bytes(b"another package")
    assert verify(dist) != 0
    sums = (dist / "SHA256SUMS").read_bytes()
    digests = [hashlib.sha256(content).hexdigest().encode() for content in (b"a package", b"another package")]
    (dist / "SHA256SUMS").write_bytes(sums.replace(digests[0], digests[1]))
    assert verify(dist) != 0
    assert sign(dist, "--key", other.private).returncode == 0
    assert verify(dist) != 0


def test_signing_without_packages_or_with_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    keys = key_files.generate(tmp_path / "keys")
    (tmp_path / "dist").mkdir()
    done = sign(tmp_path / "dist", "--key", keys.private)
    assert (done.returncode, done.stderr.splitlines()[1]) == (1, "hint: make deb client")
    (tmp_path / "dist/some.deb").write_bytes(b"")
    keys.private.chmod(0o644)
    done = sign(tmp_path / "dist", "--key", keys.private)
    assert (done.returncode, "can be read by others" in done.stderr) == (1, True)
    assert not (tmp_path / "dist/SHA256SUMS").exists()
    assert "Traceback" not in done.stderr
