"""What the Debian package takes from the sources, without building it."""

from __future__ import annotations

from pathlib import Path

import pytest
from deb import package, tvm_ffi
from deb.release import RELEASES

from agent.deploy.store.state_format import STATE_FORMAT
from tests.packaging.conftest import PROJECT


def test_the_packages_state_format_is_the_agents() -> None:
    assert package.state_format(PROJECT) == str(STATE_FORMAT)


def test_the_packages_configuration_trusts_the_packages_keyring() -> None:
    text = package.configuration(PROJECT)
    assert text.startswith("# /etc/edge-agent/agent.toml")
    assert '\ndir = "/etc/edge-agent/keyring"\n' in text


def test_of_two_builds_at_once_the_faster_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEBUNDLE_CACHE", str(tmp_path / "cache"))
    release = RELEASES[0]
    sdist = tmp_path / "sdist.tar.gz"
    sdist.write_bytes(b"sources")

    def built_by_another(_release: object, _sources: Path, _headers: Path, into: Path) -> None:
        for folder, text in ((into, "slower"), (tvm_ffi._kept(release, sdist), "faster")):
            folder.mkdir()
            (folder / "lib").write_text(text)

    monkeypatch.setattr(tvm_ffi, "_unpack", lambda sdist, _into: sdist)
    monkeypatch.setattr(tvm_ffi, "_build", built_by_another)
    tvm_ffi.build(release, sdist, tmp_path, tmp_path / "packages")
    assert (tmp_path / "packages/lib").read_text() == "faster"
